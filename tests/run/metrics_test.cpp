#include "run/metrics.h"

#include <catch2/catch.hpp>

namespace sluice {

TEST_CASE("metrics have the schema that reports read", "[metrics]") {
  TrainRecord record;
  record.step = 10;
  record.loss = 5.1;
  CHECK(
      to_json(record).dump() ==
      R"({"schema":1,"step":10,"samples":0,"tokens":0,"loss":5.1,"grad_norm":0.0,"lr":0.0,"tokens_per_second":0.0,)"
      R"("seconds":0.0,"spikes":0,"skipped":0})");
  record.epochs = {{"kjv", 0.5}, {"news", 2.0}};
  CHECK(to_json(record)["epochs"].dump() == R"({"kjv":0.5,"news":2.0})");
  record.losses = {{.name = "heads/imbalance", .value = 0.5, .console = "heads"},
                   {.name = "heads/importance", .value = 0.75},
                   {.name = "heads/balance_loss", .value = 1.5},
                   {.name = "heads/imbalance", .value = 0.5, .layer = 0},
                   {.name = "heads/importance", .value = 0.75, .layer = 0}};
  CHECK(
      to_json(record)["heads"].dump() ==
      R"({"imbalance":0.5,"importance":0.75,"balance_loss":1.5,"layers":[{"layer":0,"imbalance":0.5,"importance":0.75}]})");
  record.losses = {{.name = "router/idle", .value = 3, .whole = true, .tag = "router/idle_experts"},
                   {.name = "router/idle", .value = 1, .whole = true, .layer = 1},
                   {.name = "router/entropy", .value = 1, .layer = 1},
                   {.name = "router/idle", .value = 2, .whole = true, .layer = 4},
                   {.name = "logit_z_loss", .value = 2.5}};
  CHECK_THAT(
      to_json(record).dump(),
      Catch::EndsWith(
          R"(,"router":{"idle":3,"layers":[{"layer":1,"idle":1,"entropy":1.0},{"layer":4,"idle":2}]},"logit_z_loss":2.5})"));
  EvalResult result;
  result.sets = {{"kjv", 1.5, 4.5, 2.0, 99}};
  result.analysis.layers = {{0.25, {0.5}, 1, 2, 3, 4, {0.75, 0.5}, {}}};
  result.analysis.first_token_attention = 0.25;
  result.analysis.largest_residual = 4;
  const auto without = to_json(100, 25600, result);
  CHECK(without["analysis"]["mean_gate_score"].is_null());
  CHECK(without["analysis"]["imbalance"].is_null());
  result.analysis.mean_gate_score = 0.5;
  result.analysis.layers[0].imbalance = result.analysis.imbalance = 0.125;
  CHECK(
      to_json(100, 25600, result).dump() ==
      R"({"schema":1,"step":100,"tokens":25600,"sets":{"kjv":{"loss":1.5,"perplexity":4.5,"bits_per_byte":2.0,"tokens":99}},)"
      R"("analysis":{"layers":[{"first_token_attention":0.25,"gate_scores":[0.5],"attention_output_max":1.0,)"
      R"("attention_residual_max":2.0,"ffn_output_max":3.0,"ffn_residual_max":4.0,"importance":[0.75,0.5],"imbalance":0.125}],)"
      R"("first_token_attention":0.25,"mean_gate_score":0.5,"imbalance":0.125,"largest_residual":4.0}})");
}

}  // namespace sluice
