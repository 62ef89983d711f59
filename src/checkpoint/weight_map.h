#pragma once
// How the tensors of another program's files correspond to those of the model (made by hf/layouts.h).
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

/// Where the values of one tensor of the model are stored.
struct WeightSource {
  /// Consecutive elements of the stored tensor, in its row-major order.
  struct Run {
    int64_t begin = 0, count = 0;
  };
  std::string name;            // of the stored tensor
  std::vector<int64_t> shape;  // of the stored tensor
  std::vector<Run> runs;       // which follow each other in our tensor's row-major order; empty: all of it
  double plus = 0;             // our value = stored value + plus (norms that are stored as w - 1)
};

struct WeightMap {
  /// By the name of our tensor. A tensor that is not listed has the same name, shape and values in both.
  std::map<std::string, WeightSource, std::less<>> sources;
  /// Stored tensors whose names begin or end so are left out: they do not belong to the model's function
  /// ("mtp.", "rotary_emb.inv_freq").
  std::vector<std::string> ignored;

  const WeightSource* find(std::string_view name) const {
    const auto found = sources.find(name);
    return found == sources.end() ? nullptr : &found->second;
  }
  bool ignores(std::string_view stored_name) const {
    for (const std::string& part : ignored)
      if (stored_name.starts_with(part) || stored_name.ends_with(part)) return true;
    return false;
  }
};

/// What load_weights does beyond copying tensors of the same names.
struct WeightAdoption {
  WeightMap map;
  /// Whether a tensor of the model may be missing in the files; none may where it is empty.
  std::function<bool(const std::string& name)> may_be_missing;
};

/// What load_weights has found.
struct WeightReport {
  int64_t loaded = 0;                // tensors of the model that were filled
  std::vector<std::string> missing;  // tensors of the model that are not stored, which keep their values
  std::vector<std::string> ignored;  // stored tensors that were left out
};

}  // namespace sluice
