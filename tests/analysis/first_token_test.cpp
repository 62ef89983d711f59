#include "analysis/first_token.h"

#include <array>
#include <catch2/catch.hpp>
#include <cmath>

#include "analysis/summary.h"
#include "core/targets.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;
using FirstKeys = std::array<int32_t, 2>;

AnalysisConfig two_classes() {
  AnalysisConfig config;
  config.query_classes = {{"even", {2, 4, 6}}, {"one", {1}}};
  config.sink_threshold = 0.3;
  config.sink_length = 2;
  return config;
}

/// Sequences of 4, 1 and 3 tokens, and 2 of padding. The first and the last have no target at their ends.
test::TokenBatch planted_batch() {
  test::TokenBatch b;
  b.tokens = {1, 2, 1, 5, 7, 3, 4, 9, 0, 0};
  b.targets = {2, 1, 5, kNoTarget, kNoTarget, 4, 9, kNoTarget, kPadding, kPadding};
  b.positions = {0, 1, 2, 3, 0, 0, 1, 2, 0, 1};
  b.first_key = {0, 0, 0, 0, 4, 5, 5, 5, 8, 8};
  return b;
}

/// Attention on the first token that is planted in place of what the model computed: heads 0 and 1 of four;
/// the others give it none but where they see nothing else.
const std::vector<std::vector<double>> kPlanted = {{1, 0.5, 0.25, 0, 1, 1, 0.25, 0.125, 1, 1},
                                                   {1, 0, 0, 0, 1, 1, 0.0625, 0, 1, 1},
                                                   {1, 0, 0, 0, 1, 1, 0, 0, 1, 1},
                                                   {1, 0, 0, 0, 1, 1, 0, 0, 1, 1}};

void plant(const test::TestModel& m) {
  const SoftmaxAttention::Saved& core = m.saved.blocks[0].attention.core;
  for (int64_t h = 0; h < 4; ++h)
    for (int64_t t = 0; t < 10; ++t) {
      Pool::set(core.lse, h * 10 + t, 1.5);
      Pool::set(core.z0, h * 10 + t,
                1.5 + std::log(kPlanted[static_cast<size_t>(h)][static_cast<size_t>(t)]));
    }
}

ModelSummary planted_summary(const AnalysisConfig& config, FirstKeys of_padding = {8, 8}) {
  test::TestModel m(test::tiny_config(), planted_batch());
  m.batch.first_key[8] = of_padding[0], m.batch.first_key[9] = of_padding[1];
  m.loss();
  plant(m);
  SummaryAccumulator summary(m.model, m.store, config);
  Context ctx(1 << 20);
  summary.add(ctx, m.batch.view(), m.saved);
  return summary.result();
}

void equal(const std::vector<double>& found, const std::vector<double>& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) CHECK(found[i] == Approx(expected[i]).margin(1e-12));
}

}  // namespace

TEST_CASE("a token belongs to the class that lists it, and otherwise to \"other\"", "[summary]") {
  const QueryClasses classes(two_classes().query_classes);
  CHECK(classes.names() == std::vector<std::string>{"even", "one", "other"});
  for (const auto& [token, expected] : {std::pair(2, 0), std::pair(4, 0), std::pair(1, 1), std::pair(0, 2),
                                        std::pair(3, 2), std::pair(7, 2), std::pair(100000, 2)})
    CHECK(classes.of(token) == static_cast<size_t>(expected));
  CHECK(QueryClasses({}).names() == std::vector<std::string>{"other"});
  CHECK(QueryClasses({}).of(3) == 0);
}

TEST_CASE("first-token attention by head counts no first query, and no padding", "[summary]") {
  // A sample of padding, padding at the end of the last sequence, and two samples of it.
  const ModelSummary s =
      planted_summary(two_classes(), GENERATE(FirstKeys{8, 8}, FirstKeys{5, 5}, FirstKeys{8, 9}));
  const HeadAttention& heads = s.layers[0].heads;
  equal(heads.all, {(1.75 + 1 + 1.375) / 8, (1 + 1 + 1.0625) / 8, 3.0 / 8, 3.0 / 8});
  equal(heads.later, {(0.5 + 0.25 + 0.25 + 0.125) / 5, 0.0625 / 5, 0, 0});
  // Later queries are of tokens 2, 1, 5 and 4, 9.
  REQUIRE(heads.by_class.size() == 3);
  equal(heads.by_class[0], {(0.5 + 0.25) / 2, 0.0625 / 2, 0, 0});
  equal(heads.by_class[1], {0.25, 0, 0, 0});
  equal(heads.by_class[2], {(0 + 0.125) / 2, 0, 0, 0});
  CHECK(s.layers[0].first_token_attention ==
        Approx((1.75 + 1 + 1.375 + 3.0625 + 3 + 3) / (4 * 8)).epsilon(1e-12));
  CHECK(s.query_classes == std::vector<std::string>{"even", "one", "other"});
}

TEST_CASE("a head is a sink in the sequences whose mean first-token attention exceeds the threshold",
          "[summary]") {
  AnalysisConfig config = two_classes();
  const ModelSummary s = planted_summary(config);
  // Means over whole sequences: 1.75/4, 1, 1.375/3 | 1/4, 1, 1.0625/3 | 1/4, 1, 1/3 twice. Weights 4, 1, 3
  // of 8.
  equal(s.layers[0].heads.sink, {1, 0.5, 0.5, 0.5});
  // Of the first two queries: 0.75, 1, 0.625 | 0.5, 1, 0.53 | 0.5, 1, 0.5. Weights 2, 1, 2.
  equal(s.layers[0].heads.leading_sink, {1, 1, 1, 1});
  CHECK(s.sinks.share == Approx(2.5 / 4));
  CHECK(s.sinks.leading_share == 1);
  CHECK(s.sinks.of == 4);
  CHECK(s.sinks.heads == 0);  // 0.225 is the largest mean of the later queries
  CHECK((s.sinks.layer == 0 && s.sinks.head == 0));
  CHECK(s.sinks.strongest == Approx(1.125 / 5));
  equal(s.sinks.strongest_by_class, {0.375, 0.25, 0.0625});

  config.sink_threshold = 0.2;
  CHECK(planted_summary(config).sinks.heads == 1);
  config.sink_threshold = 0.52;
  equal(planted_summary(config).layers[0].heads.leading_sink, {1, 3.0 / 5, 1.0 / 5, 1.0 / 5});
  config.sink_length = 100;  // longer than every sequence
  const ModelSummary whole = planted_summary(config);
  CHECK(whole.sinks.leading_share == whole.sinks.share);
  config.query_classes.clear();
  const ModelSummary plain = planted_summary(config);
  CHECK(plain.query_classes.empty());
  CHECK(plain.layers[0].heads.by_class.empty());
  CHECK(plain.sinks.strongest_by_class.empty());
  CHECK(plain.sinks.strongest == Approx(1.125 / 5));
}

TEST_CASE("a model without a later query has no strongest head", "[summary]") {
  test::TokenBatch single;
  single.add({1, 2});
  test::TestModel m(test::tiny_config(), single);
  m.loss();
  SummaryAccumulator summary(m.model, m.store, two_classes());
  Context ctx(1 << 20);
  summary.add(ctx, m.batch.view(), m.saved);
  CHECK(std::isnan(summary.result().sinks.strongest));
  CHECK(summary.result().sinks.strongest_by_class.empty());
  CHECK(summary.result().sinks.heads == 0);
}

}  // namespace sluice
