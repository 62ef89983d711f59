// An extra key behind attention: against a token prepended by hand, and against central differences; windows.
#include "ops/extra_key.h"

#include "ops/attention.h"
#include "ops/op_support.h"
#include "ops/window.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr int64_t kT = 37, kH = 4, kKv = 2, kD = 6;
constexpr double kScale = 0.4;

struct Heads {
  Tensor q, k, v, first_key, o, lse, y;
  explicit Heads(Pool& pool, DType type = DType::f64)
      : q(exact_normal(pool, type, {kT, kH, kD})),
        k(exact_normal(pool, type, {kT, kKv, kD})),
        v(exact_normal(pool, type, {kT, kKv, kD})),
        first_key(pool.zeros(DType::i32, {kT})),
        o(pool.zeros(type, {kT, kH, kD})),
        lse(pool.zeros(accumulate_dtype(type), {kH, kT})),
        y(pool.zeros(type, {kT, kH, kD})) {}
  AttentionInputs inputs() const { return {q, k, v, first_key, kScale}; }
};

ExtraKey make_extra(Pool& pool, DType type, int64_t rows, bool value) {
  return {exact_normal(pool, type, {rows, kD}), value ? exact_normal(pool, type, {rows, kD}) : Tensor(),
          pool.zeros(accumulate_dtype(type), {kH, kT})};
}

}  // namespace

TEST_CASE("an extra key and value equal a token prepended by hand", "[extra_key]") {
  Context ctx(kTestScratch);
  for (const bool value : {false, true}) {
    Pool pool(3);
    Heads a(pool);
    const ExtraKey extra = make_extra(pool, DType::f64, kKv, value);
    gated_attention_forward(ctx, a.y, {a.o, a.lse}, a.inputs(), {.extra = extra});
    // [k'; K] and [v'; V]: one key more than queries, visible to all of them.
    const Tensor keys = pool.zeros(DType::f64, {kT + 1, kKv, kD}),
                 values = pool.zeros(DType::f64, {kT + 1, kKv, kD});
    for (int64_t i = 0; i < kKv * kD; ++i) {
      Pool::set(keys, i, Pool::get(extra.key, i));
      Pool::set(values, i, value ? Pool::get(extra.value, i) : 0);
    }
    for (int64_t i = 0; i < a.k.numel(); ++i) {
      Pool::set(keys, kKv * kD + i, Pool::get(a.k, i));
      Pool::set(values, kKv * kD + i, Pool::get(a.v, i));
    }
    const Tensor o = pool.zeros(DType::f64, {kT, kH, kD}), lse = pool.zeros(DType::f64, {kH, kT});
    attention_forward(ctx, {o, lse}, {a.q, keys, values, a.first_key, kScale});
    CHECK(relative_error(a.y, o) < 1e-13);
  }
}

TEST_CASE("gradients of an extra key equal central differences, before a gate and without one",
          "[extra_key]") {
  for (const int64_t rows : {int64_t{1}, kKv, kH})
    for (const bool value : {false, true})
      for (const int gate : {0, 1, 2}) {
        CAPTURE(rows, value, gate);
        Context ctx(kTestScratch);
        Pool pool(4);
        Heads a(pool);
        const ExtraKey extra = make_extra(pool, DType::f64, rows, value);
        AttentionOutput output = {.extra = extra};
        if (gate == 1) output.gate = pool.normal(DType::f64, {kT, kH, kD});
        if (gate == 2) output.gate = pool.normal(DType::f64, {kT, kH});
        const Tensor dy = pool.normal(DType::f64, {kT, kH, kD}), u = pool.normal(DType::f64, {kH, kT});
        // <dy, y> + <u, lse - logits>
        const auto loss = [&] {
          gated_attention_forward(ctx, a.y, {a.o, a.lse}, a.inputs(), output);
          return dot(dy, a.y) + dot(u, a.lse) - dot(u, extra.logits);
        };
        loss();
        const auto like = [&](const Tensor& t) { return t ? pool.copy(t, DType::f64) : Tensor(); };
        AttentionGrads d = {like(a.q), like(a.k),       like(a.v),        like(output.gate),
                            {},        like(extra.key), like(extra.value)};
        for (const Tensor& t : {d.dextra_key, d.dextra_value})
          for (int64_t i = 0; t && i < t.numel(); ++i) Pool::set(t, i, 0);
        gated_attention_backward(ctx, d, dy, a.inputs(), {a.o, a.lse}, output, {.dlse = u});
        CHECK(gradient_error(a.q, d.dq, loss, 30) < kGradientTolerance);
        CHECK(gradient_error(a.k, d.dk, loss, 30) < kGradientTolerance);
        CHECK(gradient_error(a.v, d.dv, loss, 30) < kGradientTolerance);
        CHECK(gradient_error(extra.key, d.dextra_key, loss) < kGradientTolerance);
        if (value) CHECK(gradient_error(extra.value, d.dextra_value, loss) < kGradientTolerance);
        if (gate) CHECK(gradient_error(output.gate, d.dgate, loss, 30) < kGradientTolerance);
      }
}

