// Answers of the completions API against the model's own log-probabilities and generation.
#include "eval/completions.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "data/small_model.h"
#include "eval/forward_memory.h"
#include "eval/generate.h"
#include "eval/samples.h"
#include "eval/scored_sequences.h"
#include "eval/tiny_checkpoint.h"
#include "support/model.h"

namespace sluice {

using nlohmann::json;

TEST_CASE("completions give the log-probabilities of prompts and what is generated", "[completions]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 6)), 64);
  Completions completions(trained, "tiny");

  // As lm-eval asks: ids, echo, one more token.
  const json scored = completions.complete({{"prompt", {{97, 98, 99, 100}, {120, 121}}},
                                            {"max_tokens", 1},
                                            {"temperature", 0},
                                            {"logprobs", 1},
                                            {"echo", true},
                                            {"seed", 1234}});
  REQUIRE(scored["choices"].size() == 2);
  CHECK(scored["choices"][1]["index"] == 1);
  const json& logprobs = scored["choices"][0]["logprobs"];
  REQUIRE(logprobs["token_logprobs"].size() == 5);
  CHECK(logprobs["token_logprobs"][0].is_null());
  CHECK(logprobs["tokens"][1] == "b");
  CHECK(logprobs["text_offset"][3] == 3);
  ForwardMemory memory(trained, 64);
  const ScoredSequence sequence = scored_sequence(trained.tokenizer(), {}, "a", "bcd", 32);
  const double expected = (*log_likelihoods(memory.ctx(), trained.model(), memory.buffers(), {sequence},
                                            [] { return false; }))[0];
  double sum = 0;
  for (size_t i = 1; i < 4; ++i) {
    const double value = logprobs["token_logprobs"][i];
    sum += value;
    REQUIRE(logprobs["top_logprobs"][i].size() == 1);
    CHECK(logprobs["top_logprobs"][i].begin()->get<double>() >= value - 1e-6);
  }
  CHECK(sum == Approx(expected).margin(1e-4));

  // A character of several tokens counts once; a byte that is none of any character is shown as one.
  const json parts = completions.complete({{"prompt", {{97, 0xe2, 0x82, 0xac, 98, 0xff, 0xc3, 99, 0xc3}}},
                                           {"max_tokens", 0},
                                           {"logprobs", 1},
                                           {"echo", true}})["choices"][0];
  CHECK(parts["text"] ==
        "a\xe2\x82\xac"
        "b\xef\xbf\xbd\xef\xbf\xbd"
        "c\xef\xbf\xbd");
  CHECK(parts["logprobs"]["text_offset"] == json({0, 1, 2, 2, 2, 3, 4, 5, 6}));

  // Greedy text is that of generate; its log-probabilities are the largest.
  std::vector<int32_t> tokens;
  Generator(trained).run({97, 98}, 8, {.temperature = 0}, [&](int32_t token) {
    tokens.push_back(token);
    return token != 256;
  });
  const json greedy = completions.complete(
      {{"prompt", "ab"}, {"max_tokens", 8}, {"temperature", 0}, {"logprobs", 2}, {"model", "x"}});
  std::string text = trained.tokenizer().decode(tokens);
  CHECK(greedy["choices"][0]["text"] == text);
  CHECK(greedy["usage"]["completion_tokens"] == tokens.size());
  const json& made = greedy["choices"][0]["logprobs"];
  for (size_t i = 0; i < made["token_logprobs"].size(); ++i)
    for (const auto& [name, value] : made["top_logprobs"][i].items())
      CHECK(value.get<double>() <= made["token_logprobs"][i].get<double>() + 1e-9);

  // Stop texts end, and are not part of the answer.
  if (text.size() >= 4) {
    const json stopped = completions.complete(
        {{"prompt", "ab"}, {"max_tokens", 8}, {"temperature", 0}, {"stop", text.substr(2, 1)}});
    CHECK(stopped["choices"][0]["text"] == text.substr(0, text.find(text.substr(2, 1))));
    CHECK(stopped["choices"][0]["finish_reason"] == "stop");
  }
  const auto sampled = [&](int seed) {
    return completions.complete({{"prompt", "ab"}, {"max_tokens", 20}, {"seed", seed}})["choices"][0]["text"];
  };
  CHECK(sampled(5) == sampled(5));
  CHECK(completions.complete({{"prompt", "ab"}, {"max_tokens", 0}, {"echo", true}})["choices"][0]["text"] ==
        "ab");
  CHECK(completions.models()["data"][0]["id"] == "tiny");
  CHECK(completions.tokenize({{"prompt", "ab"}})["tokens"] == json({97, 98}));
  CHECK(completions.detokenize({{"tokens", {97, 98}}})["prompt"] == "ab");
}

TEST_CASE("requests that are computed together are answered as one by one", "[completions]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 6)), 64);
  Completions completions(trained, "tiny", {}, 3);
  // Unseeded requests of one text are answered from streams of their own, one that is refused among them.
  Completions drawn(trained, "tiny");
  const json valid = {{"prompt", "the"}, {"max_tokens", 24}},
             refused = {{"prompt", "ab"}, {"max_tokens", -1}};
  const std::vector<json> batch = {refused, valid};
  const json first = drawn.complete_all(batch)[1].body, second = drawn.complete(valid);
  CHECK(first["id"] != second["id"]);
  CHECK(first["choices"][0]["text"] != second["choices"][0]["text"]);

  // More prompts than places, of different lengths, scored and not, and one that cannot be answered.
  const std::vector<json> requests = {
      {{"prompt", {"abc", "a", "the whole", "abcdefgh"}}, {"max_tokens", 9}, {"temperature", 0}},
      {{"prompt", "ab"}, {"max_tokens", -1}},
      {{"prompt", {{97, 98, 99, 100}, {120}, {121, 122}}},
       {"max_tokens", 1},
       {"temperature", 0},
       {"logprobs", 2},
       {"echo", true}},
      {{"prompt", "the"}, {"max_tokens", 5}, {"seed", 3}, {"echo", true}, {"logprobs", 1}},
      {{"prompt", {"xyz", "abcdefghijklmnopqrst"}}, {"max_tokens", 0}, {"logprobs", 1}, {"echo", true}}};
  const std::vector<CompletionAnswer> answers = completions.complete_all(requests);
  REQUIRE(answers.size() == requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    INFO(i);
    CHECK(static_cast<bool>(answers[i].error) == (i == 1));
    if (answers[i].error) continue;
    const json& choices = answers[i].body["choices"];
    const json& prompts = requests[i]["prompt"];
    REQUIRE(choices.size() == (prompts.is_array() ? prompts.size() : 1));
    for (size_t k = 0; k < choices.size(); ++k) {
      json alone = requests[i];
      if (prompts.is_array()) alone["prompt"] = prompts[k];
      Completions other(trained, "tiny", {}, 1);
      const json expected = other.complete(alone)["choices"][0];
      CHECK(choices[k]["index"] == k);
      CHECK(choices[k]["text"] == expected["text"]);
      CHECK(choices[k]["finish_reason"] == expected["finish_reason"]);
      CHECK(choices[k]["logprobs"].is_null() == expected["logprobs"].is_null());
      if (expected["logprobs"].is_null()) continue;
      const json &values = choices[k]["logprobs"]["token_logprobs"],
                 &wanted = expected["logprobs"]["token_logprobs"];
      REQUIRE(values.size() == wanted.size());
      for (size_t n = 1; n < values.size(); ++n)
        CHECK(values[n].get<double>() == Approx(wanted[n].get<double>()).margin(1e-5));
    }
  }
  // A prompt of one token and one new one: nothing is scored but what is drawn.
  CHECK(answers[2].body["choices"][1]["logprobs"]["token_logprobs"].size() == 2);
  CHECK(answers[2].body["usage"]["total_tokens"] == 10);

  const json info = completions.tokenizer_info();
  CHECK(info["eos_token"] == "<|endoftext|>");
  CHECK(completions.tokenize({{"prompt", info["eos_token"]}})["tokens"] == json({256}));
  CHECK(info["bos_token"].is_null());
  CHECK_THROWS_WITH(Completions(trained, "tiny", {.context = 33}), Catch::Contains("a context of 33 tokens"));
  Completions shorter(trained, "tiny", {.context = 10});
  CHECK_THROWS_WITH(shorter.complete({{"prompt", "abcdef"}, {"max_tokens", 5}}),
                    Catch::Contains("the model's context holds 10"));
}

TEST_CASE("equal prompts of one request are continued by different random numbers", "[completions]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 6)), 64);
  Completions completions(trained, "tiny");
  const auto texts = [&](const json& prompts) {
    const json answer = completions.complete({{"prompt", prompts}, {"max_tokens", 20}, {"seed", 3}});
    std::vector<std::string> all;
    for (const json& choice : answer["choices"]) all.push_back(choice["text"]);
    return all;
  };
  const std::vector<std::string> three = texts({"ab", "ab", "ab"});
  CHECK(three[0] == texts("ab")[0]);
  CHECK((three[0] != three[1] && three[1] != three[2] && three[0] != three[2]));
  CHECK(texts({"ab", "ab", "ab"}) == three);
}

TEST_CASE("the space between a prompt and its continuation is part of the text", "[completions]") {
  test::TinyTraining t;
  t.config.model.vocab_size = 400;
  ModelFiles files = checkpoint_files(find_checkpoint(test::trained_checkpoint(t, 3)));
  files.tokenizer = make_tokenizer(tokenizer_config(test::train_model(t.folder, "words")));
  const TrainedModel trained(std::move(files), 64);
  const Tokenizer& tokenizer = trained.tokenizer();
  Completions completions(trained, "tiny");
  // A prompt of one token that the model continues with a new word.
  json found;
  for (int32_t id = 259; id < 400 && found.is_null(); ++id) {
    std::vector<int32_t> tokens = {id};
    Generator(trained).run(tokens, 4, {.temperature = 0}, [&](int32_t token) {
      if (token == tokenizer.end_of_document() || token >= tokenizer.vocab_size()) return false;
      tokens.push_back(token);
      return true;
    });
    const std::string start = tokenizer.decode({id}), whole = tokenizer.decode(tokens);
    if (start.empty() || whole.size() < start.size() + 3 || whole[start.size()] != ' ') continue;
    found = {{"prompt", {id}}, {"start", start}, {"text", whole.substr(start.size())}};
  }
  REQUIRE(!found.is_null());
  json request = {{"prompt", found["prompt"]}, {"max_tokens", 4}, {"temperature", 0}, {"logprobs", 2}};
  const json plain = completions.complete(request)["choices"][0];
  CHECK(plain["text"] == found["text"]);
  std::string joined;
  for (const json& token : plain["logprobs"]["tokens"])
    if (token != "</s>") joined += token.get<std::string>();
  CHECK(joined == found["text"]);
  CHECK(plain["logprobs"]["tokens"][0].get<std::string>()[0] == ' ');
  request["echo"] = true;
  const std::string start = found["start"], text = found["text"];
  const json echoed = completions.complete(request)["choices"][0];
  CHECK(echoed["text"] == start + text);
  CHECK(echoed["logprobs"]["tokens"][0] == start);
  CHECK(echoed["logprobs"]["text_offset"][1] == start.size());
  request["stop"] = text.substr(0, 2);  // a space, and what follows it
  const json stopped = completions.complete(request)["choices"][0];
  CHECK(stopped["text"] == start);
  CHECK(stopped["finish_reason"] == "stop");

  // Samples of a training.
  ForwardMemory memory(trained, 64);
  const auto samples = *continue_prompts(memory.ctx(), trained.model(), memory.buffers(), tokenizer,
                                         trained.config().data, 400, {"the word"}, 6, [] { return false; });
  std::vector<int32_t> tokens = tokenizer.encode("the word");
  Generator(trained).run(std::vector<int32_t>(tokens), 6, {.temperature = 0}, [&](int32_t token) {
    if (token == tokenizer.end_of_document() || token >= tokenizer.vocab_size()) return false;
    tokens.push_back(token);
    return true;
  });
  CHECK("the word" + samples[0].text == tokenizer.decode(tokens));
}

TEST_CASE("requests that cannot be answered are refused by key", "[completions]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(t, 1)), 64);
  Completions completions(trained, "tiny");
  const auto refusal = [&](const json& request) -> std::string {
    try {
      completions.complete(request);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::usage);
      return error.what();
    }
    return "answered";
  };
  CHECK_THAT(refusal(json::array()), Catch::Contains("must be a JSON object"));
  CHECK_THAT(refusal(json::object()), Catch::Contains("prompt is missing"));
  CHECK_THAT(refusal({{"prompt", 3}}), Catch::Contains("prompt must be a text"));
  CHECK_THAT(refusal({{"prompt", {97, 257}}}), Catch::Contains("from 0 to 256, got 257"));
  CHECK_THAT(refusal({{"prompt", {97, -1}}}), Catch::Contains("got -1"));
  CHECK_THAT(refusal({{"prompt", {97, "a"}}}), Catch::Contains("token ids"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"max_tokens", 1e3}}),
             Catch::Contains("max_tokens must be a whole number"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"max_tokens", 4097}}), Catch::Contains("from 0 to 4096"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"max_tokens", 32}}), Catch::Contains("the model's context holds 32"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"temperature", -1}}),
             Catch::Contains("temperature must be a number"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"n", 2}}), Catch::Contains("n must be a whole number from 1 to 1"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"stream", true}}), Catch::Contains("stream is not supported"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"stop", {1}}}), Catch::Contains("stop must be a text"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"logprobs", 11}}), Catch::Contains("logprobs"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"min_p", 0.1}}),
             Catch::Contains("min_p must be a number from 0 to 0"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"repetition_penalty", 1.2}}), Catch::Contains("repetition_penalty"));
  CHECK_THAT(refusal({{"prompt", "a"}, {"top_k", 0.5}}), Catch::Contains("top_k must be a whole number"));
  CHECK_THAT(refusal({{"prompt", std::vector<std::string>(257, "a")}}),
             Catch::Contains("at most 256 in a request"));
  for (const char* field : {"ignore_eos", "min_tokens", "stream_options", "max_token", "guided_json"})
    CHECK_THAT(refusal({{"prompt", "a"}, {field, 1}}),
               Catch::StartsWith(std::string(field) + " is not supported") && Catch::Contains("max_tokens"));
  // What clients send that changes nothing: null stands for a field that is absent.
  CHECK(
      refusal(
          {{"prompt", "a"}, {"max_tokens", 1}, {"model", "other"}, {"user", "me"}, {"n", 1}, {"foo", {}}}) ==
      "answered");
  CHECK_THROWS_WITH(completions.tokenize({{"prompt", "a"}, {"add_special_token", false}}),
                    Catch::Contains("add_special_token is not supported"));
  CHECK_THROWS_WITH(completions.detokenize({{"tokens", {97}}, {"prompt", "a"}}),
                    Catch::Contains("prompt is not supported"));
}

}  // namespace sluice
