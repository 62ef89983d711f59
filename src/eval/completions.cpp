#include "eval/completions.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "config/derived.h"
#include "core/error.h"
#include "core/strict_json.h"
#include "eval/generate.h"
#include "eval/prompt_scores.h"
#include "eval/samples.h"

namespace sluice {
namespace {

using nlohmann::json;
using Json = nlohmann::ordered_json;

constexpr int64_t kMostAlternatives = 10, kMostStops = 4;
constexpr size_t kLongestStop = 1000;

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

struct Request {
  std::vector<std::vector<int32_t>> prompts;
  int64_t max_tokens = 16, alternatives = 0;
  bool echo = false, logprobs = false;
  std::vector<std::string> stop;
  Sampling sampling;
};

}  // namespace

class Completions::Impl {
 public:
  Impl(const TrainedModel& trained, std::string name, const CompletionLimits& limits)
      : trained_(trained),
        tokenizer_(trained.tokenizer()),
        name_(std::move(name)),
        limits_(limits),
        context_(max_positions(trained.config())),
        generator_(trained),
        scores_(trained) {
    if (const auto& token = trained.config().data.begin_token) begin_ = static_cast<int32_t>(*token);
  }

  Json complete(const json& body) {
    const Request request = read(body);
    Json choices = Json::array();
    int64_t prompt_tokens = 0, new_tokens = 0;
    for (size_t i = 0; i < request.prompts.size(); ++i) {
      Json choice = answer(request, request.prompts[i], new_tokens);
      choice["index"] = i;
      choices.push_back(std::move(choice));
      prompt_tokens += std::ssize(request.prompts[i]);
    }
    ++answered_;
    return {{"id", fmt::format("cmpl-{}", answered_)},
            {"object", "text_completion"},
            {"created", 0},
            {"model", name_},
            {"choices", choices},
            {"usage",
             {{"prompt_tokens", prompt_tokens},
              {"completion_tokens", new_tokens},
              {"total_tokens", prompt_tokens + new_tokens}}}};
  }

  Json models() const {
    return {{"object", "list"},
            {"data", Json::array({{{"id", name_}, {"object", "model"}, {"max_model_len", context_}}})}};
  }

  Json tokenize(const json& body) const {
    require_object(body);
    const json* const prompt = given(body, "prompt");
    if (!prompt || !prompt->is_string()) refuse("prompt must be a text");
    const auto tokens = tokenizer_.encode_with_special(prompt->get_ref<const std::string&>());
    return {{"tokens", tokens}, {"count", tokens.size()}, {"max_model_len", context_}};
  }

  Json detokenize(const json& body) const {
    require_object(body);
    const json* const tokens = given(body, "tokens");
    if (!tokens || !tokens->is_array()) refuse("tokens must be a list of token ids");
    return {{"prompt", valid_text(tokenizer_.decode(ids(*tokens, "tokens")))}};
  }

 private:
  static void require_object(const json& body) {
    if (!body.is_object()) refuse("the request must be a JSON object");
  }

