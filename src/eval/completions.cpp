#include "eval/completions.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <optional>

#include "config/derived.h"
#include "core/error.h"
#include "core/random.h"
#include "eval/batch_generate.h"
#include "eval/generate.h"
#include "eval/prompt_scores.h"
#include "eval/samples.h"

namespace sluice {
namespace {

using nlohmann::json;
using Json = nlohmann::ordered_json;

int64_t characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

/// Bytes at the end of a text that begin a character and do not complete it.
size_t unfinished(std::string_view text) {
  for (size_t n = 1; n <= std::min<size_t>(text.size(), 3); ++n) {
    const auto byte = static_cast<unsigned char>(text[text.size() - n]);
    if ((byte & 0xc0) == 0x80) continue;
    const size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length > n ? n : 0;
  }
  return 0;
}

/// Counts the characters of a text that comes in parts which may divide a character.
class CharacterCount {
 public:
  void add(const std::string& part) {
    open_ += part;
    const size_t whole = open_.size() - unfinished(open_);
    closed_ += characters(valid_text(open_.substr(0, whole)));
    open_.erase(0, whole);
  }
  /// With the character that has begun, if one has.
  int64_t value() const { return closed_ + (open_.empty() ? 0 : 1); }

 private:
  int64_t closed_ = 0;
  std::string open_;
};

/// What is reported of each token, in the form of the API.
struct Report {
  std::vector<int32_t> before;  // the tokens so far, and those in front of them that are not reported
  Json tokens = Json::array(), values = Json::array(), alternatives = Json::array(), offsets = Json::array();
  CharacterCount so_far;

  void add(const Tokenizer& tokenizer, int32_t token, const TokenScore* score) {
    const auto bytes = [&](int32_t id) {
      return id < tokenizer.vocab_size() ? tokenizer.decode_behind(before, {id}) : std::string();
    };
    const std::string text = bytes(token);
    tokens.push_back(valid_text(text));
    offsets.push_back(so_far.value());
    so_far.add(text);
    values.push_back(score ? Json(score->log_probability) : Json());
    // Tokens that are written alike, such as parts of characters, have one entry: that of the most probable.
    Json object = score ? Json::object() : Json();
    if (score)
      for (const auto& [id, value] : score->alternatives)
        if (const std::string name = valid_text(bytes(id)); !object.contains(name)) object[name] = value;
    alternatives.push_back(std::move(object));
    if (token < tokenizer.vocab_size()) before.push_back(token);
  }
};

/// One prompt of a request, and what becomes of it.
struct Choice {
  Choice(const CompletionRequest& r, size_t index)
      : request(r), prompt(r.prompts[index]), random(random_of(r, index)) {
    if (!scored()) report.before = prompt;
  }

  const CompletionRequest& request;
  const std::vector<int32_t>& prompt;
  RandomStream random;
  Report report;
  std::vector<int32_t> generated;
  std::string text;
  int64_t drawn = 0;  // tokens, the end included
  const char* finish = "length";

  bool scored() const { return request.echo && request.logprobs; }

  /// Equal prompts of one request are continued differently.
  static RandomStream random_of(const CompletionRequest& request, size_t index) {
    return RandomStream(request.sampling.seed,
                        index == 0 ? "generate" : fmt::format("generate/prompt {}", index));
  }

  int32_t draw(const Tokenizer& tokenizer, std::span<const float> logits) {
    const int32_t token = sample(logits, request.sampling, random.uniform(static_cast<uint64_t>(drawn++)));
    if (request.logprobs) {
      const TokenScore score = token_score(logits.data(), std::ssize(logits), token, request.alternatives);
      report.add(tokenizer, token, &score);
    }
    return token;
  }

  /// Whether the text goes on behind this token.
  bool take(const Tokenizer& tokenizer, int32_t token) {
    if (tokenizer.ends_text(token)) {
      finish = "stop";
      return false;
    }
    generated.push_back(token);
    text = tokenizer.decode_behind(prompt, generated);
    size_t end = std::string::npos;
    for (const std::string& stop : request.stop) end = std::min(end, text.find(stop));
    if (end == std::string::npos) return true;
    text.resize(end);
    finish = "stop";
    return false;
  }

