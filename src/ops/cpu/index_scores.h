// Index scores of a block of queries. Include between isa_begin.h and isa_end.h, after attention_blocks.h.

namespace {

constexpr int64_t kScoreQueries = 32;

inline Vec<float> clamp_low(Vec<float> x, float low) { return x > low ? x : splat(low); }
inline Vec<double> clamp_low(Vec<double> x, double low) { return x > low ? x : splat(low); }

/// 1 / (1 + e^-x); NaN stays NaN.
template <class A>
inline Vec<A> sigmoid_vec(Vec<A> x) {
  const Vec<A> y = A(1) / (A(1) + exp_vec(-clamp_low(x, A(-80))));
  return x == x ? y : x;
}

/// The arguments of the scores.
template <class T>
struct Index {
  using A = accumulate_t<T>;
  const T *q, *k, *w, *bias, *w_bias;
  const int32_t *first_key, *own_key;
  int64_t tq, tk, heads, depth, sets, block;
  A scale;
  IndexActivation activation;
  IndexHeadWeights head_weights;

  explicit Index(const IndexInputs& in)
      : q(in.q.as<T>()),
        k(in.k.as<T>()),
        w(in.w ? in.w.as<T>() : nullptr),
        bias(in.bias ? in.bias.as<T>() : nullptr),
        w_bias(in.w_bias ? in.w_bias.as<T>() : nullptr),
        first_key(in.first_key.as<int32_t>()),
        own_key(in.own_key ? in.own_key.as<int32_t>() : nullptr),
        tq(in.q.dim(0)),
        tk(in.k.dim(0)),
        heads(in.q.dim(1)),
        depth(in.q.dim(2)),
        sets(in.sets),
        block(in.block),
        scale(static_cast<A>(in.scale)),
        activation(in.activation),
        head_weights(in.head_weights) {}
  int64_t per_set() const { return heads / sets; }
  /// The first and the last key that query t sees.
  int64_t first(int64_t t) const { return own_key ? first_key[t] + own_key[t] - t : first_key[t]; }
  int64_t last(int64_t t) const { return own_key ? own_key[t] : t + tk - tq; }
  /// The number of blocks that query t can choose from; the i-th begins at first(t) + i block.
  int64_t candidates(int64_t t) const {
    const int64_t before = last(t) - first(t);
    return block == 1 ? before + 1 : before / block;
  }
  int64_t most_candidates() const { return (tk + block - 1) / block; }
  A head_weight(int64_t t, int64_t j) const {
    if (head_weights == IndexHeadWeights::none) return 1;
    const A x = load(w + t * heads + j) + (w_bias ? load(w_bias + j) : A(0));
    return head_weights == IndexHeadWeights::sigmoid ? static_cast<A>(sigmoid(x)) : x;
  }
  A bias_of(int64_t j) const { return bias ? load(bias + j) : A(0); }
  void check_first_keys(const char* op) const {
    for (int64_t t = 0; t < tq; ++t) {
      SLUICE_CHECK(first(t) >= (t ? first(t - 1) : 0) && first(t) <= last(t),
                   "{}: first_key[{}] = {} is below its predecessor or above {}", op, t, first(t), last(t));
      SLUICE_CHECK(last(t) > (t ? last(t - 1) : -1) && last(t) < tk,
                   "{}: own_key[{}] = {} must be above its predecessor, and one of {} keys", op, t, last(t),
                   tk);
    }
  }
};

/// Memory of one thread for the scores of a block of queries.
template <class T>
struct ScoreWork {
  using A = accumulate_t<T>;
  A *q_t, *keys, *products, *total, *weights, *scores;
  int64_t row;  // of scores
  static int64_t padded_depth(const Index<T>& p) { return padded(p.depth, Simd<A>::kWidth); }
  static int64_t size(const Index<T>& p) {
    return p.per_set() * (padded_depth(p) * kLaneStride + kScoreQueries) + kKeys * head_stride(p.depth) +
           2 * kKeys * kLaneStride + kScoreQueries * padded(p.most_candidates(), 16);
  }
  ScoreWork(A* work, const Index<T>& p) : row(padded(p.most_candidates(), 16)) {
    q_t = work;
    weights = q_t + p.per_set() * padded_depth(p) * kLaneStride;
    keys = weights + p.per_set() * kScoreQueries;
    products = keys + kKeys * head_stride(p.depth);
    total = products + kKeys * kLaneStride;
    scores = total + kKeys * kLaneStride;
  }
};

/// max(x, 0) or sigmoid(x); NaN stays NaN.
template <class T, class V>
inline V activated(const Index<T>& p, V u) {
  using A = accumulate_t<T>;
  return p.activation == IndexActivation::sigmoid ? sigmoid_vec<A>(u) : (u <= A(0) ? V{} : u);
}

/// Scores of queries [t0, t0 + count) with one first key, count <= kScoreQueries. scores[i][c], rows w.row
/// apart: I of query t0 + i and its candidate c.
template <class T>
class QueryScores {
 public:
  using A = accumulate_t<T>;
  static constexpr int64_t W = Simd<A>::kWidth;

