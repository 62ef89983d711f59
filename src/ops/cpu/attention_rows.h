// Common parts of attention's forward and backward: arguments, blocks of rows with their masks, packed keys.
// Include after attention_blocks.h.

namespace {

/// The arguments common to forward and backward.
template <class T>
struct Problem {
  using A = accumulate_t<T>;
  const T *q, *k, *v;
  const int32_t *first_key, *own_key;
  int64_t tq, tk, heads, kv_heads, depth;
  int64_t padded_depth;  // depth in whole vectors, or, for tiles, in whole steps of theirs
  A scale;
  bool softpick;
  bool independent_rows = false;  // Context's

  explicit Problem(const AttentionInputs& in)
      : q(in.q.as<T>()),
        k(in.k.as<T>()),
        v(in.v.as<T>()),
        first_key(in.first_key.as<int32_t>()),
        own_key(in.own_key ? in.own_key.as<int32_t>() : nullptr),
        tq(in.q.dim(0)),
        tk(in.k.dim(0)),
        heads(in.q.dim(1)),
        kv_heads(in.k.dim(1)),
        depth(in.q.dim(2)),
        padded_depth((depth + Simd<A>::kWidth - 1) / Simd<A>::kWidth * Simd<A>::kWidth),
        scale(static_cast<A>(in.scale)),
        softpick(in.weights == AttentionWeights::softpick) {}
  int64_t group() const { return heads / kv_heads; }
  /// The first and the last key that query t sees.
  int64_t first(int64_t t) const { return own_key ? first_key[t] + own_key[t] - t : first_key[t]; }
  int64_t last(int64_t t) const { return own_key ? own_key[t] : t + tk - tq; }
  /// The first query from `begin` on whose own key is not before `key`.
  int64_t first_row(int64_t key, int64_t begin) const {
    if (!own_key) return key + tq - tk;
    return std::lower_bound(own_key + begin, own_key + tq, key) - own_key;
  }
  int64_t pairs() const {  // visible (query, key) pairs over all heads
    int64_t n = 0;
    for (int64_t t = 0; t < tq; ++t) n += last(t) + 1 - first(t);
    return n * heads;
  }

  /// Sizes from which all memory indices are computed.
  void check_first_keys(const char* op) const {
    for (int64_t t = 0; t < tq; ++t) {
      SLUICE_CHECK(first(t) >= (t ? first(t - 1) : 0) && first(t) <= last(t),
                   "{}: first_key[{}] = {} must not be below its predecessor {} nor above {}", op, t,
                   first(t), t ? first(t - 1) : 0, last(t));
      SLUICE_CHECK(last(t) > (t ? last(t - 1) : -1) && last(t) < tk,
                   "{}: own_key[{}] = {} must be above its predecessor, and one of {} keys", op, t, last(t),
                   tk);
    }
  }
};

/// Number of threads for this many pairs of query and key: each gets some tens of microseconds of work.
int64_t useful_threads(int64_t pairs, int64_t depth) {
  return std::clamp<int64_t>(pairs * depth / 500000, 1, num_threads());
}

/// A block of up to kLanes rows of one kv head; row r is query token r / group, head g * group + r % group,
/// so that the group's heads share one pass over the keys.
template <class T>
struct RowBlock {
  using A = accumulate_t<T>;
  using Int = typename Simd<A>::Int;
  int64_t row, count, lanes, head, group;  // lanes: count rounded up to whole vectors
  int64_t first_min, first_max, last_min, last_max;
  alignas(64) Int first[kLanes], last[kLanes];  // first and last visible key of a lane

