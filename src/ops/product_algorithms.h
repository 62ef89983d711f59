#pragma once
// Which of a library's algorithms computes a matrix product on a GPU. The library's heuristic proposes some
// in the order in which it expects them to be fast; timing them finds the fastest. The algorithm decides the
// bits of the result, so what was found is kept and used again (run/timed_products.h).
#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "core/context.h"

namespace sluice {

/// c (m, n) = a (m, k) b (k, n), or c += with `accumulate`. Row-major; `transposed` says that the operand is
/// stored as its transpose. in and out: f32 and f32 (full f32 arithmetic, no TF32), bf16 and bf16, or bf16
/// and f32; sums in f32.
struct GpuProduct {
  DType in = DType::f32, out = DType::f32;  // of a and b; of c
  int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false, b_transposed = false, accumulate = false;
  /// Elements from one stored row to the next; 0: rows follow each other without a gap.
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;

  auto operator<=>(const GpuProduct&) const = default;
};

struct ProductAlgorithm {
  std::array<uint64_t, 8> words{};  // as the library describes it, of use to the same version of it alone
  double us = 0;                    // median of its times
  double heuristic_us = 0;          // that of the heuristic's first algorithm; 0 where it was not timed
  bool bits_repeat = true;          // whether two runs on the same operands gave the same bits
};

/// For products whose operands lie at multiples of 16 bytes.
struct ProductAlgorithms {
  std::map<GpuProduct, ProductAlgorithm> by_product;

  /// Null where the heuristic decides.
  const ProductAlgorithm* find(const GpuProduct& product) const {
    const auto found = by_product.find(product);
    return found == by_product.end() ? nullptr : &found->second;
  }
};

/// What times and algorithms belong to.
struct ProductCard {
  std::string name;
  int64_t compute_capability = 0;  // times ten
  int64_t multiprocessors = 0;
  int64_t library = 0;  // version of cuBLASLt

  bool operator==(const ProductCard&) const = default;
  std::string text() const;  // "NVIDIA H200, compute capability 9.0, 132 multiprocessors, cuBLASLt 130002"
};

/// Of the context's GPU. This and what follows: only on a GPU.
ProductCard product_card(Context& ctx);

/// The fastest of the heuristic's first 16 algorithms that run and, where ctx.deterministic, give the same
/// bits twice: by the median of five times in turns, each with operands that no cache holds. One that the
/// heuristic prefers wins where it is at most 1 % slower. Operands and result lie in ctx.scratch.
/// Error(internal) where no algorithm is left. A dry run only allocates.
ProductAlgorithm fastest_algorithm(Context& ctx, const GpuProduct& product);

/// Whether the library takes the algorithm for this product.
bool computes(Context& ctx, const ProductAlgorithm& algorithm, const GpuProduct& product);

/// The fastest algorithm of each product, timed one after the other in memory that is freed again. Nothing
/// else should use the GPU meanwhile.
ProductAlgorithms time_products(const std::set<GpuProduct>& products, bool deterministic);

}  // namespace sluice