  Json json_of(const Tokenizer& tokenizer, size_t index) const {
    Json out = {{"text", valid_text((request.echo ? tokenizer.decode(prompt) : "") + text)},
                {"index", index},
                {"logprobs", nullptr},
                {"finish_reason", finish}};
    if (request.logprobs)
      out["logprobs"] = {{"tokens", report.tokens},
                         {"token_logprobs", report.values},
                         {"top_logprobs", report.alternatives},
                         {"text_offset", report.offsets}};
    return out;
  }
};

}  // namespace

class Completions::Impl {
 public:
  Impl(const TrainedModel& trained, std::string name, const CompletionLimits& limits, int64_t batch)
      : trained_(trained),
        tokenizer_(trained.tokenizer()),
        name_(std::move(name)),
        served_{tokenizer_, context_of(trained.config(), limits), {}, limits},
        batch_(batch),
        scores_(trained, served_.context) {
    if (const auto& token = trained.config().data.begin_token) served_.begin = static_cast<int32_t>(*token);
  }

  std::vector<CompletionAnswer> complete_all(std::span<const json> bodies) {
    std::vector<CompletionAnswer> answers(bodies.size());
    std::vector<CompletionRequest> requests(bodies.size());
    std::vector<Choice> choices;
    std::vector<size_t> first(bodies.size());
    std::vector<int64_t> numbers(bodies.size());
    for (size_t i = 0; i < bodies.size(); ++i) try {
        requests[i] = read_completion_request(bodies[i], served_, answered_);
        numbers[i] = ++answered_;
      } catch (...) {
        answers[i].error = std::current_exception();
      }
    for (size_t i = 0; i < bodies.size(); ++i) {
      first[i] = choices.size();
      for (size_t k = 0; k < requests[i].prompts.size(); ++k) choices.emplace_back(requests[i], k);
    }
    score(choices);
    generate(choices);
    for (size_t i = 0; i < bodies.size(); ++i)
      if (!answers[i].error)
        answers[i].body =
            body_of(std::span(choices).subspan(first[i], requests[i].prompts.size()), numbers[i]);
    return answers;
  }

  Json models() const {
    return {{"object", "list"},
            {"data", Json::array({{{"id", name_},
                                   {"object", "model"},
                                   {"created", 0},
                                   {"owned_by", "sluice"},
                                   {"max_model_len", served_.context}}})}};
  }

  Json tokenizer_info() const {
    Json begin;
    if (served_.begin && *served_.begin < tokenizer_.vocab_size())
      begin = valid_text(tokenizer_.decode({*served_.begin}));
    const std::string end = end_of_document_text(tokenizer_);
    return {{"eos_token", end},
            {"bos_token", begin},
            {"pad_token", end},
            {"chat_template", nullptr},
            {"vocab_size", tokenizer_.vocab_size()}};
  }

  Json tokenize(const json& body) const {
    const auto tokens = read_tokenize_request(body, tokenizer_);
    return {{"tokens", tokens}, {"count", tokens.size()}, {"max_model_len", served_.context}};
  }

  Json detokenize(const json& body) const {
    return {{"prompt", valid_text(tokenizer_.decode(read_detokenize_request(body, tokenizer_)))}};
  }

 private:
  static int64_t context_of(const Config& config, const CompletionLimits& limits) {
    const int64_t positions = max_positions(config);
    if (limits.context > positions)
      fail(
          ExitCode::usage,
          "a context of {} tokens is longer than the model's {} positions (model.max_position_embeddings, or "
          "data.seq_len)",
          limits.context, positions);
    return limits.context > 0 ? limits.context : positions;
  }

  std::vector<int32_t> with_begin(const std::vector<int32_t>& prompt) const {
    std::vector<int32_t> tokens = prompt;
    if (served_.begin) tokens.insert(tokens.begin(), *served_.begin);
    return tokens;
  }

