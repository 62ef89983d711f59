#pragma once
// Matrix products of the CPU backend, used by linear and cross-entropy: oneDNN for f32 and bf16, OpenBLAS for
// f64. Primitives are created on first use and kept in Context::backend; their workspace comes from
// Context::scratch. For a fixed number of threads results are bitwise reproducible. With another number of
// threads oneDNN may split k differently when m and n are small, so f32 and bf16 results may differ in bits.
// With Context::independent_rows a row of c has bits that do not depend on m, unless a is stored transposed.
#include <string>

#include "core/context.h"

namespace sluice::cpu {

/// c (m, n) = a (m, k) b (k, n), or c += with `accumulate`. Row-major; `transposed` means that the operand is
/// stored transposed.
struct Product {
  enum class Layout : uint8_t { plain, transposed, packed };
  DType in = DType::f32,
        out = DType::f32;  // in: type of a and b; out: type of c, different only for bf16 -> f32
  int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false;
  Layout b = Layout::plain;
  bool accumulate = false;
  int threads = 0;  // filled in by multiply

  bool operator==(const Product&) const = default;
};

/// Computes one product. A dry run only allocates its scratch memory.
void multiply(Context& ctx, Product product, const void* a, const void* b, void* c);

/// The element type of products whose operands are stored as `storage`: for bf16, bf16 where bf16_products() says
/// so (core/cpu_features.h), else f32, because emulated bf16 products are five times slower than f32.
DType product_dtype(DType storage);

/// Bytes of the packed form of b (k, n), for products with any m; 0 if packing gains nothing, or
/// Context::independent_rows does not use it.
int64_t packed_bytes(Context& ctx, DType storage, int64_t k, int64_t n);

/// Writes the packed form of b (k, n); `b_transposed`: it is stored as (n, k).
void pack(Context& ctx, DType storage, int64_t k, int64_t n, bool b_transposed, const void* b, void* packed);

/// What oneDNN computes itself: the products of f32 that multiply() leaves to it, and those of bf16, which
/// the kernels' own are measured against. A packed b has its own form, of `library_packed_bytes` bytes.
void library_multiply(Context& ctx, Product product, const void* a, const void* b, void* c);
int64_t library_packed_bytes(Context& ctx, DType type, int64_t k, int64_t n);
void library_pack(Context& ctx, DType type, int64_t k, int64_t n, bool b_transposed, const void* b,
                  void* packed);

/// The kernels that the libraries selected for this processor and environment: "oneDNN avx512_core, OpenBLAS
/// SkylakeX".
std::string library_kernels();

}  // namespace sluice::cpu
