// scripts/sweep as a user sees it: plan, run, stop, resume, status, results, a Slurm array, and invalid
// files. scripts/faults tests kills (faults_test.cpp has a sample).
#include <filesystem>

#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;

bool no_python() {
  if (std::system("command -v python3 >/dev/null") == 0) return false;
  WARN("skipped: no Python");
  return true;
}

/// The tiny training, and sweeps of it.
struct Sweeps : test::TinyRun {
  std::string file = folder / "s.yaml", output = folder / "out";
  const std::string program = std::getenv("SLUICE_BINARY");

  void write(const std::string& text) const { test::write_bytes(file, text + "output: " + output + "\n"); }
  /// Exit code, and what was printed. sluice: the program that the environment names.
  test::Outcome run(const std::string& arguments, const std::string& sluice) const {
    const std::string script = "SLUICE=" + sluice + " " SLUICE_SOURCE_DIR "/scripts/sweep ";
    const int status = std::system((script + arguments + " >" + (folder / "said") + " 2>&1").c_str());
    return {WEXITSTATUS(status), io::read_file(folder / "said"), "", 0};
  }
  test::Outcome run(const std::string& arguments) const { return run(arguments, program); }
  test::Outcome sweep(const std::string& command, const std::string& more = "") const {
    return run(command + " " + file + " " + more);
  }
  /// The gates of a run's configuration.
  std::string gates_of(const std::string& run) const {
    const std::string text = io::read_file(output + "/" + run + "/config.yaml");
    const size_t at = text.find("gates:");
    return at == std::string::npos ? "" : text.substr(at, text.find("head_balance", at) - at);
  }
  std::string journal() const { return io::read_file(output + "/sweep.jsonl"); }
  /// How often a word stands in a text.
  static int count(const std::string& text, const std::string& word) {
    int n = 0;
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
    return n;
  }
};

}  // namespace

TEST_CASE("a sweep announces its trials, trains each once, and reports the results", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  s.write(
      "base: tiny.yaml\ngrid: {optimizer.lr: [1e-2, 3e-3]}\nseeds: [1, 2]\nresources: {slots: 2, threads: "
      "1}\n");
  const auto plan = s.run(s.file);
  INFO(plan.out);
  CHECK(plan.code == 0);
  CHECK_THAT(plan.out, Contains("lr_1e-2-s1") && Contains("4 trials: 4 waiting"));
  CHECK(plan.out.find("lr_3e-3-s1") < plan.out.find("lr_1e-2-s2"));  // first seeds first
  CHECK_FALSE(io::exists(s.output));

  const auto run = s.sweep("run");
  INFO(run.out);
  CHECK(run.code == 0);
  CHECK(Sweeps::count(run.out, "  begins") == 4);
  CHECK_THAT(run.out, Contains("2/2") && Contains("lowest validation loss"));
  const auto named = s.run("table " + s.file + " --sluice " + s.program, s.folder / "none");
  CHECK(named.code == 0);
  CHECK_THAT(named.out, Contains("lowest validation loss") && !Contains("is read by the program"));
  CHECK(Sweeps::count(s.journal(), "\"done\"") == 4);
  CHECK(Sweeps::count(io::read_file(s.output + "/sweep.csv"), "\n") == 5);

  // Finished trials are identified by their hash, independently of path and name.
  s.write(
      "base: tiny.yaml\ngrid: {optimizer.lr: [3e-3, 1e-2], train.max_steps: [8, 9]}\nseeds: [2]\nresources: "
      "{threads: 1}\n");
  const auto more = s.sweep("run");
  INFO(more.out);
  CHECK(more.code == 0);
  CHECK(Sweeps::count(more.out, "  begins") == 2);
  CHECK_THAT(s.sweep("status").out, Contains("9/9") && Contains("4 done"));

  // A removed run is trained again.
  for (const std::string& name : io::list_directory(s.output))
    if (name.find("max_steps_9-s2") != std::string::npos) std::filesystem::remove_all(s.output + "/" + name);
  CHECK(Sweeps::count(s.sweep("run").out, "  begins") == 2);

  // A folder with another run is not touched.
  for (const std::string& name : io::list_directory(s.output))
    if (name.find("lr_1e-2") == 0)
      test::write_bytes(s.output + "/" + name + "/run.json", "{\"config_hash\": \"other\"}");
  s.write("base: tiny.yaml\ngrid: {optimizer.lr: [1e-2, 3e-3]}\nseeds: [1, 2]\n");
  for (const char* command : {"run", "table"}) {
    const auto foreign = s.sweep(command);
    CHECK(foreign.code == 73);
    CHECK_THAT(foreign.out, Contains("is another training's: its configuration has the hash other"));
  }
}

