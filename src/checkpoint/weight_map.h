#pragma once
// How the tensors of another program's files correspond to those of the model (made by hf/layouts.h).
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
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
  /// A matrix of ours whose element (r, c) is stored element first + r row + c column, as of a transposed
  /// matrix, or of every second row; a vector is a matrix of one column.
  struct Strides {
    int64_t first = 0, columns = 1, row = 0, column = 0;

    /// Calls f(i, place) with the stored places of our elements [begin, begin + count), i from 0.
    template <class F>
    void for_each(int64_t begin, int64_t count, F&& f) const {
      int64_t r = begin / columns, c = begin % columns;
      for (int64_t i = 0; i < count; ++i) {
        f(i, first + r * row + c * column);
        if (++c == columns) c = 0, ++r;
      }
    }
  };
  /// The same tensor in MXFP4 (checkpoint/mxfp4.h), which is read where NAME_blocks (scales..., 16) and
  /// NAME_scales (scales...) are stored in place of NAME. Our row r is row first + r step of the blocks,
  /// whose rows have as many values as ours.
  struct Mxfp4 {
    std::vector<int64_t> scales;
    int64_t first = 0, step = 1, columns = 0;
  };
  std::string name;            // of the stored tensor
  std::vector<int64_t> shape;  // of the stored tensor
  std::vector<Run> runs;       // which follow each other in our tensor's row-major order; empty: all of it
  double plus = 0;             // our value = stored value + plus (norms that are stored as w - 1)
  std::optional<Strides> strides = {};  // in place of runs
  std::optional<Mxfp4> mxfp4 = {};
};

/// One element of 1, 2, 4 or 8 bytes.
inline void copy_element(unsigned char* to, const unsigned char* from, int64_t bytes) {
  switch (bytes) {
    case 2:
      std::memcpy(to, from, 2);
      break;
    case 4:
      std::memcpy(to, from, 4);
      break;
    default:
      std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

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
  bool rounded = false;              // some of the files' values have more digits than a bf16 of the model
};

}  // namespace sluice
