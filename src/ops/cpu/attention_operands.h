// The packed operands of attention's products, and the products, in two forms: vectors of the accumulate
// type, and pairs of bf16 that a unit for tiles multiplies (tile_units.h), with the weights of the softmax
// and their gradients rounded to bf16, as GPU kernels have them. Sums, maxima and exponentials are f32 in
// both. Scores and outputs are stored transposed, [key][lane] and [d][lane], rows kLaneStride apart. Include
// after attention_rows.h.

namespace {

/// Lanes [lane, lane + width) of a block of rows, and `keys` keys from the key `at` of a block of keys on.
struct Span {
  int64_t lane, width, at, keys;
};

template <class T_>
class VectorOperands {
 public:
  using T = T_;
  using A = accumulate_t<T>;
  /// Sums may be made in the gradients themselves where those have the type of the sums.
  static constexpr bool kSumsInPlace = std::is_same_v<T, A>;
  /// Keys that are added at once: a sum over keys depends on where such steps begin.
  static constexpr int64_t kStep = 1;
  /// Lanes of a product that is computed at once: strips of masked blocks begin at multiples of it.
  static constexpr int64_t kStrip = 2 * Simd<A>::kWidth;

  static int64_t forward_size(const Problem<T>& p) {
    return p.padded_depth * kLaneStride + 2 * kKeys * head_stride(p.depth);
  }
  static int64_t backward_size(const Problem<T>& p) {
    return 2 * p.padded_depth * kLaneStride + 2 * (kLanes + kKeys) * head_stride(p.depth);
  }
  VectorOperands(A* base, const Problem<T>& p, bool backward) : p_(p), stride_(head_stride(p.depth)) {
    const auto take = [&](int64_t n) { return std::exchange(base, base + n); };
    q_t_ = take(p.padded_depth * kLaneStride), k_ = take(kKeys * stride_), v_ = take(kKeys * stride_);
    if (!backward) return;
    d_o_t_ = take(p.padded_depth * kLaneStride), q_ = take(kLanes * stride_), d_o_ = take(kLanes * stride_);
  }
  /// Between these a thread may use the products.
  static void begin() {}
  static void end() {}

  void load_queries(const T* const* q, int64_t count, int64_t lanes) {
    pack_transposed(q_t_, q, count, lanes, p_.depth, p_.padded_depth, p_.scale);
  }
  /// The gradients of the outputs; with for_keys also what the gradients of keys and values need.
  void load_gradients(const T* const* q, const T* const* d_o, int64_t count, int64_t lanes, bool for_keys) {
    pack_transposed(d_o_t_, d_o, count, lanes, p_.depth, p_.padded_depth, A(1));
    for (int64_t i = 0; i < count && for_keys; ++i) {
      convert_row(q_ + i * stride_, q[i], p_.depth, p_.scale);
      convert_row(d_o_ + i * stride_, d_o[i], p_.depth, A(1));
      for (int64_t d = p_.depth; d < p_.padded_depth; ++d) q_[i * stride_ + d] = d_o_[i * stride_ + d] = 0;
    }
  }
  /// Keys [k0, k0 + keys) of a head. `mixes` is what is mixed by weights: values forward, keys backward, if
  /// at all.
  void load_keys(int64_t kv_head, int64_t k0, int64_t keys, const T* /*mixes*/) {
    pack_keys(k_, p_.k, p_, kv_head, k0, keys);
    pack_keys(v_, p_.v, p_, kv_head, k0, keys);
  }