TEST_CASE("keys that sweeps share in a file hold where a sweep sets none of its own", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  const std::string rest = "variants: {a: {optimizer.beta1: 0.8}, b: {optimizer.beta1: 0.9}}\nseeds: [1]\n";
  s.write("base: tiny.yaml\nset: {train.max_steps: 2, optimizer.lr: 1e-2}\n" + rest);
  REQUIRE(s.sweep("run").code == 0);
  std::filesystem::create_directory(s.folder / "common");
  test::write_bytes(s.folder / "common/keys.yaml",
                    "train: {max_steps: 2}\noptimizer: {lr: 5e-3}\noptimizer.beta1: 0.7\n");
  s.write("base: tiny.yaml\nset_from: common/keys.yaml\nset: {optimizer.lr: 1e-2}\n" + rest);
  const auto same = s.sweep("status");
  INFO(same.out);
  CHECK_THAT(same.out, Contains("\n2 done\n"));
  s.write("base: tiny.yaml\nset_from: common/keys.yaml\ngrid: {optimizer.lr: [1e-2, 5e-3]}\n" + rest);
  const auto grid = s.sweep("status");
  INFO(grid.out);
  CHECK_THAT(grid.out, Contains("\n2 done, 2 waiting\n"));

  // A variant's list replaces a shared one, and what `set` says of that.
  test::write_bytes(s.folder / "common/keys.yaml", "model.attention.gates: [{position: sdpa_output}]\n");
  s.write(
      "base: tiny.yaml\nset_from: common/keys.yaml\nset: {\"model.attention.gates[0].granularity\": "
      "headwise}\n"
      "variants:\n  shared: {}\n  own: {model.attention.gates: [{position: value, granularity: "
      "elementwise}]}\n");
  const auto lists = s.sweep("run");
  INFO(lists.out);
  REQUIRE(lists.code == 0);
  for (const std::string& name : io::list_directory(s.output)) {
    if (name.starts_with("shared-")) CHECK_THAT(s.gates_of(name), Contains("headwise"));
    if (name.starts_with("own-")) CHECK_THAT(s.gates_of(name), Contains("value") && !Contains("headwise"));
  }
}

TEST_CASE("variants of a sweep have names, a control, and analyses in the report", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  const std::string head =
      "base: tiny.yaml\nresources: {slots: 2, threads: 1}\ncontrol: plain\nvariants:\n"
      "  plain: {model.attention.gates: []}\n"
      "  headwise:\n    model: {attention: {gates: [{position: sdpa_output, granularity: headwise}]}}\n";
  s.write(head + "seeds: [1, 2, 3]\n");
  const auto plan = s.sweep("plan");
  INFO(plan.out);
  REQUIRE(plan.code == 0);
  CHECK_THAT(plan.out, Contains("plain (control)  []") &&
                           Contains("headwise         [{position: sdpa_output, granularity: headwise}]") &&
                           Contains("headwise-s3") && Contains("6 trials: 6 waiting"));

  const auto early = s.sweep("analyze");
  CHECK(early.code == 0);
  CHECK_THAT(early.out, Contains("0 analyzed now, 0 before, 0 failed; 6 of 6 trials are not finished"));
  const auto run = s.sweep("run");
  INFO(run.out);
  REQUIRE(run.code == 0);
  CHECK_THAT(run.out, Contains("control: plain") && Contains(" n=3"));

  // A trial whose checkpoints are gone is named; the others have their analyses, which are not made twice.
  std::string lost;
  for (const std::string& name : io::list_directory(s.output))
    if (name.find("headwise-s2-") == 0) lost = s.output + "/" + name;
  std::filesystem::rename(lost + "/ckpt", s.folder / "kept");
  const auto failing = s.sweep("analyze");
  INFO(failing.out);
  CHECK(failing.code == 66);
  CHECK_THAT(failing.out, Contains("headwise-s2  analysis failed: exit status 66") &&
                              Contains("5 analyzed now, 0 before, 1 failed"));
  std::filesystem::rename(s.folder / "kept", lost + "/ckpt");
  const auto again = s.sweep("analyze");
  INFO(again.out);
  CHECK(again.code == 0);
  CHECK_THAT(again.out, Contains("1 analyzed now, 5 before, 0 failed"));
  CHECK(io::exists(lost + "/analysis/analysis.json"));

  const std::string report = "SLUICE=" + std::string(std::getenv("SLUICE_BINARY")) +
                             " " SLUICE_SOURCE_DIR "/scripts/report " + s.output + " --tables-only -o " +
                             (s.folder / "page") + " >" + (s.folder / "said") + " 2>&1";
  REQUIRE(WEXITSTATUS(std::system(report.c_str())) == 0);
  const std::string page = io::read_file(s.folder / "page/report.md");
  CHECK_THAT(page, Contains("| plain (control) | [] |") && Contains("| headwise | plain |"));
  CHECK(page.find("no analysis of this run") == std::string::npos);
  CHECK_THAT(io::read_file(s.folder / "page/tables/differences_to_the_control.csv"),
             Contains("headwise,plain,loss,3,"));

  // A sweep that has its control in common with this one is compared with it, too. What has begun and not
  // ended leads no table.
  s.write(head + "name: other\nseeds: [1, 2, 3]\n");
  std::string shared = io::read_file(s.file);
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"plain", "dense"},
                                 {"headwise:", "shared:"},
                                 {"granularity: headwise", "heads: shared"}})
    for (size_t at = shared.find(from); at != std::string::npos; at = shared.find(from, at + to.size()))
      shared.replace(at, from.size(), to);
  test::write_bytes(s.file, shared);
  const auto others = s.sweep("run");
  INFO(others.out);
  REQUIRE(others.code == 0);
  CHECK(Sweeps::count(others.out, "  begins") == 3);
  REQUIRE(WEXITSTATUS(std::system(report.c_str())) == 0);
  const std::string both = io::read_file(s.folder / "page/tables/differences_to_the_control.csv");
  CHECK_THAT(both, Contains("headwise,dense / plain,loss,3,") && Contains("shared,dense / plain,loss,3,"));
  test::write_bytes(s.file, shared + "grid: {optimizer.lr: [1e-2, 1e-6]}\n");
  CHECK_THAT(s.sweep("table").out, Contains("waiting") && Contains("lowest validation loss"));
  test::write_bytes(s.file, shared.replace(shared.find("[1, 2, 3]"), 9, "[1, 2, 3, 4]"));
  CHECK_THAT(s.sweep("table").out, Contains("1 waiting") && !Contains("lowest validation loss"));

  // With a grid, every variant has every value, and is compared with the control at the same one.
  s.write(head + "grid: {optimizer: {lr: [1e-2, 3e-3]}}\n");
  CHECK_THAT(s.sweep("plan").out, Contains("plain-lr_1e-2") && Contains("headwise-lr_3e-3"));
}

