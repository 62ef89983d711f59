#pragma once
// Context, the first argument of every op.
#include <memory>
#include <set>

#include "core/arena.h"
#include "core/device.h"
#include "core/profile.h"

namespace sluice {

/// State that a backend keeps between calls (primitives, plans, handles). Created by the backend on first
/// use.
struct BackendState {
  virtual ~BackendState() = default;
};

struct GpuProduct;
struct ProductAlgorithms;

struct Context {
  Device device = Device::cpu;
  /// Ops check their arguments and allocate their temporaries, but compute nothing. One dry step measures the
  /// memory of a step, and `sluice plan` needs no memory at all. Tensors may have null data.
  bool dry_run = false;
  /// On a GPU: use only deterministic reduction orders. (On a CPU all are deterministic.)
  bool deterministic = true;
  /// On a CPU: what is computed of a token has the same bits whichever tokens are computed with it, and
  /// however many (parallel.determinism: exact). Sums over tokens need the same tokens. The fastest matrix
  /// products choose their order by the number of rows.
  bool independent_rows = false;
  Arena scratch;
  std::unique_ptr<BackendState> backend;  // lives as long as the context
  Profile* profile = nullptr;             // receives the times of ops; may be null
  /// On a GPU (ops/product_algorithms.h): receives the matrix products of a dry run; may be null.
  std::set<GpuProduct>* products = nullptr;
  /// On a GPU: which algorithms compute matrix products; of others, or null, the library's heuristic decides.
  const ProductAlgorithms* algorithms = nullptr;

  /// scratch_capacity is in bytes; 0 makes a dry-run context that measures.
  explicit Context(int64_t scratch_capacity, Device device_ = Device::cpu)
      : device(device_), dry_run(scratch_capacity == 0), scratch("scratch", scratch_capacity, device_) {}
};

}  // namespace sluice
