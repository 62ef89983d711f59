// Attention's backward. Include after attention_operands.h.
// Keys and rows are divided into chunks without attention between them (a chunk starts at a row that sees no
// key of the rows before it), and chunks into blocks of rows and blocks of keys, counted from the chunk's
// first row and key, which is the same token where every key is a row. Each pair of blocks needs five
// products: S, dP, dQ, dK, dV. Either a thread processes a whole chunk of one kv head (one pass), or, if
// there are too few of those, row blocks (dQ) and key blocks (dK, dV) are distributed separately, which
// computes S and dP twice. Both add the same numbers in the same order - dQ over key blocks ascending, dK and
// dV over row blocks ascending - so bits depend neither on this choice nor on the number of threads.

namespace {

constexpr int64_t kMinChunk = 128;  // tokens; shorter documents are combined in a chunk to fill its blocks

/// Rows [row, row_end) and keys [key, key_end).
struct Chunk {
  int64_t row, row_end, key, key_end;
};

template <class Operands>
struct Backward {
  using T = typename Operands::T;
  using A = accumulate_t<T>;
  const Problem<T>& p;
  const T* d_o;
  const A *lse, *delta, *coef0;  // (H, T); coef0 may be null
  T *dq, *dk, *dv;
  int64_t dv_row;      // elements from one token's dv to the next's
  A *dk_sum, *dv_sum;  // row j of kv head g at g * sum_head + j * its sum_row
  int64_t sum_head, dk_sum_row, dv_sum_row;

  static int64_t workspace(const Problem<T>& p) {
    return p.padded_depth * kLaneStride + 2 * kKeys * kLaneStride + Operands::backward_size(p);
  }
  /// Memory of one thread, which uses the products while this exists.
  struct Work {
    A* dq_t;    // [d][lane]
    A *s, *dp;  // [key][lane]
    Operands operands;
    alignas(64) A lse[kLanes], delta[kLanes];
    Work(A* base, const Problem<T>& p)
        : dq_t(base),
          s(dq_t + p.padded_depth * kLaneStride),
          dp(s + kKeys * kLaneStride),
          operands(dp + kKeys * kLaneStride, p, true) {
      Operands::begin();
    }
    ~Work() { Operands::end(); }
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;
  };

  void load_rows(Work& w, const RowBlock<T>& block, bool for_keys) const {
    const T *q_rows[kLanes], *d_o_rows[kLanes];
    block.pointers(q_rows, p.q, p);
    block.pointers(d_o_rows, d_o, p);
    w.operands.load_queries(q_rows, block.count, block.lanes);
    w.operands.load_gradients(q_rows, d_o_rows, block.count, block.lanes, for_keys);
    for (int64_t i = 0; i < block.lanes; ++i) {
      const bool real = i < block.count;
      w.lse[i] = real ? lse[block.statistic(i, p.tq)] : A(0);
      w.delta[i] = real ? delta[block.statistic(i, p.tq)] : A(0);
    }
  }

  /// S and dP become P and dS, in place.
  void score_gradients(Work& w, const RowBlock<T>& block, const typename RowBlock<T>::Strip& strip) const {
    const int64_t keys = strip.keys();
    if (strip.cut) block.mask(w.s, strip.lane, strip.width, strip.begin, keys, p.softpick);
    if (p.softpick) return softpick_gradients(w, block, strip);
    for (int64_t i = strip.lane; i < strip.lane + strip.width; i += Simd<A>::kWidth) {
      const Vec<A> lse_i = load_vec(w.lse + i), delta_i = load_vec(w.delta + i);
      for (int64_t j = 0; j < keys; ++j) {
        A *s = w.s + j * kLaneStride + i, *dp = w.dp + j * kLaneStride + i;
        const Vec<A> e = exp_vec(load_vec(s) - lse_i);
        store_vec(s, e);
        store_vec(dp, e * (load_vec(dp) - delta_i));
      }
    }
    if (coef0 && strip.begin <= block.first_max)
      for (int64_t i = strip.lane; i < std::min(strip.lane + strip.width, block.count); ++i)
        if (const int64_t j = block.first[i] - strip.begin; j >= 0 && j < keys)
          w.dp[j * kLaneStride + i] += coef0[block.statistic(i, p.tq)];
  }

