// The softmax core: its kinds and windows, a gate applied in the same pass, importance of heads, values of
// first tokens left out.
#include "nn/softmax_attention.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "support/enums.h"
#include "support/layer_parts.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::LayerParts;
using test::name_of;
using test::Pool;

constexpr int64_t kTokens = 9, kHeads = 4, kKvHeads = 2, kChannels = 4;

ModelConfig config_of(AttentionKind kind, int64_t window) {
  ModelConfig config = test::tiny_config();
  config.attention.kind = kind;
  config.attention.window = window;
  return config;
}

/// A core with random heads, and a gate's logits if asked for: elementwise, or headwise.
struct Core {
  enum class Gated { no, elementwise, headwise };

  Core(AttentionKind kind, Gated gated, DType dtype = DType::f64, int64_t window = 0)
      : attention(config_of(kind, window), parts.store, "a"), sequence(pool, kTokens, kChannels, dtype) {
    parts.allocate(kTokens, dtype);
    heads = {pool.normal(dtype, {kTokens, kHeads, kChannels}),
             pool.normal(dtype, {kTokens, kKvHeads, kChannels}),
             pool.normal(dtype, {kTokens, kKvHeads, kChannels})};
    s = attention.make_saved(parts.memory, "s", kTokens, dtype, gated != Gated::no);
    if (gated == Gated::no) return;
    gate.logits = gated == Gated::headwise ? pool.normal(dtype, {kTokens, kHeads})
                                           : pool.normal(dtype, {kTokens, kHeads, kChannels});
    gate.kind.activation = GateActivation::silu;
    gate.y = pool.zeros(dtype, {kTokens, kHeads, kChannels});
  }
  void forward() { attention.forward(parts.ctx, heads, sequence.view, gate, s); }
  const Tensor& y() const { return gate ? gate.y : s.y; }

  Pool pool;
  LayerParts parts;
  SoftmaxAttention attention;
  test::TestSequence sequence;
  Heads heads;
  FusedGate gate;
  SoftmaxAttention::Saved s;
};

constexpr AttentionKind kKinds[] = {AttentionKind::softmax,    AttentionKind::sink,
                                    AttentionKind::off_by_one, AttentionKind::sink_key,
                                    AttentionKind::kv_bias,    AttentionKind::softpick};
static_assert(std::size(kKinds) == test::kCount<AttentionKind> - 1);  // all but sparse
constexpr Core::Gated kGated[] = {Core::Gated::no, Core::Gated::elementwise, Core::Gated::headwise};

/// A row of attention by its definition: which keys there are, their weights, and what competes with them.
struct Row {
  double lse = 0, first = 0;  // log of the denominator over keys, weight of the sequence's first key
  std::vector<double> y = std::vector<double>(kChannels, 0.0);

  Row(const Core& c, AttentionKind kind, int64_t window, int64_t t, int64_t h) {
    const auto value = [](const Tensor& x, int64_t row, int64_t d) {
      return Pool::get(x, row * kChannels + d);
    };
    const auto score = [&](const Tensor& keys, int64_t row) {
      double z = 0;
      for (int64_t d = 0; d < kChannels; ++d) z += value(c.heads.q, t * kHeads + h, d) * value(keys, row, d);
      return z / 2;
    };
    const bool pick = kind == AttentionKind::softpick;
    const int64_t document = t < 4 ? 0 : 4;
    double keys = pick ? 1e-6 : 0;  // the denominator
    std::vector<double> sums(kChannels, 0.0);
    for (int64_t j = window > 0 ? std::max(document, t - window + 1) : document; j <= t; ++j) {
      const double e = std::exp(score(c.heads.k, j * kKvHeads + h / 2)),
                   top = pick ? std::max(e - 1, 0.0) : e;
      keys += pick ? std::abs(e - 1) : e;
      if (j == document) first = top;
      for (size_t d = 0; d < sums.size(); ++d)
        sums[d] += top * value(c.heads.v, j * kKvHeads + h / 2, static_cast<int64_t>(d));
    }
    const ParamStore& store = c.parts.store;
    double extra = kind == AttentionKind::off_by_one ? 1 : 0;
    if (kind == AttentionKind::sink) extra = std::exp(Pool::get(store.value(0), h));
    if (kind == AttentionKind::sink_key) extra = std::exp(score(store.value(0), h));
    if (kind == AttentionKind::kv_bias) {
      extra = std::exp(score(store.value(0), h / 2));
      for (size_t d = 0; d < sums.size(); ++d)
        sums[d] += extra * value(store.value(1), h / 2, static_cast<int64_t>(d));
    }
    lse = std::log(keys);
    first /= keys;
    for (size_t d = 0; d < sums.size(); ++d) y[d] = sums[d] / (keys + extra);
  }
};

