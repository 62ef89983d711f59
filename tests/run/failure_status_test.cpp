#include "run/failure_status.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "core/io.h"
#include "run/run_folder.h"
#include "support/temp_folder.h"

namespace sluice {
namespace {

nlohmann::json status_of(const std::string& folder) {
  return nlohmann::json::parse(io::read_file(folder + "/status.json"));
}

}  // namespace

TEST_CASE("a rank's error replaces the status of a run that goes on, and only that", "[run][status]") {
  const TempFolder t;
  const std::string run = t.path + "/run";
  RunFolder folder(run);
  folder.keep();
  const FailureStatus rank2(run, 2), rank1(run, 1);
  rank2.write("no status yet", ExitCode::out_of_memory, {.step = 9, .tokens = 90, .saved_step = 8});
  CHECK_FALSE(io::exists(run + "/status.json"));
  const nlohmann::ordered_json running = {{"state", "running"}, {"step", 7},   {"max_steps", 20},
                                          {"tokens", 70},       {"loss", 2.5}, {"seconds_left", 3},
                                          {"saved_step", -1}};
  folder.write_status(running);
  rank2.write("out of memory \xff", ExitCode::out_of_memory, {.step = 9, .tokens = 90, .saved_step = 8});
  const auto failed = status_of(run);
  CHECK(failed["state"] == "failed");
  CHECK(failed["step"] == 9);
  CHECK(failed["max_steps"] == 20);
  CHECK(failed["tokens"] == 90);
  CHECK(failed["saved_step"] == 8);
  CHECK_FALSE(failed.contains("loss"));  // of an earlier step
  CHECK_FALSE(failed.contains("seconds_left"));
  CHECK(failed["exit_code"] == 71);
  CHECK(failed["failed_rank"] == 2);
  CHECK(failed["error"].get<std::string>().starts_with("out of memory "));
  rank1.write("second", ExitCode::hang, {.step = 10, .tokens = 100, .saved_step = 8});
  CHECK(status_of(run) == failed);
  folder.write_status({{"state", "done"}});
  rank1.write("late", ExitCode::hang, {.step = 10, .tokens = 100, .saved_step = 8});
  CHECK(status_of(run)["state"] == "done");
  // Who reports a hang need not be who hangs.
  folder.write_status(running);
  rank1.write("rank 2 computes without end", ExitCode::hang, {.step = 7, .tokens = 70, .saved_step = -1});
  CHECK(status_of(run)["exit_code"] == 76);
  CHECK_FALSE(status_of(run).contains("failed_rank"));
  CHECK(status_of(run)["loss"] == 2.5);
  CHECK(io::glob(run + "/status.json.*").empty());
}

TEST_CASE("the status of another run that has taken the folder's place is not changed", "[run][status]") {
  const TempFolder t;
  const std::string run = t.path + "/run";
  RunFolder first(run);
  first.keep();
  first.write_status({{"state", "running"}});
  const FailureStatus rank1(run, 1);
  io::rename(run, t.path + "/moved");
  RunFolder second(run);
  second.keep();
  second.write_status({{"state", "running"}});
  rank1.write("of the first", ExitCode::hang, {.step = 1, .tokens = 10, .saved_step = -1});
  CHECK(status_of(run)["state"] == "running");
  CHECK(status_of(t.path + "/moved")["state"] == "running");
}

TEST_CASE("copies of the status that killed ranks left are removed by the next start", "[run][status]") {
  const TempFolder t;
  const std::string run = t.path + "/run";
  const auto start = [&] { RunFolder(run).keep(); };
  start();
  for (const char* left : {"status.json.rank3", "status.json.rank11.tmp", "status.json", "status.yaml.rank3"})
    io::write_file_atomic(run + "/" + left, "{}");
  start();
  CHECK(io::glob(run + "/status.json.*").empty());
  CHECK(io::exists(run + "/status.json"));
  CHECK(io::exists(run + "/status.yaml.rank3"));
}

}  // namespace sluice