  /// The same for softpick, whose scores of masked pairs are 0 (ops/attention.h).
  void softpick_gradients(Work& w, const RowBlock<T>& block, const typename RowBlock<T>::Strip& strip) const {
    const int64_t keys = strip.keys(), end = std::min(strip.lane + strip.width, block.count);
    const Vec<A> zero{};
    const bool has_first = coef0 && strip.begin <= block.first_max;
    A of_first[kLanes];  // z0's gradient, of log relu(e^z - 1), as one of z
    for (int64_t i = strip.lane; has_first && i < end; ++i)
      if (const int64_t j = block.first[i] - strip.begin; j >= 0 && j < keys) {
        const A z = w.s[j * kLaneStride + i];
        of_first[i] = z > 0 ? coef0[block.statistic(i, p.tq)] / -std::expm1(-z) : A(0);
      }
    for (int64_t i = strip.lane; i < strip.lane + strip.width; i += Simd<A>::kWidth) {
      const Vec<A> lse_i = load_vec(w.lse + i), delta_i = load_vec(w.delta + i), one = exp_vec(zero - lse_i);
      for (int64_t j = 0; j < keys; ++j) {
        A *s = w.s + j * kLaneStride + i, *dp = w.dp + j * kLaneStride + i;
        const Vec<A> z = load_vec(s), e = exp_vec(z - lse_i), above = e - one;
        const Vec<A> below = z < 0 ? e * delta_i : zero;
        store_vec(s, z > 0 ? above : zero);
        store_vec(dp, z > 0 ? e * (load_vec(dp) - delta_i) : below);
      }
    }
    for (int64_t i = strip.lane; has_first && i < end; ++i)
      if (const int64_t j = block.first[i] - strip.begin; j >= 0 && j < keys)
        w.dp[j * kLaneStride + i] += of_first[i];
  }

  /// One pair of blocks: the keys of [k0, k1) visible to any row of the block.
  void pair(Work& w, const RowBlock<T>& block, int64_t kv_head, int64_t k0, int64_t k1, bool for_rows,
            bool for_keys) const {
    k0 = std::max(k0, block.first_min);
    k1 = std::min(k1, block.last_max + 1);
    if (k0 >= k1) return;
    const int64_t width = block.strip_width(k0, k1, Operands::kStrip);
    w.operands.load_keys(kv_head, k0, k1 - k0, for_rows ? p.k : nullptr);
    for (int64_t lane = 0; lane < block.lanes; lane += width) {
      const auto strip = block.strip(lane, width, k0, k1);
      const int64_t keys = strip.keys();
      if (keys <= 0) continue;
      Span span{lane, strip.width, strip.begin - k0, keys};
      w.operands.scores(w.s, span);
      w.operands.value_scores(w.dp, span);
      score_gradients(w, block, strip);
      if (for_rows) w.operands.add_keys(w.dq_t, w.dp, span);
      if (for_keys) {
        const int64_t head = kv_head * sum_head;
        span.width = std::min(strip.width, block.count - lane);
        w.operands.add_value_gradients(dv_sum + head + strip.begin * dv_sum_row, dv_sum_row, w.s, span);
        w.operands.add_key_gradients(dk_sum + head + strip.begin * dk_sum_row, dk_sum_row, w.dp, span);
      }
    }
  }

  void store_rows(Work& w, const RowBlock<T>& block) const {
    T* dq_rows[kLanes];
    alignas(64) A scale[kLanes];
    std::fill_n(scale, kLanes, p.scale);
    block.pointers(dq_rows, dq, p);
    unpack_transposed(dq_rows, w.dq_t, scale, block.count, p.depth);
  }
  void zero_keys(int64_t kv_head, int64_t k0, int64_t k1) const {
    for (int64_t j = k0; j < k1; ++j) {
      std::fill_n(dk_sum + kv_head * sum_head + j * dk_sum_row, p.padded_depth, A(0));
      std::fill_n(dv_sum + kv_head * sum_head + j * dv_sum_row, p.padded_depth, A(0));
    }
  }
  void store_keys(int64_t kv_head, int64_t k0, int64_t k1) const {
    if (static_cast<const void*>(dk_sum) == dk) return;  // summed in place
    const A key_scale = Operands::key_gradient_scale(p);
    for (int64_t j = k0; j < k1; ++j) {
      const A* const sum = dk_sum + kv_head * sum_head + j * dk_sum_row;
      T* const to = dk + (j * p.kv_heads + kv_head) * p.depth;
      for (int64_t d = 0; d < p.depth; ++d) store(to + d, sum[d] * key_scale);
      store_row(dv + j * dv_row + kv_head * p.depth, dv_sum + kv_head * sum_head + j * dv_sum_row, p.depth);
    }
  }

