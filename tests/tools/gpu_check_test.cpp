// scripts/gpu_check without a GPU: it reports this or, on request, runs its steps on an emulated one.
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/device.h"
#include "tools/tiny_run.h"

namespace sluice::test {
namespace {

using Catch::Matchers::Contains;

/// Runs the script; `before` sets its environment.
Outcome gpu_check(const TemporaryFolder& folder, const std::string& before, const std::string& arguments) {
  const std::string out = folder / "out.txt", err = folder / "err.txt";
  const std::string command =
      before + " " SLUICE_SOURCE_DIR "/scripts/gpu_check " + arguments + " >" + out + " 2>" + err;
  Outcome o;
  o.code = WEXITSTATUS(std::system(command.c_str()));
  o.out = io::read_file(out), o.err = io::read_file(err);
  return o;
}

void write_program(const std::string& path, const std::string& script) {
  write_bytes(path, "#!/bin/sh\n" + script + "\n");
  REQUIRE(chmod(path.c_str(), 0755) == 0);
}

}  // namespace

TEST_CASE("gpu_check reports clearly that there is no GPU", "[gpu_check]") {
  const TemporaryFolder folder;
  write_program(folder / "nvidia-smi", "echo 'No devices were found'; exit 6");
  const Outcome o = gpu_check(folder, "PATH=" + folder.path + ":$PATH", "--out " + (folder / "result"));
  CHECK(o.code == 2);
  CHECK_THAT(o.err, Contains("no GPU"));
  CHECK_FALSE(io::exists(folder / "result"));
}

TEST_CASE("gpu_check fails if a step fails, hangs or tests nothing, and reports it in table and JSON",
          "[gpu_check]") {
  const TemporaryFolder folder;
  write_program(folder / "sluice", "exit 0");
  const std::string before = "SLUICE_GPU_CHECK_EMULATED=1",
                    arguments = "--build " + folder.path + " --only parity --out " + (folder / "result");
  for (const char* script : {"echo bad news; exit 1", "echo No tests ran"}) {
    write_program(folder / "test_cuda", script);
    const Outcome o = gpu_check(folder, before, arguments);
    INFO(script << o.out << o.err);
    CHECK(o.code == 1);
    CHECK_THAT(o.out, Contains("FAILED: parity"));
    const auto result = nlohmann::json::parse(io::read_file(folder / "result/gpu_check.json"));
    CHECK(result["emulated"] == true);
    CHECK(result["steps"][0]["result"] == "FAILED");
  }
  write_program(folder / "test_cuda", "echo all well");
  const Outcome o = gpu_check(folder, before, arguments);
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("all well"));
}

TEST_CASE("gpu_check runs all its steps on an emulated GPU", "[gpu_check]") {
  const std::vector<DeviceInfo> devices = cuda_devices();
  if (devices.empty() || !devices[0].emulated) {
    WARN("skipped: not an emulated build");
    return;
  }
  const TemporaryFolder folder;
  const char* binary = std::getenv("SLUICE_BINARY");
  REQUIRE(binary);
  const std::string build = std::string(binary).substr(0, std::string(binary).rfind('/'));
  const Outcome o =
      gpu_check(folder, "SLUICE_GPU_CHECK_EMULATED=1", "--build " + build + " --out " + (folder / "result"));
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  const auto result = nlohmann::json::parse(io::read_file(folder / "result/gpu_check.json"));
  std::map<std::string, std::string> steps;
  for (const auto& row : result["steps"]) steps[row["step"]] = row["result"];
  for (const char* name :
       {"parity-elementwise", "parity-linear", "parity-linear-1", "losses", "bench-kernels", "bench-matmul",
        "bench-attention", "bench-moe", "bench-sparse", "bench-step"}) {
    INFO(name);
    CHECK(steps[name] == "passed");
  }
  for (const char* name : {"memcheck", "racecheck", "synccheck"}) CHECK(steps[name] == "skipped");
  CHECK(result["bench"]["kernels"]["kernels"].size() > 15);

  const Outcome quick = gpu_check(folder, "SLUICE_GPU_CHECK_EMULATED=1 SLUICE_GPU_CHECK_TAG=linear",
                                  "--quick --build " + build + " --out " + (folder / "quick"));
  INFO(quick.out << quick.err);
  CHECK(quick.code == 0);
  const auto quick_result = nlohmann::json::parse(io::read_file(folder / "quick/gpu_check.json"));
  std::map<std::string, std::string> quick_steps;
  for (const auto& row : quick_result["steps"]) quick_steps[row["step"]] = row["result"];
  for (const char* name : {"parity-linear", "parity-linear-1", "bench-attention", "bench-step"})
    CHECK(quick_steps[name] == "passed");
  for (const char* name : {"losses", "memcheck"}) CHECK(quick_steps.count(name) == 0);
}

}  // namespace sluice::test
