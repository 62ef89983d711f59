#include "eval/ruler.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <map>
#include <set>

#include "core/io.h"
#include "eval/tiny_checkpoint.h"

namespace sluice {
namespace {

constexpr int64_t kLength = 3000;  // bytes

std::vector<RulerQuestion> questions() {
  std::vector<RulerQuestion> all;
  for (int i = 0; i < 30; ++i)
    all.push_back(
        {fmt::format("Where does person {} live?", i),
         {fmt::format("town {}", i), fmt::format("city {}", i)},
         {fmt::format("Person {} lives in town {}, which some call city {}. There it rains.", i, i, i)}});
  all[1].documents.push_back("Person 1 is the mayor of town 1.");
  return all;
}

RulerTexts texts() {
  RulerTexts t;
  t.words = built_in_words();
  std::string text;
  for (int i = 0; i < 60; ++i)
    text += fmt::format("Sentence {} of this text says \"nothing!\" (at all.) Is that so? Yes, it is\n\n{}. ",
                        i, i);
  t.haystack = split_haystack(text);
  t.questions_1 = t.questions_2 = questions();
  return t;
}

std::unique_ptr<Tokenizer> bytes() { return make_tokenizer(TokenizerConfig{}); }

RulerTask task(size_t i) { return static_cast<RulerTask>(i); }

nlohmann::ordered_json to_json(const RulerPrompt& p) {
  return {{"input", p.input}, {"answer_prefix", p.answer_prefix}, {"outputs", p.outputs},
          {"depth", p.depth}, {"other_values", p.other_values},   {"size", p.size}};
}

int64_t count_of(const std::string& text, const std::string& part) {
  int64_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("every task has the prompts that it had", "[ruler]") {
  const std::string path = SLUICE_SOURCE_DIR "/tests/golden/ruler.json";
  const RulerTexts t = texts();
  const auto tokenizer = bytes();
  nlohmann::ordered_json prompts;
  for (size_t i = 0; i < kRulerTasks.size(); ++i)
    prompts[std::string(kRulerTasks[i])] = to_json(RulerPrompts(task(i), t, *tokenizer, kLength, 42).make(3));
  if (std::getenv("SLUICE_WRITE_GOLDENS")) io::write_file_atomic(path, prompts.dump(1) + "\n");
  CHECK(nlohmann::ordered_json::parse(io::read_file(path)) == prompts);
}

TEST_CASE("prompts are as long as the length allows, and hold what is asked for", "[ruler]") {
  const RulerTexts t = texts();
  const auto tokenizer = bytes();
  for (size_t i = 0; i < kRulerTasks.size(); ++i) {
    INFO(kRulerTasks[i]);
    const RulerPrompts prompts(task(i), t, *tokenizer, kLength, 42),
        longer(task(i), t, *tokenizer, kLength + 400, 42), other_seed(task(i), t, *tokenizer, kLength, 43);
    std::set<std::string> inputs;
    for (int64_t sample = 0; sample < 12; ++sample) {
      const RulerPrompt p = prompts.make(sample);
      CHECK(p.tokens == std::ssize(p.text()));
      CHECK(p.tokens + tokens_to_generate(task(i)) <= kLength);
      const bool all_documents = task(i) >= RulerTask::qa_1 && p.size >= 30;
      if (!all_documents) CHECK(p.tokens + tokens_to_generate(task(i)) > kLength - 320);  // a part is shorter
      CHECK(to_json(prompts.make(sample)) == to_json(p));
      CHECK(other_seed.make(sample).input != p.input);
      if (!all_documents) CHECK(longer.make(sample).size > p.size);
      CHECK(p.longest == all_documents);
      for (const std::string& output : p.outputs) CHECK(p.input.find(output) != std::string::npos);
      inputs.insert(p.input);
    }
    CHECK(inputs.size() == 12);
  }
}

TEST_CASE("needles stand at their depth, and other values differ", "[ruler]") {
  const RulerTexts t = texts();
  const auto tokenizer = bytes();
  std::set<double> depths;
  for (const RulerTask one :
       {RulerTask::niah_single_1, RulerTask::niah_single_2, RulerTask::niah_single_3,
        RulerTask::niah_multikey_1, RulerTask::niah_multikey_2, RulerTask::niah_multikey_3}) {
    INFO(name(one));
    const RulerPrompts prompts(one, t, *tokenizer, 8000, 42);
    for (int64_t sample = 0; sample < 40; ++sample) {
      const RulerPrompt p = prompts.make(sample);
      REQUIRE(p.outputs.size() == 1);
      const size_t begin = p.input.find('\n'), end = p.input.rfind('\n'), at = p.input.find(p.outputs[0]);
      // Parts of a haystack are up to 150 bytes long, and the needle itself is one.
      CHECK(100.0 * static_cast<double>(at - begin) / static_cast<double>(end - begin) ==
            Approx(p.depth).margin(4));
      depths.insert(p.depth);
      CHECK(count_of(p.input, p.outputs[0]) == 1);
      const std::set<std::string> others(p.other_values.begin(), p.other_values.end());
      CHECK(others.size() == 9);
      CHECK(others.count(p.outputs[0]) == 0);
      const bool among_needles = one == RulerTask::niah_multikey_2 || one == RulerTask::niah_multikey_3;
      for (const std::string& other : others) {
        CHECK(other.size() == p.outputs[0].size());
        // Where other needles stand, theirs are the other values, so that it takes the key to tell them
        // apart.
        CHECK(count_of(p.input, other) == (among_needles ? 1 : 0));
      }
    }
  }
  CHECK(depths.size() > 30);  // of 40
  CHECK(*depths.begin() == 0);
  CHECK(*depths.rbegin() == 100);
  const RulerPrompt four = RulerPrompts(RulerTask::niah_multivalue, t, *tokenizer, kLength, 42).make(0);
  CHECK(four.outputs.size() == 4);
  CHECK(count_of(four.input, "One of the special magic numbers for") == 4);
  const RulerPrompt queries = RulerPrompts(RulerTask::niah_multiquery, t, *tokenizer, kLength, 42).make(0);
  CHECK(queries.outputs.size() == 4);
  CHECK(queries.answer_prefix.find(", and ") != std::string::npos);
  CHECK(queries.depth == -1);
}

TEST_CASE("chains, counts and documents give the stated answers", "[ruler]") {
  const RulerTexts t = texts();
  const auto tokenizer = bytes();
  for (int64_t sample = 0; sample < 8; ++sample) {
    // Follow the chain through the text behind the example.
    const RulerPrompt vt = RulerPrompts(RulerTask::vt, t, *tokenizer, kLength, 1).make(sample);
    std::map<std::string, std::string> value_of;
    std::set<std::string> assigned;
    const std::string text = vt.input.substr(vt.input.rfind("Memorize"));
    const std::string asked = text.substr(text.find("assigned the value ") + 19, 5);
    for (size_t at = text.find("VAR "); at != std::string::npos; at = text.find("\nVAR ", at + 1)) {
      const size_t start = text.find("VAR ", at) + 4;
      const std::string key = text.substr(start, 5), rest = text.substr(start + 8, 9);
      value_of[key] = rest.starts_with("VAR ") ? value_of[rest.substr(4, 5)] : rest.substr(0, 5);
      if (value_of[key] == asked) assigned.insert(key);
    }
    CHECK(assigned == std::set<std::string>(vt.outputs.begin(), vt.outputs.end()));
    CHECK(assigned.size() == 5);

    const auto most = [](const std::string& words, size_t skip, size_t count) {
      std::map<std::string, int> counts;
      for (const std::string& word : split_haystack(words).words)
        if (word.find_first_of("0123456789") == std::string::npos) ++counts[word];
      std::vector<std::pair<int, std::string>> order;
      for (const auto& [word, n] : counts) order.emplace_back(-n, word);
      std::sort(order.begin(), order.end());
      CHECK(order[skip + count - 1].first < order[skip + count].first);
      std::set<std::string> top;
      for (size_t i = skip; i < skip + count; ++i) top.insert(order[i].second);
      return top;
    };
    const auto context = [](const RulerPrompt& p, const std::string& before) {
      const size_t begin = p.input.rfind(before) + before.size();
      return p.input.substr(begin, p.input.rfind("\nQuestion:") - begin);
    };
    const RulerPrompt cwe = RulerPrompts(RulerTask::cwe, t, *tokenizer, kLength, 1).make(sample);
    CHECK(most(context(cwe, "most often.\n"), 0, 10) ==
          std::set<std::string>(cwe.outputs.begin(), cwe.outputs.end()));
    const RulerPrompt fwe = RulerPrompts(RulerTask::fwe, t, *tokenizer, kLength, 1).make(sample);
    const std::string coded = context(fwe, "coded words. ");
    CHECK(most(coded, 0, 1) == std::set<std::string>{"......"});
    CHECK(most(coded, 1, 3) == std::set<std::string>(fwe.outputs.begin(), fwe.outputs.end()));

    const RulerPrompt qa = RulerPrompts(RulerTask::qa_1, t, *tokenizer, kLength, 1).make(sample);
    CHECK(qa.outputs == t.questions_1[static_cast<size_t>(sample)].answers);
    for (const std::string& document : t.questions_1[static_cast<size_t>(sample)].documents)
      CHECK(count_of(qa.input, ":\n" + document) == 1);
    CHECK(count_of(qa.input, "Document ") == qa.size);
    CHECK((qa.depth == -1) == (sample == 1));  // which has two documents
  }
}

TEST_CASE("lists of up to 192 words count single words, longer ones pairs", "[ruler]") {
  RulerTexts t = texts();
  t.short_words = built_in_short_words();
  CHECK(std::set<std::string>(t.short_words.begin(), t.short_words.end()).size() == 192);
  const auto tokenizer = bytes();
  const auto pairs = [&](int64_t length) {
    const RulerPrompt p = RulerPrompts(RulerTask::cwe, t, *tokenizer, length, 1).make(3);
    for (const std::string& word : p.outputs) CHECK((word.find('-') == std::string::npos) == (p.size <= 192));
    CHECK(p.longest == (p.size == 192));  // the words do not suffice for more
    return count_of(p.input, "-");
  };
  CHECK(pairs(2048) == 0);
  CHECK(pairs(16384) == 0);
  CHECK(pairs(65536) > 1000);
  const std::string with = t.fingerprint();
  t.short_words.clear();
  CHECK(t.fingerprint() != with);
}

TEST_CASE("a length that sample 0 fits into, and another does not, is refused at the start", "[ruler]") {
  const RulerTexts t = texts();
  const auto tokenizer = bytes();
  int64_t length = 4096;
  const auto fits = [&] {
    try {
      RulerPrompts(RulerTask::cwe, t, *tokenizer, length, 1);
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  while (!fits()) length += 16;
  const RulerPrompts prompts(RulerTask::cwe, t, *tokenizer, length, 1);
  prompts.require_fit(1);
  test::expect_error(ExitCode::usage, {"RULER's cwe at a length of", "the shortest prompt has"},
                     [&] { prompts.require_fit(50); });
}

TEST_CASE("a score is the share of references found, of questions any of them", "[ruler]") {
  const std::vector<std::string> two = {"Alpha", "beta"};
  CHECK(ruler_score(RulerTask::vt, two, "it is ALPHA and Beta.") == 1);
  CHECK(ruler_score(RulerTask::vt, two, "beta") == 0.5);
  CHECK(ruler_score(RulerTask::vt, two, "alpine bet") == 0);
  CHECK(ruler_score(RulerTask::vt, two, "") == 0);
  CHECK(ruler_score(RulerTask::cwe, {"a", "b", "c", "d"}, "1. A 2. b") == 0.5);
  CHECK(ruler_score(RulerTask::qa_1, two, "the beta one") == 1);
  CHECK(ruler_score(RulerTask::qa_2, two, "gamma") == 0);
  CHECK(ruler_score(RulerTask::niah_single_1, {"1234567"}, "is 12345678") == 1);  // contained, as in RULER
  CHECK(ruler_score(RulerTask::qa_1, {"\u00c9COLE \u041c\u0418\u0420"}, "l'\u00e9cole \u043c\u0438\u0440") ==
        1);
  CHECK(ruler_score(RulerTask::qa_1, {"Alpha"}, "\xff alpha \xc3") == 1);  // bytes that are no characters
}

TEST_CASE("a length that a task does not fit into, and missing texts, are refused", "[ruler]") {
  RulerTexts t = texts();
  const auto tokenizer = bytes();
  test::expect_error(ExitCode::usage,
                     {"RULER's cwe at a length of 512 tokens: the shortest prompt has", "120 are"},
                     [&] { RulerPrompts(RulerTask::cwe, t, *tokenizer, 512, 1); });
  t.haystack = {};
  t.questions_2.clear();
  test::expect_error(ExitCode::usage, {"niah_multiquery needs --haystack TEXT"},
                     [&] { RulerPrompts(RulerTask::niah_multiquery, t, *tokenizer, kLength, 1); });
  test::expect_error(ExitCode::usage, {"qa_2 needs --qa-2 JSONL"},
                     [&] { RulerPrompts(RulerTask::qa_2, t, *tokenizer, kLength, 1); });
  CHECK(missing_for(RulerTask::qa_1, t).empty());
  CHECK(missing_for(RulerTask::vt, t).empty());
}

TEST_CASE("texts are read, and bad ones are named with their line", "[ruler]") {
  const test::TemporaryFolder folder;
  const Haystack h = split_haystack(" One two.  \"Three!\" four\n\n five? ");
  CHECK(h.words == std::vector<std::string>{"One", "two.", "\"Three!\"", "four", "five?"});
  CHECK(h.ends_sentence == std::vector<bool>{false, true, true, false, true});
  const std::vector<std::string> words = built_in_words();
  CHECK(std::set<std::string>(words.begin(), words.end()).size() == 8192);
  test::write_bytes(folder / "few", "a b c\n");
  test::expect_error(ExitCode::data, {"few: 3 different words"}, [&] { read_words(folder / "few"); });
  test::write_bytes(folder / "latin", "caf\nna\xefve\n");
  test::expect_error(ExitCode::data, {"latin:2: not UTF-8"}, [&] { read_words(folder / "latin"); });
  test::expect_error(ExitCode::data, {"few: 3 words are too few"}, [&] { read_haystack(folder / "few"); });
  test::write_bytes(folder / "q.jsonl",
                    "{\"question\": \"Who?\", \"answers\": [\"I\"], \"documents\": [\"It was I.\"]}\n\n"
                    "{\"question\": \"Why?\", \"answers\": []}\n");
  test::expect_error(ExitCode::data, {"q.jsonl:3: a question needs \"answers\""},
                     [&] { read_questions(folder / "q.jsonl"); });

  test::write_bytes(folder / "vt.jsonl",
                    "{\"index\": 0, \"input\": \"text?\", \"outputs\": [\"A\", \"B\"], \"length\": 9}\n"
                    "{\"input\": \"more\", \"outputs\": [\"C\"], \"answer_prefix\": \" is\"}\n");
  const std::vector<RulerPrompt> prompts = read_ruler_prompts(folder / "vt.jsonl");
  REQUIRE(prompts.size() == 2);
  CHECK(prompts[0].text() == "text?");
  CHECK(prompts[0].given);
  CHECK(prompts[0].outputs == std::vector<std::string>{"A", "B"});
  CHECK(prompts[1].text() == "more is");
  CHECK(task_of_file(folder / "vt.jsonl") == RulerTask::vt);
  CHECK(task_of_file("data/4096/qa_1/validation.jsonl") == RulerTask::qa_1);
  test::expect_error(ExitCode::usage, {"name the file, or its folder, after its task"},
                     [&] { task_of_file("data/validation.jsonl"); });
  test::write_bytes(folder / "bad.jsonl", "{\"input\": \"text?\"}\n");
  test::expect_error(ExitCode::data, {"bad.jsonl:1: a prompt of RULER needs"},
                     [&] { read_ruler_prompts(folder / "bad.jsonl"); });
}

TEST_CASE("a run that was stopped goes on to the same answers", "[ruler]") {
  test::TinyTraining training;
  training.config.model.initializer_range = 0.5;
  training.config.model.max_position_embeddings = 1400;
  const TrainedModel trained(find_checkpoint(test::trained_checkpoint(training, 0)), 64);
  const RulerTexts t = texts();
  std::vector<RulerCell> cells;
  for (const RulerTask one : {RulerTask::niah_single_1, RulerTask::fwe})
    for (const int64_t length : {1000, 1400}) {
      const auto prompts = std::make_shared<RulerPrompts>(one, t, trained.tokenizer(), length, 42);
      cells.push_back({one, length, 3, [prompts](int64_t i) { return prompts->make(i); }});
    }
  const nlohmann::ordered_json header = {{"schema", 1}, {"seed", 42}};
  const auto run = [&](const std::string& path, int64_t answers) {
    RulerResults results(path, header);
    CachedModel model(trained, {.context = 1400, .sequences = 2, .chunk = 256});
    int64_t done = 0;
    const bool complete = run_ruler(
        model, trained.tokenizer(), std::nullopt, cells, {}, results, [&](const RulerAnswer&) { ++done; },
        [&] { return done >= answers; });
    return std::pair(complete, done);
  };
  const test::TemporaryFolder folder;
  CHECK(run(folder / "whole.jsonl", 100) == std::pair(true, int64_t{12}));
  CHECK(run(folder / "parts.jsonl", 5) == std::pair(false, int64_t{5}));
  {
    io::OutputFile file(folder / "parts.jsonl", io::OutputFile::Mode::append);
    file.write("{\"task\": \"fwe\", \"leng");  // killed while it wrote
    file.close();
  }
  CHECK(run(folder / "parts.jsonl", 100) == std::pair(true, int64_t{7}));
  CHECK(run(folder / "parts.jsonl", 100) == std::pair(true, int64_t{0}));
  const auto sorted = [&](const std::string& path) {
    std::multiset<std::string> lines;
    const RulerResults results(path, header);
    for (const RulerAnswer& a : results.answers())
      lines.insert(fmt::format("{} {} {} {} {} {}", name(a.task), a.length, a.sample, a.depth, a.tokens,
                               a.prediction));
    return lines;
  };
  CHECK(sorted(folder / "parts.jsonl") == sorted(folder / "whole.jsonl"));
  CHECK(sorted(folder / "whole.jsonl").size() == 12);
  test::expect_error(ExitCode::usage, {"other prompts or of another model"}, [&] {
    RulerResults(folder / "whole.jsonl", {{"schema", 1}, {"seed", 43}});
  });
  test::write_bytes(folder / "bad.jsonl", header.dump() + "\n{\"task\": \"fwe\"}\n");
  test::expect_error(ExitCode::data, {"bad.jsonl:2: not an answer"},
                     [&] { RulerResults(folder / "bad.jsonl", header); });
}

TEST_CASE("a damaged file of RULER's answers is refused by line and key", "[ruler]") {
  const test::TemporaryFolder folder;
  const nlohmann::ordered_json header = {{"schema", 1}};
  const nlohmann::ordered_json good = {{"task", "vt"},      {"length", 64},    {"sample", 0},
                                       {"depth", -1},       {"score", 0.5},    {"tokens", 60},
                                       {"prediction", "x"}, {"outputs", {"x"}}};
  const auto read = [&](const nlohmann::ordered_json& line) {
    test::write_bytes(folder / "a.jsonl", header.dump() + "\n" + good.dump() + "\n" + line.dump() + "\n");
    return RulerResults(folder / "a.jsonl", header).answers().size();
  };
  CHECK(read(good) == 1);  // the same answer twice, of two calls at one time, counts once
  nlohmann::ordered_json other = good;
  other["sample"] = 1;
  CHECK(read(other) == 2);
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, nlohmann::ordered_json>>{{"length", 1e300},
                                                                   {"length", 64.5},
                                                                   {"sample", -1},
                                                                   {"tokens", uint64_t{1} << 63},
                                                                   {"score", 2},
                                                                   {"score", "1"},
                                                                   {"depth", 101},
                                                                   {"depth", nullptr}}) {
    nlohmann::ordered_json bad = good;
    bad[key] = value;
    INFO(bad.dump());
    test::expect_error(ExitCode::data, {"a.jsonl:3: \"" + key + "\" must be a"}, [&] { read(bad); });
  }
}

TEST_CASE("the summary averages over the tasks that have every length", "[ruler]") {
  const auto answer = [](RulerTask task, int64_t length, double depth, double score) {
    return RulerAnswer{task, length, 0, depth, score, 100, {"x"}, "y"};
  };
  const nlohmann::ordered_json summary = ruler_summary(
      {answer(RulerTask::vt, 1024, -1, 0.2), answer(RulerTask::vt, 2048, -1, 0.4),
       answer(RulerTask::niah_single_1, 1024, 0, 1), answer(RulerTask::niah_single_1, 1024, 0, 0),
       answer(RulerTask::niah_single_1, 1024, 100, 1), answer(RulerTask::niah_single_1, 2048, 100, 0),
       answer(RulerTask::fwe, 1024, -1, 1)},
      {{"schema", 1}});
  CHECK(summary["average"]["1024"] == 43.33);  // (20 + 66.67) / 2: fwe has no 2048
  CHECK(summary["average"]["2048"] == 20);
  CHECK(summary["cells"].size() == 5);
  CHECK(summary["cells"][0]["score"] == 66.67);
  CHECK(summary["cells"][0]["samples"] == 3);
  CHECK(summary["cells"][0]["tokens"] == 100);
  REQUIRE(summary["depths"].size() == 3);
  CHECK(summary["depths"][0]["score"] == 50);
  CHECK(summary["depths"][0]["samples"] == 2);
  CHECK(ruler_table(summary) ==
        "task                   1024     2048   samples\n"
        "niah_single_1          66.7      0.0       1-3\n"
        "vt                     20.0     40.0         1\n"
        "fwe                   100.0        -         1\n"
        "average                43.3     20.0\n");
}

}  // namespace sluice