TEST_CASE("bases of a sweep are compared with the one that is the control, at the same grid value",
          "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  test::write_bytes(s.folder / "wide.yaml", "extends: tiny.yaml\nmodel: {intermediate_size: 40}\n");
  const std::string grid = "grid: {optimizer.lr: [1e-2, 3e-3]}\nresources: {slots: 2, threads: 1}\n";
  s.write("base: [tiny.yaml, wide.yaml]\ncontrol: tiny\n" + grid);
  const auto plan = s.sweep("plan");
  INFO(plan.out);
  REQUIRE(plan.code == 0);
  // Names and folders differ for every base, and are the sweep's own.
  CHECK_THAT(plan.out, Contains("variant         intermediate_size\n") && Contains("tiny (control)  "));
  REQUIRE(s.sweep("run").code == 0);
  const std::string measured = s.sweep("table --markdown loss").out;
  INFO(measured);
  const auto difference = [&](const std::string& trial) {
    const size_t row = measured.find("`" + trial + "`"), end = measured.find(" |\n", row);
    REQUIRE(end != std::string::npos);
    return measured.substr(measured.rfind("| ", end - 1) + 2, end - measured.rfind("| ", end - 1) - 2);
  };
  for (const std::string lr : {"1e-2", "3e-3"}) {
    CHECK(difference("tiny-lr_" + lr) == "");
    CHECK_THAT(difference("wide-lr_" + lr), Catch::Matches("[+-]0\\.[0-9]{4} \\(n < 3\\)"));
  }

  s.write("base: [tiny.yaml, wide.yaml]\ncontrol: narrow\n" + grid);
  CHECK_THAT(s.sweep("plan").out, Contains("control: there is no base narrow; there are: tiny, wide"));
  s.write("base: tiny.yaml\ncontrol: tiny\n" + grid);
  CHECK_THAT(s.sweep("plan").out, Contains("control is the name of a variant or of one of several bases"));
}