/// Tensors that a kind learns.
size_t parameters_of(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::sink:
    case AttentionKind::sink_key:
      return 1;
    case AttentionKind::kv_bias:
      return 2;
    case AttentionKind::softmax:
    case AttentionKind::off_by_one:
    case AttentionKind::softpick:
    case AttentionKind::sparse:
      break;
  }
  return 0;
}

}  // namespace

TEST_CASE("the core of every kind is its definition, in every window", "[softmax_attention]") {
  for (const AttentionKind kind : kKinds)
    for (const int64_t window : {0, 1, 2, 4, 9}) {
      INFO(name_of(kind) << ", window " << window);
      Core c(kind, Core::Gated::no, DType::f64, window);
      const bool alone = kind == AttentionKind::softmax || kind == AttentionKind::softpick;
      CHECK((c.s.y.data == c.s.o.data) == alone);
      CHECK(c.parts.store.specs().size() == parameters_of(kind));
      c.forward();
      for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t h = 0; h < kHeads; ++h) {
          const Row row(c, kind, window, t, h);
          const double lse = Pool::get(c.s.lse, h * kTokens + t), z0 = Pool::get(c.s.z0, h * kTokens + t);
          REQUIRE(lse == Approx(row.lse).margin(1e-11));
          REQUIRE(std::exp(z0 - lse) == Approx(row.first).margin(1e-11));
          for (int64_t d = 0; d < kChannels; ++d)
            REQUIRE(Pool::get(c.s.y, (t * kHeads + h) * kChannels + d) ==
                    Approx(row.y[static_cast<size_t>(d)]).margin(1e-11));
        }
    }
}

TEST_CASE("a fused gate gives the bits and gradients of the core followed by the gate",
          "[softmax_attention][equivalence]") {
  for (const AttentionKind kind : kKinds)
    for (const Core::Gated gated : {Core::Gated::elementwise, Core::Gated::headwise})
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
        INFO(name_of(kind) << ", gate " << static_cast<int>(gated) << " " << dtype_name(dtype));
        Core fused(kind, gated, dtype), apart(kind, gated, dtype);
        const Tensor z = apart.gate.logits, y = apart.gate.y;
        const GateKind gate_kind = apart.gate.kind;
        apart.gate = {};
        apart.s = apart.attention.make_saved(apart.parts.memory, "apart", kTokens, dtype, false);
        fused.forward();
        apart.forward();
        gate_forward(apart.parts.ctx, y, apart.s.y, z, gate_kind);
        CHECK(test::equal_bits(fused.gate.y, y));

        Pool pool(9);
        const Tensor dy = pool.normal(dtype, {kTokens, kHeads, kChannels});
        std::vector<AttentionGrads> d;
        for (int i = 0; i < 2; ++i)
          d.push_back({pool.zeros(dtype, {kTokens, kHeads, kChannels}),
                       pool.zeros(dtype, {kTokens, kKvHeads, kChannels}),
                       pool.zeros(dtype, {kTokens, kKvHeads, kChannels})});
        fused.gate.dlogits = pool.copy(z, dtype);
        fused.attention.backward(fused.parts.ctx, d[0], dy, fused.heads, fused.sequence.view, fused.gate, {},
                                 fused.s);
        const Tensor dz = pool.copy(z, dtype), d_o = pool.copy(dy, dtype);
        gate_backward(apart.parts.ctx, d_o, dz, dy, apart.s.y, z, gate_kind);
        apart.attention.backward(apart.parts.ctx, d[1], d_o, apart.heads, apart.sequence.view, {}, {},
                                 apart.s);
        CHECK(test::equal_bits(fused.gate.dlogits, dz));
        CHECK(test::equal_bits(d[0].dq, d[1].dq));
        CHECK(test::equal_bits(d[0].dk, d[1].dk));
        CHECK(test::equal_bits(d[0].dv, d[1].dv));
        for (size_t i = 0; i < parameters_of(kind); ++i) {
          const auto id = static_cast<ParamStore::Id>(i);
          CHECK(test::equal_bits(fused.parts.store.grad(id), apart.parts.store.grad(id)));
        }
      }
}

