// scripts/report on synthetic runs: it plots what exists and skips what does not.
#include <cstdlib>
#include <filesystem>

#include "core/io.h"
#include "data/temporary.h"

namespace sluice {
namespace {

using namespace test;

/// Exit code of `scripts/report ARGUMENTS`, output in folder/out.
int report(const TemporaryFolder& folder, const std::string& arguments) {
  const std::string command =
      fmt::format("{}/scripts/report {} > {} 2>&1", SLUICE_SOURCE_DIR, arguments, folder / "out");
  return WEXITSTATUS(std::system(command.c_str()));
}

void write_run(const std::string& path, bool gates, const std::string& tail) {
  std::filesystem::create_directories(path);
  std::string metrics, evals;
  for (int step = 10; step <= 200; step += 10) {
    metrics += fmt::format(
        "{{\"schema\":1,\"step\":{},\"samples\":{},\"tokens\":{},\"loss\":{},\"grad_norm\":0.5,\"lr\":1e-3,"
        "\"tokens_per_second\":1000,\"seconds\":1,\"spikes\":{},\"skipped\":0}}\n",
        step, step, step * 100, step == 50 ? "null" : fmt::format("{}", 5.0 / step), step > 100 ? 1 : 0);
  }
  for (int step : {0, 100, 200}) {
    evals += fmt::format(
        "{{\"schema\":1,\"step\":{},\"tokens\":{},\"sets\":{{\"kjv\":{{\"loss\":1.25,\"perplexity\":3.49,"
        "\"bits_per_byte\":1.803,\"tokens\":77}}}},\"analysis\":{{\"layers\":[{{\"first_token_attention\":0."
        "25,"
        "\"gate_scores\":[{}],\"attention_residual_max\":3,\"ffn_residual_max\":4}}],\"first_token_"
        "attention\":0.25,"
        "\"mean_gate_score\":{},\"largest_residual\":4}}}}\n",
        step, step * 100, gates ? "0.125" : "", gates ? "0.125" : "null");
  }
  write_bytes(path + "/metrics.jsonl", metrics + tail);
  write_bytes(path + "/eval.jsonl", evals);
  write_bytes(path + "/run.json", "{\"name\":\"same\",\"parameters\":1234567,\"config_hash\":\"h\"}");
}

}  // namespace

TEST_CASE("a report has losses by position and RULER beside the paper's table", "[report]") {
  TemporaryFolder folder;
  write_run(folder / "long", false, "");
  write_bytes(
      folder / "long/eval.jsonl",
      R"({"step": 200, "tokens": 20000, "sets": {"kjv": {"loss": 1.5, "tokens": 9, "by_position": [)"
      R"({"from": 0, "to": 64, "loss": 2, "tokens": 4}, {"from": 64, "to": 100, "loss": 1, "tokens": 5}]}},)"
      R"( "ruler": [{"task": "niah_single_1", "length": 256, "samples": 4, "accuracy": 0.5, "loss": 9}]})"
      "\n");
  std::filesystem::create_directories(folder / "long/ruler");
  write_bytes(
      folder / "long/ruler/step_00000200.json",
      R"({"step": 200, "yarn": 1.0, "cells": [{"task": "vt", "length": 4096, "samples": 2, "score": 33.3}],)"
      R"( "average": {"4096": 33.3}, "depths": [{"task": "niah_single_1", "length": 4096, "depth": 50,)"
      R"( "samples": 2, "score": 50}]})");
  write_bytes(folder / "long/ruler/step_00000300.json", "torn");
  const int code = report(folder, fmt::format("{} -o {}", folder / "long", folder / "page"));
  const std::string out = io::read_file(folder / "out");
  if (out.find("matplotlib is missing") != std::string::npos) {
    WARN("skipped: no Python with matplotlib");
    return;
  }
  INFO(out);
  REQUIRE(code == 0);
  for (const char* name : {"loss_by_position", "ruler_depths", "ruler_choice"})
    CHECK(io::exists(folder / "page/" + name + ".svg"));
  CHECK(io::read_file(folder / "page/tables/ruler.csv").find("vt,33.3") != std::string::npos);
  CHECK(io::read_file(folder / "page/tables/ruler.csv").find("the paper's 1.7B gate, trained at 32k\"") !=
        std::string::npos);
  CHECK_THAT(io::read_file(folder / "page/tables/ruler.csv"), Catch::Contains("90.6"));
}

TEST_CASE("a report of two runs has the table, the plots and one page", "[report]") {
  TemporaryFolder folder;
  write_run(folder / "plain", false, "{\"schema\":1,\"st");  // truncated, as a killed run leaves it
  write_run(folder / "gated", true, "");
  const int code =
      report(folder, fmt::format("{} {} -o {}", folder / "plain", folder / "gated", folder / "page"));
  const std::string out = io::read_file(folder / "out");
  if (out.find("matplotlib is missing") != std::string::npos) {
    WARN("skipped: no Python with matplotlib");
    return;
  }
  INFO(out);
  REQUIRE(code == 0);
  // Equal names are replaced by folder names.
  for (const char* part :
       {"plain", "gated", "1.23M", "1.2500", "1.8030", "0.125", "3.49", "page/report.html"}) {
    CHECK_THAT(out, Catch::Contains(part));
  }
  const std::string page = io::read_file(folder / "page/report.html");
  size_t pictures = 0;
  for (size_t at = page.find("data:image/png;base64,"); at != std::string::npos;
       at = page.find("data:image", at + 1)) {
    ++pictures;
  }
  CHECK(pictures == 10);
  CHECK(page.find("src=\"http") == std::string::npos);  // it needs nothing else
  // Ten pictures in three formats, report.html, report.md and the folder of the tables.
  CHECK(io::list_directory(folder / "page").size() == 3 * 10 + 3);
  for (const char* name : {"overview.csv", "overview.tex", "differences_to_the_control.csv"})
    CHECK(io::exists(folder / "page/tables/" + name));
  CHECK(io::read_file(folder / "page/train_loss.pdf").find("%PDF") == 0);
  CHECK_THAT(io::read_file(folder / "page/train_loss.svg"), Catch::Contains("</svg>"));

  // A run that has just started.
  std::filesystem::remove(folder / "plain/eval.jsonl");
  std::filesystem::remove(folder / "plain/run.json");
  write_bytes(folder / "plain/metrics.jsonl", "{\"step\":1,\"tokens\":5,\"loss\":5.5,\"lr\":0}\n");
  CHECK(report(folder, fmt::format("{} -o {}", folder / "plain", folder / "early")) == 0);
  CHECK(io::exists(folder / "early/train_loss.png"));
  CHECK_FALSE(io::exists(folder / "early/gate_score.png"));
  CHECK_FALSE(io::exists(folder / "early/logit_z_loss.png"));

  // Numbers of losses that the report has never heard of, and names that are no file's.
  write_bytes(
      folder / "plain/metrics.jsonl",
      "{\"step\":1,\"tokens\":5,\"loss\":5.5,\"logit_z_loss\":2.5,\"indexer\":{\"kl\":1,\"layers\":[1]},"
      "\"../outside\":3}\n");
  CHECK(report(folder, fmt::format("{} -o {}", folder / "plain", folder / "losses")) == 0);
  CHECK(io::exists(folder / "losses/logit_z_loss.png"));
  CHECK(io::exists(folder / "losses/indexer_kl.png"));
  CHECK_FALSE(io::exists(folder / "losses/indexer_layers.png"));
  CHECK_FALSE(io::exists(folder / "outside.png"));

  CHECK(report(folder, fmt::format("{} -o {}", folder / "none", folder / "page")) == 66);
}

}  // namespace sluice
