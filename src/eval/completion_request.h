#pragma once
// The bodies of requests of OpenAI's completions API, read: what a stranger may have written.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "eval/sampling.h"

namespace sluice {

struct CompletionLimits {
  int64_t max_prompts = 256;      // of one request
  int64_t max_new_tokens = 4096;  // of one prompt
  int64_t context = 0;            // tokens of a sequence; 0: the model's positions
};

/// What a request is read against.
struct ServedModel {
  const Tokenizer& tokenizer;
  int64_t context = 0;           // tokens of a sequence
  std::optional<int32_t> begin;  // stands in front of every prompt, which does not contain it
  CompletionLimits limits = {};
};

struct CompletionRequest {
  std::vector<std::vector<int32_t>> prompts;  // without ServedModel::begin; empty only where there is one
  int64_t max_tokens = 16;
  bool echo = false, logprobs = false;
  int64_t alternatives = 0;  // of every token, where logprobs is set
  std::vector<std::string> stop;
  Sampling sampling;
};

/// POST /v1/completions: prompt (a text, a list of texts, of token ids, or of lists of token ids), max_tokens
/// (16), temperature (1), top_p (1), top_k (0), seed (`seed` where it is not given), stop (a text or up to
/// 4), echo, logprobs (up to 10 alternatives per token). Of model, any name is accepted; user is not looked
/// at. Error(usage), which names the field, for what cannot be answered, and for every other field that is
/// not null.
CompletionRequest read_completion_request(const nlohmann::json& body, const ServedModel& served,
                                          int64_t seed);

/// POST /tokenize: prompt. The end-of-document token may be written as end_of_document_text says.
std::vector<int32_t> read_tokenize_request(const nlohmann::json& body, const Tokenizer& tokenizer);
/// POST /detokenize: tokens.
std::vector<int32_t> read_detokenize_request(const nlohmann::json& body, const Tokenizer& tokenizer);

/// A text that read_tokenize_request turns into the end-of-document token.
std::string end_of_document_text(const Tokenizer& tokenizer);

}  // namespace sluice
