// Norm and SiLU of attention's output, each with and without the other.
#include "nn/output_transform.h"

#include <catch2/catch.hpp>

#include "support/enums.h"
#include "support/layer_parts.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::for_each_value;
using test::LayerParts;
using test::Pool;

constexpr int64_t kTokens = 5, kHeads = 4, kChannels = 4;

template <class Body>
void for_each_config(Body&& body) {
  for_each_value<OutputNorm>([&](OutputNorm norm) {
    for_each_value<OutputActivation>([&](OutputActivation activation) {
      ModelConfig config = test::tiny_config();
      config.attention.output_norm = norm;
      config.attention.output_activation = activation;
      INFO(test::name_of(norm) << ", " << test::name_of(activation));
      body(config);
    });
  });
}

}  // namespace

TEST_CASE("the output is normalised per head, then activated", "[output_transform]") {
  for_each_config([](const ModelConfig& config) {
    const bool normed = config.attention.output_norm != OutputNorm::none,
               per_head = config.attention.output_norm == OutputNorm::rmsnorm,
               silu = config.attention.output_activation == OutputActivation::silu;
    LayerParts parts;
    const OutputTransform transform(config, parts.store, "o_norm.weight");
    REQUIRE(parts.store.specs().size() == (normed ? 1u : 0u));
    parts.allocate(kTokens);
    Pool pool;
    const Tensor x = pool.normal(DType::f64, {kTokens, kHeads, kChannels});
    OutputTransform::Saved s = transform.make_saved(parts.memory, "o", x);
    CHECK(transform.identity() == (s.y.data == x.data));
    CHECK(transform.identity() == (!normed && !silu));
    transform.forward(parts.ctx, x, s);
    for (int64_t row = 0; row < kTokens * kHeads; ++row) {
      double squares = 0;
      for (int64_t c = 0; c < kChannels; ++c) squares += std::pow(Pool::get(x, row * kChannels + c), 2);
      const double rstd = 1 / std::sqrt(squares / kChannels + config.rms_norm_eps);
      for (int64_t c = 0; c < kChannels; ++c) {
        double expected = Pool::get(x, row * kChannels + c);
        if (normed)
          expected *= rstd * Pool::get(parts.store.value(0), (per_head ? row % kHeads * kChannels : 0) + c);
        if (silu) expected /= 1 + std::exp(-expected);
        REQUIRE(Pool::get(s.y, row * kChannels + c) == Approx(expected).epsilon(1e-12));
      }
    }
  });
}

TEST_CASE("gradients through the output's norm and activation equal central differences",
          "[output_transform][gradient]") {
  const test::OneThread one_thread;
  for_each_config([](const ModelConfig& config) {
    LayerParts parts;
    const OutputTransform transform(config, parts.store, "o_norm.weight");
    if (transform.identity()) return;
    parts.allocate(kTokens);
    Pool pool;
    const Tensor x = pool.normal(DType::f64, {kTokens, kHeads, kChannels}),
                 dy = pool.normal(DType::f64, {kTokens, kHeads, kChannels}), dx = pool.copy(dy, DType::f64);
    OutputTransform::Saved s = transform.make_saved(parts.memory, "o", x);
    const auto loss = [&] {
      transform.forward(parts.ctx, x, s);
      return test::dot(dy, s.y);
    };
    loss();
    transform.backward(parts.ctx, dx, dx, x, s);
    CHECK(test::gradient_error(x, dx, loss) < 1e-7);
    CHECK(parts.worst_parameter(loss) < 1e-7);
  });
}

}  // namespace sluice