  QueryScores(const Index<T>& p, const ScoreWork<T>& w, int64_t set, int64_t t0, int64_t count)
      : p_(p),
        w_(w),
        t0_(t0),
        count_(count),
        per_set_(p.per_set()),
        head0_(set * per_set_),
        depth_(w.padded_depth(p)),
        pairs_(count * per_set_ <= kLanes && padded(count * per_set_, W) < per_set_ * padded(count, W)),
        lanes_(padded(pairs_ ? count * per_set_ : count, W)) {
    pairs_ ? load_pairs() : load_heads();
  }

  /// Candidates [from, to).
  void write(A* scores, int64_t from, int64_t to) const {
    const int64_t stride = head_stride(p_.depth);
    for (int64_t c0 = from; c0 < to; c0 += kKeys) {
      const int64_t here = std::min(kKeys, to - c0);
      for (int64_t c = 0; c < here; ++c)
        convert_row(w_.keys + c * stride, p_.k + (p_.first(t0_) + (c0 + c) * p_.block) * p_.depth, p_.depth,
                    A(1));
      pairs_ ? write_pairs(scores + c0, here) : write_heads(scores + c0, here);
    }
  }

 private:
  const T* query(int64_t i, int64_t j) const { return p_.q + ((t0_ + i) * p_.heads + head0_ + j) * p_.depth; }

  // Many queries: one head after the other, lanes are queries.
  void load_heads() const {
    for (int64_t j = 0; j < per_set_; ++j) {
      const T* rows[kScoreQueries];
      for (int64_t i = 0; i < count_; ++i) rows[i] = query(i, j);
      pack_transposed(w_.q_t + j * depth_ * kLaneStride, rows, count_, lanes_, p_.depth, depth_, p_.scale);
      for (int64_t i = 0; i < lanes_; ++i)
        w_.weights[j * kScoreQueries + i] = i < count_ ? p_.head_weight(t0_ + i, head0_ + j) : A(0);
    }
  }
  void write_heads(A* scores, int64_t here) const {
    for (int64_t j = 0; j < per_set_; ++j) {
      key_scores(here, lanes_, p_.depth, w_.keys, w_.q_t + j * depth_ * kLaneStride, w_.products);
      const A bias = p_.bias_of(head0_ + j);
      for (int64_t c = 0; c < here; ++c)
        for (int64_t i = 0; i < lanes_; i += W) {
          const Vec<A> act = activated(p_, load_vec(w_.products + c * kLaneStride + i) + bias);
          A *const product = w_.products + c * kLaneStride + i, *const sum = w_.total + c * kLaneStride + i;
          // Stored, so that it is rounded before it is added, as write_pairs does: a query's scores must not
          // depend on how many are scored with it.
          store_vec(product, load_vec(w_.weights + j * kScoreQueries + i) * act);
          store_vec(sum, j == 0 ? load_vec(product) : load_vec(sum) + load_vec(product));
        }
    }
    // Up to a whole vector is written beyond the last score, where rows are padded or the next scores come.
    for (int64_t i = 0; i < lanes_; i += W)
      for (int64_t c = 0; c < here; c += W) {
        Vec<A> square[W];
#pragma GCC unroll 16
        for (int64_t e = 0; e < W; ++e) square[e] = load_vec(w_.total + (c + e) * kLaneStride + i);
        transpose<A>(square);
        for (int64_t e = 0; e < std::min(W, count_ - i); ++e)
          store_vec(scores + (i + e) * w_.row + c, square[e]);
      }
  }

  // Few queries, as in decoding: lanes are pairs of a query and a head, so that all heads are one product.
  void load_pairs() const {
    const T* rows[kLanes];
    A* const bias = w_.total;
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      const int64_t i = lane / per_set_, j = lane % per_set_;
      if (i < count_) rows[lane] = query(i, j);
      w_.weights[lane] = i < count_ ? p_.head_weight(t0_ + i, head0_ + j) : A(0);
      bias[lane] = p_.bias_of(head0_ + j);
    }
    pack_transposed(w_.q_t, rows, count_ * per_set_, lanes_, p_.depth, depth_, p_.scale);
  }
  void write_pairs(A* scores, int64_t here) const {
    const A* const bias = w_.total;
    key_scores(here, lanes_, p_.depth, w_.keys, w_.q_t, w_.products);
    for (int64_t c = 0; c < here; ++c) {
      A* const row = w_.products + c * kLaneStride;
      for (int64_t lane = 0; lane < lanes_; lane += W)
        store_vec(row + lane,
                  load_vec(w_.weights + lane) * activated(p_, load_vec(row + lane) + load_vec(bias + lane)));
      for (int64_t i = 0; i < count_; ++i) {
        A sum = row[i * per_set_];
        for (int64_t j = 1; j < per_set_; ++j) sum += row[i * per_set_ + j];
        scores[i * w_.row + c] = sum;
      }
    }
  }

  const Index<T>& p_;
  const ScoreWork<T>& w_;
  int64_t t0_, count_, per_set_, head0_, depth_;
  bool pairs_;
  int64_t lanes_;
};

}  // namespace
