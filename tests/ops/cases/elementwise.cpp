// Residual additions, clipping, copies: on and off the vector width, in place, at addresses no vector is
// aligned to.
#include "ops/elementwise.h"

#include <spdlog/fmt/fmt.h>

#include <bit>

#include "core/targets.h"
#include "ops/cases.h"
#include "ops/columns.h"
#include "ops/padding.h"

namespace sluice::test {
namespace {

OpCase add_case(int64_t rows, int64_t width) {
  return {fmt::format("add_forward ({}, {})", rows, width), [=](CaseRun& r) {
            const Tensor a = r.input("a", {rows, width}), b = r.input("b", {rows, width});
            add_forward(r.ctx, r.output("y", {rows, width}), a, b);
          }};
}

OpCase add_in_place_case(int64_t n, bool first) {
  return {fmt::format("add_forward ({}) onto its {} argument", n, first ? "first" : "second"),
          [=](CaseRun& r) {
            const Tensor a = r.input("a", {n}), b = r.input("b", {n});
            add_forward(r.ctx, r.compared("y", first ? a : b), a, b);
          }};
}

/// All but the first element: no address is a multiple of 16.
OpCase add_shifted_case(int64_t n) {
  return {fmt::format("add_forward ({}) one element on", n), [=](CaseRun& r) {
            const Tensor a = r.input("a", {n + 1}), b = r.input("b", {n + 1}),
                         y = r.inout("y", r.dtype, {n + 1});
            add_forward(r.ctx, y.rows(1, n), a.rows(1, n), b.rows(1, n));
          }};
}

OpCase clip_case(int64_t n, double limit, bool in_place) {
  return {fmt::format("clip ({}) limit {}{}", n, limit, in_place ? " in place" : ""), [=](CaseRun& r) {
            const Tensor x = r.input("x", {n}), dy = r.input("dy", {n});
            clip_backward(r.ctx, in_place ? r.compared("dx", dy) : r.output("dx", {n}), dy, x, limit);
            clip_forward(r.ctx, in_place ? r.compared("y", x) : r.output("y", {n}), x, limit);
          }};
}

OpCase soft_cap_case(int64_t n, double spread, bool in_place) {
  return {fmt::format("soft cap ({}) of {}{}", n, spread, in_place ? " in place" : ""), [=](CaseRun& r) {
            const Tensor x = r.input("x", {n}, spread);
            soft_cap_forward(r.ctx, in_place ? r.compared("y", x) : r.output("y", {n}), x, 15);
          }};
}

OpCase cast_case(int64_t n, DType from, DType to) {
  return {fmt::format("cast ({}) {} to {}", n, dtype_name(from), dtype_name(to)), [=](CaseRun& r) {
            // Thirds have more digits than bf16.
            const Tensor x =
                r.input("x", from, {n}, [](int64_t i) { return static_cast<double>(i - 40) / 3; });
            cast(r.ctx, r.output("y", to, {n}), x);
          }};
}

/// As f32 0x7fffffff, which GPUs compute.
const double kDeviceNan = std::bit_cast<double>(uint64_t{0x7fffffffffffffff});

/// The same bits on every backend; infinities, NaN and the largest among them.
OpCase rounding_case(int64_t n, bool shifted) {
  OpCase c{fmt::format("round_stochastically ({}){}", n, shifted ? " one element on" : ""), [=](CaseRun& r) {
             const Tensor all = r.input("x", DType::f32, {n + 1}, [](int64_t i) {
               return i % 97 == 5   ? INFINITY
                      : i % 89 == 7 ? static_cast<double>(NAN)
                      : i % 83 == 3 ? 3.4e38
                      : i % 79 == 2 ? kDeviceNan
                                    : std::sin(static_cast<double>(i)) / 3;
             });
             const Tensor y = r.compared_exactly("y", r.input("y", DType::bf16, {n + 1}));
             const int64_t at = shifted ? 1 : 0;
             round_stochastically(r.ctx, y.rows(at, n), all.rows(at, n), 12345);
           }};
  c.bf16 = false;
  return c;
}

OpCase columns_case(int64_t rows, int64_t width, int64_t begin, int64_t n) {
  return {fmt::format("columns ({}, {}) of {} from {} on", rows, n, width, begin), [=](CaseRun& r) {
            take_columns(r.ctx, r.output("part", {rows, n}), r.input("x", {rows, width}), begin);
            put_columns(r.ctx, r.inout("z", r.dtype, {rows, width}), r.input("new part", {rows, n}), begin);
            add_columns(r.ctx, r.inout("y", r.dtype, {rows, width}), r.input("added", {rows, n}), begin);
          }};
}

OpCase fill_case(int64_t n) {
  return {fmt::format("fill and scale ({})", n), [=](CaseRun& r) {
            fill(r.ctx, r.output("y", {n}), 1.0 / 3);
            fill(r.ctx, r.output("number", DType::f64, {3}), 1.0 / 3);
            scale(r.ctx, r.inout("scaled", r.dtype, {n}), 0.7);
          }};
}

OpCase padding_case(int64_t tokens, int64_t width) {
  return {fmt::format("clear_padding T={} width {}", tokens, width), [=](CaseRun& r) {
            const Tensor targets = r.input("targets", DType::i32, {tokens},
                                           [](int64_t t) { return t % 5 == 3 ? kPadding : t % 3 - 1.; });
            clear_padding(r.ctx, r.inout("x", r.dtype, {tokens, width}), targets);
            clear_padding(r.ctx, r.columns("columns", tokens, width), targets);
          }};
}

}  // namespace

OpFamily elementwise_cases() {
  OpFamily family{"elementwise", {}, {}};
  for (const int64_t width : {1, 7, 64, 1000}) family.cases.push_back(add_case(3, width));
  family.cases.push_back(add_case(0, 8));
  for (const int64_t n : {5, 64, 4096 + 1000}) {
    family.cases.push_back(add_in_place_case(n, true));
    family.cases.push_back(add_in_place_case(n, false));
    family.cases.push_back(add_shifted_case(n));
    family.cases.push_back(clip_case(n, 0.5, false));
    family.cases.push_back(clip_case(n, 1e9, true));
    family.cases.push_back(fill_case(n));
    family.cases.push_back(rounding_case(n, n == 64));
    family.cases.push_back(soft_cap_case(n, 20, n == 64));
    for (const DType from : {DType::f32, DType::bf16})
      for (const DType to : {DType::f32, DType::bf16}) family.cases.push_back(cast_case(n, from, to));
  }
  for (const int64_t tokens : {0, 1, 9, 300}) family.cases.push_back(padding_case(tokens, tokens + 3));
  family.cases.push_back(columns_case(5, 48, 16, 32));
  family.cases.push_back(columns_case(7, 9, 3, 5));
  family.cases.push_back(columns_case(4, 24, 4, 16));  // vectors of the part, not of its place
  family.cases.push_back(columns_case(0, 8, 0, 8));
  family.fuzz = [](Random& random) {
    const int64_t n = uniform(random, 1, 9000);
    switch (uniform(random, 0, 3)) {
      case 0:
        return add_case(uniform(random, 1, 9), uniform(random, 1, 600));
      case 1:
        return clip_case(n, 0.7, uniform(random, 0, 1) == 1);
      case 2:
        return cast_case(n, DType::f32, DType::bf16);
      default:
        return fill_case(n);
    }
  };
  return family;
}

}  // namespace sluice::test
