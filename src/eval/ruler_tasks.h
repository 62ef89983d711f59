#pragma once
// The thirteen tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654; https://github.com/NVIDIA/RULER,
// Apache-2.0, from which the wording of the templates is taken). The generators are this program's own: a
// prompt is a pure function of (seed, task, length, sample), the texts and the tokenizer.
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "eval/ruler_texts.h"

namespace sluice {

enum class RulerTask : uint8_t {
  niah_single_1,
  niah_single_2,
  niah_single_3,
  niah_multikey_1,
  niah_multikey_2,
  niah_multikey_3,
  niah_multivalue,
  niah_multiquery,
  vt,
  cwe,
  fwe,
  qa_1,
  qa_2,
};
constexpr std::array<std::string_view, 13> kRulerTasks = {"niah_single_1",
                                                          "niah_single_2",
                                                          "niah_single_3",
                                                          "niah_multikey_1",
                                                          "niah_multikey_2",
                                                          "niah_multikey_3",
                                                          "niah_multivalue",
                                                          "niah_multiquery",
                                                          "vt",
                                                          "cwe",
                                                          "fwe",
                                                          "qa_1",
                                                          "qa_2"};
std::string_view name(RulerTask task);
std::optional<RulerTask> ruler_task(std::string_view name);
/// Tokens that a model may generate: 128 for needles, 30 for vt, 120 for cwe, 50 for fwe, 32 for questions.
int64_t tokens_to_generate(RulerTask task);
/// What the texts lack for a task: "--haystack TEXT"; empty if nothing.
std::string missing_for(RulerTask task, const RulerTexts& texts);

struct RulerPrompt {
  std::string input, answer_prefix;  // the prompt is both, one behind the other
  std::vector<std::string> outputs;  // the references
  double depth = -1;  // 0 to 100: where what is asked for stands; -1 where it is in several places
  std::vector<std::string> other_values = {};  // with one needle: nine that were not asked for
  int64_t size = 0;      // parts of the haystack: sentences, words, needles or documents, by the task
  int64_t tokens = 0;    // of the prompt
  bool longest = false;  // the texts hold no longer one
  bool given = false;    // from a file, where special tokens are written out

  std::string text() const { return input + answer_prefix; }
};

/// Of the prompt's text, without a begin token: special tokens stand in prompts of a file alone.
std::vector<int32_t> tokens_of(const RulerPrompt& prompt, const Tokenizer& tokenizer);

struct RulerPlan;

/// Prompts of one task at one length. The arguments outlive it.
class RulerPrompts {
 public:
  /// length: tokens of a prompt and of what is generated: new_tokens, or tokens_to_generate if not given.
  /// Error(usage): the shortest prompt is longer, or the texts lack something.
  RulerPrompts(RulerTask task, const RulerTexts& texts, const Tokenizer& tokenizer, int64_t length,
               uint64_t seed, std::optional<int64_t> new_tokens = std::nullopt);
  /// The largest prompt that leaves room for what is generated; its size is found by bisection on the number
  /// of tokens.
  RulerPrompt make(int64_t sample) const;
  /// Error(usage) where the shortest prompt of one of the first `samples` is too long, as that of sample 0
  /// need not be.
  void require_fit(int64_t samples) const;

 private:
  RulerPrompt written(const RulerPlan& plan, int64_t size) const;
  bool fits(const RulerPrompt& prompt) const { return prompt.tokens + new_tokens_ <= length_; }
  [[noreturn]] void refuse(const RulerPrompt& shortest) const;
  RulerPrompt fitted(int64_t sample, int64_t guess) const;

  RulerTask task_;
  const RulerTexts& texts_;
  const Tokenizer& tokenizer_;
  int64_t length_, new_tokens_;
  uint64_t seed_;
  int64_t guess_ = 0;  // the size of sample 0
};

/// The share of the references that the prediction contains, regardless of case (RULER's string_match_all);
/// of qa_1 and qa_2, 1 if it contains any of them (string_match_part).
double ruler_score(RulerTask task, const std::vector<std::string>& outputs, std::string_view prediction);

}  // namespace sluice