TEST_CASE("gradients of the core equal central differences: heads, parameters, gate, importance",
          "[softmax_attention][gradient]") {
  const test::OneThread one_thread;
  for (const AttentionKind kind : kKinds)
    for (const Core::Gated gated : kGated)
      for (const bool balanced : {false, true}) {
        if (balanced && gated != Core::Gated::no) continue;  // then the gate measures a head's importance
        INFO(name_of(kind) << ", gate " << static_cast<int>(gated) << ", balanced " << balanced);
        Core c(kind, gated, DType::f64, balanced ? 3 : 0);
        Pool pool(9);
        const Tensor dy = pool.normal(DType::f64, {kTokens, kHeads, kChannels}),
                     dimportance = balanced ? pool.normal(DType::f64, {kHeads}) : Tensor(),
                     row = pool.zeros(DType::f64, {head_row_size(kHeads)});
        // <dy, y>, and dimportance times the sum over tokens of the importance of each head.
        const auto loss = [&] {
          c.forward();
          double sum = test::dot(dy, c.y());
          if (!balanced) return sum;
          head_importance(c.parts.ctx, row, {}, c.attention.head_gate(c.s, c.sequence.view.first_key),
                          kTokens);
          for (int64_t h = 0; h < kHeads; ++h) sum += Pool::get(dimportance, h) * Pool::get(row, h);
          return sum;
        };
        loss();
        const AttentionGrads d = {pool.zeros(DType::f64, {kTokens, kHeads, kChannels}),
                                  pool.zeros(DType::f64, {kTokens, kKvHeads, kChannels}),
                                  pool.zeros(DType::f64, {kTokens, kKvHeads, kChannels})};
        if (c.gate) c.gate.dlogits = pool.copy(c.gate.logits, DType::f64);
        c.attention.backward(c.parts.ctx, d, dy, c.heads, c.sequence.view, c.gate, dimportance, c.s);
        CHECK(test::gradient_error(c.heads.q, d.dq, loss) < 1e-7);
        CHECK(test::gradient_error(c.heads.k, d.dk, loss) < 1e-7);
        CHECK(test::gradient_error(c.heads.v, d.dv, loss) < 1e-7);
        if (c.gate) CHECK(test::gradient_error(c.gate.logits, c.gate.dlogits, loss) < 1e-7);
        CHECK(c.parts.worst_parameter(loss) < 1e-7);
      }
}

TEST_CASE("value zeroing equals attention over values whose first rows are zero",
          "[softmax_attention][zeroing]") {
  for (const AttentionKind kind : kKinds)
    for (const Core::Gated gated : kGated) {
      Core zeroed(kind, gated), expected(kind, gated);
      const ValueZeroing all_heads;
      zeroed.sequence.view.zeroing = &all_heads;
      zeroed.forward();
      for (const int64_t first : {0, 4})
        for (int64_t i = 0; i < kKvHeads * kChannels; ++i)
          Pool::set(expected.heads.v, first * kKvHeads * kChannels + i, 0);
      expected.forward();
      CHECK(test::equal_bits(zeroed.y(), expected.y()));
      CHECK(test::equal_bits(zeroed.s.o, expected.s.o));
    }
}

}  // namespace sluice
