#pragma once
// The tensors of a training, whichever ranks hold what of them.
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "checkpoint/content.h"

namespace sluice::test {

/// All tensors of a run, for any sharding.
class WholeState {
 public:
  void add(const CheckpointContent& content) {
    const std::scoped_lock lock(mutex_);
    for (const auto* tensors : {&content.weights, &content.optimizer})
      for (const NamedTensor& t : *tensors) {
        int64_t elements = 1;
        for (const int64_t d : t.shape) elements *= d;
        const auto size = static_cast<size_t>(dtype_size(t.tensor.dtype));
        std::string& whole = tensors_[t.name];
        whole.resize(static_cast<size_t>(t.shape.empty() ? t.tensor.numel() : elements) * size, '?');
        std::memcpy(whole.data() + static_cast<size_t>(t.begin) * size, t.tensor.data,
                    static_cast<size_t>(t.tensor.bytes()));
        filled_ += t.tensor.bytes();
      }
  }
  /// Every tensor's bytes by its name.
  const std::map<std::string, std::string>& tensors() const { return tensors_; }
  /// All bits in the order of names; every element must have been given exactly once.
  std::string bits() const {
    std::string all;
    for (const auto& [name, bytes] : tensors_) all += name + bytes;
    int64_t expected = 0;
    for (const auto& [name, bytes] : tensors_) expected += std::ssize(bytes);
    if (filled_ != expected) throw std::runtime_error("not every element was given once");
    return all;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> tensors_;
  int64_t filled_ = 0;
};

}  // namespace sluice::test
