#include "ops/rope.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/io.h"
#include "support/gradcheck.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Table {
  Tensor cos, sin;
  Table(Pool& pool, DType dtype, int64_t positions, int64_t depth, double theta,
        const RopeScaling& scaling = {})
      : cos(pool.zeros(dtype, {positions, depth / 2}, "cos")),
        sin(pool.zeros(dtype, {positions, depth / 2}, "sin")) {
    rope_table(cos, sin, theta, scaling);
  }
};

}  // namespace

TEST_CASE("rope rotates pairs (i, i + D/2) by position times theta^(-2i/D)", "[rope]") {
  Context ctx(1 << 20);
  Pool pool(3);
  const int64_t tokens = 9, heads = 3, depth = 16;
  const Table table(pool, DType::f64, 50, depth, 10000);
  const Tensor x = pool.normal(DType::f64, {tokens, heads, depth}),
               y = pool.zeros(DType::f64, {tokens, heads, depth});
  const Tensor positions = pool.integers({tokens}, 0, 49);
  rope_forward(ctx, y, x, positions, table.cos, table.sin);
  double worst = 0;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < depth / 2; ++i) {
        const double angle =
            positions.as<int32_t>()[t] * std::pow(10000.0, -2.0 * static_cast<double>(i) / depth);
        const int64_t at = (t * heads + h) * depth + i;
        const double a = Pool::get(x, at), b = Pool::get(x, at + depth / 2);
        worst = std::max(worst, std::abs(Pool::get(y, at) - (a * std::cos(angle) - b * std::sin(angle))));
        worst = std::max(
            worst, std::abs(Pool::get(y, at + depth / 2) - (a * std::sin(angle) + b * std::cos(angle))));
      }
  CHECK(worst < 1e-13);
}

