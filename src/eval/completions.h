#pragma once
// Requests of OpenAI's completions API, answered by a trained model: what lm-evaluation-harness asks of a
// server (its model local-completions).
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "eval/trained_model.h"

namespace sluice {

struct CompletionLimits {
  int64_t max_prompts = 256;      // of one request
  int64_t max_new_tokens = 4096;  // of one prompt
};

/// One thread uses it at a time. Requests that cannot be answered throw Error(usage), whose message is for
/// the client.
class Completions {
 public:
  /// trained outlives this. name: of the model in answers.
  Completions(const TrainedModel& trained, std::string name, const CompletionLimits& limits = {});
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  /// POST /v1/completions: prompt (a text, a list of texts, of token ids, or of lists of token ids),
  /// max_tokens (16), temperature (1), top_p (1), seed, stop (a text or up to 4), echo, logprobs (up to 10
  /// alternatives per token). Tokens of the prompt have log-probabilities too where echo is set; the first
  /// has none.
  nlohmann::ordered_json complete(const nlohmann::json& request);
  /// GET /v1/models
  nlohmann::ordered_json models() const;
  /// POST /tokenize {"prompt": TEXT, "add_special_tokens": false}: {"tokens": [...], "count",
  /// "max_model_len"}.
  nlohmann::ordered_json tokenize(const nlohmann::json& request) const;
  /// POST /detokenize {"tokens": [...]}: {"prompt": TEXT}.
  nlohmann::ordered_json detokenize(const nlohmann::json& request) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
