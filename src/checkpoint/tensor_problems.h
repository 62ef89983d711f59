#pragma once
// Summarises the problems of the tensors in a file or folder: a model of another width is reported in one
// line, not in one per tensor.
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "checkpoint/stored_tensors.h"

namespace sluice {

class TensorProblems {
 public:
  void missing(const TensorShape& wanted) { missing_.push_back({wanted.name, wanted.shape, ""}); }
  void unexpected(const StoredTensor& stored) {
    unexpected_.push_back({stored.name, stored.shape, stored.dtype});
  }
  void shape(const StoredTensor& stored, const TensorShape& wanted);
  void other(std::string line) { others_.push_back(std::move(line)); }

  bool empty() const { return count() == 0; }
  /// Number of affected tensors.
  size_t count() const { return missing_.size() + unexpected_.size() + shapes_.size() + others_.size(); }
  /// One line for each model size that differs ("hidden_size: folder 96, configuration 128"), for each tensor
  /// name over all its layers, and for each remaining problem. `source`: what to call the place where the
  /// tensors are stored.
  std::vector<std::string> lines(const std::string& source) const;

 private:
  struct One {
    std::string name;
    std::vector<int64_t> shape;
    std::string dtype;  // empty: not stored
  };
  struct Shape {
    One stored;
    std::vector<int64_t> wanted;
  };
  std::vector<One> missing_, unexpected_;
  std::vector<Shape> shapes_;
  std::vector<std::string> others_;
};

}  // namespace sluice
