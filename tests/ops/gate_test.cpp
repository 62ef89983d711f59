#include "ops/gate.h"

#include "ops/op_support.h"
#include "support/enums.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Case {
  GateKind kind;
  bool elementwise, per_token;

  std::string name() const {
    return fmt::format("{} {} {} {} {}", name_of(kind.activation), name_of(kind.sharing),
                       name_of(kind.combine), elementwise ? "elementwise" : "headwise",
                       per_token ? "Z = T" : "Z = 1");
  }
  Tensor logits(Pool& pool, DType type, int64_t T, int64_t H, int64_t D) const {
    const int64_t Z = per_token ? T : 1;
    return elementwise ? exact_normal(pool, type, {Z, H, D}, 2) : exact_normal(pool, type, {Z, H}, 2);
  }
  DType gradient_type(DType type) const { return per_token ? type : accumulate_dtype(type); }
};

/// Every gate there is: activations x sharings x combinations x 2 granularities x {Z = T, Z = 1}.
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for_each_value<GateActivation>([&](GateActivation activation) {
    for_each_value<GateSharing>([&](GateSharing sharing) {
      for_each_value<GateCombine>([&](GateCombine combine) {
        for (const bool elementwise : {true, false})
          for (const bool per_token : {true, false})
            cases.push_back({{activation, sharing, combine}, elementwise, per_token});
      });
    });
  });
  return cases;
}

double activated(GateActivation a, double z) {
  const double s = 1 / (1 + std::exp(-z));
  switch (a) {
    case GateActivation::sigmoid:
      return s;
    case GateActivation::silu:
      return z * s;
    case GateActivation::identity:
      return z;
    case GateActivation::ns_sigmoid:
      return 0.5 + 0.5 * s;
    case GateActivation::two_sigmoid:
      return 2 * s;
  }
  return NAN;
}

/// The score of (token, head, channel) by the formulas of gate.h.
double score(const Case& c, const Tensor& z, int64_t t, int64_t h, int64_t d) {
  const int64_t H = z.dim(1), W = c.elementwise ? z.dim(2) : 1, row = c.per_token ? t : 0,
                channel = c.elementwise ? d : 0;
  const auto logit = [&](int64_t head) { return Pool::get(z, (row * H + head) * W + channel); };
  double sum = 0;
  switch (c.kind.sharing) {
    case GateSharing::specific:
      return activated(c.kind.activation, logit(h));
    case GateSharing::shared:
      for (int64_t i = 0; i < H; ++i) sum += activated(c.kind.activation, logit(i));
      return sum / static_cast<double>(H);
    case GateSharing::shared_before_activation:
      for (int64_t i = 0; i < H; ++i) sum += logit(i);
      return activated(c.kind.activation, sum / static_cast<double>(H));
  }
  return NAN;
}

void set_zero(const Tensor& t) {
  for (int64_t i = 0; i < t.numel(); ++i) Pool::set(t, i, 0);
}

}  // namespace

TEST_CASE("every gate equals its formula, and gate_scores are the scores it uses", "[gate]") {
  Context ctx(kTestScratch);
  const int64_t T = 5, H = 3, D = 7;
  for (const Case& c : all_cases()) {
    INFO(c.name());
    Pool pool;
    const Tensor x = pool.normal(DType::f64, {T, H, D}), z = c.logits(pool, DType::f64, T, H, D);
    const Tensor y = pool.zeros(DType::f64, {T, H, D}), scores = pool.copy(z, DType::f64);
    gate_forward(ctx, y, x, z, c.kind);
    gate_scores(ctx, scores, z, c.kind);
    double worst = 0;
    for (int64_t t = 0; t < T; ++t)
      for (int64_t h = 0; h < H; ++h)
        for (int64_t d = 0; d < D; ++d) {
          const int64_t at = (t * H + h) * D + d, row = c.per_token ? t : 0;
          const double s = score(c, z, t, h, d), value = Pool::get(x, at);
          const double expected = c.kind.combine == GateCombine::multiply ? value * s : value + s;
          worst = std::max(worst, std::abs(Pool::get(y, at) - expected));
          worst = std::max(
              worst, std::abs(Pool::get(scores, c.elementwise ? (row * H + h) * D + d : row * H + h) - s));
        }
    CHECK(worst <= 1e-13);
  }
}

