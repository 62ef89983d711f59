#include "ops/embedding.h"

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

TEST_CASE("embedding agrees over types and threads, at odd sizes", "[embedding]") {
  constexpr int64_t kSizes[][3] = {{1, 1, 1}, {7, 3, 5}, {129, 31, 77}, {600, 50, 200}};  // T, V, C
  for (const auto& [tokens_, vocab, width] : kSizes) {
    const int64_t T = tokens_, V = vocab, C = width;
    INFO(T << " tokens, " << V << " words, " << C << " channels");
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const Tensor tokens = pool.integers({T}, 0, static_cast<int32_t>(V - 1)),
                   weight = exact_normal(pool, type, {V, C});
      const Tensor y = pool.zeros(type, {T, C}), dy = exact_normal(pool, type, {T, C});
      const Tensor dweight = exact_normal(pool, accumulate_dtype(type), {V, C});
      embedding_forward(ctx, y, tokens, weight);
      embedding_backward(ctx, dweight, dy, tokens);
      return std::vector{y, dweight};
    });
  }
}

TEST_CASE("embedding copies rows; its gradient sums them in the order of the tokens", "[embedding]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t T = 50, V = 6, C = 70;
  const Tensor tokens = pool.integers({T}, 0, V - 1), weight = pool.normal(DType::f32, {V, C});
  const Tensor y = pool.normal(DType::f32, {T, C}), dy = pool.normal(DType::f32, {T, C});
  const Tensor dweight = pool.normal(DType::f32, {V, C}), expected = pool.copy(dweight, DType::f32);
  embedding_forward(ctx, y, tokens, weight);
  embedding_backward(ctx, dweight, dy, tokens);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t c = 0; c < C; ++c) {
      const int64_t at = tokens.as<int32_t>()[t] * C + c;
      CHECK(y.as<float>()[t * C + c] == weight.as<float>()[at]);
      expected.as<float>()[at] += dy.as<float>()[t * C + c];
    }
  CHECK(same_bits(dweight, expected));
}

TEST_CASE("the gradient of embedding equals central differences", "[embedding]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor tokens = pool.integers({20}, 0, 4), weight = pool.normal(DType::f64, {5, 9});
  const Tensor y = pool.zeros(DType::f64, {20, 9}), dy = pool.normal(DType::f64, {20, 9});
  const Tensor dweight = pool.zeros(DType::f64, {5, 9});
  embedding_backward(ctx, dweight, dy, tokens);
  CHECK(gradient_error(weight, dweight, [&] {
          return embedding_forward(ctx, y, tokens, weight), dot(dy, y);
        }) <= kGradientTolerance);
}

TEST_CASE("embedding refuses wrong arguments by name, and tokens outside the vocabulary", "[embedding]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor tokens = pool.zeros(DType::i32, {4}), weight = pool.zeros(DType::bf16, {5, 3});
  const Tensor y = pool.zeros(DType::bf16, {4, 3}), dweight = pool.zeros(DType::f32, {5, 3});
  CHECK(error_of([&] { embedding_forward(ctx, weight, tokens, weight); }) ==
        "embedding_forward: y must be (4, 3) bf16, got (5, 3) bf16");
  CHECK(error_of([&] { embedding_forward(ctx, y, y, weight); }) ==
        "embedding_forward: tokens must be (T) i32, got (4, 3) bf16");
  CHECK(error_of([&] { embedding_backward(ctx, weight, y, tokens); }) ==
        "embedding_backward: dweight must be (5, 3) f32, got (5, 3) bf16");
  CHECK(error_of([&] { embedding_backward(ctx, dweight, weight, tokens); }) ==
        "embedding_backward: dy must be (4, 3) bf16, got (5, 3) bf16");
  for (const int32_t bad : {5, -1}) {
    tokens.as<int32_t>()[2] = bad;
    const std::string tail = fmt::format(": token {} at position 2 is outside the vocabulary of 5", bad);
    CHECK(error_of([&] { embedding_forward(ctx, y, tokens, weight); }) == "embedding_forward" + tail);
    CHECK(error_of([&] { embedding_backward(ctx, dweight, y, tokens); }) == "embedding_backward" + tail);
    try {
      embedding_forward(ctx, y, tokens, weight);
    } catch (const Error& e) {
      CHECK(e.code() == ExitCode::data);
    }
  }
}
