// sluice bench at tiny sizes, on the CPU and, if the build has one, on a GPU (or its emulation). The numbers
// are meaningless, but every measurement runs.
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/cpu_features.h"
#include "core/device.h"
#include "tools/tiny_run.h"

namespace sluice::test {
namespace {

using Catch::Matchers::Contains;

void check_bench(const TinyRun& t, const std::string& device) {
  const std::string file = t.run + "-bench.json";
  const Outcome outcome =
      t.sluice({"bench", "kernels,matmul,attention,moe,sparse,step", "--device", device, "--size", "tiny",
                "--model", "tiny,tiny-moe", "--precision", "bf16", "--json", file});
  INFO(device << outcome.err);
  REQUIRE(outcome.code == 0);
  const auto result = nlohmann::json::parse(io::read_file(file));
  CHECK(result["device"] == device);

  std::set<std::string> kernels;
  for (const auto& row : result["kernels"]) {
    INFO(row.dump());
    kernels.insert(row["name"].get<std::string>());
    CHECK(row["us"].get<double>() > 0);
    CHECK(row["samples"] == 3);
    CHECK(row["percent_of_copy"].get<double>() > 0);
  }
  for (const char* name :
       {"copy", "add_rmsnorm_forward", "rmsnorm_backward", "norm_rope_backward", "gate_backward, elementwise",
        "swiglu_backward", "embedding_backward", "adamw_update", "sum_of_squares"})
    CHECK(kernels.count(name) == 1);
  int timed = 0;
  for (const auto& row : result["matmul"]) {
    INFO(row.dump());
    CHECK(row["tflops"].get<double>() > 0);
    if (row.value("algorithm", "") == "timed") {
      ++timed;
      CHECK(row["of_heuristic"].get<double>() > 0);
    }
    if (row.value("library", "") == "own") CHECK(row["of_onednn"].get<double>() > 0);
  }
  if (device == "cpu")
    CHECK(result["matmul"].size() == (bf16_products() && bf16_unit() != Bf16Unit::amx_emulated ? 8u : 0u));
  CHECK(2 * timed == (device == "cpu" ? 0 : static_cast<int>(result["matmul"].size())));
  int skipped = 0;
  for (const auto& row : result["attention"]) {
    INFO(row.dump());
    if (row.contains("skipped")) {
      ++skipped;
      CHECK(row["kernel"] == "cudnn");
      CHECK_THAT(row["skipped"].get<std::string>(), Contains("this build has no cuDNN"));
    } else {
      CHECK(row["tflops"].get<double>() > 0);
    }
  }
  // Forward and backward: without a gate and with either, with documents, with a sink, in any order, with the
  // norm of queries apart and in one.
  CHECK(result["attention"].size() == (device == "cpu" ? 16u : 48u));
  for (const auto& row : result["attention_check"]) {
    INFO(row.dump());
    if (row.contains("skipped")) continue;
    CHECK(row["same_bits"] == true);
    CHECK(row["difference"].get<double>() < 1e-2);
  }
  CHECK(result["attention_check"].size() == (device == "cpu" ? 1u : 3u));
  if (device == "cpu") CHECK(skipped == 0);
  int against_dense = 0;
  for (const auto& row : result["moe"]) {
    INFO(row.dump());
    CHECK(row["tflops"].get<double>() > 0);
    CHECK(row.contains("of_dense") == row.contains("experts"));
    if (!row.contains("of_dense")) continue;
    CHECK(row["of_dense"].get<double>() > 0);
    ++against_dense;
  }
  if (device == "cpu") {
    CHECK(result["sparse"].size() == 8);  // dense and sparse, layer and attention, forward and both passes
    for (const auto& row : result["sparse"]) CHECK(row.contains("of_dense") == (row["kernel"] != "dense"));
  } else {
    // Both attentions, forward and backward, the choice of keys, both losses; neighbours alike and unlike.
    REQUIRE(result["sparse"].size() == 14);
    for (const auto& row : result["sparse"]) {
      INFO(row.dump());
      CHECK(row["tflops"].get<double>() > 0);
      CHECK(row.contains("of_dense") ==
            (row["kernel"] == "sparse" && row["name"].get<std::string>().starts_with("attention")));
    }
    const auto unions = [&](size_t i) { return result["sparse"][i]["union_of_8_over_keys"].get<double>(); };
    CHECK(unions(0) >= 1);
    CHECK(unions(7) > 1.2 * unions(0));
  }
  CHECK(against_dense == 2);  // forward, and with backward
  REQUIRE(result["steps"].size() == 2);
  for (const auto& step : result["steps"]) {
    CHECK(step["loss"].get<double>() == Approx(std::log(61)).epsilon(0.2));  // random tokens of 61
    CHECK(step["memory_bytes"].get<double>() > 0);
  }
}

}  // namespace

TEST_CASE("bench measures kernels, products, attention, experts and steps on every device", "[bench]") {
  const TinyRun t;
  check_bench(t, "cpu");
  if (!cuda_devices().empty())
    check_bench(t, "cuda");
  else
    CHECK_THAT(t.sluice({"bench", "kernels", "--device", "cuda"}).err, Contains("bench: --device cuda"));
}

TEST_CASE("operations are compared with the peak of products of their own type", "[bench]") {
  const TinyRun t;
  const std::string file = t.folder / "ops.json";
  const Outcome o = t.sluice(
      {"bench", "peak,ops", "--size", "tiny", "--device", "cpu", "--seconds", "0.001", "--json", file});
  INFO(o.err);
  REQUIRE(o.code == 0);
  const auto result = nlohmann::json::parse(io::read_file(file));
  const std::string unit = result["bf16_products"],
                    key = (unit == "amx" ? "amx" : "bf16") + std::string("_gflops");
  const bool in_hardware = unit != "f32" && unit != "amx_emulated" && result["peak"][key] > 0;
  std::map<std::string, double> peaks;
  for (const auto& row : result["ops"]) {
    if (!row.contains("gflops")) continue;
    INFO(row.dump());
    const double peak = peaks[row["precision"]] = row["peak_gflops"];
    CHECK(row["percent_of_peak"].get<double>() == Approx(100 * row["gflops"].get<double>() / peak));
    CHECK(row["peak"] == (row["precision"] == "bf16" && in_hardware ? "bf16 peak" : "FMA peak"));
  }
  REQUIRE(peaks.size() == 2);
  if (in_hardware) CHECK(peaks["bf16"] != peaks["f32"]);
}

}  // namespace sluice::test
