#include "ops/norm_rope.h"

#include "ops/op_support.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr double kEps = 1e-5;
constexpr int64_t kPositions = 40;

enum class Weight { none, shared, per_head };

struct Size {
  int64_t tokens, heads, depth;
};
// Halves on and off the width of vectors; several chunks of tokens.
constexpr Size kSizes[] = {{1, 1, 2}, {5, 3, 10}, {9, 2, 64}, {70, 4, 34}, {300, 2, 128}};

struct Inputs {
  Tensor x, dy, weight, dweight, positions, cos, sin;
  Inputs(Pool& pool, DType type, const Size& s, Weight kind)
      : x(exact_normal(pool, type, {s.tokens, s.heads, s.depth})),
        dy(exact_normal(pool, type, {s.tokens, s.heads, s.depth})),
        positions(pool.integers({s.tokens}, 0, kPositions - 1)),
        cos(pool.zeros(accumulate_dtype(type), {kPositions, s.depth / 2})),
        sin(pool.zeros(accumulate_dtype(type), {kPositions, s.depth / 2})) {
    rope_table(cos, sin, 1e4, {});
    if (kind == Weight::none) return;
    weight = kind == Weight::shared ? exact_normal(pool, type, {s.depth})
                                    : exact_normal(pool, type, {s.heads, s.depth});
    dweight = pool.copy(weight, accumulate_dtype(type));
  }
};

template <class Body>
void for_each_case(Body&& body) {
  for (const Size& s : kSizes)
    for (const Weight kind : {Weight::none, Weight::shared, Weight::per_head}) {
      INFO(s.tokens << " tokens, " << s.heads << " heads of " << s.depth << ", weight "
                    << static_cast<int>(kind));
      body(s, kind);
    }
}

}  // namespace

TEST_CASE("norm_rope agrees over types and threads, in columns of a matrix and in place", "[norm_rope]") {
  for_each_case([](const Size& s, Weight kind) {
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const Inputs in(pool, type, s, kind);
      const Tensor y = pool.zeros(type, {s.tokens, s.heads, s.depth}),
                   rstd = pool.zeros(accumulate_dtype(type), {s.tokens * s.heads});
      norm_rope_forward(ctx, y, rstd, in.x, in.weight, kEps, in.positions, in.cos, in.sin);
      const int64_t width = s.heads * s.depth;
      const Tensor whole = exact_normal(pool, type, {s.tokens, width + 5}),
                   dx = whole.columns(3, width).view({s.tokens, s.heads, s.depth});
      norm_rope_backward(ctx, dx, in.dweight, in.dy, in.x, in.weight, rstd, in.positions, in.cos, in.sin);
      norm_rope_backward(ctx, in.dy, in.dweight, in.dy, in.x, in.weight, rstd, in.positions, in.cos, in.sin);
      int64_t different = 0;
      for (int64_t i = 0; !ctx.dry_run && i < s.tokens * width; ++i)
        different += Pool::get(whole, i / width * (width + 5) + 3 + i % width) != Pool::get(in.dy, i);
      CHECK(different == 0);
      std::vector outputs{y, rstd, whole};
      if (in.weight) outputs.push_back(in.dweight);
      return outputs;
    });
  });
}

TEST_CASE("norm_rope is the norm of every head, then the rotation", "[norm_rope]") {
  for_each_case([](const Size& s, Weight kind) {
    Context ctx(kTestScratch);
    Pool pool(3);
    const Inputs in(pool, DType::f64, s, kind);
    const auto zeros = [&] { return pool.zeros(DType::f64, {s.tokens, s.heads, s.depth}); };
    const Tensor y = zeros(), expected = zeros(), dx = zeros(), expected_dx = zeros();
    const Tensor rstd = pool.zeros(DType::f64, {s.tokens * s.heads}),
                 expected_rstd = pool.zeros(DType::f64, {s.tokens * s.heads});
    const Tensor dweight = in.weight ? pool.copy(in.dweight, DType::f64) : Tensor();
    norm_rope_forward(ctx, y, rstd, in.x, in.weight, kEps, in.positions, in.cos, in.sin);
    rmsnorm_forward(ctx, expected, expected_rstd, in.x, in.weight, kEps);
    rope_forward(ctx, expected, expected, in.positions, in.cos, in.sin);
    CHECK(relative_error(y, expected) < 1e-13);
    CHECK(relative_error(rstd, expected_rstd) < 1e-13);
    norm_rope_backward(ctx, dx, dweight, in.dy, in.x, in.weight, rstd, in.positions, in.cos, in.sin);
    rope_backward(ctx, expected_dx, in.dy, in.positions, in.cos, in.sin);
    rmsnorm_backward(ctx, expected_dx, in.dweight, expected_dx, in.x, in.weight, rstd, Into::overwrite);
    CHECK(relative_error(dx, expected_dx) < 1e-13);
    if (in.weight) CHECK(relative_error(dweight, in.dweight) < 1e-13);
  });
}
