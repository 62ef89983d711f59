// Multiple choice by log-likelihood, and samples of text, against computations one sequence at a time.
#include "eval/tasks.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "eval/evaluate.h"
#include "eval/forward_memory.h"
#include "eval/generate.h"
#include "eval/prompt_scores.h"
#include "eval/scored_sequences.h"
#include "eval/tiny_checkpoint.h"
#include "support/model.h"

namespace sluice {
namespace {

const auto kNever = [] { return false; };

/// log p of the continuation's bytes, from the logits behind each prefix, through the cache of generation:
/// one token at a time, in f64.
double direct(const TrainedModel& trained, const std::string& context, const std::string& continuation) {
  Arena measure("cache", 0);
  trained.model().make_cache(measure, 32, trained.dtype());
  Arena memory("cache", measure.high_water());
  KeyValueCache cache = trained.model().make_cache(memory, 32, trained.dtype());
  Arena activations("activations", 1 << 22), host("host");
  Context ctx(1 << 22);
  ForwardBuffers one = make_forward_buffers(trained, activations, host, 1, Recompute::none);
  const Tensor logits = activations.alloc("logits", DType::f32, {1, 257});
  const std::string text = context + continuation;
  double sum = 0;
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    one.host.tokens.as<int32_t>()[0] = static_cast<unsigned char>(text[i]);
    one.host.targets.as<int32_t>()[0] = -1;
    one.host.positions.as<int32_t>()[0] = static_cast<int32_t>(i);
    one.host.first_key.as<int32_t>()[0] = 0;
    trained.model().forward(ctx, one.batch, one.saved, {}, &cache);
    trained.model().logits(ctx, logits, one.saved.hidden);
    if (i + 1 < context.size()) continue;
    double total = 0;
    for (int64_t v = 0; v < 257; ++v) total += std::exp(static_cast<double>(logits.as<float>()[v]));
    sum += static_cast<double>(logits.as<float>()[static_cast<unsigned char>(text[i + 1])]) - std::log(total);
  }
  return sum;
}

std::string refusal(const std::string& path, const std::string& content) {
  std::ofstream(path) << content;
  try {
    read_task(path);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::data);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("log-likelihoods of packed sequences are those of each alone", "[tasks]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 6)), 64);
  ForwardMemory memory(trained, 64);
  const std::vector<TaskChoice> choices = {
      {"ab", "c"},        {"abcabc", "abcab"},  {"the question is ", "long"},
      {"x", "yzyzyzyzy"}, {"0123456789", "01"}, {"q", "r"}};
  std::vector<ScoredSequence> sequences;
  for (const TaskChoice& c : choices)
    sequences.push_back(scored_sequence(trained.tokenizer(), {}, c.context, c.continuation, 32));
  const auto sums = *log_likelihoods(memory.ctx(), trained.model(), memory.buffers(), sequences, kNever);
  REQUIRE(sums.size() == choices.size());
  for (size_t i = 0; i < choices.size(); ++i) {
    // White space at the end of the context is scored with the continuation.
    const bool space = choices[i].context.ends_with(' ');
    const std::string context = choices[i].context.substr(0, choices[i].context.size() - (space ? 1 : 0));
    INFO(choices[i].context);
    CHECK(sums[i] ==
          Approx(direct(trained, context, (space ? " " : "") + choices[i].continuation)).margin(1e-4));
  }
  CHECK_FALSE(
      log_likelihoods(memory.ctx(), trained.model(), memory.buffers(), sequences, [] { return true; }));
}

TEST_CASE("sequences: begin tokens, empty contexts, truncation", "[tasks]") {
  const auto bytes = make_tokenizer({});
  const ScoredSequence plain = scored_sequence(*bytes, {}, "ab", " c", 32);
  CHECK(plain.tokens == std::vector<int32_t>{'a', 'b', ' ', 'c'});
  CHECK(plain.first_target == 2);
  const ScoredSequence empty = scored_sequence(*bytes, {}, "", "c", 32);
  CHECK(empty.tokens == std::vector<int32_t>{256, 'c'});
  CHECK(empty.first_target == 1);
  const ScoredSequence begin = scored_sequence(*bytes, 7, "a", "c", 32);
  CHECK(begin.tokens == std::vector<int32_t>{7, 'a', 'c'});
  CHECK(begin.first_target == 2);
  const ScoredSequence cut = scored_sequence(*bytes, {}, "abcdef", "gh", 4);
  CHECK(cut.context_cut);
  CHECK(cut.unscored == 0);
  CHECK(cut.tokens == std::vector<int32_t>{'d', 'e', 'f', 'g', 'h'});
  CHECK(cut.first_target == 3);
  // A continuation that does not fit leaves one input in front of what is scored.
  const ScoredSequence longer = scored_sequence(*bytes, {}, "a", "bcdefgh", 4);
  CHECK(longer.tokens == std::vector<int32_t>{'d', 'e', 'f', 'g', 'h'});
  CHECK(longer.first_target == 1);
  CHECK(longer.unscored == 3);
  // What stands in front of every text stays there.
  const ScoredSequence behind = scored_sequence(*bytes, 7, "abcdef", "gh", 4);
  CHECK(behind.tokens == std::vector<int32_t>{7, 'e', 'f', 'g', 'h'});
  CHECK(behind.first_target == 3);
  CHECK(behind.context_cut);
  CHECK(behind.unscored == 0);
  for (const std::optional<int64_t> first : {std::optional<int64_t>(7), std::optional<int64_t>()}) {
    const ScoredSequence alone = scored_sequence(*bytes, first, "", "abcdef", 4);
    CHECK(alone.tokens == std::vector<int32_t>{first ? 7 : 256, 'c', 'd', 'e', 'f'});
    CHECK(alone.first_target == 1);
    CHECK_FALSE(alone.context_cut);
    CHECK(alone.unscored == 2);
  }
}

TEST_CASE("tasks are answered with shots, whole and by bytes", "[tasks]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 3)), 64);
  ForwardMemory memory(trained, 64);
  const std::string file = t.folder / "letters.jsonl";
  std::ofstream(file) << "{\"context\": \"a\", \"choices\": [\" b\", \" cde\"], \"answer\": 1}\n\n"
                      << "{\"contexts\": [\"x\", \"yy\", \"z\"], \"continuation\": \" w\", \"answer\": 2}\n"
                      << "{\"context\": \"k\", \"choices\": [\" l\", \" mno\"], \"answer\": 0}\n";
  const Task task = read_task(file);
  CHECK(task.name == "letters");
  REQUIRE(task.questions.size() == 3);
  const auto answer = [&](const TaskOptions& options) {
    return *answer_task(memory.ctx(), trained.model(), memory.buffers(), trained.tokenizer(), t.config.data,
                        task, options, kNever);
  };
  const TaskResult result = answer({});
  CHECK(result.questions == 3);
  double right = 0, right_bytes = 0;
  for (size_t q = 0; q < 3; ++q) {
    const TaskQuestion& question = task.questions[q];
    size_t best = 0, best_bytes = 0;
    std::vector<double> sums, shares;
    for (const TaskChoice& c : question.choices) {
      sums.push_back(direct(trained, c.context, c.continuation));
      shares.push_back(sums.back() / static_cast<double>(c.continuation.size() - 1));
      CHECK(result.log_likelihoods[q][sums.size() - 1] == Approx(sums.back()).margin(1e-4));
      if (sums.back() > sums[best]) best = sums.size() - 1;
      if (shares.back() > shares[best_bytes]) best_bytes = shares.size() - 1;
    }
    right += best == question.answer;
    right_bytes += best_bytes == question.answer;
  }
  CHECK(result.accuracy == Approx(right / 3));
  CHECK(result.accuracy_bytes == Approx(right_bytes / 3));
  const TaskResult shot = answer({.shots = 1, .max_questions = 1});
  CHECK(shot.questions == 1);
  CHECK(shot.log_likelihoods[0][1] == Approx(direct(trained, "a cde\n\nyy", " w")).margin(1e-4));
  try {
    answer({.shots = 3});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK_THAT(error.what(), Catch::Contains("3 shots leave none of its 3 questions"));
  }
}

TEST_CASE("logits that are not numbers are an error, and not the choice of the first", "[tasks]") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const auto numeric = [](const auto& f, const std::string& part) {
    try {
      f();
      FAIL_CHECK("no error");
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::numeric);
      CHECK_THAT(error.what(), Catch::Contains(part));
    }
  };
  for (const float bad : {nan, inf}) {
    const std::vector<float> logits = {1, 2, bad, 0};
    for (const double temperature : {0.0, 1.0})
      numeric([&] { sample(logits, {.temperature = temperature}, 0.5); }, "logit of token 2");
    numeric([&] { token_score(logits.data(), 4, 1, 2); }, "logit of token 2");
  }
  CHECK(sample(std::vector<float>{1, 2, -inf, 0}, {.temperature = 0}, 0.5) == 1);

  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 1)), 64);
  const Tensor embedding = trained.store().value(0);
  for (int64_t i = 0; i < embedding.numel(); ++i) test::Pool::set(embedding, i, nan);
  ForwardMemory memory(trained, 64);
  const Task task{"letters", {{{{"a", " b"}, {"a", " c"}}, 0}}};
  numeric(
      [&] {
        answer_task(memory.ctx(), trained.model(), memory.buffers(), trained.tokenizer(), t.config.data, task,
                    {}, kNever);
      },
      "task letters, question 1: the log-likelihood of choice 1 is not a number");
  numeric(
      [&] {
        continue_prompts(memory.ctx(), trained.model(), memory.buffers(), trained.tokenizer(), t.config.data,
                         257, {"ab"}, 3, kNever);
      },
      "prompt \"ab\": the model's logits are not finite");
}

