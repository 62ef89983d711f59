#include "eval/completion_request.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr int64_t kMostAlternatives = 10, kMostStops = 4;
constexpr size_t kLongestStop = 1000;
// For tokenizers whose end-of-document token has no text, as transformers writes that of bytes.
constexpr const char* kEndOfDocument = "<|endoftext|>";

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  fail(ExitCode::usage, "{}", fmt::format(format, std::forward<Args>(args)...));
}

/// The value of a key that is neither absent nor null.
const json* given(const json& request, const char* key) {
  const auto found = request.find(key);
  return found == request.end() || found->is_null() ? nullptr : &*found;
}

int64_t whole(const json& request, const char* key, int64_t absent, int64_t low, int64_t high) {
  const json* const value = given(request, key);
  if (!value) return absent;
  if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX) ||
      value->get<int64_t>() < low || value->get<int64_t>() > high)
    refuse("{} must be a whole number from {} to {}", key, low, high);
  return value->get<int64_t>();
}

double number(const json& request, const char* key, double absent, double low, double high) {
  const json* const value = given(request, key);
  if (!value) return absent;
  if (!value->is_number() || !(value->get<double>() >= low && value->get<double>() <= high))
    refuse("{} must be a number from {} to {}", key, low, high);
  return value->get<double>();
}

bool flag(const json& request, const char* key) {
  const json* const value = given(request, key);
  if (!value) return false;
  if (!value->is_boolean()) refuse("{} must be true or false", key);
  return value->get<bool>();
}

/// Of a request for a completion; of some, only the value that changes nothing is accepted.
const std::vector<std::string_view> kFields = {"model",
                                               "user",
                                               "prompt",
                                               "max_tokens",
                                               "temperature",
                                               "top_p",
                                               "top_k",
                                               "seed",
                                               "stop",
                                               "echo",
                                               "logprobs",
                                               "stream",
                                               "n",
                                               "best_of",
                                               "min_p",
                                               "suffix",
                                               "logit_bias",
                                               "presence_penalty",
                                               "frequency_penalty",
                                               "repetition_penalty"};

/// A field that is not among those known may ask for what is not computed.
void require_object(const json& body, const std::vector<std::string_view>& known) {
  if (!body.is_object()) refuse("the request must be a JSON object");
  for (const auto& [key, value] : body.items())
    if (!value.is_null() && std::find(known.begin(), known.end(), key) == known.end())
      refuse("{} is not supported: it is none of {}", printable(key, 40), fmt::join(known, ", "));
}

std::vector<int32_t> ids(const json& list, const char* what, const Tokenizer& tokenizer) {
  std::vector<int32_t> out;
  for (const json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= tokenizer.vocab_size())
      refuse("{}: token ids are whole numbers from 0 to {}, got {}", what, tokenizer.vocab_size() - 1,
             printable(id.dump(-1, ' ', true, json::error_handler_t::replace), 40));
    out.push_back(id.get<int32_t>());
  }
  return out;
}

/// What would change the answer and is not computed has its neutral value.
void refuse_other(const json& body) {
  if (flag(body, "stream")) refuse("stream is not supported");
  for (const char* key : {"n", "best_of"}) whole(body, key, 1, 1, 1);
  for (const char* key : {"presence_penalty", "frequency_penalty", "min_p"}) number(body, key, 0, 0, 0);
  number(body, "repetition_penalty", 1, 1, 1);
  for (const char* key : {"suffix", "logit_bias"})
    if (given(body, key)) refuse("{} is not supported", key);
}

void read_stop(const json& body, CompletionRequest& r) {
  const json* const stop = given(body, "stop");
  if (!stop) return;
  const json list = stop->is_array() ? *stop : json::array({*stop});
  if (std::ssize(list) > kMostStops) refuse("stop: at most {} texts", kMostStops);
  for (const json& text : list) {
    if (!text.is_string() || text.get_ref<const std::string&>().size() > kLongestStop)
      refuse("stop must be a text, or a list of texts, of at most {} bytes", kLongestStop);
    if (!text.get_ref<const std::string&>().empty()) r.stop.push_back(text.get<std::string>());
  }
}

void read_prompts(const json& body, const ServedModel& served, CompletionRequest& r) {
  const json* const prompt = given(body, "prompt");
  if (!prompt) refuse("prompt is missing");
  const auto add = [&](const json& one) {
    if (one.is_string()) {
      r.prompts.push_back(served.tokenizer.encode_with_special(one.get_ref<const std::string&>()));
    } else if (one.is_array()) {
      r.prompts.push_back(ids(one, "prompt", served.tokenizer));
    } else {
      refuse("prompt must be a text, a list of texts, a list of token ids, or a list of such lists");
    }
  };
  const bool many = prompt->is_array() && !prompt->empty() && !(*prompt)[0].is_number();
  if (many && std::ssize(*prompt) > served.limits.max_prompts)
    refuse("prompt: at most {} in a request", served.limits.max_prompts);
  if (!many) add(*prompt);
  for (size_t i = 0; many && i < prompt->size(); ++i) add((*prompt)[i]);
  for (std::vector<int32_t>& tokens : r.prompts) {
    if (tokens.empty() && !served.begin) tokens.push_back(served.tokenizer.end_of_document());
    const int64_t length = std::ssize(tokens) + (served.begin ? 1 : 0);
    if (length + r.max_tokens > served.context)
      refuse("prompt has {} tokens and max_tokens is {}, but the model's context holds {}", length,
             r.max_tokens, served.context);
  }
}

}  // namespace

CompletionRequest read_completion_request(const json& body, const ServedModel& served, int64_t seed) {
  require_object(body, kFields);
  refuse_other(body);
  CompletionRequest r;
  r.max_tokens = whole(body, "max_tokens", 16, 0, served.limits.max_new_tokens);
  r.echo = flag(body, "echo");
  if (const json* const value = given(body, "logprobs");
      value && !(value->is_boolean() && !value->get<bool>())) {
    r.logprobs = true;
    r.alternatives = value->is_boolean() ? 1 : whole(body, "logprobs", 0, 0, kMostAlternatives);
  }
  r.sampling.temperature = number(body, "temperature", 1, 0, 100);
  r.sampling.top_p = number(body, "top_p", 1, 1e-9, 1);
  r.sampling.top_k = whole(body, "top_k", 0, -1, INT32_MAX);
  r.sampling.seed = static_cast<uint64_t>(whole(body, "seed", seed, INT64_MIN, INT64_MAX));
  read_stop(body, r);
  read_prompts(body, served, r);
  return r;
}

std::vector<int32_t> read_tokenize_request(const json& body, const Tokenizer& tokenizer) {
  require_object(body, {"model", "prompt", "add_special_tokens"});
  flag(body, "add_special_tokens");  // there are none to add
  const json* const prompt = given(body, "prompt");
  if (!prompt || !prompt->is_string()) refuse("prompt must be a text");
  const auto& text = prompt->get_ref<const std::string&>();
  if (text == end_of_document_text(tokenizer)) return {tokenizer.end_of_document()};
  return tokenizer.encode_with_special(text);
}

std::vector<int32_t> read_detokenize_request(const json& body, const Tokenizer& tokenizer) {
  require_object(body, {"model", "tokens"});
  const json* const tokens = given(body, "tokens");
  if (!tokens || !tokens->is_array()) refuse("tokens must be a list of token ids");
  return ids(*tokens, "tokens", tokenizer);
}

std::string end_of_document_text(const Tokenizer& tokenizer) {
  const std::string text = tokenizer.decode({tokenizer.end_of_document()});
  return text.empty() ? kEndOfDocument : text;
}

}  // namespace sluice
