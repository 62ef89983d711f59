#include "eval/ruler_choice.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "eval/cached_model.h"
#include "eval/evaluate.h"
#include "eval/ruler_tasks.h"
#include "eval/tiny_checkpoint.h"
#include "run/metrics.h"

namespace sluice {
namespace {

constexpr int64_t kLength = 640;

struct Choosing {
  test::TinyTraining training{Precision::f64};
  std::unique_ptr<TrainedModel> trained;

  explicit Choosing(int64_t samples, int64_t seq_len = 700) {
    Config& c = training.config;
    c.data.seq_len = seq_len;
    c.model.max_position_embeddings = 900;
    c.model.initializer_range = 0.5;
    c.eval.ruler.samples = samples;
    c.eval.ruler.tasks = {"niah_single_1", "niah_multikey_2"};
    c.eval.ruler.lengths = {kLength};
    trained = std::make_unique<TrainedModel>(find_checkpoint(test::trained_checkpoint(training, 0)), 64);
  }

  std::vector<RulerChoice> run(int64_t rows, const ValueZeroing* zeroing = nullptr) const {
    const RulerChoices choices(trained->config(), trained->tokenizer());
    Arena memory("buffers", int64_t{1} << 28), host("host");
    Context ctx(int64_t{1} << 26, Device::cpu);
    ForwardBuffers buffers =
        make_forward_buffers(*trained, memory, host, rows * trained->config().data.seq_len, Recompute::block);
    return *choices.run(
        ctx, trained->model(), buffers, [] { return false; }, zeroing);
  }

  /// Nats of a continuation, token by token.
  double nats(CachedModel& model, const std::string& prompt, const std::string& value) const {
    const std::vector<int32_t> tokens = trained->tokenizer().encode(prompt),
                               more = trained->tokenizer().encode(value);
    model.truncate(0, 0);
    std::span<const float> logits = model.prefill(0, tokens);
    double sum = 0;
    for (const int32_t token : more) {
      double total = 0;
      for (const float z : logits) total += std::exp(static_cast<double>(z));
      sum += std::log(total) - static_cast<double>(logits[static_cast<size_t>(token)]);
      logits = model.prefill(0, std::vector<int32_t>{token});
    }
    return sum;
  }
};

}  // namespace

TEST_CASE("the likelihood of a value is that of its tokens behind the prompt", "[ruler_choice]") {
  const Choosing c(1);
  const std::vector<RulerChoice> choices = c.run(3);
  REQUIRE(choices.size() == 2);
  RulerTexts texts;
  texts.words = built_in_words();
  CachedModel model(*c.trained, {.context = 700});
  for (const RulerChoice& choice : choices) {
    INFO(choice.task);
    CHECK(choice.length == kLength);
    CHECK(choice.samples == 1);
    const RulerPrompt p =
        RulerPrompts(*ruler_task(choice.task), texts, c.trained->tokenizer(), kLength, 42, 9).make(0);
    const double expected = c.nats(model, p.text(), " " + p.outputs[0]);
    double best = 1e9;
    for (const std::string& other : p.other_values)
      best = std::min(best, c.nats(model, p.text(), " " + other));
    CHECK(choice.loss == Approx(expected).epsilon(1e-5));
    CHECK(choice.margin == Approx(best - expected).margin(1e-3));
    CHECK(choice.accuracy == (expected < best ? 1 : 0));
  }
}

TEST_CASE("choices do not depend on the size of the batch, and are part of an evaluation", "[ruler_choice]") {
  const Choosing c(3);
  const std::vector<RulerChoice> one = c.run(1), four = c.run(4);
  for (size_t i = 0; i < 2; ++i) {
    CHECK(one[i].loss == Approx(four[i].loss).epsilon(1e-12));
    CHECK(one[i].margin == Approx(four[i].margin).margin(1e-9));
    CHECK(one[i].accuracy == four[i].accuracy);
    CHECK(one[i].samples == 3);
  }
  EvalResult result;
  result.ruler = one;
  const nlohmann::ordered_json line = to_json(5, 100, result);
  CHECK(line["ruler"].size() == 2);
  CHECK(line["ruler"][1]["task"] == "niah_multikey_2");
  CHECK(line["ruler"][1]["loss"] == one[1].loss);
  CHECK(describe(result).at(0).find("  ruler niah_single_1 at 640: ") == 0);
}

TEST_CASE("which heads are zeroed for a prompt does not depend on the length of the samples",
          "[ruler_choice][zeroing]") {
  const Choosing c(1), longer(1, 900);
  const auto loss = [](const Choosing& choosing, double threshold) {
    const ValueZeroing zeroing{threshold};
    return choosing.run(2, &zeroing)[0].loss;
  };
  const double all = loss(c, 0), none = loss(c, 1);
  int between = 0;
  for (double threshold = 0; threshold < 0.012; threshold += 0.001) {
    const double of_heads = loss(c, threshold);
    CHECK(loss(longer, threshold) == Approx(of_heads).epsilon(1e-12));
    between += of_heads != all && of_heads != none;
  }
  CHECK(all != none);
  CHECK(between > 0);
}

TEST_CASE("a length that no needle fits into is refused before the training", "[ruler_choice]") {
  Config config;
  config.data.seq_len = 256;
  config.eval.ruler.samples = 1;
  const auto tokenizer = make_tokenizer(TokenizerConfig{});
  test::expect_error(
      ExitCode::usage,
      {"eval.ruler.lengths", "niah_single_1 at a length of 256 tokens: the shortest prompt has",
       "eval.ruler.samples: 0"},
      [&] { RulerChoices(config, *tokenizer); });
  config.eval.ruler.samples = 0;
  CHECK(RulerChoices(config, *tokenizer).empty());
}

}  // namespace sluice
