// Norm and rotary embedding of queries and keys, in both orders and without a norm.
#include "nn/qk_position.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "ops/rmsnorm.h"
#include "support/layer_parts.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::LayerParts;
using test::Pool;

constexpr int64_t kTokens = 7, kHeads = 2, kChannels = 4;

enum class Way { norm_first, norm_last, no_norm };
constexpr Way kWays[] = {Way::norm_first, Way::norm_last, Way::no_norm};

ModelConfig config_of(Way way) {
  ModelConfig config = test::tiny_config();
  config.qk_norm = way != Way::no_norm;
  config.qk_norm_order = way == Way::norm_last ? QkNormOrder::after_rope : QkNormOrder::before_rope;
  return config;
}

}  // namespace

TEST_CASE("queries and keys are normalised and rotated in the configured order", "[qk_position]") {
  std::vector<Tensor> results;
  Pool pool;
  for (const Way way : kWays) {
    const ModelConfig config = config_of(way);
    LayerParts parts;
    const QkPosition position(config, parts.store, "q_norm.weight");
    REQUIRE(parts.store.specs().size() == (way == Way::no_norm ? 0u : 1u));
    parts.allocate(kTokens);
    const test::TestSequence sequence(pool, kTokens, kChannels);
    Pool same(3);  // the same numbers every time
    const Tensor x = same.normal(DType::f64, {kTokens, kHeads, kChannels}),
                 expected = pool.zeros(DType::f64, {kTokens, kHeads, kChannels}),
                 rstd = pool.zeros(DType::f64, {kTokens * kHeads});
    const auto rotate = [&](const Tensor& y, const Tensor& from) {
      rope_forward(parts.ctx, y, from, sequence.view.positions, sequence.view.rope_cos,
                   sequence.view.rope_sin);
    };
    const auto normalise = [&](const Tensor& y, const Tensor& from) {
      rmsnorm_forward(parts.ctx, y, rstd, from, parts.store.value(0), config.rms_norm_eps);
    };
    const Tensor between = pool.zeros(DType::f64, {kTokens, kHeads, kChannels});
    if (way == Way::norm_first) normalise(between, x), rotate(expected, between);
    if (way == Way::norm_last) rotate(between, x), normalise(expected, between);
    if (way == Way::no_norm) rotate(expected, x);

    QkPosition::Saved s = position.make_saved(parts.memory, "q", x);
    CHECK((s.y.data == x.data) == (way == Way::no_norm));
    position.forward(parts.ctx, x, sequence.view, s);
    CHECK(test::relative_error(s.y, expected) < 1e-14);
    results.push_back(pool.copy(s.y, DType::f64));
  }
  // The norm's weights differ from channel to channel: the order shows.
  CHECK(test::relative_error(results[0], results[1]) > 0.01);
}

TEST_CASE("gradients through norm and rotation equal central differences", "[qk_position][gradient]") {
  const test::OneThread one_thread;
  for (const Way way : kWays)
    for (const bool in_place : {true, false}) {
      INFO("way " << static_cast<int>(way) << (in_place ? ", in place" : ""));
      const ModelConfig config = config_of(way);
      LayerParts parts;
      const QkPosition position(config, parts.store, "q_norm.weight");
      parts.allocate(kTokens);
      Pool pool;
      const test::TestSequence sequence(pool, kTokens, kChannels);
      const Tensor input = pool.normal(DType::f64, {kTokens, kHeads, kChannels}),
                   x = pool.zeros(DType::f64, {kTokens, kHeads, kChannels}),
                   dy = pool.normal(DType::f64, {kTokens, kHeads, kChannels});
      QkPosition::Saved s = position.make_saved(parts.memory, "q", x);
      const auto loss = [&] {
        std::memcpy(x.data, input.data, static_cast<size_t>(x.bytes()));  // forward may rotate x in place
        position.forward(parts.ctx, x, sequence.view, s);
        return test::dot(dy, s.y);
      };
      loss();
      const Tensor d = pool.copy(dy, DType::f64), dx = in_place ? d : pool.copy(x, DType::f64);
      position.backward(parts.ctx, dx, d, x, sequence.view, s);
      CHECK(test::gradient_error(input, dx, loss) < 1e-7);
      CHECK(parts.worst_parameter(loss) < 1e-7);
    }
}

}  // namespace sluice