  std::vector<int32_t> ids(const json& list, const char* what) const {
    std::vector<int32_t> out;
    for (const json& id : list) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= tokenizer_.vocab_size())
        refuse("{}: token ids are whole numbers from 0 to {}, got {}", what, tokenizer_.vocab_size() - 1,
               printable(id.dump(-1, ' ', true, json::error_handler_t::replace), 40));
      out.push_back(id.get<int32_t>());
    }
    return out;
  }

  Request read(const json& body) const {
    require_object(body);
    Request r;
    if (flag(body, "stream")) refuse("stream is not supported");
    for (const char* key : {"n", "best_of"}) whole(body, key, 1, 1, 1);
    for (const char* key : {"presence_penalty", "frequency_penalty"}) number(body, key, 0, 0, 0);
    for (const char* key : {"suffix", "logit_bias"})
      if (given(body, key)) refuse("{} is not supported", key);
    r.max_tokens = whole(body, "max_tokens", 16, 0, limits_.max_new_tokens);
    r.echo = flag(body, "echo");
    if (const json* const value = given(body, "logprobs");
        value && !(value->is_boolean() && !value->get<bool>())) {
      r.logprobs = true;
      r.alternatives = value->is_boolean() ? 1 : whole(body, "logprobs", 0, 0, kMostAlternatives);
    }
    r.sampling.temperature = number(body, "temperature", 1, 0, 100);
    r.sampling.top_p = number(body, "top_p", 1, 1e-9, 1);
    r.sampling.seed = static_cast<uint64_t>(whole(body, "seed", answered_, INT64_MIN, INT64_MAX));
    read_stop(body, r);
    read_prompts(body, r);
    return r;
  }

  static void read_stop(const json& body, Request& r) {
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

  void read_prompts(const json& body, Request& r) const {
    const json* const prompt = given(body, "prompt");
    if (!prompt) refuse("prompt is missing");
    const auto add = [&](const json& one) {
      if (one.is_string()) {
        r.prompts.push_back(tokenizer_.encode_with_special(one.get_ref<const std::string&>()));
      } else if (one.is_array()) {
        r.prompts.push_back(ids(one, "prompt"));
      } else {
        refuse("prompt must be a text, a list of texts, a list of token ids, or a list of such lists");
      }
    };
    const bool many = prompt->is_array() && !prompt->empty() && !(*prompt)[0].is_number();
    if (many && std::ssize(*prompt) > limits_.max_prompts)
      refuse("prompt: at most {} in a request", limits_.max_prompts);
    if (!many) add(*prompt);
    for (size_t i = 0; many && i < prompt->size(); ++i) add((*prompt)[i]);
    for (std::vector<int32_t>& tokens : r.prompts) {
      if (tokens.empty() && !begin_) tokens.push_back(tokenizer_.end_of_document());
      const int64_t length = std::ssize(tokens) + (begin_ ? 1 : 0);
      if (length + r.max_tokens > context_)
        refuse("the prompt has {} tokens and max_tokens is {}, but the model's context holds {}", length,
               r.max_tokens, context_);
    }
  }

  std::string piece(int32_t token) const {
    return token < tokenizer_.vocab_size() ? valid_text(tokenizer_.decode({token})) : std::string();
  }

  /// What is reported of each token, in the form of the API.
  struct Report {
    Json tokens = Json::array(), values = Json::array(), alternatives = Json::array(),
         offsets = Json::array();
    int64_t offset = 0;  // characters so far
  };

  void add(Report& report, int32_t token, const TokenScore* score) const {
    const std::string text = piece(token);
    report.tokens.push_back(text);
    report.offsets.push_back(report.offset);
    report.offset += std::count_if(text.begin(), text.end(),
                                   [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
    report.values.push_back(score ? Json(score->log_probability) : Json());
    if (!score) return report.alternatives.push_back(nullptr);
    // Tokens that are written alike, such as parts of characters, have one entry: that of the most probable.
    Json object = Json::object();
    for (const auto& [id, value] : score->alternatives)
      if (const std::string name = piece(id); !object.contains(name)) object[name] = value;
    report.alternatives.push_back(std::move(object));
  }

  Json answer(const Request& r, const std::vector<int32_t>& prompt, int64_t& new_tokens) {
    Report report;
    if (r.echo && r.logprobs) {
      std::vector<int32_t> tokens = prompt;
      if (begin_) tokens.insert(tokens.begin(), *begin_);
      const auto scores = scores_.score(tokens, r.alternatives);
      for (size_t i = 0; i < prompt.size(); ++i) {
        const size_t at = i + (begin_ ? 1 : 0);
        add(report, prompt[i], at > 0 ? &scores[at - 1] : nullptr);
      }
    }
    std::vector<int32_t> generated;
    std::string text;
    const char* finish = "length";
    if (r.max_tokens > 0)
      generator_.run(prompt, r.max_tokens, r.sampling, [&](int32_t token) {
        ++new_tokens;
        if (r.logprobs) {
          const std::span<const float> logits = generator_.logits();
          const TokenScore score = token_score(logits.data(), std::ssize(logits), token, r.alternatives);
          add(report, token, &score);
        }
        if (token == tokenizer_.end_of_document() || token >= tokenizer_.vocab_size()) {
          finish = "stop";
          return false;
        }
        generated.push_back(token);
        text = tokenizer_.decode(generated);
        size_t end = std::string::npos;
        for (const std::string& stop : r.stop) end = std::min(end, text.find(stop));
        if (end == std::string::npos) return true;
        text.resize(end);
        finish = "stop";
        return false;
      });
    Json choice = {{"text", valid_text((r.echo ? tokenizer_.decode(prompt) : "") + text)}, {"index", 0}};
    if (r.logprobs)
      choice["logprobs"] = {{"tokens", report.tokens},
                            {"token_logprobs", report.values},
                            {"top_logprobs", report.alternatives},
                            {"text_offset", report.offsets}};
    else
      choice["logprobs"] = nullptr;
    choice["finish_reason"] = finish;
    return choice;
  }

  const TrainedModel& trained_;
  const Tokenizer& tokenizer_;
  const std::string name_;
  const CompletionLimits limits_;
  const int64_t context_;
  std::optional<int32_t> begin_;
  Generator generator_;
  PromptScores scores_;
  int64_t answered_ = 0;
};

Completions::Completions(const TrainedModel& trained, std::string name, const CompletionLimits& limits)
    : impl_(std::make_unique<Impl>(trained, std::move(name), limits)) {}
Completions::~Completions() = default;
Json Completions::complete(const json& request) { return impl_->complete(request); }
Json Completions::models() const { return impl_->models(); }
Json Completions::tokenize(const json& request) const { return impl_->tokenize(request); }
Json Completions::detokenize(const json& request) const { return impl_->detokenize(request); }

}  // namespace sluice