TEST_CASE("gradients of every gate equal central differences", "[gate]") {
  Context ctx(kTestScratch);
  for (const Case& c : all_cases())
    for (const int64_t H : {1, 3}) {
      INFO(c.name() << ", heads " << H);
      const int64_t T = 5, D = 7;
      Pool pool(11);
      const Tensor x = pool.normal(DType::f64, {T, H, D}), z = c.logits(pool, DType::f64, T, H, D);
      const Tensor y = pool.zeros(DType::f64, {T, H, D}), dy = pool.normal(DType::f64, {T, H, D});
      const Tensor dx = pool.normal(DType::f64, {T, H, D}), dz = pool.copy(z, DType::f64);
      if (!c.per_token) set_zero(dz);
      // A gradient of heads' mean scores joins in where scores are specific to a head.
      const Tensor dhead = c.kind.sharing == GateSharing::specific ? pool.normal(DType::f64, {H}) : Tensor();
      gate_backward(ctx, dx, dz, dy, x, z, c.kind, dhead);
      const auto loss = [&] {
        gate_forward(ctx, y, x, z, c.kind);
        double total = dot(dy, y);
        for (int64_t i = 0; dhead && i < x.numel(); ++i)
          total += Pool::get(dhead, i / D % H) * score(c, z, i / (H * D), i / D % H, i % D) /
                   static_cast<double>(D);
        return total;
      };
      CHECK(gradient_error(x, dx, loss, 40) <= kGradientTolerance);
      CHECK(gradient_error(z, dz, loss, 40) <= kGradientTolerance);
    }
}

TEST_CASE("every gate agrees over types and threads, at odd sizes", "[gate]") {
  struct Size {
    int64_t T, H, D;
  };
  for (const Case& c : all_cases())
    for (const Size s :
         {Size{3, 5, 17}, Size{25, 5, 130}, Size{2, 1, 1}, Size{9, 1, 2500}, Size{700, 2, 16}}) {
      // The partition of the work, which the other cases test, does not depend on the activation.
      if (s.T > 3 && c.kind.activation != GateActivation::silu) continue;
      INFO(c.name() << ": " << s.T << " x " << s.H << " x " << s.D);
      check_op([&](Pool& pool, Context& ctx, DType type) {
        const Tensor x = exact_normal(pool, type, {s.T, s.H, s.D}), z = c.logits(pool, type, s.T, s.H, s.D);
        const Tensor dy = exact_normal(pool, type, {s.T, s.H, s.D});
        const Tensor y = pool.zeros(type, {s.T, s.H, s.D}), dx = pool.zeros(type, {s.T, s.H, s.D});
        const Tensor dz = pool.copy(z, c.gradient_type(type)), scores = pool.copy(z, accumulate_dtype(type));
        gate_forward(ctx, y, x, z, c.kind);
        gate_backward(ctx, dx, dz, dy, x, z, c.kind);
        gate_scores(ctx, scores, z, c.kind);
        return std::vector{y, dx, dz, scores};
      });
    }
}

TEST_CASE("every gate works in place", "[gate]") {
  Context ctx(kTestScratch);
  const int64_t T = 6, H = 3, D = 19;
  for (const Case& c : all_cases())
    for (const DType type : kFloatingTypes) {
      INFO(c.name() << ", " << dtype_name(type));
      Pool pool;
      const Tensor x = pool.normal(type, {T, H, D}), z = c.logits(pool, type, T, H, D),
                   dy = pool.normal(type, {T, H, D});
      const Tensor y = pool.zeros(type, {T, H, D}), dx = pool.zeros(type, {T, H, D});
      const Tensor dz = pool.copy(z, c.gradient_type(type)), dz2 = pool.copy(z, c.gradient_type(type));
      gate_forward(ctx, y, x, z, c.kind);
      gate_backward(ctx, dx, dz, dy, x, z, c.kind);
      const Tensor x2 = pool.copy(x, type), dy2 = pool.copy(dy, type);
      gate_forward(ctx, x2, x2, z, c.kind);
      gate_backward(ctx, dy2, dz2, dy2, x, z, c.kind);
      CHECK(same_bits(x2, y));
      CHECK(same_bits(dy2, dx));
      CHECK(same_bits(dz2, dz));
    }
}