  RowBlock(const Problem<T>& p, int64_t kv_head, int64_t row_, int64_t count_)
      : row(row_), count(count_), head(kv_head * p.group()), group(p.group()) {
    constexpr int64_t W = Simd<A>::kWidth;
    lanes = (count + W - 1) / W * W;
    for (int64_t i = 0; i < count; ++i) {
      first[i] = static_cast<Int>(p.first(token(i)));
      last[i] = static_cast<Int>(p.last(token(i)));
    }
    first_min = first[0], first_max = first[count - 1];
    last_min = last[0], last_max = last[count - 1];
    for (int64_t i = count; i < lanes; ++i) first[i] = 0, last[i] = std::numeric_limits<Int>::max();
  }
  int64_t token(int64_t i) const { return (row + i) / group; }
  int64_t head_of(int64_t i) const { return head + (row + i) % group; }
  template <class P>
  void pointers(P** out, P* tensor, const Problem<T>& p) const {
    for (int64_t i = 0; i < count; ++i) out[i] = tensor + (token(i) * p.heads + head_of(i)) * p.depth;
  }
  /// Index into (H, Tq).
  int64_t statistic(int64_t i, int64_t tq) const { return head_of(i) * tq + token(i); }

  /// Lanes [lane, lane + width) and the keys of [begin, end) visible to any of them. A block of keys at an
  /// edge of the mask is computed in strips of the products' tile width to avoid masked work; others are
  /// computed as a whole.
  struct Strip {
    int64_t lane, width, begin, end;
    bool cut;  // some pairs are masked
    int64_t keys() const { return end - begin; }
  };
  int64_t strip_width(int64_t k0, int64_t k1, int64_t of_products) const {
    return k0 < first_max || k1 - 1 > last_min ? of_products : lanes;
  }
  /// `unit`: keys are left out from k0 on by multiples of it.
  Strip strip(int64_t lane, int64_t max_width, int64_t k0, int64_t k1, int64_t unit = 1) const {
    const int64_t width = std::min(max_width, lanes - lane), end = std::min(lane + width, count) - 1,
                  hidden = std::max<int64_t>(first[lane] - k0, 0) / unit * unit;
    Strip s{lane, width, k0 + hidden, std::min<int64_t>(k1, last[end] + 1), false};
    s.cut = s.begin < first[end] || s.end - 1 > last[lane];
    return s;
  }

  /// s[key][lane] = -inf for masked pairs, with softpick 0: scores whose weight is 0.
  void mask(A* s, int64_t lane, int64_t width, int64_t k0, int64_t keys, bool softpick) const {
    const Vec<A> hidden = splat(softpick ? A(0) : -std::numeric_limits<A>::infinity());
    for (int64_t i = lane; i < lane + width; i += Simd<A>::kWidth) {
      const auto lo = *reinterpret_cast<const typename Simd<A>::Mask*>(first + i);
      const auto hi = *reinterpret_cast<const typename Simd<A>::Mask*>(last + i);
      for (int64_t j = 0; j < keys; ++j) {
        const typename Simd<A>::Mask key = typename Simd<A>::Mask{} + static_cast<Int>(k0 + j);
        A* x = s + j * kLaneStride + i;
        store_vec(x, (key >= lo) & (key <= hi) ? load_vec(x) : hidden);
      }
    }
  }
};

/// dst[key][d] of keys [k0, k0 + keys) of one kv head, zero for depth <= d < padded_depth.
template <class T>
void pack_keys(accumulate_t<T>* dst, const T* src, const Problem<T>& p, int64_t kv_head, int64_t k0,
               int64_t keys) {
  const int64_t stride = head_stride(p.depth);
  for (int64_t j = 0; j < keys; ++j) {
    // With few queries this is memory-bound, and the rows are not contiguous, so they are prefetched
    // explicitly.
    const T* const ahead = src + (std::min(k0 + j + 8, p.tk - 1) * p.kv_heads + kv_head) * p.depth;
    prefetch_row(ahead, p.depth);
    convert_row(dst + j * stride, src + ((k0 + j) * p.kv_heads + kv_head) * p.depth, p.depth,
                accumulate_t<T>(1));
    for (int64_t d = p.depth; d < p.padded_depth; ++d) dst[j * stride + d] = 0;
  }
}

}  // namespace
