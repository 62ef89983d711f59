#pragma once
// Logits that transformers wrote beside a folder: {"input_ids": [...], "logits_f64": [[...]]}.
#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/io.h"
#include "support/model.h"

namespace sluice::test {

class GoldenLogits {
 public:
  explicit GoldenLogits(const std::string& folder)
      : json_(nlohmann::json::parse(io::read_file(folder + "/logits.json"))) {}

  TokenBatch batch() const {
    const auto ids = json_.at("input_ids").get<std::vector<int32_t>>();
    TokenBatch batch;
    batch.add(ids);
    // add() uses the last token only as a target; here it is also an input.
    batch.tokens.push_back(ids.back());
    batch.targets.push_back(-1);
    batch.positions.push_back(static_cast<int32_t>(ids.size()) - 1);
    batch.first_key.push_back(0);
    return batch;
  }

  /// ||logits - golden|| / ||golden||
  double error(const std::vector<double>& logits) const {
    double difference = 0, norm = 0;
    size_t i = 0;
    for (const auto& row : json_.at("logits_f64"))
      for (const double expected : row) {
        difference += (logits.at(i) - expected) * (logits.at(i) - expected);
        norm += expected * expected;
        ++i;
      }
    CHECK(i == logits.size());
    return std::sqrt(difference / norm);
  }

 private:
  nlohmann::json json_;
};

}  // namespace sluice::test
