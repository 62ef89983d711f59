#include "eval/ruler_choice.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/targets.h"
#include "eval/ruler_tasks.h"
#include "eval/sample_rows.h"

namespace sluice {
namespace {

constexpr int64_t kValues = 10;
constexpr uint64_t kSeed = 42;
// At most one token per byte, and one more: " 1234567", and a space with the 36 characters of a UUID.
constexpr int64_t kNumberTokens = 9, kUuidTokens = 38;

int64_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
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
  int64_t first = std::ssize(alone);
  const size_t begin = cell.rows.size();
  for (const std::string& value : values) {
    Row row{tokenizer.encode(prompt + " " + value), 0};
    if (begin_token_) row.tokens.insert(row.tokens.begin(), *begin_token_);
    first = std::min(first, common_prefix(alone, row.tokens));
    SLUICE_CHECK(std::ssize(row.tokens) <= seq_len_ + 1, "RulerChoices: {} tokens in samples of {}",
                 row.tokens.size(), seq_len_);
    cell.rows.push_back(std::move(row));
  }
  for (size_t i = begin; i < cell.rows.size(); ++i) cell.rows[i].first = std::max<int64_t>(first, 1);
}

/// Sample `at` of a batch; nothing is predicted without a row.
void RulerChoices::fill(const Batch& batch, const Row* row, int64_t at) const {
  const int64_t base = at * seq_len_;
  int32_t *tokens = batch.tokens.as<int32_t>() + base, *targets = batch.targets.as<int32_t>() + base,
          *positions = batch.positions.as<int32_t>() + base,
          *first_key = batch.first_key.as<int32_t>() + base;
  std::fill_n(tokens, seq_len_, 0);
  std::fill_n(targets, seq_len_, kPadding);
  std::iota(positions, positions + seq_len_, 0);
  std::fill_n(first_key, seq_len_, static_cast<int32_t>(base));
  if (!row) return;
  std::copy(row->tokens.begin(), row->tokens.end() - 1, tokens);
  std::fill_n(targets, std::ssize(row->tokens) - 1, kNoTarget);
  std::copy(row->tokens.begin() + row->first, row->tokens.end(), targets + row->first - 1);
}

std::optional<std::vector<RulerChoice>> RulerChoices::run(Context& ctx, const Transformer& model,
                                                          ForwardBuffers& buffers,
                                                          const std::function<bool()>& stop,
                                                          const ValueZeroing* zeroing) const {
  std::vector<RulerChoice> choices;
  SampleRows samples(model, buffers);
  const int64_t at_once = seq_len_ > 0 ? samples.tokens() / seq_len_ : 0;
  for (const Cell& cell : cells_) {
    const int64_t rows = std::ssize(cell.rows);
    std::vector<double> nats(cell.rows.size());
    for (int64_t begin = 0; begin < rows; begin += at_once) {
      if (stop()) return std::nullopt;
      for (int64_t i = 0; i < at_once; ++i)
        fill(samples.whole(), begin + i < rows ? &cell.rows[static_cast<size_t>(begin + i)] : nullptr, i);
      samples.upload(ctx);
      model.forward(ctx, buffers.batch, buffers.saved, {}, nullptr, zeroing);
      model.loss_forward(ctx, buffers.losses, buffers.batch, buffers.saved);
      const std::vector<double> losses = samples.losses(ctx);
      const int32_t* targets = samples.whole().targets.as<int32_t>();
      for (int64_t i = 0; i < std::min(at_once, rows - begin); ++i)
        for (int64_t t = i * seq_len_; t < (i + 1) * seq_len_; ++t)
          if (targets[t] >= 0) nats[static_cast<size_t>(begin + i)] += losses[static_cast<size_t>(t)];
    }
    RulerChoice choice{.task = cell.task, .length = cell.length, .samples = rows / kValues};
    if (std::any_of(nats.begin(), nats.end(), [](double x) { return std::isnan(x); }))
      fail(ExitCode::numeric,
           "eval.ruler, {} at {}: the log-likelihood of a value is not a number: the model's logits are not "
           "finite",
           cell.task, cell.length);
    for (auto first = nats.begin(); first != nats.end(); first += kValues) {
      const double best_other = *std::min_element(first + 1, first + kValues);
      choice.loss += *first;
      choice.margin += best_other - *first;
      choice.accuracy += *first < best_other;
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