  RowBlock<T> block_of(int64_t kv_head, const Chunk& c, int64_t index) const {
    const int64_t row = c.row * p.group() + index * kLanes;
    return RowBlock<T>(p, kv_head, row, std::min(kLanes, c.row_end * p.group() - row));
  }
  int64_t row_blocks(const Chunk& c) const { return ((c.row_end - c.row) * p.group() + kLanes - 1) / kLanes; }

  /// All keys for one block of rows: dQ, and with for_keys the rows' part of dK and dV.
  void row_pass(Work& w, int64_t kv_head, const Chunk& c, int64_t index, bool for_keys) const {
    const RowBlock<T> block = block_of(kv_head, c, index);
    load_rows(w, block, for_keys);
    std::fill_n(w.dq_t, p.padded_depth * kLaneStride, A(0));
    for (int64_t k0 = c.key + (block.first_min - c.key) / kKeys * kKeys; k0 <= block.last_max; k0 += kKeys)
      pair(w, block, kv_head, k0, k0 + kKeys, true, for_keys);
    store_rows(w, block);
  }
  /// All rows for one block of keys: dK and dV.
  void key_pass(Work& w, int64_t kv_head, const Chunk& c, int64_t index) const {
    const int64_t k0 = c.key + index * kKeys, k1 = std::min(k0 + kKeys, c.key_end);
    zero_keys(kv_head, k0, k1);
    for (int64_t b = (p.first_row(k0, c.row) - c.row) * p.group() / kLanes; b < row_blocks(c); ++b) {
      const RowBlock<T> block = block_of(kv_head, c, b);
      if (block.first_min >= k1) break;
      load_rows(w, block, true);
      pair(w, block, kv_head, k0, k1, false, true);
    }
    store_keys(kv_head, k0, k1);
  }
  void one_pass(Work& w, int64_t kv_head, const Chunk& c) const {
    zero_keys(kv_head, c.key, c.key_end);
    for (int64_t b = 0; b < row_blocks(c); ++b) row_pass(w, kv_head, c, b, true);
    store_keys(kv_head, c.key, c.key_end);
  }
};

/// Chunk i has the rows [cuts[i], cuts[i + 1]). Returns the number of chunks.
template <class T>
int64_t cut_chunks(int32_t* cuts, const Problem<T>& p) {
  int64_t n = 0;
  cuts[0] = 0;
  for (int64_t t = kMinChunk; t < p.tq; ++t)
    if (p.first(t) > p.last(t - 1) && t - cuts[n] >= kMinChunk) cuts[++n] = static_cast<int32_t>(t);
  cuts[++n] = static_cast<int32_t>(p.tq);
  return n;
}

/// The i-th of them. A key that no row sees belongs to the chunk before it.
template <class T>
Chunk chunk_of(const int32_t* cuts, int64_t i, const Problem<T>& p) {
  const int64_t row = cuts[i], end = cuts[i + 1];
  return {row, end, row == 0 ? 0 : p.first(row), end == p.tq ? p.tk : p.first(end)};
}

/// Whether assigning whole chunks to threads is faster than dividing 7/5 of the work (and the packing)
/// evenly. load has one element per thread.
template <class T>
bool chunks_suffice(double* load, int64_t threads, const int32_t* cuts, int64_t chunks, const Problem<T>& p) {
  std::fill_n(load, threads, 0.0);
  double total = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    double cost = 0;
    for (int64_t t = cuts[c]; t < cuts[c + 1]; ++t) cost += static_cast<double>(p.last(t) + 32 - p.first(t));
    for (int64_t g = 0; g < p.kv_heads; ++g) *std::min_element(load, load + threads) += cost;
    total += cost * static_cast<double>(p.kv_heads);
  }
  return *std::max_element(load, load + threads) <= 1.45 * total / static_cast<double>(threads);
}

}  // namespace