TEST_CASE("recorded results replace trainings on another machine", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  const std::string head =
      "base: tiny.yaml\nresources: {slots: 2, threads: 1}\ncontrol: plain\nvariants:\n"
      "  plain: {model.attention.gates: []}\n"
      "  headwise:\n    model: {attention: {gates: [{position: sdpa_output, granularity: headwise}]}}\n";
  s.write(head + "seeds: [1, 2]\n");
  const auto without = s.sweep("record");
  CHECK(without.code == 64);
  CHECK_THAT(without.out, Contains("no key `record`"));

  const std::string record = s.folder / "results/s.jsonl", key = "record: results/s.jsonl\n";
  s.write(head + key + "seeds: [1, 2]\n");
  REQUIRE(s.sweep("run").code == 0);
  const auto recorded = s.sweep("record");
  INFO(recorded.out);
  REQUIRE(recorded.code == 0);
  CHECK_THAT(recorded.out, Contains("4 recorded now; 4 of 4 trials are in " + record));
  const std::string lines = io::read_file(record), table = s.sweep("table").out;
  CHECK(Sweeps::count(lines, "\n") == 4);
  CHECK(lines.find(s.folder.path) == std::string::npos);  // nothing of this machine
  CHECK_THAT(s.sweep("record").out, Contains("0 recorded now; 4 of 4"));
  CHECK(io::read_file(record) == lines);

  const auto configuration = [&] {
    for (const std::string& name : io::list_directory(s.output))
      if (name.find("plain-s1-") == 0) {
        const std::string text = io::read_file(s.output + "/" + name + "/config.yaml");
        return text.substr(text.find("\nmodel:"));  // behind the comment with the hash
      }
    return std::string();
  };
  const std::string trained = configuration();

  // Another machine: nothing is trained, and the tables are the same.
  std::filesystem::remove_all(s.output);
  CHECK_THAT(s.sweep("plan").out, Contains("nothing to run"));
  CHECK_THAT(s.sweep("status").out, Contains("headwise-s2  recorded") && Contains("8/8"));
  CHECK_FALSE(io::exists(s.output));
  const auto run = s.sweep("run");
  INFO(run.out);
  CHECK(run.code == 0);
  CHECK(Sweeps::count(run.out, "  begins") == 0);
  CHECK_THAT(run.out, Contains("4 done (4 of them recorded)"));
  CHECK(s.sweep("table").out == table);
  CHECK(configuration() == trained);
  CHECK_THAT(s.sweep("status").out, Contains("headwise-s2  recorded"));
  CHECK_THAT(s.sweep("analyze").out, Contains("4 are recorded, without weights to analyze"));
  const std::string report = "SLUICE=" + std::string(std::getenv("SLUICE_BINARY")) +
                             " " SLUICE_SOURCE_DIR "/scripts/report " + s.output + " --tables-only -o " +
                             (s.folder / "page") + " >" + (s.folder / "said") + " 2>&1";
  REQUIRE(WEXITSTATUS(std::system(report.c_str())) == 0);
  CHECK_THAT(io::read_file(s.folder / "page/tables/differences_to_the_control.csv"),
             Contains("headwise,plain,loss,2,"));

  // Losses on other tokens are not compared.
  s.write(head + key + "seeds: [1, 2]\n");
  for (const std::string& name : io::list_directory(s.output))
    if (name.starts_with("plain-s")) {
      std::string evaluations = io::read_file(s.output + "/" + name + "/eval.jsonl");
      const size_t at = evaluations.rfind("\"perplexity\""), tokens = evaluations.find("\"tokens\": ", at);
      REQUIRE(tokens != std::string::npos);
      evaluations.insert(tokens + 10, "9");
      test::write_bytes(s.output + "/" + name + "/eval.jsonl", evaluations);
    }
  CHECK_THAT(table, Contains("(n < 3)  "));
  CHECK_THAT(s.sweep("table").out, !Contains("(n < 3)  ") && Contains("control"));
  std::filesystem::remove_all(s.output);

  // An unfinished training of a recorded trial hides nothing.
  s.write(head + key + "seeds: [1, 2]\n");
  REQUIRE(s.sweep("run").code == 0);
  std::string unfinished;
  for (const std::string& name : io::list_directory(s.output))
    if (name.starts_with("plain-s1-")) unfinished = s.output + "/" + name;
  std::filesystem::remove(unfinished + "/status.json");
  CHECK_THAT(s.sweep("status").out, Contains("plain-s1     recorded"));
  for (const char* command : {"run", "table", "record"}) {
    const auto refused = s.sweep(command);
    CHECK(refused.code == 73);
    CHECK_THAT(refused.out, Contains("unfinished here: 1") && Contains("rm -r " + unfinished));
  }
  std::filesystem::remove_all(unfinished);
  CHECK(s.sweep("table").out == table);
  std::filesystem::remove_all(s.output);

  // A seed more is trained here, and joins the others. A trial with other settings is another trial.
  s.write(head + key + "seeds: [1, 2, 3]\n");
  CHECK(Sweeps::count(s.sweep("run").out, "  begins") == 2);
  CHECK_THAT(s.sweep("record").out, Contains("2 recorded now; 6 of 6"));
  s.write(head + key + "set: {optimizer.lr: 2e-3}\nseeds: [1]\n");
  CHECK_THAT(s.sweep("record").out, Contains("0 of 2 trials are in") && Contains("6 of configurations that"));

  // What is damaged is reported by its line, and trained again; results of other data are told apart.
  std::filesystem::remove_all(s.output);
  std::string damaged = lines;
  damaged.replace(damaged.find("\"evaluations\":["), 15, "\"evaluations\":{");
  const std::string key_of_data = "\"data_fingerprint\":\"";
  REQUIRE(damaged.rfind(key_of_data) != std::string::npos);
  const size_t last = damaged.rfind(key_of_data) + key_of_data.size();
  damaged[last + 20] = damaged[last + 20] == '0' ? '1' : '0';
  test::write_bytes(record, damaged + "{\"schema\": 1, \"hash\": \"torn");
  s.write(head + key + "seeds: [1, 2]\n");
  const auto again = s.sweep("run");
  INFO(again.out);
  CHECK(again.code == 0);
  CHECK_THAT(again.out, Contains("s.jsonl:1: not a whole JSON object") &&
                            Contains("s.jsonl:5: not a whole JSON object") &&
                            Contains("of several training data"));
  CHECK(Sweeps::count(again.out, "  begins") == 1);
}

