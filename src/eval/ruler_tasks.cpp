#include "eval/ruler_tasks.h"

#include <utf8proc.h>

#include <algorithm>

#include "core/error.h"
#include "core/utf8.h"
#include "data/unicode_form.h"
#include "eval/ruler_plan.h"

namespace sluice {
namespace {

RulerPlan plan_of(RulerTask task, const RulerTexts& texts, int64_t length, uint64_t seed, int64_t sample) {
  const std::string label = fmt::format("ruler/{}/{}/{}", name(task), length, sample);
  switch (task) {
    case RulerTask::niah_single_1:
    case RulerTask::niah_single_2:
    case RulerTask::niah_single_3:
    case RulerTask::niah_multikey_1:
    case RulerTask::niah_multikey_2:
    case RulerTask::niah_multikey_3:
    case RulerTask::niah_multivalue:
    case RulerTask::niah_multiquery:
      return plan_needles(task, texts, seed, label);
    case RulerTask::vt:
      return plan_variables(texts, seed, label);
    case RulerTask::cwe:
      return plan_common_words(texts, length, seed, label);
    case RulerTask::fwe:
      return plan_frequent_words(seed, label);
    case RulerTask::qa_1:
      return plan_questions(texts.questions_1, sample, seed, label);
    case RulerTask::qa_2:
      return plan_questions(texts.questions_2, sample, seed, label);
  }
  fail(ExitCode::internal, "ruler: unknown task");
}

/// Every character in lower case, of all scripts; bytes that are not UTF-8 stay.
std::string lower(std::string_view text) {
  std::string all;
  for (size_t at = 0; at < text.size();) {
    const size_t bad = find_invalid_utf8(text.substr(at));
    const size_t end = bad == std::string_view::npos ? text.size() : at + bad;
    while (at < end) {
      utf8proc_int32_t c = 0;
      at += static_cast<size_t>(utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(&text[at]),
                                                 static_cast<utf8proc_ssize_t>(end - at), &c));
      append_utf8(all, static_cast<char32_t>(utf8proc_tolower(c)));
    }
    if (at < text.size()) all += text[at++];
  }
  return all;
}

}  // namespace

std::string_view name(RulerTask task) { return kRulerTasks[static_cast<size_t>(task)]; }

std::optional<RulerTask> ruler_task(std::string_view name) {
  const auto found = std::find(kRulerTasks.begin(), kRulerTasks.end(), name);
  if (found == kRulerTasks.end()) return std::nullopt;
  return static_cast<RulerTask>(found - kRulerTasks.begin());
}

int64_t tokens_to_generate(RulerTask task) {
  switch (task) {
    case RulerTask::niah_single_1:
    case RulerTask::niah_single_2:
    case RulerTask::niah_single_3:
    case RulerTask::niah_multikey_1:
    case RulerTask::niah_multikey_2:
    case RulerTask::niah_multikey_3:
    case RulerTask::niah_multivalue:
    case RulerTask::niah_multiquery:
      return 128;
    case RulerTask::vt:
      return 30;
    case RulerTask::cwe:
      return 120;
    case RulerTask::fwe:
      return 50;
    case RulerTask::qa_1:
    case RulerTask::qa_2:
      return 32;
  }
  fail(ExitCode::internal, "ruler: unknown task");
}

std::vector<int32_t> tokens_of(const RulerPrompt& prompt, const Tokenizer& tokenizer) {
  return prompt.given ? tokenizer.encode_with_special(prompt.text()) : tokenizer.encode(prompt.text());
}

std::string missing_for(RulerTask task, const RulerTexts& texts) {
  if (task == RulerTask::qa_1) return texts.questions_1.empty() ? "--qa-1 JSONL" : "";
  if (task == RulerTask::qa_2) return texts.questions_2.empty() ? "--qa-2 JSONL" : "";
  const bool in_text = task == RulerTask::niah_single_2 || task == RulerTask::niah_single_3 ||
                       task == RulerTask::niah_multikey_1 || task == RulerTask::niah_multivalue ||
                       task == RulerTask::niah_multiquery;
  return in_text && texts.haystack.words.empty() ? "--haystack TEXT" : "";
}

RulerPrompts::RulerPrompts(RulerTask task, const RulerTexts& texts, const Tokenizer& tokenizer,
                           int64_t length, uint64_t seed, std::optional<int64_t> new_tokens)
    : task_(task),
      texts_(texts),
      tokenizer_(tokenizer),
      length_(length),
      new_tokens_(new_tokens.value_or(tokens_to_generate(task))),
      seed_(seed) {
  if (const std::string missing = missing_for(task, texts); !missing.empty())
    fail(ExitCode::usage, "RULER's {} needs {}", name(task), missing);
  guess_ = fitted(0, 1).size;
}

RulerPrompt RulerPrompts::make(int64_t sample) const { return fitted(sample, guess_); }

void RulerPrompts::require_fit(int64_t samples) const {
  for (int64_t sample = 0; sample < samples; ++sample) {
    const RulerPlan plan = plan_of(task_, texts_, length_, seed_, sample);
    if (const RulerPrompt shortest = written(plan, plan.smallest); !fits(shortest)) refuse(shortest);
  }
}

RulerPrompt RulerPrompts::written(const RulerPlan& plan, int64_t size) const {
  RulerPrompt p = plan.written(size);
  p.size = size;
  p.longest = size == plan.largest || size == plan.leap;
  p.tokens = std::ssize(tokenizer_.encode(p.text()));
  return p;
}

void RulerPrompts::refuse(const RulerPrompt& shortest) const {
  fail(ExitCode::usage,
       "RULER's {} at a length of {} tokens: the shortest prompt has {}, and {} are generated", name(task_),
       length_, shortest.tokens, new_tokens_);
}

/// The largest prompt that fits. The search begins at a guess, because all samples of a task have about the
/// same size.
RulerPrompt RulerPrompts::fitted(int64_t sample, int64_t guess) const {
  const RulerPlan plan = plan_of(task_, texts_, length_, seed_, sample);
  // `low` is the largest size known to fit, `high` the smallest known not to.
  RulerPrompt best;
  int64_t low = plan.smallest - 1, high = plan.largest + 1;
  const auto probe = [&](int64_t size) {
    RulerPrompt p = written(plan, size);
    if (fits(p)) {
      low = size;
      best = std::move(p);
    } else {
      high = size;
    }
  };
  const int64_t start = std::clamp(guess, plan.smallest, plan.largest);
  probe(start);
  if (low == start) {
    for (int64_t step = 1; low < plan.largest && high > plan.largest; step *= 2)
      probe(std::min(low + step, plan.largest));
  } else {
    for (int64_t step = 1; low < plan.smallest && high > plan.smallest; step *= 2)
      probe(std::max(high - step, plan.smallest));
  }
  while (high - low > 1) probe(low + (high - low) / 2);
  if (low < plan.smallest) refuse(written(plan, plan.smallest));
  return best;
}

double ruler_score(RulerTask task, const std::vector<std::string>& outputs, std::string_view prediction) {
  if (outputs.empty()) return 0;
  const std::string text = lower(prediction);
  int64_t found = 0;
  for (const std::string& output : outputs) found += text.find(lower(output)) != std::string::npos;
  if (task == RulerTask::qa_1 || task == RulerTask::qa_2) return found > 0 ? 1 : 0;
  return static_cast<double>(found) / static_cast<double>(outputs.size());
}

}  // namespace sluice
