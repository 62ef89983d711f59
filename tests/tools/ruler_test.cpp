// sluice ruler, as a user runs it.
#include <nlohmann/json.hpp>

#include "core/file_lock.h"
#include "tools/tiny_run.h"

namespace sluice::test {

using Catch::Matchers::Contains;

TEST_CASE("ranks divide ruler's prompts, and take over what killed ranks have kept", "[ruler][ranks]") {
  const TinyRun t;
  REQUIRE(t.train({"model.max_position_embeddings=1400"}).code == 0);
  const auto command = [&](const std::string& samples, const std::string& output) {
    return std::vector<std::string>{
        "ruler",     t.run,   "--lengths", "1000,1400", "--tasks",        "fwe,niah_single_1",
        "--samples", samples, "--json",    "-o",        t.folder / output};
  };
  const auto cells = [](const Outcome& o) {
    INFO(o.err);
    REQUIRE(o.code == 0);
    return nlohmann::json::parse(o.out)["cells"];
  };
  const auto ranks = [&](const std::vector<std::string>& arguments, int count) {
    return Program(t.folder.path, arguments, {}, count).wait();
  };
  const auto alone = cells(t.sluice(command("5", "alone")));
  CHECK(cells(ranks(command("5", "three"), 3)) == alone);
  const std::string file = t.folder / "three/step_00000008.jsonl";
  CHECK(count_of(io::read_file(file), "\n") == 1 + 4 * 5);
  CHECK_FALSE(io::exists(file + ".rank1"));

  // Groups of two ranks share prompts; one of each group keeps the answers.
  std::vector<std::string> shared = command("5", "shared");
  shared.insert(shared.end(), {"--context", "2"});
  CHECK(cells(ranks(shared, 4)) == alone);
  CHECK(count_of(io::read_file(t.folder / "shared/step_00000008.jsonl"), "\n") == 1 + 4 * 5);
  const Outcome undivided = ranks(shared, 3);
  CHECK(undivided.code == 64);
  CHECK_THAT(undivided.err, Contains("--context 2: 3 ranks cannot be divided into groups of that size"));

  // As after a kill: rank 1 has kept one answer and the beginning of another.
  const std::string all = io::read_file(file);
  const size_t header = all.find('\n') + 1, first = all.find('\n', header) + 1;
  write_bytes(file + ".rank1", all.substr(0, first + 20));
  write_bytes(file, all.substr(0, header) + all.substr(first));
  CHECK(cells(t.sluice(command("5", "three"))) == alone);
  CHECK_FALSE(io::exists(file + ".rank1"));
  CHECK(count_of(io::read_file(file), "\n") == 1 + 4 * 5);

  {
    const FileLock other(file + ".lock", "held");
    const Outcome o = t.sluice(command("6", "three"));
    CHECK(o.code == 73);
    CHECK_THAT(o.err,
               Contains("three/step_00000008.jsonl: another sluice ruler answers these prompts; wait"));
    CHECK(count_of(io::read_file(file), "\n") == 1 + 4 * 5);
  }

  // Ranks that were asked for different things answer nothing.
  const Outcome differ = ranks({"ruler", t.run, "--lengths", "8000"}, 2);
  CHECK(differ.code == 64);
}

TEST_CASE("ruler answers prompts, keeps every answer and goes on", "[ruler]") {
  const TinyRun t;
  REQUIRE(t.train({"model.max_position_embeddings=700"}).code == 0);
  const std::vector<std::string> command = {"ruler",         t.run,       "--lengths", "700",   "--tasks",
                                            "niah_single_1", "--samples", "2",         "--json"};
  const Outcome first = t.sluice(command);
  INFO(first.err);
  REQUIRE(first.code == 0);
  const auto summary = nlohmann::json::parse(first.out);
  CHECK(summary["cells"][0]["samples"] == 2);
  CHECK(summary["cells"][0]["length"] == 700);
  const std::string answers = io::read_file(t.run + "/ruler/step_00000008.jsonl");
  CHECK(count_of(answers, "\n") == 3);  // the header and two answers
  CHECK(nlohmann::json::parse(io::read_file(t.run + "/ruler/step_00000008.json")) == summary);

  // Nothing is left to do; more samples are added to these.
  CHECK(t.sluice(command).out == first.out);
  CHECK(io::read_file(t.run + "/ruler/step_00000008.jsonl") == answers);
  std::vector<std::string> more = command;
  more[7] = "3";
  CHECK(nlohmann::json::parse(t.sluice(more).out)["cells"][0]["samples"] == 3);
  CHECK(io::read_file(t.run + "/ruler/step_00000008.jsonl").find(answers) == 0);

  // Twice the positions, without training; a table.
  const Outcome yarn = t.sluice({"ruler", t.run, "--lengths", "1400", "--yarn", "2", "--tasks",
                                 "fwe,niah_multikey_2", "--samples", "1"});
  INFO(yarn.err);
  REQUIRE(yarn.code == 0);
  CHECK_THAT(yarn.out, Contains("niah_multikey_2") && Contains("average"));
  CHECK(io::exists(t.run + "/ruler/step_00000008_yarn2.json"));

  // Another training of that name has answers of its own.
  const std::string other = t.folder / "other";
  REQUIRE(t.train({"model.max_position_embeddings=700", "train.seed=2", "run_dir=" + other}).code == 0);
  std::vector<std::string> mixed = command;
  mixed[1] = other;
  mixed.insert(mixed.end(), {"-o", t.run + "/ruler"});
  const Outcome refused = t.sluice(mixed);
  CHECK(refused.code != 0);
  CHECK_THAT(refused.err, Contains("another"));

  // RULER's own files.
  write_bytes(t.folder / "vt.jsonl", "{\"input\": \"VAR A = 1. Who?\", \"outputs\": [\"A\"]}\n");
  const Outcome given =
      t.sluice({"ruler", t.run, "--prompts", t.folder / "vt.jsonl", "-o", t.folder / "own", "--json"});
  INFO(given.err);
  REQUIRE(given.code == 0);
  CHECK(nlohmann::json::parse(given.out)["cells"][0]["task"] == "vt");
  CHECK(nlohmann::json::parse(given.out)["cells"][0]["length"] == 64);

  // A begin token takes a place, too: 34 + 30 tokens fill a length of 64 without it.
  const std::string begins = t.folder / "begins";
  REQUIRE(t.train({"model.max_position_embeddings=700", "data.begin_token=256", "run_dir=" + begins}).code ==
          0);
  write_bytes(t.folder / "vt.jsonl", "{\"input\": \"" + std::string(34, 'x') + "\", \"outputs\": [\"A\"]}\n");
  for (const auto& [run, length] : {std::pair(t.run, 64), std::pair(begins, 128)}) {
    const Outcome o = t.sluice({"ruler", run, "--prompts", t.folder / "vt.jsonl", "-o",
                                t.folder / fmt::format("filled{}", length), "--json"});
    INFO(o.err);
    REQUIRE(o.code == 0);
    CHECK(nlohmann::json::parse(o.out)["cells"][0]["length"] == length);
  }

  // Of a file all prompts are asked, unless --samples is given.
  std::string many;
  for (int i = 0; i < 103; ++i)
    many += fmt::format("{{\"input\": \"VAR {} = 1. Who?\", \"outputs\": [\"A\"]}}\n", i);
  write_bytes(t.folder / "vt.jsonl", many);
  const std::vector<std::string> files = {"ruler",          t.run, "--prompts", t.folder / "vt.jsonl", "-o",
                                          t.folder / "many"};
  const Outcome whole = t.sluice(files);
  INFO(whole.err);
  REQUIRE(whole.code == 0);
  CHECK_THAT(whole.out, Contains("   samples\n") && Contains("       103\n"));
  std::vector<std::string> few = files;
  few.insert(few.end(), {"--samples", "100", "--json"});
  CHECK(nlohmann::json::parse(t.sluice(few).out)["cells"][0]["samples"] == 100);
}

TEST_CASE("ruler refuses what cannot be measured", "[ruler]") {
  const TinyRun t;
  REQUIRE(t.train({"model.max_position_embeddings=700"}).code == 0);
  const auto refused = [&](std::vector<std::string> arguments, const std::string& part) {
    arguments.insert(arguments.begin(), {"ruler", t.run});
    const Outcome o = t.sluice(arguments);
    INFO(o.err);
    CHECK(o.code == 64);
    CHECK_THAT(o.err, Contains(part));
    CHECK(count_of(o.err, "error:") == 1);
  };
  refused({"--lengths", "2k", "--tasks", "fwe"},
          "2048 tokens are more than the model's 700 positions; --yarn 3");
  refused({"--lengths", "1x"}, "\"1x\" is no number of tokens");
  refused({"--lengths", "300", "--tasks", "vt"}, "the shortest prompt has");
  refused({"--lengths", "100"}, "--lengths 100: no task fits into so few tokens");
  refused({"--tasks", "fwe"},
          "--lengths is not given, which means 1k: 1024 tokens are more than the model's 700 positions");
  refused({"--lengths", "700", "--tasks", "needle"}, "--tasks needle: known are all, niah_single_1");
  refused({"--lengths", "700", "--tasks", "qa_1"}, "qa_1 needs --qa-1 JSONL");
  refused({"--lengths", "700", "--context", "3"}, "--context 3: as many ranks can share a prompt as 1, 2, 4");
  refused({"--lengths", "700", "--context", "2"}, "--context 2: 1 rank cannot be divided into groups");
  refused({"--lengths", "700", "--yarn", "0.5"}, "--yarn 0.5: must be at least 1");
  write_bytes(t.folder / "vt.jsonl",
              "{\"input\": \"" + std::string(800, 'x') + "\", \"outputs\": [\"A\"]}\n");
  const std::vector<std::pair<std::string, std::string>> of_generated = {
      {"--lengths", "16k"}, {"--tasks", "vt"},   {"--seed", "7"},    {"--haystack", "x.txt"},
      {"--words", "x.txt"}, {"--qa-1", "q.txt"}, {"--qa-2", "q.txt"}};
  for (const auto& [option, value] : of_generated)
    refused({"--prompts", t.folder / "vt.jsonl", option, value}, option + " has no effect on --prompts");
  refused({"--prompts", t.folder / "vt.jsonl"}, "a prompt of 800 tokens and 30 generated ones do not fit");
}

}  // namespace sluice::test
