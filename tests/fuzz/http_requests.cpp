// Bodies of requests to sluice serve, as POST /v1/completions, /tokenize and /detokenize read them: what is
// accepted stays within the limits.
#include <algorithm>

#include "core/strict_json.h"
#include "eval/completion_request.h"
#include "support/fuzz.h"

using namespace sluice;

namespace {

constexpr int64_t kContext = 64;

void expect_known(const std::vector<int32_t>& tokens, const Tokenizer& tokenizer) {
  const bool known = std::all_of(tokens.begin(), tokens.end(),
                                 [&](int32_t id) { return id >= 0 && id < tokenizer.vocab_size(); });
  fuzz::expect(known, "a token is outside the vocabulary");
}

void read(const nlohmann::json& body, const ServedModel& served) {
  const CompletionRequest r = read_completion_request(body, served, 1);
  const CompletionLimits& limits = served.limits;
  fuzz::expect(!r.prompts.empty() && std::ssize(r.prompts) <= limits.max_prompts, "prompts");
  fuzz::expect(r.max_tokens >= 0 && r.max_tokens <= limits.max_new_tokens, "max_tokens");
  fuzz::expect(r.alternatives >= 0 && r.alternatives <= 10, "logprobs");
  fuzz::expect(r.sampling.temperature >= 0 && r.sampling.top_p > 0 && r.sampling.top_p <= 1, "sampling");
  fuzz::expect(r.stop.size() <= 4, "stop");
  for (const std::string& text : r.stop) fuzz::expect(!text.empty() && text.size() <= 1000, "a stop text");
  for (const std::vector<int32_t>& prompt : r.prompts) {
    expect_known(prompt, served.tokenizer);
    const int64_t length = std::ssize(prompt) + (served.begin ? 1 : 0);
    fuzz::expect(length >= 1 && length + r.max_tokens <= kContext, "a prompt is longer than the context");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto tokenizer = make_tokenizer({});
  nlohmann::json body;
  bool parsed = false;
  fuzz::attempt([&] {
    body = parse_strict_json(fuzz::text_of(data, size), "the request");
    parsed = true;
  });
  if (!parsed) return 0;
  for (const std::optional<int32_t> begin : {std::optional<int32_t>(), std::optional<int32_t>(256)})
    fuzz::attempt([&] {
      read(body, {*tokenizer, kContext, begin, {.max_prompts = 5, .max_new_tokens = 20}});
    });
  fuzz::attempt([&] { expect_known(read_tokenize_request(body, *tokenizer), *tokenizer); });
  fuzz::attempt([&] {
    const std::vector<int32_t> tokens = read_detokenize_request(body, *tokenizer);
    expect_known(tokens, *tokenizer);
    tokenizer->decode(tokens);
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::mutated_json(text, most, random))
