// Tokens to experts and back: one block of the sort and many, loads even, skewed, with experts that have
// nothing; rows on and off the vector width. The plan is compared bit for bit.
#include "ops/permute.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"

namespace sluice::test {
namespace {

enum class LoadKind : uint8_t { even, one, sparse, frequent };

constexpr const char* name_of(LoadKind load) {
  constexpr const char* kNames[] = {"even", "all to one", "few experts", "one frequent"};
  return kNames[static_cast<int>(load)];
}

int64_t expert_of(LoadKind load, int64_t slot, int64_t experts) {
  const int64_t any = (slot * 7919 + slot / 13 * 104729) % experts;
  switch (load) {
    case LoadKind::even:
      return any;
    case LoadKind::one:
      return experts / 2;
    case LoadKind::sparse:
      return any - any % 5;
    case LoadKind::frequent:
      return slot % 7 < 5 ? experts - 1 : any;
  }
  return -1;
}

struct PlanOutputs {
  Permutation plan;

  PlanOutputs(CaseRun& r, int64_t tokens, int64_t experts, int64_t chosen, LoadKind load)
      : plan{.offsets = r.output("offsets", DType::i32, {experts + 1}),
             .slots = r.output("slots", DType::i32, {tokens * chosen}),
             .tokens = r.output("tokens", DType::i32, {tokens * chosen}),
             .rows = r.output("rows", DType::i32, {tokens, chosen})} {
    permute_plan(r.ctx, plan, r.input("experts", DType::i32, {tokens, chosen}, [=](int64_t slot) {
      return static_cast<double>(expert_of(load, slot, experts));
    }));
  }
};

OpCase plan_case(int64_t tokens, int64_t experts, int64_t chosen, LoadKind load) {
  OpCase c{fmt::format("permute_plan T={} E={} K={} {}", tokens, experts, chosen, name_of(load)),
           [=](CaseRun& r) { PlanOutputs(r, tokens, experts, chosen, load); }};
  c.bf16 = false;  // integers all
  return c;
}

/// `shifted`: x and y begin one element behind what vectors are aligned to.
OpCase unpermute_case(int64_t tokens, int64_t width, int64_t chosen, Into into, bool shifted = false) {
  return {
      fmt::format("unpermute T={} C={} K={}{}{}", tokens, width, chosen, into == Into::add ? " added" : "",
                  shifted ? " shifted" : ""),
      [=](CaseRun& r) {
        const int64_t rows = tokens * chosen, first = shifted ? 1 : 0;
        const PlanOutputs p(r, tokens, 6, chosen, LoadKind::frequent);
        const Tensor x = r.input("x", {rows * width + first}).rows(first, rows * width).view({rows, width});
        const Tensor all = r.inout("y", r.dtype, {tokens * width + first});
        unpermute(r.ctx, all.rows(first, tokens * width).view({tokens, width}), x, p.plan.rows, into);
      }};
}

/// Rows out of order, there and back, bit by bit; and numbers of rows.
OpCase move_case(int64_t rows, int64_t width, DType dtype, bool shifted = false) {
  OpCase c{fmt::format("take_rows, put_rows ({}, {}) {}{}", rows, width, dtype_name(dtype),
                       shifted ? " shifted" : ""),
           [=](CaseRun& r) {
             const int64_t all = 2 * rows + 3, first = shifted ? 1 : 0;
             const auto matrix = [&](const char* name, int64_t count, bool output) {
               const Tensor flat = r.input(name, dtype, {count * width + first});
               if (output) r.compared_exactly(name, flat);
               return flat.rows(first, count * width).view({count, width});
             };
             const Tensor index = r.input("index", DType::i32, {rows}, [&](int64_t i) {
               return static_cast<double>((i * 2 + 5) % (2 * rows + 1));
             });
             take_rows(r.ctx, matrix("taken", rows, true), matrix("x", all, false), index);
             put_rows(r.ctx, matrix("y", all, true), matrix("z", rows, false), index);
             const Tensor places = r.inout("places", DType::i32, {rows});
             number_rows(r.ctx, places);
             move_rows_last(r.ctx, places, rows / 3, rows / 2, rows);
           }};
  c.bf16 = false;
  return c;
}

}  // namespace

OpFamily permute_cases() {
  OpFamily family{"permute", {}, {}};
  auto& cases = family.cases;
  for (const LoadKind load : {LoadKind::even, LoadKind::one, LoadKind::sparse, LoadKind::frequent}) {
    for (const int64_t experts : {1, 2, 7, 31, 33, 128, 200})
      cases.push_back(plan_case(37, experts, 2, load));
    cases.push_back(plan_case(400, 128, 8, load));  // four blocks
    cases.push_back(plan_case(1, 1, 1, load));
    cases.push_back(plan_case(40, 1024, 32, load));
  }
  for (int64_t chosen = 1; chosen <= 9; ++chosen) cases.push_back(plan_case(137, 9, chosen, LoadKind::even));
  cases.push_back(plan_case(16900, 5, 2, LoadKind::frequent));  // more blocks than the scan has rows
  cases.push_back(plan_case(0, 5, 2, LoadKind::even));
  for (const Into into : {Into::overwrite, Into::add}) {
    for (int64_t chosen = 1; chosen <= 16; ++chosen) cases.push_back(unpermute_case(5, 24, chosen, into));
    for (const int64_t width : {1, 3, 8, 12, 100, 128}) cases.push_back(unpermute_case(19, width, 4, into));
    cases.push_back(unpermute_case(3, 2056, 8, into));
    cases.push_back(unpermute_case(3, 64, 31, into));
    cases.push_back(unpermute_case(7, 32, 4, into, true));
    cases.push_back(unpermute_case(0, 32, 4, into));
  }
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t width : {1, 3, 8, 24, 100}) cases.push_back(move_case(37, width, dtype, width == 24));
  cases.push_back(move_case(5000, 64, DType::bf16));
  family.fuzz = [](Random& random) {
    const int64_t chosen = uniform(random, 1, 12);
    if (uniform(random, 0, 1) == 0)
      return plan_case(uniform(random, 1, 3000 / chosen),
                       uniform(random, 1, one_of<int64_t>(random, {9, 130, 1024})), chosen,
                       static_cast<LoadKind>(uniform(random, 0, 3)));
    return unpermute_case(uniform(random, 1, 40),
                          one_of<int64_t>(random, {uniform(random, 1, 70), 8 * uniform(random, 1, 40)}),
                          chosen, one_of(random, {Into::overwrite, Into::add}), uniform(random, 0, 3) == 0);
  };
  return family;
}

}  // namespace sluice::test
