#pragma once
// Evaluation during training, and what is measured in it.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

/// RULER's needles (Hsieh et al. 2024, arXiv 2404.06654) as an evaluation during training
/// (eval/ruler_choice.h).
struct RulerEvalConfig {
  int64_t samples = 0;
  std::vector<std::string> tasks = {"niah_single_1"};
  std::vector<int64_t> lengths;

  template <class V>
  void fields(V& f) {
    f("samples", samples,
      "prompts per task and length, each scored by the log-likelihood of the true value against nine others; "
      "0: off");
    f("tasks", tasks, "niah_single_1, niah_multikey_2 or niah_multikey_3: the needles that need no text");
    f("lengths", lengths, "tokens of a prompt with its value, at most data.seq_len; empty: data.seq_len");
  }
};

struct EvalConfig {
  int64_t every_steps = 0;
  int64_t max_tokens = 0;
  std::vector<std::string> tasks;
  int64_t shots = 0;
  int64_t max_questions = 0;
  std::vector<std::string> prompts;
  int64_t prompt_tokens = 64;
  RulerEvalConfig ruler;

  template <class V>
  void fields(V& f) {
    f("every_steps", every_steps, "steps between validations; 0: validate only at the end");
    f("max_tokens", max_tokens, "tokens evaluated per validation set; 0: all of it");
    f("tasks", tasks,
      "files of multiple-choice questions (JSONL), answered by log-likelihood at every validation");
    f("shots", shots, "solved questions that stand before each question of a task");
    f("max_questions", max_questions, "questions of each task that are answered; 0: all of them");
    f("prompts", prompts, "texts that the model continues at every validation, most probable token first");
    f("prompt_tokens", prompt_tokens, "tokens by which each prompt is continued");
    f("ruler", ruler, "");
  }
};

/// Token ids whose queries and losses are reported apart, such as the triggers of Bigram-Backcopy.
struct QueryClassConfig {
  std::string name;
  std::vector<int64_t> tokens;

  template <class V>
  void fields(V& f) {
    f("name", name, "name of the class in tables and logs");
    f("tokens", tokens, "token ids; each id belongs to at most one class");
  }
};

struct AnalysisConfig {
  std::vector<QueryClassConfig> query_classes;
  double sink_threshold = 0.3;
  int64_t sink_length = 64;

  template <class V>
  void fields(V& f) {
    f("query_classes", query_classes,
      "first-token attention and loss are reported for the queries of each class, and for all others as "
      "\"other\"");
    f("sink_threshold", sink_threshold,
      "a head is counted as a sink if its mean attention on the first token exceeds this (Sink^eps of Gu et "
      "al. 2024)");
    f("sink_length", sink_length,
      "the sink measure is also taken over the first queries of a sample up to this length");
  }
};

}  // namespace sluice
