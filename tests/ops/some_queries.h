#pragma once
// Queries that are any of the keys (own_key, ops/attention.h): two chunks of a sequence, as a rank has them.
#include <utility>
#include <vector>

#include "support/gradcheck.h"

namespace sluice::test {

struct SomeQueries {
  std::vector<int64_t> tokens;
  Tensor own_key, first_key;  // first_key: relative

  /// Two of the four chunks of `count` tokens, whose first keys are first_keys (count).
  SomeQueries(Pool& pool, int64_t count, const std::pair<int64_t, int64_t>& chunks,
              const Tensor& first_keys) {
    for (const int64_t chunk : {chunks.first, chunks.second})
      for (int64_t i = 0; i < count / 4; ++i) tokens.push_back(chunk * (count / 4) + i);
    own_key = pool.zeros(DType::i32, {size()});
    first_key = pool.zeros(DType::i32, {size()});
    for (int64_t i = 0; i < size(); ++i) {
      const auto t = static_cast<int32_t>(tokens[static_cast<size_t>(i)]);
      own_key.as<int32_t>()[i] = t;
      first_key.as<int32_t>()[i] = first_keys.as<int32_t>()[t] - t + static_cast<int32_t>(i);
    }
  }
  int64_t size() const { return std::ssize(tokens); }
  /// Their part of a tensor whose dimension `axis` is all tokens.
  Tensor of(Pool& pool, const Tensor& all, int axis = 0) const {
    int64_t outer = 1, inner = 1;
    for (int i = 0; i < all.rank; ++i) (i < axis ? outer : inner) *= i == axis ? 1 : all.dim(i);
    Tensor part = pool.zeros(all.dtype, {outer * size() * inner});
    for (int64_t o = 0; o < outer; ++o)
      for (int64_t t = 0; t < size(); ++t)
        for (int64_t i = 0; i < inner; ++i)
          Pool::set(part, (o * size() + t) * inner + i,
                    Pool::get(all, (o * all.dim(axis) + tokens[static_cast<size_t>(t)]) * inner + i));
    part.rank = all.rank, part.shape = all.shape;
    part.shape[static_cast<size_t>(axis)] = size();
    return part;
  }
};

/// sum += x, element by element.
inline void add_to(const Tensor& sum, const Tensor& x) {
  for (int64_t i = 0; i < sum.numel(); ++i) Pool::set(sum, i, Pool::get(sum, i) + Pool::get(x, i));
}

/// The head and the tail, and what is between.
constexpr std::pair<int64_t, int64_t> kChunks[] = {{0, 3}, {1, 2}};

}  // namespace sluice::test
