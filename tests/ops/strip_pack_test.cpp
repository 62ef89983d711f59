#include "ops/strip_pack.h"

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

TEST_CASE("strips of 64 columns hold a matrix row after row, and zeros beyond it", "[strip_pack]") {
  for (const auto& [k, n] :
       {std::pair<int64_t, int64_t>{1, 1}, {16, 64}, {5, 70}, {100, 63}, {33, 200}, {130, 129}})
    for (const bool transposed : {false, true})
      for (const int threads : {1, 3}) {
        INFO(k << " rows of " << n << ", transposed: " << transposed);
        const Threads some(threads);
        const int64_t rows = (k + kStripRows - 1) / kStripRows * kStripRows,
                      strips = (n + kStripColumns - 1) / kStripColumns;
        Pool pool(5);
        Context ctx(kTestScratch);
        const Tensor b = transposed ? pool.normal(DType::f32, {n, k}) : pool.normal(DType::f32, {k, n});
        Arena memory("packed", 1 << 20);
        const Tensor packed = memory.alloc("packed", DType::f32, {strips * rows * kStripColumns});
        for (int64_t i = 0; i < packed.numel(); ++i) Pool::set(packed, i, 7);
        strip_pack(ctx, k, n, transposed, b.as<float>(), packed.as<float>());
        int64_t wrong = 0;
        for (int64_t i = 0; i < packed.numel(); ++i) {
          const int64_t row = i / kStripColumns % rows,
                        column = i / (rows * kStripColumns) * kStripColumns + i % kStripColumns;
          const bool inside = row < k && column < n;
          const double expected =
              !inside ? 0 : Pool::get(b, transposed ? column * k + row : row * n + column);
          wrong += Pool::get(packed, i) != expected;
        }
        CHECK(wrong == 0);
      }
}