TEST_CASE("two tasks of one name are refused with both files", "[tasks]") {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "x");
  const std::string one = folder / "q.jsonl", other = folder / "x/q.jsonl";
  for (const std::string& path : {one, other})
    std::ofstream(path) << "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n";
  try {
    read_tasks({one, other});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    CHECK_THAT(error.what(), Catch::Contains(one) && Catch::Contains(other) && Catch::Contains("named q"));
  }
  CHECK(read_tasks({one}).size() == 1);
}

TEST_CASE("damaged task files are refused with file and line", "[tasks]") {
  const TempFolder folder;
  const std::string path = folder / "t.jsonl",
                    good = "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n";
  CHECK_THAT(refusal(path, good + "nonsense\n"), Catch::Contains("t.jsonl:2") && Catch::Contains("not JSON"));
  CHECK_THAT(refusal(path, good + "[1]\n"), Catch::Contains("t.jsonl:2: must be a JSON object"));
  CHECK_THAT(refusal(path, "{\"context\": \"a\", \"choices\": [\"b\"], \"answer\": 0}"),
             Catch::Contains("\"choices\" must be a list of 2 to 1000 texts"));
  CHECK_THAT(refusal(path, "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 2}"),
             Catch::Contains("\"answer\" must be the number of a choice, from 0 to 1"));
  CHECK_THAT(refusal(path, "{\"context\": 1, \"choices\": [\"b\", \"c\"], \"answer\": 0}"),
             Catch::Contains("\"context\" must be a text"));
  CHECK_THAT(refusal(path, "{\"context\": \"a\", \"choices\": [\"b\", \"\"], \"answer\": 0}"),
             Catch::Contains("a continuation is empty"));
  CHECK_THAT(refusal(path, "\n"), Catch::Contains("contains no question"));
}