TEST_CASE("a sweep starts from the weights of another, variant by variant and seed by seed", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  const std::string variants =
      "resources: {slots: 2, threads: 1}\ncontrol: plain\nvariants:\n"
      "  plain: {model.attention.gates: []}\n"
      "  headwise:\n    model: {attention: {gates: [{position: sdpa_output, granularity: headwise}]}}\n";
  const std::string seeds = "seeds: [1, 2]\n", second = s.folder / "second.yaml";
  s.write("base: tiny.yaml\nrecord: results.jsonl\n" + variants + seeds);
  const auto write_second = [&](const std::string& text) {
    test::write_bytes(second, "after: s.yaml\nbase: tiny.yaml\noutput: " + (s.folder / "out2") + "\n" + text);
  };
  const std::string longer = "set: {optimizer.lr: 1e-12, train.init_ignore: [model.rope]}\n";
  write_second(longer + variants + seeds + "grid: {model.rope.theta: [1e4, 1e6]}\n");

  // It plans at any time, and begins where all that it starts from is done.
  const auto plan = s.run("plan " + second);
  INFO(plan.out);
  REQUIRE(plan.code == 0);
  CHECK_THAT(plan.out, Contains("8 trials: 8 waiting") && !Contains("init_from"));
  for (const auto& [command, trials] : {std::pair{"run ", "4"}, {"slurm ", "4"}, {"trial ", "1"}}) {
    const auto early = s.run(command + second + (*trials == '1' ? " 0" : ""));
    CHECK(early.code == 66);
    CHECK_THAT(early.out, Contains(trials + std::string(" trials of ")) &&
                              Contains("s.yaml come first and are not done, plain-s1 "));
  }
  CHECK_FALSE(io::exists(s.folder / "out2/sweep.jsonl"));

  REQUIRE(s.sweep("run").code == 0);
  const auto run = s.run("run " + second);
  INFO(run.out);
  REQUIRE(run.code == 0);
  CHECK(Sweeps::count(run.out, " 2/2 ") == 4);
  int trials = 0;
  for (const std::string& name : io::list_directory(s.folder / "out2")) {
    const std::string folder = s.folder / ("out2/" + name);
    if (!io::exists(folder + "/config.yaml")) continue;
    ++trials;
    const std::string source = name.substr(0, name.find('-')) + name.substr(name.find("-s"), 3);
    CHECK_THAT(io::read_file(folder + "/config.yaml"), Contains("init_from: " + s.output + "/" + source));
    // The learning rate changes nothing: where the base of the rotary frequencies is the first sweep's, so is
    // the loss.
    const auto last_loss = [](const std::string& folder_of_run) {
      const std::string lines = io::read_file(folder_of_run + "/eval.jsonl");
      const size_t last = lines.rfind('\n', lines.size() - 2) + 1;
      return nlohmann::json::parse(lines.substr(last))["sets"]["held_out"]["loss"].get<double>();
    };
    for (const std::string& first : io::list_directory(s.output))
      if (first.starts_with(source + "-") && name.find("theta_1e4") != std::string::npos)
        CHECK(std::abs(last_loss(folder) - last_loss(s.output + "/" + first)) < 1e-6);
  }
  CHECK(trials == 8);

  // The weights are named by the trial, so that the hashes of those that start from it are the same
  // everywhere.
  std::string plain;
  for (const std::string& name : io::list_directory(s.output))
    if (name.starts_with("plain-s1-")) plain = name;
  const std::string other = "old" + plain.substr(5);
  std::filesystem::rename(s.output + "/" + plain, s.output + "/" + other);
  std::filesystem::remove_all(s.folder / "out2");
  const auto renamed = s.run("run " + second);
  CHECK(renamed.code == 73);
  CHECK_THAT(renamed.out, Contains(other + " has another name than its trial") && Contains(plain));
  std::filesystem::rename(s.output + "/" + other, s.output + "/" + plain);

  // Variants may differ in nothing but the weights that they start from.
  const std::string slots = "resources: {slots: 2, threads: 1}\n";
  s.write("base: tiny.yaml\nvariants: {slow: {optimizer.lr: 1e-3}, fast: {optimizer.lr: 3e-2}}\n" + slots +
          seeds);
  REQUIRE(s.sweep("run").code == 0);
  write_second("variants: {slow: {}, fast: {}}\nset: {optimizer.lr: 1e-12}\n" + slots + seeds);
  const auto alike = s.run("run " + second);
  INFO(alike.out);
  CHECK(alike.code == 0);
  CHECK_THAT(alike.out, Contains("\nslow ") && Contains("\nfast "));
  CHECK(Sweeps::count(alike.out, " 2/2 ") == 2);

  // Weights that are younger than what started from them.
  CHECK_THAT(alike.out, !Contains("of several weights"));
  for (const std::string& name : io::list_directory(s.output)) {
    if (!name.starts_with("slow-s1-")) continue;
    for (const std::string& step : io::list_directory(s.output + "/" + name + "/ckpt")) {
      const std::string manifest = s.output + "/" + name + "/ckpt/" + step + "/MANIFEST.json";
      if (io::exists(manifest))
        std::filesystem::last_write_time(
            manifest, std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
    }
  }
  CHECK_THAT(s.run("table " + second).out,
             Contains("of several weights of slow-s1, which was trained again"));

  s.write("base: tiny.yaml\nrecord: results.jsonl\n" + variants + seeds);
  write_second(longer + variants + seeds + "grid: {model.rope.theta: [1e4, 1e6]}\n");

  // Recorded results have no weights.
  REQUIRE(s.sweep("record").code == 0);
  std::filesystem::remove_all(s.output);
  std::filesystem::remove_all(s.folder / "out2");
  REQUIRE(s.sweep("table").code == 0);
  const auto bare = s.run("run " + second);
  CHECK(bare.code == 66);
  CHECK_THAT(bare.out, Contains("has no weights to start from") && Contains("results.jsonl"));

  struct {
    std::string text, message;
  } const wrong[] = {
      {variants + "seeds: [1, 3]\n", "has no trials of the variant and seed of plain-s3"},
      {seeds, "has no trials of the variant and seed of tiny-s1"},
      {variants + seeds + "set: {train.init_from: x}\n", "train.init_from follows from the key `after`"},
  };
  for (const auto& [text, message] : wrong) {
    write_second(text);
    const auto said = s.run("plan " + second);
    INFO(said.out);
    CHECK(said.code == 64);
    CHECK_THAT(said.out, Contains("second.yaml:") && Contains(message));
  }
  write_second(variants + seeds);
  s.write("after: second.yaml\nbase: tiny.yaml\n" + variants + seeds);
  const auto circle = s.run("plan " + second);
  CHECK(circle.code == 64);
  CHECK_THAT(circle.out, Contains("comes after this sweep itself"));
  s.write("after: none.yaml\nbase: tiny.yaml\n" + variants + seeds);
  CHECK_THAT(s.sweep("plan").out, Contains("after: no such file") && Contains("none.yaml"));
}

TEST_CASE("losses of other tokens or of other text are neither averaged nor compared", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  const std::string record = s.folder / "s.jsonl";
  const std::string head =
      "base: tiny.yaml\nresources: {slots: 2, threads: 1}\ncontrol: plain\nrecord: " + record +
      "\nvariants:\n  plain: {model.attention.gates: []}\n" +
      "  headwise: {model.attention.gates: [{granularity: headwise}]}\n";
  s.write(head + "set: {eval.max_tokens: 64}\nseeds: [1]\n");
  REQUIRE(s.sweep("run").code == 0);
  REQUIRE(s.sweep("record").code == 0);
  const std::string lines = io::read_file(record);
  CHECK_THAT(lines, Contains("\"max_tokens\":64") && Contains("\"sink_threshold\":0.3") &&
                        Contains("\"validation_fingerprints\":{\"held_out\":\"xxh3-whole:"));
  CHECK(lines.find(s.folder.path) == std::string::npos);

  // The sweep file says something else later: the record still says how its trials were evaluated.
  std::filesystem::remove_all(s.output);
  s.write(head + "seeds: [1, 2]\n");
  const auto mixed = s.sweep("run");
  INFO(mixed.out);
  CHECK(mixed.code == 0);
  CHECK(Sweeps::count(mixed.out, "  begins") == 2);
  CHECK_THAT(mixed.out, Contains("2/2         -") && Contains("evaluated on different tokens") &&
                            !Contains("(n < 3)  "));
  for (const std::string& name : io::list_directory(s.output))
    if (name.starts_with("plain-s"))
      CHECK_THAT(io::read_file(s.output + "/" + name + "/config.yaml"),
                 Contains(name.starts_with("plain-s1") ? "  max_tokens: 64\n" : "  max_tokens: 0\n"));

  // The validation set is replaced by another text of the same length, then a variant is added that
  // computes the same.
  std::filesystem::remove_all(s.output);
  std::filesystem::remove(record);
  s.write(head + "seeds: [1]\n");
  REQUIRE(s.sweep("run").code == 0);
  std::string tokens = io::read_file(s.folder / "held_out.bin");
  for (size_t i = 0; i + 1 < tokens.size(); i += 2)
    if (tokens[i + 1] == 0) tokens[i] = static_cast<char>((tokens[i] + 1) % 31);
  test::write_bytes(s.folder / "held_out.bin", tokens);
  s.write(head + "  recomputed: {model.attention.gates: [], train.recompute: mlp}\nseeds: [1]\n");
  const auto replaced = s.sweep("run");
  INFO(replaced.out);
  CHECK(replaced.code == 0);
  CHECK(Sweeps::count(replaced.out, "  begins") == 1);
  CHECK(Sweeps::count(replaced.out, "(n < 3)  ") == 1);  // of the variant evaluated on the first text
  CHECK_THAT(replaced.out, Contains("of several validation data: held_out xxh3-whole:"));
  const std::string report = "SLUICE=" + std::string(std::getenv("SLUICE_BINARY")) +
                             " " SLUICE_SOURCE_DIR "/scripts/report " + s.output + " --tables-only -o " +
                             (s.folder / "page") + " >" + (s.folder / "said") + " 2>&1";
  REQUIRE(WEXITSTATUS(std::system(report.c_str())) == 0);
  const std::string differences = io::read_file(s.folder / "page/tables/differences_to_the_control.csv");
  CHECK_THAT(differences, Contains("headwise,plain,loss,1,") && !Contains("recomputed,"));
  CHECK_THAT(io::read_file(s.folder / "page/tables/overview.csv"),
             Contains("\nplain,1,") && Contains("\nheadwise,1,") && Contains("\nrecomputed,1,"));
}

TEST_CASE("a sweep's trials end by a rule or a failure, and are repeated only on request", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  s.write(
      "base: tiny.yaml\nset: {train.max_steps: 100000, data.validation: []}\nseeds: [1]\nresources: "
      "{threads: 1}\n"
      "stop_if: [{metric: loss, op: '>', value: 1000}, {metric: loss, op: '<', value: 5.4, after_steps: 3}, "
      "{metric: heads.imbalance, op: nonfinite}]\n");
  const auto run = s.sweep("run");
  INFO(run.out);
  CHECK(run.code == 0);
  CHECK_THAT(run.out, Contains("stopped at step") && Contains("loss < 5.4 after step 3") &&
                          Contains("no heads.imbalance, which stop_if asks for"));
  CHECK(s.sweep("run").out.find("begins") == std::string::npos);
  CHECK(Sweeps::count(s.journal(), "\"started\"") == 1);
  CHECK_THAT(s.sweep("run", "--retry stopped").out, Contains("goes on from step"));  // with the same result
  CHECK(Sweeps::count(s.journal(), "\"event\": \"stopped\"") == 2);

  s.write(
      "base: tiny.yaml\npaired: [{data.seq_len: 16, optimizer.lr: 1}, {data.seq_len: 9999, optimizer.lr: "
      "2}]\n"
      "resources: {threads: 1}\n");
  const auto failing = s.sweep("run");  // the corpus is too short for the second
  INFO(failing.out);
  CHECK(failing.code == 65);
  CHECK_THAT(failing.out, Contains("failed: exit status 65") && Contains("1/1"));
  const auto again = s.sweep("run");
  CHECK(again.code == 65);
  CHECK(again.out.find("begins") == std::string::npos);

  // A trial that dies without progress is started three times; each slot has its GPU.
  s.write("base: tiny.yaml\nname: dying\nset: {optimizer.lr: 2e-2}\nresources: {gpus: 1, threads: 1}\n");
  setenv("CUDA_VISIBLE_DEVICES", "5,7", 1);
  const auto dying =
      s.sweep("run", "--launcher \"sh -c 'echo gpu \\$CUDA_VISIBLE_DEVICES; kill -9 \\$\\$'\"");
  unsetenv("CUDA_VISIBLE_DEVICES");
  INFO(dying.out);
  CHECK(dying.code == 137);
  CHECK(Sweeps::count(dying.out, "lost (exit status 137)") == 2);
  CHECK_THAT(dying.out, Contains("failed: exit status 137: gpu 5"));
}

TEST_CASE("a stopped sweep lets its trials save, and resumes from there", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  s.write(
      "base: tiny.yaml\nset: {train.max_steps: 4000, checkpoint.every_steps: 0}\nseeds: [1]\n"
      "resources: {threads: 1}\n");
  setenv("SLUICE", std::getenv("SLUICE_BINARY"), 1);
  // exec: the signal must reach the script, not its shell.
  const std::string stop = "run " + s.file + " & job=$!; for i in $(seq 3000); do sleep 0.02; cat " +
                           s.output + "/*-s1-*/metrics.jsonl 2>/dev/null | grep -q . && break; done; ";
  const int status =
      std::system(("bash -c 'run() { exec " SLUICE_SOURCE_DIR "/scripts/sweep run \"$1\"; }; " + stop +
                   "kill -TERM $job; wait $job' >" + (s.folder / "said") + " 2>&1")
                      .c_str());
  const std::string said = io::read_file(s.folder / "said");
  INFO(said);
  CHECK(WEXITSTATUS(status) == 75);
  CHECK_THAT(said, Contains("stopping: what runs saves and ends (trials: 1)"));
  CHECK_THAT(s.journal(), Contains("preempted"));
  CHECK_THAT(s.sweep("status").out, Contains("paused"));
  // Another sweep or a truncated journal does not affect saved trials.
  test::write_bytes(s.output + "/sweep.jsonl", s.journal() + "{\"event\": \"do");
  const auto on = s.sweep("run");
  INFO(on.out);
  CHECK(on.code == 0);
  CHECK_THAT(on.out, Contains("goes on from step"));
  CHECK_THAT(s.journal(), Contains("{\"event\": \"do\n{\"time\""));
}

TEST_CASE("a sweep as a Slurm array trains each trial by one task", "[sweep][launch]") {
  if (no_python()) return;
  const Sweeps s;
  s.write(
      "base: tiny.yaml\ngrid: {optimizer.lr: [1e-2, 3e-3]}\nresources: {slots: 5, threads: 1, time: "
      "'01:30:00', partition: cpu}\n");
  const auto made = s.sweep("slurm");
  INFO(made.out);
  REQUIRE(made.code == 0);
  const std::string script = s.output + "/array.sbatch", text = io::read_file(script);
  CHECK_THAT(text, Contains("#SBATCH --array=0-1%5") && Contains("--time=01:30:00") &&
                       Contains("--partition=cpu") && Contains("--cpus-per-task=1"));
  CHECK(std::system(("bash -n " + script).c_str()) == 0);
  if (std::system("command -v shellcheck >/dev/null") == 0)
    CHECK(std::system(("shellcheck " + script).c_str()) == 0);

  // A fake scheduler: srun runs its command, or exits with a given code.
  for (const char* name : {"srun", "scontrol"}) {
    test::write_bytes(
        s.folder / name,
        "#!/bin/bash\necho " + std::string(name) + " \"$@\" >>" + (s.folder / "asked") +
            "\n[ -z \"$ENDS_WITH\" ] || exit $ENDS_WITH\nwhile [[ $1 == -* ]]; do shift; done\n" +
            (std::string(name) == "srun" ? "exec \"$@\"\n" : ""));
    REQUIRE(std::system(("chmod +x " + (s.folder / name)).c_str()) == 0);
  }
  const auto task = [&](int index, const std::string& environment) {
    const int status =
        std::system((environment + " PATH=" + s.folder.path +
                     ":$PATH SLURM_ARRAY_JOB_ID=42 SLURM_ARRAY_TASK_ID=" + std::to_string(index) + " bash " +
                     script + " >" + (s.folder / "said") + " 2>&1")
                        .c_str());
    UNSCOPED_INFO(io::read_file(s.folder / "said"));
    return WEXITSTATUS(status);
  };
  CHECK(task(0, "ENDS_WITH=75") == 75);
  CHECK_THAT(io::read_file(s.folder / "asked"), Contains("scontrol requeue 42_0"));
  // Losses are counted from the last stop that saved, for each task by itself.
  const std::string much = " SLURM_RESTART_COUNT=9 SLUICE_RESTARTS=1", losses = "/logs/slurm-42_0.losses";
  const auto lost = [&](int index, int status, const char* said) {
    CHECK(task(index, fmt::format("ENDS_WITH={}{}", status, much)) == status);
    CHECK_THAT(io::read_file(s.folder / "said"), Contains(said));
  };
  lost(1, 137, "queued again");
  lost(0, 76, "queued again");
  CHECK(io::exists(s.output + losses));
  lost(1, 76, "exit status 76 after 1 restarts without a stop that saved: not again");
  std::filesystem::remove(s.folder / "asked");
  CHECK(task(0, "") == 0);
  CHECK_FALSE(io::exists(s.output + losses));
  CHECK(task(0, "") == 0);  // it has its result
  CHECK_THAT(io::read_file(s.folder / "asked"),
             Contains("srun --mpi=pmix --kill-on-bad-exit=1") && Contains("train.threads=1"));
  CHECK(Sweeps::count(io::read_file(s.folder / "asked"), "srun") == 1);
  CHECK_THAT(s.sweep("status").out, Contains("1 done, 1 waiting"));
  CHECK_THAT(s.sweep("slurm").out, Contains("1 of 2 trials"));
}

TEST_CASE("an invalid sweep file is refused with its line", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  const std::string base = "base: tiny.yaml\n";
  const std::pair<std::string, std::string> wrong[] = {
      {"grid: {}\n", "s.yaml:1:1: base is missing"},
      {"base: none.yaml\n", "s.yaml:1:7: no such file"},
      {base + "grids: {}\n", "s.yaml:2:8: unknown key grids"},
      {base + "grid: {optimizer.lr: 1}\n", "s.yaml:2:22: grid.optimizer.lr needs a list of values"},
      {base + "grid:\n  optimizer.lrr: [1]\n", "unknown key optimizer.lrr; did you mean lr?"},
      {base + "set: {optimizer.lr: 1}\ngrid: {optimizer.lr: [1, 2]}\n",
       "s.yaml:3:22: optimizer.lr stands in set, too"},
      {base + "paired: [{optimizer.lr: 1}, {train.max_steps: 2}]\n",
       "s.yaml:2:29: every item of paired gives the same keys"},
      {base + "set: {train.seed: 1}\n", "s.yaml:2:19: train.seed: give the list `seeds` instead"},
      {base + "resources: {slots: 0}\n", "s.yaml:2:20: slots is at least 1, got 0"},
      {base + "stop_if: {metric: loss, op: '>'}\n", "s.yaml:2:10: stop_if.value goes with"},
      {base + "stop_if: {metric: los, op: nonfinite}\n",
       "s.yaml:2:19: stop_if.metric: unknown metric los; did you mean loss?"},
      {base + "stop_if: [{metric: val.held_out.los, op: nonfinite}]\n",
       "s.yaml:2:20: stop_if.metric: unknown metric val.held_out.los; of a validation set there are"},
      {base + "seeds: *one\n", "s.yaml:2:8: not valid YAML: the referenced anchor is not defined"},
      {base + "base: tiny.yaml\n", "s.yaml:2:1: duplicate key base; it is also given at"},
      {base + "set: {train.max_steps: 0}\n", "s.yaml:1: tiny has no length"},
      {base + "set: {train: {seed: 4}}\n", "s.yaml:2:21: train.seed: give the list `seeds` instead"},
      {base + "set: {train: {max_steps: 4}, train.max_steps: 5}\n",
       "s.yaml:2:47: train.max_steps is given twice"},
      {base + "variants: [a, b]\n", "s.yaml:2:11: variants is a map of names"},
      {base + "variants: {}\n", "s.yaml:2:11: variants is a map of names"},
      {base + "variants:\n  a/b: {}\n", "s.yaml:3:8: the name 'a/b' of a variant"},
      {base + "variants:\n  ..: {}\n", "s.yaml:3:7: the name '..' of a variant"},
      {base + "variants:\n  a: {}\n  a: {}\n", "s.yaml:4:3: duplicate key"},
      {base + "variants:\n  a: {}\n  A: {train.max_steps: 3}\n",
       "s.yaml:4:6: the variants a and A differ in upper and lower case alone"},
      {base + "variants:\n  a: 5\n", "s.yaml:3:6: the variant a holds `key: value` pairs"},
      {base + "variants:\n  a: {}\n  b: {optimizer.lrr: 1}\n", "unknown key optimizer.lrr; did you mean lr?"},
      {base + "variants:\n  a: {optimizer: {lr: 1}}\ngrid: {optimizer.lr: [1, 2]}\n",
       "s.yaml:3:23: optimizer.lr stands in grid, too"},
      {base + "variants:\n  a: {}\n  b: {train: {seed: 4}}\n", "train.seed: give the list `seeds` instead"},
      {base + "variants:\n  a: {}\n  b: {optimizer.beta1: 0.9}\n",
       "s.yaml:4:6: the variant b is the same training as a"},
      {base + "variants: {a: {}}\ncontrol: b\n", "s.yaml:3:10: control: there is no variant b; there are: a"},
      {base + "set_from: none.yaml\n", "s.yaml:2:11: set_from: no such file: "},
      {base + "set_from: list.yaml\n", "list.yaml:1:1: the file of set_from holds `key: value` pairs"},
      {base + "set_from: seed.yaml\n", "seed.yaml:1:13: train.seed: give the list `seeds` instead"},
      {base + "control: b\n",
       "s.yaml:2:10: control is the name of a variant or of one of several bases; the file has neither"},
  };
  test::write_bytes(s.folder / "list.yaml", "[1, 2]\n");
  test::write_bytes(s.folder / "seed.yaml", "train.seed: 4\n");
  for (const auto& [text, message] : wrong) {
    INFO(text);
    test::write_bytes(s.file, text);
    const auto said = s.sweep("plan");
    INFO(said.out);
    CHECK(said.code == 64);
    CHECK_THAT(said.out, Contains(message));
    CHECK(said.out.find("Traceback") == std::string::npos);
  }
  CHECK(s.run("plan " + (s.folder / "none.yaml")).code == 66);
}

TEST_CASE("every shipped sweep plans", "[sweep]") {
  if (no_python()) return;
  const Sweeps s;
  int files = 0;
  std::vector<std::string> sweeps;
  for (const std::string& name : io::list_directory(SLUICE_SOURCE_DIR "/configs/sweeps"))
    if (name.find(".yaml") != std::string::npos) sweeps.push_back("sweeps/" + name);
  for (const std::string& name : sweeps) {
    const auto said = s.run("plan " SLUICE_SOURCE_DIR "/configs/" + name);
    INFO(name << "\n" << said.out);
    CHECK(said.code == 0);
    ++files;
  }
  CHECK(files >= 2);
}

}  // namespace sluice
