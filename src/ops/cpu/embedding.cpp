#include "ops/embedding.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

/// Checked before threads start, because an exception must not leave a parallel region.
inline void check_tokens(const char* op, const Tensor& tokens, int64_t vocab_size) {
  const int32_t* token = tokens.as<int32_t>();
  for (int64_t t = 0; t < tokens.numel(); ++t)
    if (token[t] < 0 || token[t] >= vocab_size)
      fail(ExitCode::data, "{}: token {} at position {} is outside the vocabulary of {}", op, token[t], t,
           vocab_size);
}

void embedding_forward(Context& ctx, Tensor y, const Tensor& tokens, const Tensor& weight) {
  if (ctx.dry_run) return;
  check_tokens("embedding_forward", tokens, weight.dim(0));
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    const int64_t width = y.dim(1);
    const int32_t* token = tokens.as<int32_t>();
    parallel_for(y.dim(0), 32768 / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        std::copy_n(weight.as<T>() + token[t] * width, width, y.as<T>() + t * width);
    });
  });
}

void embedding_backward(Context& ctx, Tensor dweight, const Tensor& dy, const Tensor& tokens) {
  if (ctx.dry_run) return;
  check_tokens("embedding_backward", tokens, dweight.dim(0));
  with_storage_type(dy.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t width = dy.dim(1);
    const int32_t* token = tokens.as<int32_t>();
    // Columns are divided among threads in whole cache lines, so that each element is summed by one thread in
    // the order of the tokens.
    constexpr int64_t kColumns = 64;
    parallel_for((width + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kColumns, count = std::min(end * kColumns, width) - first;
      for (int64_t t = 0; t < dy.dim(0); ++t) {
        const T* source = dy.as<T>() + t * width + first;
        A* sink = dweight.as<A>() + token[t] * width + first;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) sink[i] += load(source + i);
      }
    });
  });
}

#include "ops/cpu/isa_end.h"
