#pragma once
// Argument checks at the entry points of ops, with the names of op and argument in the message.
#include "core/context.h"

namespace sluice {

/// Storage types the kernels compute with.
inline void check_floating(const char* op, const char* argument, const Tensor& t) {
  SLUICE_CHECK(t && (t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::f64),
               "{}: {} must be f32, bf16 or f64, got {}", op, argument, t.describe());
  SLUICE_CHECK(t.contiguous(), "{}: {} must be contiguous, got {}", op, argument, t.describe());
}

/// Equal shape and dtype, whatever lies between the rows.
inline void check_rows_like(const char* op, const char* argument, const Tensor& t, const Tensor& reference) {
  SLUICE_CHECK(t.dtype == reference.dtype && t.rank == reference.rank && t.shape == reference.shape,
               "{}: {} must be {}, got {}", op, argument, reference.describe(), t.describe());
}

/// Equal shape and dtype, and contiguous.
inline void check_like(const char* op, const char* argument, const Tensor& t, const Tensor& reference) {
  check_rows_like(op, argument, t, reference);
  SLUICE_CHECK(t.contiguous(), "{}: {} must be contiguous, got {}", op, argument, t.describe());
}

/// Equal element count, and the given dtype.
inline void check_count(const char* op, const char* argument, const Tensor& t, DType dtype, int64_t count) {
  SLUICE_CHECK(t.contiguous() && t.dtype == dtype && t.numel() == count,
               "{}: {} must hold {} elements of {}, got {}", op, argument, count, dtype_name(dtype),
               t.describe());
}

}  // namespace sluice
