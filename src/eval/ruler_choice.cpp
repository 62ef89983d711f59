#include "eval/ruler_choice.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "eval/ruler_tasks.h"

namespace sluice {
namespace {

constexpr int64_t kValues = 10;
constexpr uint64_t kSeed = 42;
// At most one token per byte, and one more: " 1234567", and a space with the 36 characters of a UUID.
constexpr int64_t kNumberTokens = 9, kUuidTokens = 38;

size_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

/// f(), with errors that say which keys to change.
template <class F>
auto naming_keys(const F& f) {
  try {
    return f();
  } catch (const Error& error) {
    fail(error.code(),
         "eval.ruler.lengths (by default data.seq_len): {}; give longer ones, or eval.ruler.samples: 0",
         error.what());
  }
}

}  // namespace

RulerChoices::RulerChoices(const Config& config, const Tokenizer& tokenizer) : seq_len_(config.data.seq_len) {
  const RulerEvalConfig& ruler = config.eval.ruler;
  if (ruler.samples == 0) return;
  if (const auto& token = config.data.begin_token) begin_token_ = static_cast<int32_t>(*token);
  const std::vector<int64_t> lengths =
      ruler.lengths.empty() ? std::vector<int64_t>{config.data.seq_len} : ruler.lengths;
  RulerTexts texts;
  texts.words = built_in_words();
  for (const std::string& name : ruler.tasks)
    for (const int64_t length : lengths) {
      const std::optional<RulerTask> task = ruler_task(name);
      SLUICE_CHECK(task, "RulerChoices: no task {}", name);
      const int64_t value = *task == RulerTask::niah_multikey_3 ? kUuidTokens : kNumberTokens;
      const RulerPrompts prompts = naming_keys([&] {
        return RulerPrompts(*task, texts, tokenizer, length, kSeed, value + begin_token_.has_value());
      });
      Cell& cell = cells_.emplace_back(Cell{name, length, {}});
      for (int64_t i = 0; i < ruler.samples; ++i) {
        const RulerPrompt p = naming_keys([&] { return prompts.make(i); });
        std::vector<std::string> values = p.outputs;
        values.insert(values.end(), p.other_values.begin(), p.other_values.end());
        add(cell, p.text(), values, tokenizer);
      }
    }
}

/// Scored are the tokens from the first on in which a value may differ from the prompt alone.
void RulerChoices::add(Cell& cell, const std::string& prompt, const std::vector<std::string>& values,
                       const Tokenizer& tokenizer) const {
  SLUICE_CHECK(std::ssize(values) == kValues, "RulerChoices: {} values", values.size());
  std::vector<int32_t> alone = tokenizer.encode(prompt);
  if (begin_token_) alone.insert(alone.begin(), *begin_token_);
  size_t first = alone.size();
  const size_t begin = cell.values.size();
  for (const std::string& value : values) {
    ScoredSequence sequence{tokenizer.encode(prompt + " " + value)};
    if (begin_token_) sequence.tokens.insert(sequence.tokens.begin(), *begin_token_);
    first = std::min(first, common_prefix(alone, sequence.tokens));
    SLUICE_CHECK(std::ssize(sequence.tokens) <= seq_len_ + 1, "RulerChoices: {} tokens in samples of {}",
                 sequence.tokens.size(), seq_len_);
    cell.values.push_back(std::move(sequence));
  }
  for (size_t i = begin; i < cell.values.size(); ++i)
    cell.values[i].first_target = std::max<size_t>(first, 1);
}

std::optional<std::vector<RulerChoice>> RulerChoices::run(Context& ctx, const Transformer& model,
                                                          ForwardBuffers& buffers,
                                                          const std::function<bool()>& stop,
                                                          const ValueZeroing* zeroing) const {
  std::vector<RulerChoice> choices;
  for (const Cell& cell : cells_) {
    const auto sums = log_likelihoods(ctx, model, buffers, cell.values, stop, zeroing);
    if (!sums) return std::nullopt;
    RulerChoice choice{.task = cell.task, .length = cell.length, .samples = std::ssize(*sums) / kValues};
    if (std::any_of(sums->begin(), sums->end(), [](double x) { return std::isnan(x); }))
      fail(ExitCode::numeric,
           "eval.ruler, {} at {}: the log-likelihood of a value is not a number: the model's logits are not "
           "finite",
           cell.task, cell.length);
    for (auto first = sums->begin(); first != sums->end(); first += kValues) {
      const double best_other = *std::max_element(first + 1, first + kValues);
      choice.loss -= *first;
      choice.margin += *first - best_other;
      choice.accuracy += *first > best_other;
    }
    for (double* mean : {&choice.loss, &choice.margin, &choice.accuracy})
      *mean /= static_cast<double>(choice.samples);
    choices.push_back(choice);
  }
  return choices;
}

std::string describe(const RulerChoice& c) {
  return fmt::format(
      "  ruler {} at {}: {:.1f}% of {} right (10% by chance), true value {:.2f} nats, margin {:.2f}", c.task,
      c.length, 100 * c.accuracy, c.samples, c.loss, c.margin);
}

}  // namespace sluice
