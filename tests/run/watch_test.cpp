#include "run/watch.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include "support/temp_folder.h"

using namespace sluice;

namespace {

void append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::app) << text;
}

std::string record(int step, double loss) {
  return fmt::format(
      "{{\"schema\": 1, \"step\": {}, \"loss\": {}, \"grad_norm\": 0.5, \"tokens_per_second\": 1500}}\n",
      step, loss);
}

}  // namespace

TEST_CASE("a follower reads whole lines as they come", "[watch]") {
  const TempFolder folder;
  RunFollower run(folder.path + "/");
  run.update();
  CHECK(run.losses().empty());
  CHECK(run.facts().step == -1);
  const std::string metrics = folder / "metrics.jsonl";
  append(metrics, record(10, 5.5) + "{\"step\": 20, \"lo");
  run.update();
  REQUIRE(run.losses().size() == 1);
  append(metrics, "ss\": 4.25, \"grad_norm\": 0.25}\nnot json\n");
  run.update();
  REQUIRE(run.losses().size() == 2);
  CHECK(run.losses()[1] == std::pair<int64_t, double>(20, 4.25));
  CHECK(run.facts().grad_norm == 0.25);
  append(metrics, "{\"step\": 30, \"loss\": null}\n");
  run.update();
  CHECK(std::isnan(run.facts().loss));
  // A resumed run rewrites the file without its last lines.
  std::filesystem::remove(metrics);
  append(metrics, record(10, 5.5));
  run.update();
  CHECK(run.losses().size() == 1);
  CHECK_FALSE(run.ended());
  append(folder / "status.json", "{\"state\": \"done\", \"step\": 40, \"max_steps\": 40}");
  append(folder / "eval.jsonl",
         "{\"step\": 40, \"sets\": {\"news\": {\"loss\": 3.5}, \"a\": {\"loss\": 1}}}\n");
  run.update();
  CHECK(run.ended());
  CHECK(run.facts().step == 40);
  CHECK(run.facts().validation == "news 3.5000");
}

TEST_CASE("a sparkline shows the course from low to high", "[watch]") {
  std::vector<std::pair<int64_t, double>> values;
  for (int i = 0; i < 80; ++i) values.emplace_back(i, 8.0 - i / 10.0);
  CHECK(sparkline(values, 8, false) == "#*+=~-._");
  CHECK(sparkline(values, 8, true).size() == 24);
  CHECK(sparkline({{0, 1.0}, {1, NAN}, {3, 2.0}}, 4, false) == "_! #");
  CHECK(sparkline({{5, 1.0}}, 3, false) == "_  ");
  CHECK(sparkline({}, 3, false) == "   ");
  CHECK(sparkline(values, 0, true).empty());
}

TEST_CASE("the table of runs keeps to the terminal", "[watch]") {
  const TempFolder folder;
  append(folder / "status.json",
         "{\"state\": \"running\", \"step\": 50, \"max_steps\": 200, \"seconds_left\": 125}");
  append(folder / "metrics.jsonl", record(10, 5.5) + record(50, 3.25));
  std::vector<RunFollower> runs;
  runs.emplace_back(folder.path);
  runs.emplace_back(folder / "missing");
  for (RunFollower& run : runs) run.update();
  Terminal terminal;
  terminal.width = 140;
  const auto lines = watch_table(runs, terminal);
  REQUIRE(lines.size() == 3);
  CHECK_THAT(lines[1], Catch::Contains("running") && Catch::Contains("50/200  25%") &&
                           Catch::Contains("3.2500") && Catch::Contains("1.50k") &&
                           Catch::Contains("2m05s") && Catch::Contains("#"));
  CHECK_THAT(lines[2], Catch::Contains("missing") && Catch::Contains("-"));
  terminal.width = 40;
  for (const std::string& line : watch_table(runs, terminal)) CHECK(line.size() <= 40);
}