  /// s[key][lane] = scale <K[key], Q[lane]>
  void scores(A* s, const Span& x) const {
    key_scores(x.keys, x.width, p_.depth, k_ + x.at * stride_, q_t_ + x.lane, s + x.lane);
  }
  /// dp[key][lane] = <V[key], dO[lane]>
  void value_scores(A* dp, const Span& x) const {
    key_scores(x.keys, x.width, p_.depth, v_ + x.at * stride_, d_o_t_ + x.lane, dp + x.lane);
  }
  /// o_t[d][lane] = alpha[lane] o_t[d][lane] + sum over keys of V[key][d] s[key][lane]
  void add_values(A* o_t, const A* s, const A* alpha, const Span& x) const {
    mix_keys(p_.padded_depth, x.width, x.keys, v_ + x.at * stride_, stride_, s + x.lane, o_t + x.lane,
             Onto::rescale_add, alpha + x.lane);
  }
  /// dq_t[d][lane] += sum over keys of K[key][d] ds[key][lane]
  void add_keys(A* dq_t, const A* ds, const Span& x) const {
    mix_keys(p_.padded_depth, x.width, x.keys, k_ + x.at * stride_, stride_, ds + x.lane, dq_t + x.lane,
             Onto::add);
  }
  /// dv[key][d] += sum over lanes of s[key][lane] dO[lane][d]; x.width lanes are real.
  void add_value_gradients(A* dv, int64_t ld, const A* s, const Span& x) const {
    mix_lanes(x.keys, p_.padded_depth, x.width, s + x.lane, d_o_ + x.lane * stride_, stride_, dv, ld);
  }
  /// dk[key][d] += sum over lanes of ds[key][lane] Q[lane][d], times scale / key_gradient_scale(p)
  void add_key_gradients(A* dk, int64_t ld, const A* ds, const Span& x) const {
    mix_lanes(x.keys, p_.padded_depth, x.width, ds + x.lane, q_ + x.lane * stride_, stride_, dk, ld);
  }
  static A key_gradient_scale(const Problem<T>&) { return A(1); }

 private:
  const Problem<T>& p_;
  int64_t stride_;
  A *q_t_, *k_, *v_;                                    // [d][lane], [key][d]
  A *d_o_t_ = nullptr, *q_ = nullptr, *d_o_ = nullptr;  // [d][lane], [lane][d]
};

/// Depths beyond p.depth are zero, up to p.padded_depth, a multiple of kUnitDepth. Keys are read where they
/// lie if they need no such zeros, else from copies of a block.
template <class Unit>
class TileOperands {
 public:
  using T = bf16;
  using A = float;
  static constexpr bool kSumsInPlace = false;
  static constexpr int64_t kStep = kUnitDepth;
  static constexpr int64_t kStrip = kPairStrip;

  static int64_t padded(int64_t depth) { return ceil_div(depth, kUnitDepth) * kUnitDepth; }
  /// Tiles have at least twice the rate of vectors: they pay if less than half of them is zeros.
  static bool multiplies(const Problem<T>& p) {
    return p.depth % 2 == 0 && padded(p.depth) < 2 * p.depth && padded(p.depth) <= kMostDepth;
  }
  static int64_t forward_size(const Problem<T>& p) {
    return lanes_size(p) + mixed_size(p) + kPairsOfKeys * kLanes + copy_size(p);
  }
  static int64_t backward_size(const Problem<T>& p) {
    return forward_size(p) + 3 * lanes_size(p) + kKeys * kLaneRow / 2 + copy_size(p);
  }
  TileOperands(A* base, const Problem<T>& p, bool backward) : p_(p) {
    const auto take = [&](int64_t n) { return std::exchange(base, base + n); };
    q_t_ = take(lanes_size(p)), mixed_ = take(mixed_size(p)), weights_ = take(kPairsOfKeys * kLanes);
    const bool copies = copy_size(p) > 0;
    if (copies) k_ = reinterpret_cast<bf16*>(take(copy_size(p)));
    if (!backward) return;
    d_o_t_ = take(lanes_size(p)), q_ = take(lanes_size(p)), d_o_ = take(lanes_size(p));
    lanes_of_keys_ = reinterpret_cast<bf16*>(take(kKeys * kLaneRow / 2));
    if (copies) v_ = reinterpret_cast<bf16*>(take(copy_size(p)));
  }
  static void begin() { Unit::begin(); }
  static void end() { Unit::end(); }

