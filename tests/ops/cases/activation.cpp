// SiLU, squared ReLU and SwiGLU: on and off the vector width, in place, several tiles.
#include "ops/activation.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"

namespace sluice::test {
namespace {

OpCase silu_case(int64_t n, bool in_place) {
  return {fmt::format("silu ({}){}", n, in_place ? " in place" : ""), [=](CaseRun& r) {
            const Tensor x = r.input("x", {n}, 3), dy = r.input("dy", {n});
            if (in_place) {
              silu_backward(r.ctx, r.compared("dx", dy), dy, x);
              silu_forward(r.ctx, r.compared("y", x), x);
            } else {
              silu_forward(r.ctx, r.output("y", {n}), x);
              silu_backward(r.ctx, r.output("dx", {n}), dy, x);
            }
          }};
}

OpCase squared_relu_case(int64_t n, bool in_place) {
  return {fmt::format("squared relu ({}){}", n, in_place ? " in place" : ""), [=](CaseRun& r) {
            const Tensor x = r.input("x", {n}, 3), dy = r.input("dy", {n});
            squared_relu_backward(r.ctx, in_place ? r.compared("dx", dy) : r.output("dx", {n}), dy, x);
            squared_relu_forward(r.ctx, in_place ? r.compared("y", x) : r.output("y", {n}), x);
          }};
}

OpCase swiglu_case(int64_t tokens, int64_t width, bool in_place) {
  return {fmt::format("swiglu T={} F={}{}", tokens, width, in_place ? " in place" : ""), [=](CaseRun& r) {
            const Tensor gate_up = r.input("gate_up", {tokens, 2 * width}, 2),
                         dy = r.input("dy", {tokens, width});
            swiglu_forward(r.ctx, r.output("y", {tokens, width}), gate_up);
            const Tensor d =
                in_place ? r.compared("dgate_up", gate_up) : r.output("dgate_up", {tokens, 2 * width});
            swiglu_backward(r.ctx, d, dy, gate_up);
          }};
}

/// `shifted`: rows begin one element behind what vectors are aligned to. With a limit the clamped form.
OpCase weighted_case(int64_t tokens, int64_t chosen, int64_t width, bool in_place, bool shifted = false,
                     std::optional<double> limit = {}) {
  return {fmt::format("weighted swiglu T={} K={} F={}{}{}{}", tokens, chosen, width,
                      in_place ? " in place" : "", shifted ? " shifted" : "", limit ? " clamped" : ""),
          [=](CaseRun& r) {
            const int64_t rows = tokens * chosen, first = shifted ? 1 : 0;
            const Tensor all = r.input("gate_up", {rows * 2 * width + first}, 2);
            const Tensor gate_up = all.rows(first, rows * 2 * width).view({rows, 2 * width});
            const Tensor weights = r.input("weights", r.wide, {tokens, chosen});
            const Tensor slots = r.input("slots", DType::i32, {rows}, [=](int64_t i) {
              return static_cast<double>((i * 7919 + 3) % rows);  // 7919 is prime: every slot once
            });
            weighted_swiglu_forward(r.ctx, r.output("y", {rows, width}), gate_up, weights, slots, limit);
            if (in_place) r.compared("dgate_up", all);
            weighted_swiglu_backward(r.ctx, in_place ? gate_up : r.output("dgate_up", {rows, 2 * width}),
                                     r.output("dweights", r.wide, {tokens, chosen}),
                                     r.input("dy", {rows, width}), gate_up, weights, slots, limit);
          }};
}

/// The ends of the sigmoid: neither infinity nor NaN may come out of a finite input.
OpCase large_case() {
  return {"silu of large arguments", [](CaseRun& r) {
            const Tensor x =
                r.input("x", r.dtype, {64}, [](int64_t i) { return 8.0 * static_cast<double>(i - 32); });
            silu_forward(r.ctx, r.output("y", {64}), x);
            silu_backward(r.ctx, r.output("dx", {64}), r.input("dy", {64}), x);
          }};
}

}  // namespace

OpFamily activation_cases() {
  OpFamily family{"activation", {large_case()}, {}};
  for (const bool in_place : {false, true}) {
    for (const int64_t n : {1, 7, 64, 1000, 8192 + 3}) family.cases.push_back(silu_case(n, in_place));
    for (const int64_t n : {1, 7, 1000}) family.cases.push_back(squared_relu_case(n, in_place));
    for (const int64_t width : {1, 5, 8, 60, 256}) family.cases.push_back(swiglu_case(3, width, in_place));
    family.cases.push_back(swiglu_case(40, 200, in_place));
  }
  family.cases.push_back(swiglu_case(0, 16, false));
  for (const bool in_place : {false, true}) {
    // One vector of a row, a part of eight lanes, of a warp; one to three vectors a lane, and more than one
    // round of them.
    for (const int64_t width : {1, 7, 8, 24, 64, 72, 256, 264, 512, 520, 768, 776})
      for (const std::optional<double> limit : {std::optional<double>(), std::optional<double>(1.3)})
        family.cases.push_back(weighted_case(7, 3, width, in_place, false, limit));
    family.cases.push_back(weighted_case(5, 2, 40, in_place, true));
    family.cases.push_back(weighted_case(1, 1, 16, in_place));
    family.cases.push_back(weighted_case(0, 2, 16, in_place));
  }
  family.fuzz = [](Random& random) {
    const bool in_place = uniform(random, 0, 1) == 1;
    if (uniform(random, 0, 1))
      return weighted_case(uniform(random, 1, 30), uniform(random, 1, 4),
                           one_of<int64_t>(random, {uniform(random, 1, 100), 8 * uniform(random, 1, 100)}),
                           in_place, uniform(random, 0, 3) == 0);
    return uniform(random, 0, 1) ? silu_case(uniform(random, 1, 9000), in_place)
                                 : swiglu_case(uniform(random, 1, 40), uniform(random, 1, 300), in_place);
  };
  return family;
}

}  // namespace sluice::test
