// Attention of one query token, as in generation with a cache: keys and values are read once, in place.
// Chunks of keys are computed apart and joined in order, so that threads share even a single head and results
// do not depend on their number. Limited by the memory's bandwidth. Include after attention_rows.h and
// gathered_rows.h.

namespace {

constexpr int64_t kDecodeChunk = 128;  // keys

constexpr auto kInOrder = [] {
  std::array<int32_t, kDecodeChunk> list{};
  for (size_t i = 0; i < list.size(); ++i) list[i] = static_cast<int32_t>(i);
  return list;
}();

template <class T>
struct Decode {
  using A = accumulate_t<T>;
  const Problem<T>& p;
  const A* q;  // (H, D), scaled
  A* parts;  // (chunks, H, D + 2): of a chunk's softmax the output before its division, the maximum, the sum
  A* z0;     // (H), or null
  int64_t team;  // of threads, so that the next chunk of one is most likely so many further on

  int64_t size() const { return p.depth + 2; }
  A* part(int64_t chunk, int64_t head) const { return parts + (chunk * p.heads + head) * size(); }

  void chunk(int64_t c) const {
    const int64_t at_once = std::max(kHeadsAtOnce / p.group(), int64_t{1});
    for (int64_t head = 0; head < p.kv_heads; head += at_once)
      heads(c, head, std::min(at_once, p.kv_heads - head));
  }

  /// The softmax over all chunks of one head; returns its lse.
  A join(int64_t head, int64_t first, int64_t last, T* o) const {
    A* const total = part(first, head);
    A largest = total[p.depth], sum = 0;
    for (int64_t c = first; c <= last; ++c) largest = std::max(largest, part(c, head)[p.depth]);
    for (int64_t c = first; c <= last; ++c) {
      const A* const x = part(c, head);
      const A factor = std::exp(x[p.depth] - largest);
      sum += factor * x[p.depth + 1];
      for (int64_t d = 0; d < p.depth; ++d) total[d] = (c == first ? A(0) : total[d]) + factor * x[d];
    }
    for (int64_t d = 0; d < p.depth; ++d) store(o + d, total[d] / sum);
    return largest + std::log(sum);
  }

 private:
  static constexpr int64_t kHeadsAtOnce = 32, kKeysAtOnce = 16;

  /// The heads of `count` key heads from `kv_head` on. A few keys are read for all of them, and then the
  /// next, so that memory is read in its order: one head of a token is only some cache lines of its row. The
  /// next few are asked for meanwhile: behind the last keys the first values, and behind the last of these
  /// the first keys of the thread's next chunk.
  void heads(int64_t c, int64_t kv_head, int64_t count) const {
    const int64_t begin = std::max<int64_t>(c * kDecodeChunk, p.first_key[0]),
                  keys = std::min((c + 1) * kDecodeChunk, p.tk) - begin, stride = p.kv_heads * p.depth,
                  head = kv_head * p.group();
    alignas(64) A scores[kHeadsAtOnce * kDecodeChunk];
    std::vector<A> more;  // where one key head has more heads than that
    A* s = scores;
    if (count * p.group() > kHeadsAtOnce) {
      more.resize(static_cast<size_t>(count * p.group() * kDecodeChunk));
      s = more.data();
    }
    const auto by_keys = [&](const T* base, const T* next, const auto& work) {
      for (int64_t e = 0; e < keys; e += kKeysAtOnce)
        for (int64_t i = 0; i < count; ++i) {
          const int64_t column = (kv_head + i) * p.depth;
          for (int64_t n = e + kKeysAtOnce; n < e + 2 * kKeysAtOnce; ++n)
            prefetch_row(
                n < keys ? base + (begin + n) * stride + column : next + (n - keys) * stride + column,
                p.depth);
          const Rows<const T> rows{base + (begin + e) * stride + column, kInOrder.data(), stride};
          work(i * p.group(), e, rows, std::min(kKeysAtOnce, keys - e));
        }
    };
    by_keys(p.k, p.v + begin * stride, [&](int64_t h, int64_t e, const Rows<const T>& rows, int64_t n) {
      dot_rows(s + h * kDecodeChunk + e, kDecodeChunk, q + (head + h) * p.depth, p.depth, p.group(), rows, n,
               p.depth);
    });
    for (int64_t h = 0; h < count * p.group(); ++h) {
      A* const row = s + h * kDecodeChunk;
      if (begin == p.first_key[0] && z0) z0[head + h] = row[0];
      // At least half the lowest number, so that exp(-inf - -inf) is not computed.
      A largest = std::numeric_limits<A>::lowest() / 2;
      for (int64_t j = 0; j < keys; ++j) largest = std::max(largest, row[j]);
      A* const statistics = part(c, head + h) + p.depth;
      statistics[0] = largest;
      statistics[1] = exp_row(row, keys, largest);
      std::fill_n(part(c, head + h), p.depth, A(0));
    }
    const int64_t next = (c + team) * kDecodeChunk;
    by_keys(p.v, p.k + (next < p.tk ? next : begin) * stride,
            [&](int64_t h, int64_t e, const Rows<const T>& rows, int64_t n) {
              mix_rows(part(c, head + h), size(), s + h * kDecodeChunk + e, kDecodeChunk, p.group(), rows, n,
                       p.depth);
            });
  }
};

/// One query; also its own key alone, so that one shape needs no other memory than the next.
template <class T>
bool decodes(const Problem<T>& p) {
  return p.tq == 1 && !p.own_key && !p.softpick;
}

template <class T>
void decode_t(Context& ctx, const AttentionState& out, const Problem<T>& p) {
  using A = accumulate_t<T>;
  constexpr int64_t kBytesOfThread = 256 << 10;  // some ten microseconds
  ScratchScope temporaries(ctx.scratch);
  const int64_t chunks = (p.tk + kDecodeChunk - 1) / kDecodeChunk;
  const auto take = [&](const char* name, int64_t count) {
    return temporaries.alloc(name, dtype_of<A>::value, {count}).template as<A>();
  };
  A* const q = take("attention query", p.heads * p.depth);
  A* const parts = take("attention parts", chunks * p.heads * (p.depth + 2));
  if (ctx.dry_run) return;
  p.check_first_keys("attention_forward");

  convert_row(q, p.q, p.heads * p.depth, p.scale);
  const int64_t first = p.first_key[0] / kDecodeChunk,
                bytes = 2 * (p.tk - p.first_key[0]) * p.kv_heads * p.depth * static_cast<int64_t>(sizeof(T)),
                team =
                    std::clamp<int64_t>(bytes / kBytesOfThread, 1, std::min<int64_t>(num_threads(), chunks));
  const Decode<T> decode{p, q, parts, out.z0.empty() ? nullptr : out.z0.as<A>(), team};
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast <int>(team))
  for (int64_t c = first; c < chunks; ++c) decode.chunk(c);
  for (int64_t h = 0; h < p.heads; ++h)
    out.lse.as<A>()[h] = decode.join(h, first, chunks - 1, out.o.as<T>() + h * p.depth);
}

}  // namespace