  /// Log-probabilities of prompts, and from the same passes the first new token of those that want one alone.
  void score(std::vector<Choice>& choices) {
    std::vector<ScoredPrompt> prompts;
    std::vector<Choice*> scored;
    for (Choice& choice : choices)
      if (choice.scored()) {
        prompts.push_back(
            {with_begin(choice.prompt), choice.request.alternatives, choice.request.max_tokens == 1});
        scored.push_back(&choice);
      }
    const std::vector<PromptScore> scores = scores_.score(prompts);
    for (size_t i = 0; i < scored.size(); ++i) {
      Choice& choice = *scored[i];
      const size_t skipped = served_.begin ? 1 : 0;
      for (size_t k = 0; k < choice.prompt.size(); ++k) {
        const size_t at = k + skipped;
        choice.report.add(tokenizer_, choice.prompt[k], at > 0 ? &scores[i].tokens[at - 1] : nullptr);
      }
      if (prompts[i].next) choice.take(tokenizer_, choice.draw(tokenizer_, scores[i].next));
    }
  }

  void generate(std::vector<Choice>& choices) {
    std::vector<Continuation> prompts;
    std::vector<Choice*> going;
    for (Choice& choice : choices) {
      const int64_t wanted = choice.request.max_tokens;
      if (wanted == 0 || choice.drawn > 0) continue;
      prompts.push_back({with_begin(choice.prompt), wanted});
      going.push_back(&choice);
    }
    if (prompts.empty()) return;
    if (!model_)
      model_ = std::make_unique<CachedModel>(
          trained_, CachedModel::Sizes{.context = served_.context, .sequences = batch_});
    const auto of = [&](int64_t i) -> Choice& { return *going[static_cast<size_t>(i)]; };
    continue_prompts(
        *model_, prompts,
        [&](int64_t i, std::span<const float> logits) { return of(i).draw(tokenizer_, logits); },
        [&](int64_t i, int32_t token) { return of(i).take(tokenizer_, token); },
        [](int64_t) { return true; });
  }

  Json body_of(std::span<const Choice> choices, int64_t number) const {
    Json all = Json::array();
    int64_t prompt_tokens = 0, new_tokens = 0;
    for (const Choice& choice : choices) {
      all.push_back(choice.json_of(tokenizer_, all.size()));
      prompt_tokens += std::ssize(choice.prompt);
      new_tokens += choice.drawn;
    }
    return {{"id", fmt::format("cmpl-{}", number)},
            {"object", "text_completion"},
            {"created", 0},
            {"model", name_},
            {"choices", all},
            {"usage",
             {{"prompt_tokens", prompt_tokens},
              {"completion_tokens", new_tokens},
              {"total_tokens", prompt_tokens + new_tokens}}}};
  }

  const TrainedModel& trained_;
  const Tokenizer& tokenizer_;
  const std::string name_;
  ServedModel served_;
  const int64_t batch_;
  PromptScores scores_;
  std::unique_ptr<CachedModel> model_;
  int64_t answered_ = 0;
};

Completions::Completions(const TrainedModel& trained, std::string name, const CompletionLimits& limits,
                         int64_t batch)
    : impl_(std::make_unique<Impl>(trained, std::move(name), limits, batch)) {}
Completions::~Completions() = default;
std::vector<CompletionAnswer> Completions::complete_all(std::span<const json> requests) {
  return impl_->complete_all(requests);
}
Json Completions::complete(const json& request) {
  CompletionAnswer answer = std::move(impl_->complete_all(std::span(&request, 1))[0]);
  if (answer.error) std::rethrow_exception(answer.error);
  return std::move(answer.body);
}
Json Completions::models() const { return impl_->models(); }
Json Completions::tokenizer_info() const { return impl_->tokenizer_info(); }
Json Completions::tokenize(const json& request) const { return impl_->tokenize(request); }
Json Completions::detokenize(const json& request) const { return impl_->detokenize(request); }

}  // namespace sluice
