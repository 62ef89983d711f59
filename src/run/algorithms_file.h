#pragma once
// RUN/matmul_algorithms.json: which algorithms compute the matrix products of a run on a GPU, by card and
// version of cuBLASLt. A resumed run reads it, so that its bits repeat, and so does a new run into whose
// folder it was copied.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ops/product_algorithms.h"

namespace sluice {

constexpr const char* kAlgorithmsFile = "matmul_algorithms.json";

struct CardAlgorithms {
  ProductCard card;
  ProductAlgorithms algorithms;
};

nlohmann::ordered_json product_json(const GpuProduct& product);
/// Error(data) names `path`.
GpuProduct read_product(const nlohmann::json& json, const std::string& path);

/// The file's text, with a checksum, and back. Error(data) names `path`, whatever the text.
std::string algorithms_text(const std::vector<CardAlgorithms>& cards);
std::vector<CardAlgorithms> read_algorithms(const std::string& text, const std::string& path);

}  // namespace sluice
