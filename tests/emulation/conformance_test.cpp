// The emulator against what the documents say of every PTX wrapper, and, once a GPU has run the same
// micro-tests, against what it did (conformance/conformance.h).
#include "conformance/conformance.h"

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "seam.h"

namespace sluice::conformance {
namespace {

std::vector<Dump> run_all() {
  std::vector<Dump> dumps = run_ampere();
  for (Dump& d : run_hopper()) dumps.push_back(std::move(d));
  return dumps;
}

TEST_CASE("every PTX wrapper follows the PTX documents in every schedule", "[conformance]") {
  const std::vector<Dump> right = expected();
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const uint64_t before = emu::seed();
    emu::set_seed(seed);
    const std::vector<Dump> dumps = run_all();
    emu::set_seed(before);
    REQUIRE(dumps.size() == right.size());
    for (size_t i = 0; i < dumps.size(); ++i) {
      INFO(dumps[i].name << " (" << right[i].name << "), seed " << seed);
      REQUIRE(dumps[i].words.size() == right[i].words.size());
      size_t first = 0;
      while (first < right[i].words.size() && dumps[i].words[first] == right[i].words[first]) ++first;
      INFO("first difference at word " << first);
      CHECK(agree(dumps[i], right[i]));
    }
  }
}

TEST_CASE("every PTX wrapper matches the golden results of a GPU, if there are any", "[conformance]") {
  std::ifstream file(SLUICE_SOURCE_DIR "/tests/golden/ptx_conformance.json");
  if (!file) {
    WARN("no GPU has written tests/golden/ptx_conformance.json yet");
    return;
  }
  const nlohmann::json golden = nlohmann::json::parse(file);
  INFO("golden of " << golden.at("source").get<std::string>());
  for (const Dump& d : run_all()) {
    if (!golden.at("tests").contains(d.name)) continue;  // written on a card older than sm_90
    INFO(d.name);
    const nlohmann::json& test = golden.at("tests").at(d.name);
    if (d.approximate)
      CHECK(agree(d, {d.name, test.at("words").get<std::vector<uint32_t>>(), true}));
    else
      CHECK(hash(d.words) == test.at("hash").get<uint64_t>());
  }
}

}  // namespace
}  // namespace sluice::conformance