TEST_CASE("an extra key in f32 and bf16, with threads, and in a dry run", "[extra_key]") {
  for (const bool value : {false, true})
    check_op([&](Pool& pool, Context& ctx, DType type) {
      Heads a(pool, type);
      const ExtraKey extra = make_extra(pool, type, kKv, value);
      const DType wide = accumulate_dtype(type);
      // lse near the logits, so that both have a share
      for (int64_t i = 0; i < a.lse.numel(); ++i) Pool::set(a.lse, i, 0.25 * static_cast<double>(i % 7));
      a.o = exact_normal(pool, type, {kT, kH, kD});
      extra_key_logits(ctx, extra.logits, a.q, extra.key, kScale);
      extra_key_forward(ctx, a.y, a.o, a.lse, extra);
      const Tensor dy = exact_normal(pool, type, {kT, kH, kD}), dlse = pool.zeros(wide, {kH, kT}),
                   dkey = pool.zeros(wide, {kKv, kD}),
                   dvalue = value ? pool.zeros(wide, {kKv, kD}) : Tensor(),
                   dq = exact_normal(pool, type, {kT, kH, kD});
      extra_key_backward(ctx, dy, dlse, dvalue, dy, a.o, a.lse, extra);
      extra_key_logits_backward(ctx, dq, dkey, dlse, a.q, extra.key, kScale);
      std::vector<Tensor> out = {extra.logits, a.y, dy, dlse, dkey, dq};
      if (value) out.push_back(dvalue);
      return out;
    });
}

TEST_CASE("a window moves the first key, and hides the logits of keys before it", "[window]") {
  Context ctx(kTestScratch);
  Pool pool(5);
  const Tensor first = pool.zeros(DType::i32, {6}), out = pool.zeros(DType::i32, {6});
  const std::vector<int32_t> documents = {0, 0, 0, 3, 3, 3};
  std::copy(documents.begin(), documents.end(), first.as<int32_t>());
  const auto seen = [&](int64_t keys, int64_t window) {
    window_first_key(ctx, out, first, keys, window);
    return std::vector<int32_t>(out.as<int32_t>(), out.as<int32_t>() + 6);
  };
  CHECK(seen(6, 6) == documents);
  CHECK(seen(6, 100) == documents);
  CHECK(seen(6, 2) == std::vector<int32_t>{0, 0, 1, 3, 3, 4});
  CHECK(seen(6, 1) == std::vector<int32_t>{0, 1, 2, 3, 4, 5});
  CHECK(seen(9, 4) == std::vector<int32_t>{0, 1, 2, 3, 4, 5});  // three earlier keys in a cache
  seen(6, 2);
  for (const DType type : {DType::f32, DType::f64}) {
    const Tensor z0 = pool.normal(type, {2, 6}), before = pool.copy(z0, type);
    hide_first_logits(ctx, z0, first, out);
    for (int64_t i = 0; i < 12; ++i) {
      const bool hidden = i % 6 == 2 || i % 6 == 5;
      CHECK(Pool::get(z0, i) == (hidden ? -INFINITY : Pool::get(before, i)));
    }
  }
  CHECK(error_of([&] { window_first_key(ctx, out, first, 6, 0); }) ==
        "window_first_key: window of 0 over 6 keys and 6 queries");
}
