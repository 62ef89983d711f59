#pragma once
// Matrix products of the CPU backend: oneDNN for f32 and bf16, OpenBLAS for f64. Behind linear and
// cross-entropy. Primitives are built on first use and kept in Context::backend; their work memory comes from
// Context::scratch. For a fixed number of threads results repeat bit for bit. With another number the sums of
// a product may be cut differently (oneDNN may split k between threads when m and n are small), so f32 and
// bf16 bits may then differ.
#include <string>

#include "core/context.h"

namespace sluice::cpu {

/// c (m, n) = a (m, k) b (k, n), or c += with `accumulate`. Row-major; `transposed` says that the operand is
/// stored as its transpose.
struct Product {
  enum class Layout : uint8_t { plain, transposed, packed };
  DType in = DType::f32, out = DType::f32;  // of a and b; of c. out differs from in only for bf16 -> f32
  int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false;
  Layout b = Layout::plain;
  bool accumulate = false;
  int threads = 0;  // filled in by multiply

  bool operator==(const Product&) const = default;
};

/// Computes one product. In a dry run only its scratch is taken.
void multiply(Context& ctx, Product product, const void* a, const void* b, void* c);

/// The element type in which products with operands stored as `storage` are computed: bf16 where the
/// processor multiplies bf16 tiles (AMX), else f32 for bf16. Emulated bf16 products are five times slower
/// than f32 ones.
DType product_dtype(DType storage);

/// Bytes of the packed form of b (k, n), for products of any m; 0 where a packed copy gains nothing.
int64_t packed_bytes(Context& ctx, DType storage, int64_t k, int64_t n);

/// Writes the packed form of b (k, n); `b_transposed`: it is stored as (n, k).
void pack(Context& ctx, DType storage, int64_t k, int64_t n, bool b_transposed, const void* b, void* packed);

/// Which kernels the libraries have chosen for this processor and environment: "oneDNN avx512_core, OpenBLAS
/// SkylakeX".
std::string library_kernels();

}  // namespace sluice::cpu
