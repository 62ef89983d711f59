#include "run/trace.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <set>

#include "support/tiny_training.h"

namespace sluice {

TEST_CASE("a trace contains every op of a step, in order, within the step's time", "[trace]") {
  test::TinyTraining tiny;
  const Blend data = tiny.blend();
  Trainer trainer(tiny.config, data);
  trainer.initialize();
  trainer.step();
  Profile profile;
  profile.keep_timeline();
  trainer.context().profile = &profile;
  const auto start = std::chrono::steady_clock::now();
  trainer.step();
  const double whole = 1e6 * std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  trainer.context().profile = nullptr;

  const nlohmann::json trace = nlohmann::json::parse(chrome_trace(profile, "cpu"));
  std::set<std::string> ops;
  double end = 0;
  int64_t events = 0;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    ++events;
    ops.insert(event["name"].get<std::string>());
    CHECK(event["ts"].get<double>() >= end - 1e-3);  // ops do not overlap
    end = event["ts"].get<double>() + event["dur"].get<double>();
  }
  CHECK(end <= whole);
  CHECK(end > 0.2 * whole);
  for (const char* op :
       {"embedding_forward", "linear_forward", "attention_forward", "gate_backward", "adamw_update"})
    CHECK(ops.count(op) == 1);
  int64_t calls = 0;
  for (const Profile::Entry& entry : profile) calls += entry.calls;
  CHECK(events == calls);
}

}  // namespace sluice
