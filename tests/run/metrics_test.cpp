#include "run/metrics.h"

#include <catch2/catch.hpp>
#include <cmath>

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
  result.analysis.layers[0].heads = {
      .all = {0.5, 0.25}, .later = {0.25, 0.125}, .by_class = {}, .sink = {1, 0}, .leading_sink = {0.5, 0}};
  result.analysis.layers[0].value_norm = {0.5, 1.5};
  result.analysis.layers[0].residual_max = {40, 4};
  result.analysis.sink_threshold = 0.3;
  result.analysis.sink_length = 64;
  result.analysis.sinks = {
      .share = 0.5, .leading_share = 0.25, .heads = 0, .of = 2, .strongest = 0.25, .strongest_by_class = {}};
  const auto without = to_json(100, 25600, result);
  CHECK(without["analysis"]["mean_gate_score"].is_null());
  CHECK(without["analysis"]["imbalance"].is_null());
  result.analysis.mean_gate_score = 0.5;
  result.analysis.layers[0].imbalance = result.analysis.imbalance = 0.125;
  CHECK(
      to_json(100, 25600, result).dump() ==
      R"({"schema":1,"step":100,"tokens":25600,"sets":{"kjv":{"loss":1.5,"perplexity":4.5,"bits_per_byte":2.0,"tokens":99}},)"
      R"("analysis":{"layers":[{"first_token_attention":0.25,"gate_scores":[0.5],"attention_output_max":1.0,)"
      R"("attention_residual_max":2.0,"ffn_output_max":3.0,"ffn_residual_max":4.0,"importance":[0.75,0.5],"imbalance":0.125,)"
      R"("value_norm_first":0.5,"value_norm_rest":1.5,"residual_max_first":40.0,"residual_max_rest":4.0,)"
      R"("heads":{"first_token_attention_without_first_query":[0.25,0.125],"sink_share":[1.0,0.0],"sink_share_leading":[0.5,0.0]}}],)"
      R"("first_token_attention":0.25,"sinks":{"threshold":0.3,"length":64,"share":0.5,"share_leading":0.25,"heads":0,"of":2,)"
      R"("strongest":{"layer":0,"head":0,"first_token_attention":0.25}},"mean_gate_score":0.5,"imbalance":0.125,"largest_residual":4.0}})");

  result.analysis.layers[0].gate_health = {
      {.below = {0.5, 1}, .above = {0.25, 0}, .shut_tokens = {0, 1}, .row_norms = {2, 3}},
      {.below = {}, .above = {}, .shut_tokens = {}, .row_norms = {1, 1}}};
  CHECK(
      to_json(100, 25600, result)["analysis"]["layers"][0]["gates"].dump() ==
      R"([{"below_0.05":0.75,"above_0.95":0.125,"shut_heads":0.5,"heads":{"below_0.05":[0.5,1.0],"above_0.95":[0.25,0.0],)"
      R"("shut_tokens":[0.0,1.0],"row_norm":[2.0,3.0]}},{"below_0.05":null,"above_0.95":null,"shut_heads":null,)"
      R"("heads":{"below_0.05":null,"above_0.95":null,"shut_tokens":null,"row_norm":[1.0,1.0]}}])");

  result.analysis.query_classes = {"trigger", "other"};
  result.analysis.layers[0].heads.by_class = {{0.125, 0}, {0.5, std::nan("")}};
  result.analysis.sinks.strongest_by_class = {0.125, 0.5};
  result.sets[0].classes = {{"trigger", 0.5, 0.75, 40}, {"other", 2.0, 0.25, 59}};
  const auto classes = to_json(100, 25600, result);
  CHECK(
      classes["sets"]["kjv"]["classes"].dump() ==
      R"({"trigger":{"loss":0.5,"share_likely":0.75,"tokens":40},"other":{"loss":2.0,"share_likely":0.25,"tokens":59}})");
  CHECK(classes["analysis"]["layers"][0]["heads"]["first_token_attention_by_class"].dump() ==
        R"({"trigger":[0.125,0.0],"other":[0.5,null]})");
  CHECK(classes["analysis"]["sinks"]["strongest"]["by_class"].dump() == R"({"trigger":0.125,"other":0.5})");
}

}  // namespace sluice
