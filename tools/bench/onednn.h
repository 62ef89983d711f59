#pragma once
// A library's products beside Sluice's own, for `sluice bench matmul` on a CPU.
#include <cstdint>
#include <memory>

#include "ops/matmul.h"

namespace sluice::bench {

/// oneDNN's product of bf16 matrices. With Layout::packed, b is kept in the layout that oneDNN prefers for
/// it.
class OneDnnProduct {
 public:
  /// Error(internal) where oneDNN refuses it.
  explicit OneDnnProduct(const cpu::Product& product);
  ~OneDnnProduct();
  OneDnnProduct(OneDnnProduct&&) noexcept;
  OneDnnProduct& operator=(OneDnnProduct&&) = delete;

  /// Of a packed product: b (k, n), or stored as (n, k).
  void pack(const void* b, bool transposed);
  /// b is ignored where it is packed.
  void run(const void* a, const void* b, void* c);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::bench
