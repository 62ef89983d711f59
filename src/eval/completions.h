#pragma once
// Requests of OpenAI's completions API, answered by a trained model: what lm-evaluation-harness asks of a
// server (its model local-completions).
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "eval/completion_request.h"
#include "eval/trained_model.h"

namespace sluice {

/// The answer to a request, or why there is none: an Error(usage), whose message is for the client, or what
/// went wrong here.
struct CompletionAnswer {
  nlohmann::ordered_json body;
  std::exception_ptr error;
};

/// One thread uses it at a time.
class Completions {
 public:
  /// trained outlives this. name: of the model in answers. batch: sequences that are continued at once, for
  /// whose keys and values memory is taken with the first request that needs it.
  Completions(const TrainedModel& trained, std::string name, const CompletionLimits& limits = {},
              int64_t batch = 8);
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  /// POST /v1/completions (eval/completion_request.h). The prompts of all requests are computed together. The
  /// random numbers of a prompt depend on the request's seed and on the prompt's place in the request. With
  /// echo, tokens of the prompt have log-probabilities too; the first has none.
  std::vector<CompletionAnswer> complete_all(std::span<const nlohmann::json> requests);
  /// Of one request; throws its error.
  nlohmann::ordered_json complete(const nlohmann::json& request);
  /// GET /v1/models
  nlohmann::ordered_json models() const;
  /// GET /tokenizer_info: {"eos_token", "bos_token", "pad_token", "chat_template", "vocab_size"}.
  nlohmann::ordered_json tokenizer_info() const;
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