  void load_queries(const T* const* q, int64_t count, int64_t /*lanes*/) {
    pack_rows_transposed(q_t_, q, count);
  }
  void load_gradients(const T* const* q, const T* const* d_o, int64_t count, int64_t /*lanes*/,
                      bool for_keys) {
    pack_rows_transposed(d_o_t_, d_o, count);
    if (!for_keys) return;
    pack_pairs(q_, count, kLanes / 2, p_.depth, [q](int64_t i) { return q[i]; });
    pack_pairs(d_o_, count, kLanes / 2, p_.depth, [d_o](int64_t i) { return d_o[i]; });
  }
  void load_keys(int64_t kv_head, int64_t k0, int64_t keys, const T* mixes) {
    first_ = (k0 * p_.kv_heads + kv_head) * p_.depth;
    copy_keys(k_, p_.k, keys);
    copy_keys(v_, p_.v, keys);
    if (!mixes) return;
    static const std::array<bf16, static_cast<size_t>(kMostDepth)> zeros{};
    pack_pair_columns(mixed_, kPairsOfKeys + kPad, 2 * kPairsOfKeys, kPairsOfKeys, p_.depth,
                      [&](int64_t j) { return j < keys ? mixes + first_ + j * row() : zeros.data(); });
  }

  void scores(A* s, const Span& x) const {
    of_keys(s, x, p_.k, k_, q_t_);
    for (int64_t j = 0; j < x.keys; ++j)
      for (int64_t i = x.lane; i < x.lane + x.width; i += Simd<A>::kWidth) {
        A* const at = s + j * kLaneStride + i;
        store_vec(at, load_vec(at) * p_.scale);
      }
  }
  void value_scores(A* dp, const Span& x) const { of_keys(dp, x, p_.v, v_, d_o_t_); }
  void add_values(A* o_t, const A* s, const A* alpha, const Span& x) const {
    for (int64_t d = 0; d < p_.depth; ++d)
      for (int64_t i = x.lane; i < x.lane + x.width; i += Simd<A>::kWidth) {
        A* const at = o_t + d * kLaneStride + i;
        store_vec(at, load_vec(at) * load_vec(alpha + i));
      }
    add_keys(o_t, s, x);
  }
  void add_keys(A* dq_t, const A* ds, const Span& x) const {
    const int64_t steps = ceil_div(x.keys, kUnitDepth), units = steps * kUnitDepth / 2;
    Unit::pair_rows(weights_, units, ds + x.lane, kLaneStride, x.keys, ceil_div(x.width, kPairStrip));
    for (int64_t i = 0; i < x.width; i += kPairStrip)
      for (int64_t d = 0; d < p_.depth; d += kUnitRows)
        Unit::multiply(std::min(kUnitRows, p_.depth - d), steps,
                       reinterpret_cast<const bf16*>(mixed_ + d * (kPairsOfKeys + kPad)) + x.at,
                       2 * (kPairsOfKeys + kPad), weights_ + i * units, dq_t + d * kLaneStride + x.lane + i,
                       kLaneStride, true);
  }
  void add_value_gradients(A* dv, int64_t ld, const A* s, const Span& x) const {
    of_lanes(dv, ld, s, x, d_o_);
  }
  void add_key_gradients(A* dk, int64_t ld, const A* ds, const Span& x) const { of_lanes(dk, ld, ds, x, q_); }
  static A key_gradient_scale(const Problem<T>& p) { return p.scale; }