TEST_CASE("of a choice that is longer than a sample the end is scored, per byte of that end", "[tasks]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 3)), 64);
  ForwardMemory memory(trained, 64);
  const std::string file = t.folder / "long.jsonl", text(40, 'x');
  std::ofstream(file) << "{\"context\": \"abc\", \"choices\": [\"" << text << "\", \"b\"], \"answer\": 0}\n";
  const TaskResult result = *answer_task(memory.ctx(), trained.model(), memory.buffers(), trained.tokenizer(),
                                         t.config.data, read_task(file), {}, kNever);
  const int64_t scored = t.config.data.seq_len;
  REQUIRE(scored < std::ssize(text));
  CHECK(result.choices_cut == 1);
  CHECK(result.contexts_cut == 1);
  CHECK(result.answer_loss == Approx(-result.log_likelihoods[0][0] / static_cast<double>(scored)));
  CHECK_THAT(describe(result),
             Catch::Matchers::Contains("1 contexts truncated, 1 choices longer than a sample"));
}

TEST_CASE("a prompt that is longer than a sample keeps its begin token", "[tasks]") {
  test::TinyTraining t;
  t.config.data.begin_token = 256;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 6)), 64);
  ForwardMemory memory(trained, 64);
  std::vector<std::string> prompts;
  for (int i = 0; i < 12; ++i)
    prompts.push_back(std::string(static_cast<size_t>(40 + i), static_cast<char>('a' + i)) + "the");
  const auto samples = *continue_prompts(memory.ctx(), trained.model(), memory.buffers(), trained.tokenizer(),
                                         t.config.data, 257, prompts, 1, kNever);
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::string end =
        prompts[i].substr(prompts[i].size() - static_cast<size_t>(t.config.data.seq_len - 1));
    std::string expected;
    Generator(trained).run(trained.tokenizer().encode(end), 1, {.temperature = 0}, [&](int32_t token) {
      if (token != 256) expected = trained.tokenizer().decode({token});
      return false;
    });
    CHECK(samples[i].text == expected);
  }
}

TEST_CASE("samples of a training are those of generation", "[tasks]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 6)), 64);
  ForwardMemory memory(trained, 64);
  const std::vector<std::string> prompts = {"ab", "the", "x"};  // two samples fit into the buffers
  const auto samples = *continue_prompts(memory.ctx(), trained.model(), memory.buffers(), trained.tokenizer(),
                                         t.config.data, 257, prompts, 12, kNever);
  REQUIRE(samples.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    std::vector<int32_t> expected;
    Generator(trained).run(trained.tokenizer().encode(prompts[i]), 12, {.temperature = 0},
                           [&](int32_t token) {
                             if (token == 256) return false;
                             expected.push_back(token);
                             return true;
                           });
    CHECK(samples[i].text == trained.tokenizer().decode(expected));
  }
  CHECK(valid_text("a\xff\xe4\xbd\xa0\xe4") == "a\xef\xbf\xbd\xe4\xbd\xa0\xef\xbf\xbd");
  CHECK(describe(SampleText{"a\nb", "\x1b[0m"}) == "  sample \"a\\nb\" -> \" [0m\"");
}

}  // namespace sluice