TEST_CASE("the gradient of input-independent logits is accumulated, that of a token's logits overwritten",
          "[gate]") {
  Context ctx(kTestScratch);
  const int64_t T = 50, H = 3, D = 5;
  for (const Case& c : all_cases()) {
    INFO(c.name());
    Pool pool;
    const Tensor x = pool.normal(DType::f64, {T, H, D}), z = c.logits(pool, DType::f64, T, H, D);
    const Tensor dy = pool.normal(DType::f64, {T, H, D}), dx = pool.zeros(DType::f64, {T, H, D});
    const Tensor once = pool.copy(z, DType::f64), onto = pool.copy(z, DType::f64),
                 expected = pool.copy(z, DType::f64);
    set_zero(once);
    gate_backward(ctx, dx, once, dy, x, z, c.kind);
    gate_backward(ctx, dx, onto, dy, x, z, c.kind);
    for (int64_t i = 0; i < z.numel(); ++i)
      Pool::set(expected, i, Pool::get(once, i) + (c.per_token ? 0 : Pool::get(z, i)));
    CHECK(relative_error(onto, expected) <= 1e-14);
  }
}

TEST_CASE("an input-independent gate equals the gate with repeated logits; its gradient is their sum",
          "[gate]") {
  Context ctx(kTestScratch);
  const int64_t T = 40, H = 3, D = 11;
  for (const Case& c : all_cases()) {
    if (c.per_token) continue;
    INFO(c.name());
    Pool pool;
    const int64_t n = c.elementwise ? H * D : H;
    const Tensor x = pool.normal(DType::f64, {T, H, D}), dy = pool.normal(DType::f64, {T, H, D});
    const Tensor z = c.logits(pool, DType::f64, T, H, D), dz = pool.copy(z, DType::f64);
    set_zero(dz);
    const Tensor repeated =
        c.elementwise ? pool.zeros(DType::f64, {T, H, D}) : pool.zeros(DType::f64, {T, H});
    for (int64_t i = 0; i < T * n; ++i) Pool::set(repeated, i, Pool::get(z, i % n));
    const Tensor drepeated = pool.copy(repeated, DType::f64), summed = pool.copy(dz, DType::f64);
    const Tensor y1 = pool.zeros(DType::f64, {T, H, D}), y2 = pool.zeros(DType::f64, {T, H, D});
    const Tensor dx1 = pool.zeros(DType::f64, {T, H, D}), dx2 = pool.zeros(DType::f64, {T, H, D});
    gate_forward(ctx, y1, x, z, c.kind);
    gate_forward(ctx, y2, x, repeated, c.kind);
    CHECK(relative_error(y1, y2) <= 1e-15);
    gate_backward(ctx, dx1, dz, dy, x, z, c.kind);
    gate_backward(ctx, dx2, drepeated, dy, x, repeated, c.kind);
    for (int64_t i = 0; i < T * n; ++i)
      Pool::set(summed, i % n, Pool::get(summed, i % n) + Pool::get(drepeated, i));
    CHECK(relative_error(dx1, dx2) <= 1e-15);
    CHECK(relative_error(dz, summed) <= 1e-13);
  }
}

TEST_CASE("a headwise gate equals an elementwise one with repeated logits", "[gate]") {
  Context ctx(kTestScratch);
  const int64_t T = 9, H = 4, D = 33;
  for (const Case& c : all_cases()) {
    if (c.elementwise) continue;
    for (const DType type : kFloatingTypes) {
      INFO(c.name() << ", " << dtype_name(type));
      Pool pool;
      const Tensor x = pool.normal(type, {T, H, D}), dy = pool.normal(type, {T, H, D}),
                   z = c.logits(pool, type, T, H, D);
      const int64_t Z = z.dim(0);
      const Tensor repeated = pool.zeros(type, {Z, H, D});
      for (int64_t i = 0; i < repeated.numel(); ++i) Pool::set(repeated, i, Pool::get(z, i / D));
      const Tensor y1 = pool.zeros(type, {T, H, D}), y2 = pool.zeros(type, {T, H, D});
      const Tensor dx1 = pool.zeros(type, {T, H, D}), dx2 = pool.zeros(type, {T, H, D});
      const Tensor dz = pool.copy(z, c.gradient_type(type)),
                   drepeated = pool.copy(repeated, c.gradient_type(type));
      set_zero(dz), set_zero(drepeated);
      gate_forward(ctx, y1, x, z, c.kind);
      gate_forward(ctx, y2, x, repeated, c.kind);
      gate_backward(ctx, dx1, dz, dy, x, z, c.kind);
      gate_backward(ctx, dx2, drepeated, dy, x, repeated, c.kind);
      CHECK(relative_error(y1, y2) <= (type == DType::bf16 ? 1e-3 : 1e-6));
      CHECK(relative_error(dx1, dx2) <= (type == DType::bf16 ? 1e-3 : 1e-6));
      const Tensor summed = pool.copy(z, DType::f64);
      set_zero(summed);
      for (int64_t i = 0; i < repeated.numel(); ++i)
        Pool::set(summed, i / D, Pool::get(summed, i / D) + Pool::get(drepeated, i));
      CHECK(relative_error(dz, summed) <= tolerance(type));
    }
  }
}