 private:
  // Keys of a block, and as many zeros as a step that begins within the block may read behind them.
  static constexpr int64_t kPairsOfKeys = (kKeys + kUnitDepth) / 2, kPad = 16, kMostDepth = 1024;
  static constexpr int64_t kLaneRow = kLanes + 32;
  static int64_t mixed_size(const Problem<T>& p) { return p.depth * (kPairsOfKeys + kPad); }
  static int64_t lanes_size(const Problem<T>& p) { return kLanes / 2 * padded(p.depth); }
  static int64_t copy_size(const Problem<T>& p) {
    return p.depth == padded(p.depth) ? 0 : kKeys * padded(p.depth) / 2;
  }
  int64_t row() const { return p_.kv_heads * p_.depth; }

  void pack_rows_transposed(float* to, const T* const* rows, int64_t count) const {
    pack_pairs_transposed(to, p_.depth, p_.padded_depth / 2, count, [rows](int64_t i) { return rows[i]; });
  }
  /// The block's keys, with zeros behind each; `to` is null where no copies are needed.
  void copy_keys(T* to, const T* keys, int64_t count) const {
    for (int64_t j = 0; to && j < count; ++j, to += p_.padded_depth) {
      std::copy_n(keys + first_ + j * row(), p_.depth, to);
      std::fill(to + p_.depth, to + p_.padded_depth, T{});
    }
  }
  /// s[key][lane] = <row of the key, row of the lane>
  void of_keys(A* s, const Span& x, const T* keys, const T* copy, const float* lanes) const {
    const T* const from = copy ? copy + x.at * p_.padded_depth : keys + first_ + x.at * row();
    const int64_t ld = copy ? p_.padded_depth : row();
    for (int64_t i = x.lane; i < x.lane + x.width; i += kPairStrip)
      for (int64_t j = 0; j < x.keys; j += kUnitRows)
        Unit::multiply(std::min(kUnitRows, x.keys - j), p_.padded_depth / kUnitDepth, from + j * ld, ld,
                       lanes + i / kPairStrip * (p_.padded_depth / 2) * kPairStrip, s + j * kLaneStride + i,
                       kLaneStride, false);
  }
  /// sums[key][d] += sum over lanes of weights[key][lane] rows[lane][d]
  void of_lanes(A* sums, int64_t ld, const A* weights, const Span& x, const float* rows) const {
    const int64_t steps = ceil_div(x.width, kUnitDepth);
    Unit::round_rows(lanes_of_keys_, kLaneRow, weights + x.lane, kLaneStride, x.keys, x.width,
                     steps * kUnitDepth);
    for (int64_t d = 0; d < p_.depth; d += kPairStrip)
      for (int64_t j = 0; j < x.keys; j += kUnitRows)
        Unit::multiply(std::min(kUnitRows, x.keys - j), steps, lanes_of_keys_ + j * kLaneRow, kLaneRow,
                       rows + (d / kPairStrip * kLanes / 2 + x.lane / 2) * kPairStrip, sums + j * ld + d, ld,
                       true);
  }

  const Problem<T>& p_;
  int64_t first_ = 0;                                       // element of the block's first key
  T *k_ = nullptr, *v_ = nullptr;                           // [key][d]
  float *q_t_, *mixed_, *weights_;                          // pairs of d, of keys, of keys
  float *d_o_t_ = nullptr, *q_ = nullptr, *d_o_ = nullptr;  // pairs of d, of lanes, of lanes
  bf16* lanes_of_keys_ = nullptr;                           // [key][lane]
};

/// Calls f with the operands for this problem, as a type, and with the problem, padded as they want it.
template <class T, class F>
void with_operands(const Problem<T>& p, F&& f) {
  if constexpr (std::is_same_v<T, bf16>)
    if (bf16_products() && TileOperands<EmulatedUnit>::multiplies(p)) {
      Problem<T> padded = p;
      padded.padded_depth = TileOperands<EmulatedUnit>::padded(p.depth);
      return with_tile_unit(
          [&](auto unit) { f(std::type_identity<TileOperands<decltype(unit)>>{}, padded); });
    }
  f(std::type_identity<VectorOperands<T>>{}, p);
}

}  // namespace
