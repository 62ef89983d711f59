// For evaluation: plain loops, bound by memory.
#include "ops/value_zeroing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/parallel_for.h"
#include "core/targets.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

void zero_first_values(Context& ctx, Tensor out, const Tensor& v, const Tensor& first_key) {
  if (ctx.dry_run || v.numel() == 0) return;
  const int64_t tokens = v.dim(0), row = v.bytes() / tokens;
  const int32_t* first = first_key.as<int32_t>();
  char* const to = static_cast<char*>(out.data);
  const char* const from = static_cast<const char*>(v.data);
  for (int64_t t = 0; t < tokens; ++t) {
    if (first[t] == t)
      std::memset(to + t * row, 0, static_cast<size_t>(row));
    else if (to != from)
      std::memcpy(to + t * row, from + t * row, static_cast<size_t>(row));
  }
}

void take_sink_heads(Context& ctx, Tensor o, const Tensor& other, const Tensor& lse, const Tensor& z0,
                     const Tensor& sink, const Tensor& first_key, const Tensor& targets, double threshold) {
  if (ctx.dry_run) return;
  const int64_t tokens = o.dim(0), heads = o.dim(1), depth = o.dim(2);
  const int32_t *first = first_key.as<int32_t>(), *target = targets.as<int32_t>();
  with_storage_type(o.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    parallel_for(heads, 1, [&](int64_t from, int64_t to) {
      for (int64_t h = from; h < to; ++h) {
        const A *l = lse.as<A>() + h * tokens, *z = z0.as<A>() + h * tokens;
        for (int64_t start = 0, end = 0; start < tokens; start = end) {
          double sum = 0;
          int64_t count = 0;
          for (; end < tokens && first[end] == first[start]; ++end) {
            if (target[end] == kPadding) continue;
            A a = exp_fast(std::min(z[end] - l[end], A(0)));
            if (sink && sink.rank == 2)
              a *= sigmoid(l[end] - sink.as<A>()[h * tokens + end]);
            else if (sink)
              a *= sigmoid(l[end] - load(sink.as<T>() + h));
            sum += static_cast<double>(a);
            ++count;
          }
          if (!(sum > threshold * static_cast<double>(count))) continue;
          for (int64_t t = start; t < end; ++t) {
            const int64_t at = (t * heads + h) * depth;
            std::copy_n(other.as<T>() + at, depth, o.as<T>() + at);
          }
        }
      }
    });
  });
}

#include "ops/cpu/isa_end.h"
