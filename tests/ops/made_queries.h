#pragma once
// How the queries of an op case were made, where attention's backward goes on to what they were made from.
#include <cmath>

#include "ops/attention.h"
#include "ops/cases.h"

namespace sluice::test {

/// Positions of tokens, and the rotary embedding's table for kPositions of them.
struct RopeAngles {
  static constexpr int64_t kPositions = 50;
  Tensor positions, cos, sin;
  RopeAngles(CaseRun& r, int64_t tokens, int64_t half)
      : positions(r.integers("positions", {tokens}, 0, kPositions - 1)),
        cos(r.input("cos", r.wide, {kPositions, half}, [=](int64_t i) { return std::cos(angle(i, half)); })),
        sin(r.input("sin", r.wide, {kPositions, half}, [=](int64_t i) { return std::sin(angle(i, half)); })) {
  }
  static double angle(int64_t i, int64_t half) {
    return static_cast<double>(i / half) *
           std::pow(1e4, -static_cast<double>(i % half) / static_cast<double>(half));
  }
};

enum class Made { plainly, by_rope, by_norm_rope, by_norm_per_head, by_norm_without_weight };

/// grads.dq (T, H, D), which backward leaves, or grads.queries, to which it goes on: to rows that dq
/// occupied, to columns of a matrix, or to a tensor, by the number of tokens.
inline void set_queries(CaseRun& r, AttentionGrads& grads, Made made, int64_t T, int64_t H, int64_t D) {
  const bool in_place = T % 3 == 0;
  grads.dq = made == Made::plainly || in_place ? r.output("dq", {T, H, D}) : r.input("room of dq", {T, H, D});
  if (made == Made::plainly) return;
  const RopeAngles angles(r, T, D / 2);
  PositionBackward p = {.dx = grads.dq, .positions = angles.positions, .cos = angles.cos, .sin = angles.sin};
  if (!in_place)
    p.dx = T % 2 == 0 ? r.columns("dx of queries", T, H * D).view({T, H, D})
                      : r.output("dx of queries", {T, H, D});
  if (made != Made::by_rope) {
    p.x = r.input("x of queries", {T, H, D});
    p.rstd = r.input("rstd of queries", r.wide, {T * H},  // x has elements of variance 1
                     [](int64_t i) { return 1 + 0.05 * static_cast<double>(i % 7 - 3); });
  }
  const auto around_one = [](int64_t i) { return 0.5 + static_cast<double>(i % 9) / 8; };
  if (made == Made::by_norm_rope)
    p.weight = r.input("weight", r.dtype, {D}, around_one), p.dweight = r.inout("dweight", r.wide, {D});
  if (made == Made::by_norm_per_head)
    p.weight = r.input("weight", r.dtype, {H, D}, around_one), p.dweight = r.inout("dweight", r.wide, {H, D});
  grads.queries = p;
}

}  // namespace sluice::test