TEST_CASE("rope's backward is the transpose of its forward, and both preserve norms", "[rope]") {
  Context ctx(1 << 20);
  for (DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (int64_t depth : {2, 6, 24, 64, 80, 128})
      for (bool yarn : {false, true}) {
        Pool pool(5);
        RopeScaling scaling;
        scaling.yarn = yarn;
        scaling.factor = 4;
        const Table table(pool, accumulate_dtype(dtype), 300, depth, 1e4, scaling);
        const Tensor x = pool.normal(dtype, {70, 2, depth}), w = pool.normal(dtype, {70, 2, depth});
        const Tensor y = pool.zeros(dtype, {70, 2, depth}), dx = pool.zeros(dtype, {70, 2, depth});
        const Tensor positions = pool.integers({70}, 0, 299);
        rope_forward(ctx, y, x, positions, table.cos, table.sin);
        rope_backward(ctx, dx, w, positions, table.cos, table.sin);
        const double tolerance = dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 1e-6 : 4e-3;
        const double m = yarn ? 0.1 * std::log(4.0) + 1 : 1, size = std::sqrt(dot(x, x) * dot(w, w));
        INFO(dtype_name(dtype) << " D " << depth << " yarn " << yarn);
        CHECK(std::abs(dot(w, y) - dot(dx, x)) < tolerance * m * size);
        CHECK(std::sqrt(dot(y, y) / dot(x, x)) == Approx(m).epsilon(tolerance));
        CHECK(std::sqrt(dot(dx, dx) / dot(w, w)) == Approx(m).epsilon(tolerance));
        // In place gives the same bits.
        const Tensor z = pool.copy(x, dtype);
        rope_forward(ctx, z, z, positions, table.cos, table.sin);
        CHECK(std::memcmp(z.data, y.data, static_cast<size_t>(y.bytes())) == 0);
        const Tensor dz = pool.copy(w, dtype);
        rope_backward(ctx, dz, dz, positions, table.cos, table.sin);
        CHECK(std::memcmp(dz.data, dx.data, static_cast<size_t>(dx.bytes())) == 0);
      }
}

TEST_CASE("scores of rotated queries and keys depend only on their distance", "[rope]") {
  Context ctx(1 << 20);
  Pool pool(7);
  const Table table(pool, DType::f64, 2000, 32, 1e4);
  const Tensor qk = pool.normal(DType::f64, {2, 1, 32}), rotated = pool.zeros(DType::f64, {2, 1, 32});
  const auto score = [&](int32_t q, int32_t k) {
    const Tensor positions = pool.integers({2}, q, q);
    positions.as<int32_t>()[1] = k;
    rope_forward(ctx, rotated, qk, positions, table.cos, table.sin);
    return dot(rotated.rows(0, 1), rotated.rows(1, 1));
  };
  CHECK(score(17, 5) == Approx(score(1512, 1500)).margin(1e-11));
  CHECK(std::abs(score(17, 5) - score(18, 5)) > 1e-3);
}

TEST_CASE("YaRN keeps fast dimensions, divides slow ones and multiplies cos and sin by m", "[rope]") {
  Pool pool(9);
  // The gated-attention paper's extension from 32k to 128k: head_dim 128, base 1e6, so low = 23, high = 40.
  RopeScaling scaling;
  scaling.yarn = true;
  scaling.factor = 4;
  scaling.original_max_position_embeddings = 32768;
  const Table table(pool, DType::f64, 2, 128, 1e6, scaling);
  for (int64_t i = 0; i < 64; ++i) {
    const double c = Pool::get(table.cos, 64 + i), s = Pool::get(table.sin, 64 + i);
    CHECK(std::hypot(c, s) == Approx(1.13863).epsilon(1e-6));
    CHECK(Pool::get(table.cos, i) == Approx(1.13863).epsilon(1e-6));  // position 0
    const double ratio = std::atan2(s, c) / std::pow(1e6, -2.0 * static_cast<double>(i) / 128);
    const double ramp = std::clamp((static_cast<double>(i) - 23) / (40 - 23), 0.0, 1.0);
    INFO("dimension " << i);
    CHECK(ratio == Approx(ramp / 4 + 1 - ramp).epsilon(1e-9));
  }
}

TEST_CASE("YaRN's tables are those of transformers, with its factor of cosines and sines and without",
          "[rope]") {
  const auto golden = nlohmann::json::parse(io::read_file(SLUICE_SOURCE_DIR "/tests/golden/yarn.json"));
  REQUIRE(golden["cases"].size() == 10);
  for (const nlohmann::json& c : golden["cases"]) {
    RopeScaling scaling = {.yarn = true,
                           .factor = c["factor"],
                           .original_max_position_embeddings = c["original"],
                           .truncate = c.value("truncate", true)};
    if (c.contains("attention_factor")) scaling.attention_factor = c["attention_factor"].get<double>();
    const int64_t half = c["head_dim"].get<int64_t>() / 2, late = 1000;
    Pool pool(12);
    const Table table(pool, DType::f64, late + 1, 2 * half, c["theta"], scaling);
    const double m = c["cos_and_sin"];
    INFO("head_dim " << 2 * half << ", factor " << scaling.factor << ", m " << m);
    REQUIRE(std::ssize(c["frequencies"]) == half);
    for (int64_t i = 0; i < half; ++i)
      for (const int64_t position : {int64_t{1}, late}) {
        // transformers computes frequencies in f32.
        const double angle =
            static_cast<double>(position) * c["frequencies"][static_cast<size_t>(i)].get<double>();
        CHECK(Pool::get(table.cos, position * half + i) ==
              Approx(m * std::cos(angle)).margin(3e-7 * angle + 1e-9));
        CHECK(Pool::get(table.sin, position * half + i) ==
              Approx(m * std::sin(angle)).margin(3e-7 * angle + 1e-9));
      }
  }
}

TEST_CASE("YaRN's ramp need not end at whole dimensions", "[rope]") {
  Pool pool(10);
  // gpt-oss: head_dim 64, base 150000, from 4096 to 131072 positions, truncate: false.
  const RopeScaling scaling = {
      .yarn = true, .factor = 32, .original_max_position_embeddings = 4096, .truncate = false};
  const Table table(pool, DType::f64, 2, 64, 150000, scaling);
  for (int64_t i = 0; i < 32; ++i) {
    const double ratio = std::atan2(Pool::get(table.sin, 32 + i), Pool::get(table.cos, 32 + i)) /
                         std::pow(150000, -2.0 * static_cast<double>(i) / 64);
    const double ramp = std::clamp((static_cast<double>(i) - 8.092779) / (17.398025 - 8.092779), 0.0, 1.0);
    INFO("dimension " << i);
    CHECK(ratio == Approx(ramp / 32 + 1 - ramp).epsilon(1e-6));
  }
}

TEST_CASE("the rotation table keeps its precision at late positions", "[rope]") {
  Pool pool(11);
  const Table table(pool, DType::f32, 131072, 8, 1e4);
  const double angle = 131071.0 * std::pow(1e4, -2.0 / 8);
  CHECK(std::abs(Pool::get(table.cos, 131071 * 4 + 1) - std::cos(angle)) < 1e-7);
  CHECK(std::abs(Pool::get(table.sin, 131071 * 4) - std::sin(131071.0)) < 1e-7);
}

TEST_CASE("rope's errors name the op and the wrong argument", "[rope]") {
  Context ctx(1 << 20);
  Pool pool(13);
  const Table table(pool, DType::f32, 10, 8, 1e4);
  const Tensor x = pool.zeros(DType::f32, {4, 2, 8}), positions = pool.integers({4}, 0, 9);
  const auto forward = [&](const Tensor& y, const Tensor& in, const Tensor& at) {
    return message_of([&] { rope_forward(ctx, y, in, at, table.cos, table.sin); });
  };
  using Catch::Contains;
  CHECK_THAT(forward(x, pool.zeros(DType::f32, {4, 2, 7}), positions),
             Contains("rope_forward: x must be (T, H, D) with D even"));
  CHECK_THAT(forward(pool.zeros(DType::f32, {4, 2, 4}), x, positions),
             Contains("rope_forward: y must be (4, 2, 8) f32"));
  const Tensor wide = pool.zeros(DType::f32, {4, 2, 16});
  CHECK_THAT(forward(wide, wide, positions),
             Contains("rope_forward: cos must be (10, 8) f32, got (10, 4) f32"));
  CHECK_THAT(forward(x, x, pool.integers({4}, 10, 10)),
             Contains("rope_forward: position 10 of token 0 is outside the table of 10"));
  CHECK_THAT(message_of([&] { rope_backward(ctx, x, x, pool.integers({4}, -1, -1), table.cos, table.sin); }),
             Contains("rope_backward: position -1 of token 0"));
  try {
    rope_forward(ctx, x, x, pool.integers({4}, 99, 99), table.cos, table.sin);
  } catch (const Error& e) {
    CHECK(e.code() == ExitCode::data);
  }
  Context dry(0);
  Tensor nothing = x;
  nothing.data = nullptr;
  rope_forward(dry, nothing, nothing, positions, table.cos, table.sin);
}