TEST_CASE("an open gate has no effect: large sigmoid logits multiply by one, bit for bit", "[gate]") {
  Context ctx(kTestScratch);
  const int64_t T = 4, H = 3, D = 21;
  for (const Case& c : all_cases()) {
    if (c.kind.combine != GateCombine::multiply) continue;
    if (c.kind.activation != GateActivation::sigmoid && c.kind.activation != GateActivation::ns_sigmoid)
      continue;
    for (const DType type : kFloatingTypes)
      for (const double large : {60.0, 1000.0, static_cast<double>(INFINITY)}) {
        INFO(c.name() << ", " << dtype_name(type) << ", logits " << large);
        Pool pool;
        const Tensor x = pool.normal(type, {T, H, D}), dy = pool.normal(type, {T, H, D}),
                     z = c.logits(pool, type, T, H, D);
        for (int64_t i = 0; i < z.numel(); ++i) Pool::set(z, i, large);
        const Tensor y = pool.zeros(type, {T, H, D}), dx = pool.zeros(type, {T, H, D});
        Tensor gradient = pool.copy(z, c.gradient_type(type));
        set_zero(gradient);
        gate_forward(ctx, y, x, z, c.kind);
        gate_backward(ctx, dx, gradient, dy, x, z, c.kind);
        // The mean of H ones is one, except for rounding if 1/H is not a power of two.
        if (c.kind.sharing == GateSharing::specific) {
          CHECK(same_bits(y, x));
          CHECK(same_bits(dx, dy));
        } else {
          CHECK(relative_error(y, x) <= tolerance(type));
          CHECK(relative_error(dx, dy) <= tolerance(type));
        }
        for (int64_t i = 0; i < gradient.numel(); ++i) CHECK(std::abs(Pool::get(gradient, i)) <= 1e-6);
      }
  }
}

TEST_CASE("gates refuse wrong arguments by name", "[gate]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.zeros(DType::bf16, {4, 3, 5}), z = pool.zeros(DType::bf16, {4, 3, 5});
  const Tensor heads = pool.zeros(DType::bf16, {4, 3}), constant = pool.zeros(DType::bf16, {1, 3});
  const GateKind kind;
  const std::string form = "z must be (Z, 3, 5) or (Z, 3) bf16 with Z = 4 or 1, got ";
  CHECK(error_of([&] {
          gate_forward(ctx, x, x, pool.zeros(DType::bf16, {2, 3}), kind);
        }) == "gate_forward: " + form + "(2, 3) bf16");
  CHECK(error_of([&] {
          gate_forward(ctx, x, x, pool.zeros(DType::f32, {4, 3}), kind);
        }) == "gate_forward: " + form + "(4, 3) f32");
  CHECK(error_of([&] { gate_forward(ctx, x, heads, heads, kind); }) ==
        "gate_forward: x must be (T, H, D), got (4, 3) bf16");
  CHECK(error_of([&] { gate_forward(ctx, heads, x, z, kind); }) ==
        "gate_forward: y must be (4, 3, 5) bf16, got (4, 3) bf16");
  CHECK(error_of([&] { gate_backward(ctx, x, heads, x, x, z, kind); }) ==
        "gate_backward: dz must have the shape of z, (4, 3, 5) bf16, and be bf16, got (4, 3) bf16");
  CHECK(error_of([&] { gate_backward(ctx, x, constant, x, x, constant, kind); }) ==
        "gate_backward: dz must have the shape of z, (1, 3) bf16, and be f32, got (1, 3) bf16");
  CHECK(error_of([&] { gate_scores(ctx, z, z, kind); }) ==
        "gate_scores: scores must have the shape of z, (4, 3, 5) bf16, and be f32, got (4, 3, 5) bf16");
  const Tensor one = pool.zeros(DType::f32, {1, 3, 5});
  CHECK(error_of([&] { gate_backward(ctx, one, one, one, one, one, kind); }) ==
        "gate_backward: with one token, z (1, 3, 5) f32 may be an activation or a parameter; run at least "
        "two tokens");
}
