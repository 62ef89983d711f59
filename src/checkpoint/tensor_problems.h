#pragma once
// What is wrong with the tensors of a file or folder, summed up: a model of another width is told in a line,
// not in one for every tensor.
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
  /// Tensors that are concerned.
  size_t count() const { return missing_.size() + unexpected_.size() + shapes_.size() + others_.size(); }
  /// A line each for: sizes of the model that differ ("hidden_size: folder 96, configuration 128"), tensors
  /// of one name in several layers, and what is left. `source`: how the place where tensors are stored is
  /// called.
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
