// The router: numbers of experts on and off the warp's grid, one to all of them chosen, ties, saturated rows,
// loads even and skewed, counted or not. What is chosen is compared bit for bit, so logits of a token are
// equal or a few thousandths apart: no rounding of a softmax turns their order.
#include "ops/router.h"

#include <spdlog/fmt/fmt.h>

#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <set>

#include "core/targets.h"
#include "ops/cases.h"

namespace sluice::test {
namespace {

OpCase logits_case(int64_t tokens, int64_t width, int64_t experts, Into into) {
  return {fmt::format("router_logits T={} C={} E={}{}", tokens, width, experts,
                      into == Into::add ? " added" : ""),
          [=](CaseRun& r) {
            const Tensor x = r.input("x", {tokens, width});
            LinearWeight weight;
            weight.value = r.input("weight", {experts, width}, 0.1);
            router_logits_forward(r.ctx, r.output("logits", r.wide, {tokens, experts}), x, weight);
            const Tensor dx =
                into == Into::add ? r.inout("dx", r.dtype, {tokens, width}) : r.output("dx", {tokens, width});
            router_logits_backward(r.ctx, dx, r.inout("dweight", r.wide, {experts, width}),
                                   r.input("dlogits", r.wide, {tokens, experts}), x, weight, into);
          }};
}

struct RouteShape {
  int64_t tokens, experts, chosen;
  bool norm = true;
  int64_t ties = 1;     // number of equal logits per token
  bool skewed = false;  // the first experts come first for every token
  bool in_place = false;
  double balance = 1e-2, z = 1e-3;
  double range = 4;  // of a token's logits
};

/// Forward, then backward from what forward left.
OpCase route_case(const RouteShape& s) {
  OpCase c{fmt::format("route T={} E={} K={}{}{}{}{} balance {} z {} range {}", s.tokens, s.experts, s.chosen,
                       s.norm ? " normalised" : "", s.ties > 1 ? fmt::format(" {} tied", s.ties) : "",
                       s.skewed ? " skewed" : "", s.in_place ? " in place" : "", s.balance, s.z, s.range),
           [=](CaseRun& r) {
             const int64_t T = s.tokens, E = s.experts, K = s.chosen;
             const Tensor logits = r.input("logits", r.wide, {T, E}, [=](int64_t i) {
               const int64_t t = i / E, e = i % E;
               const int64_t place = s.skewed ? E - 1 - e : (e * 7919 + t * 104729) % E;
               return s.range * static_cast<double>(place / s.ties) / static_cast<double>(E) +
                      static_cast<double>(t % 7) - 3;
             });
             const Tensor probabilities =
                 s.in_place ? r.compared("dlogits", logits) : r.output("probabilities", r.wide, {T, E});
             const Tensor lse = r.output("lse", r.wide, {T}), weights = r.output("weights", r.wide, {T, K});
             const Tensor experts = r.output("experts", DType::i32, {T, K});
             route_forward(r.ctx, probabilities, lse, weights, experts, logits, s.norm);
             const Tensor counts = r.input("counts", DType::f64, {E}, [=](int64_t e) {
               return s.skewed ? (e == 0 ? static_cast<double>(T * K) : 0) : static_cast<double>(e * 37 % 11);
             });
             route_backward(r.ctx, s.in_place ? probabilities : r.output("dlogits", r.wide, {T, E}),
                            r.input("dweights", r.wide, {T, K}), probabilities, lse, weights, experts, counts,
                            s.norm, {.balance = s.balance, .z = s.z});
           }};
  c.bf16 = false;  // all of it is f32 whatever the storage
  return c;
}

Tensor every_fourth_padded(CaseRun& r, int64_t tokens) {
  return r.input("targets", DType::i32, {tokens},
                 [](int64_t t) { return t % 4 == 3 ? kPadding : t % 3 - 1.; });
}

/// exponent: 0 for experts of equal load; 8 sends nearly all to the last.
OpCase load_case(int64_t tokens, int64_t experts, int64_t chosen, bool totals, double exponent,
                 bool padded = false) {
  OpCase c{fmt::format("router_load T={} E={} K={} exponent {}{}{}", tokens, experts, chosen, exponent,
                       totals ? "" : " without totals", padded ? " padded" : ""),
           [=](CaseRun& r) {
             const Tensor offsets = r.input("offsets", DType::i32, {experts + 1}, [=](int64_t e) {
               const double part = static_cast<double>(e) / static_cast<double>(experts);
               return std::floor(static_cast<double>(tokens * chosen) * std::pow(part, 1 + exponent));
             });
             const Tensor probabilities = r.input("probabilities", r.wide, {tokens, experts}, [=](int64_t i) {
               return static_cast<double>(i * 7919 % 1009 + i % experts) /
                      (1009.0 * static_cast<double>(experts));
             });
             const Tensor sum =
                 totals ? r.inout("totals", DType::f64, {router_totals_size(experts)}, 10) : Tensor();
             router_load(r.ctx, r.output("counts", DType::f64, {experts}), sum, offsets, probabilities,
                         r.input("lse", r.wide, {tokens}, 3),
                         padded ? r.input("experts", DType::i32, {tokens, chosen},
                                          [=](int64_t i) { return static_cast<double>(i * 7 % experts); })
                                : Tensor(),
                         padded ? every_fourth_padded(r, tokens) : Tensor());
           }};
  c.bf16 = false;
  return c;
}

/// For any row of logits the experts are valid and distinct; other rows are not affected.
OpCase not_finite_case(int64_t experts, int64_t chosen, double bad, bool whole_row) {
  OpCase c{
      fmt::format("route of {}{}, {} of {} experts", bad, whole_row ? " alone" : "", chosen, experts),
      [=](CaseRun& r) {
        const int64_t tokens = 11, E = experts, K = chosen;
        const Tensor logits = r.input("logits", r.wide, {tokens, E}, [=](int64_t i) {
          const bool is_bad = i / E % 3 == 1 && (whole_row || i % E == E / 2);
          return is_bad ? bad : static_cast<double>(i * 7919 % E) / static_cast<double>(E);
        });
        const Tensor p = r.input("p", r.wide, {tokens, E}), lse = r.input("lse", r.wide, {tokens});
        const Tensor weights = r.input("weights", r.wide, {tokens, K});
        const Tensor ids = r.input("experts", DType::i32, {tokens, K}, [](int64_t) { return -1.0; });
        route_forward(r.ctx, p, lse, weights, ids, logits, true);
        if (r.ctx.dry_run) return;
        Pool pool;
        const Tensor host_ids = pool.zeros(DType::i32, {tokens, K}), host_p = pool.zeros(r.wide, {tokens, E});
        const Tensor host_weights = pool.zeros(r.wide, {tokens, K});
        copy(r.ctx, host_ids, ids), copy(r.ctx, host_p, p), copy(r.ctx, host_weights, weights);
        synchronize(r.ctx);
        for (int64_t t = 0; t < tokens; ++t) {
          std::set<int32_t> different;
          for (int64_t k = 0; k < K; ++k) different.insert(host_ids.as<int32_t>()[t * K + k]);
          INFO("token " << t);
          CHECK(static_cast<int64_t>(different.size()) == K);
          CHECK(*different.begin() >= 0);
          CHECK(*different.rbegin() < E);
          CHECK(std::isfinite(Pool::get(host_p, t * E)) == (t % 3 != 1));
          CHECK(std::isfinite(Pool::get(host_weights, t * K)) == (t % 3 != 1));
        }
      }};
  c.bf16 = false;
  return c;
}

}  // namespace

OpFamily router_cases() {
  OpFamily family{"router", {}, {}};
  auto& cases = family.cases;
  for (const Into into : {Into::overwrite, Into::add}) {
    cases.push_back(logits_case(1, 1, 1, into));
    cases.push_back(logits_case(33, 40, 13, into));
    cases.push_back(logits_case(64, 64, 128, into));
    cases.push_back(logits_case(0, 16, 4, into));
  }
  for (const int64_t experts : {1,   2,   3,   8,   31,  32,  33,  63,  64,  65,   96,  97,
                                127, 128, 129, 170, 200, 256, 300, 512, 513, 1000, 1024}) {
    const int64_t most = std::min(experts, kMaxExpertsPerToken);
    cases.push_back(route_case({.tokens = 9, .experts = experts, .chosen = std::min<int64_t>(experts, 8)}));
    cases.push_back(
        route_case({.tokens = 5, .experts = experts, .chosen = most, .norm = false, .in_place = true}));
    cases.push_back(route_case({.tokens = 3, .experts = experts, .chosen = 1, .ties = 3, .balance = 0}));
  }
  for (int64_t chosen = 1; chosen <= 16; ++chosen)
    cases.push_back(route_case(
        {.tokens = 6, .experts = 16, .chosen = chosen, .norm = chosen % 2 == 0, .ties = 1 + chosen % 4}));
  cases.push_back(route_case({.tokens = 40, .experts = 128, .chosen = 8, .ties = 1000}));  // all equal
  cases.push_back(route_case({.tokens = 40, .experts = 1024, .chosen = 32, .norm = false, .ties = 1024}));
  cases.push_back(route_case({.tokens = 70, .experts = 64, .chosen = 8, .skewed = true, .in_place = true}));
  cases.push_back(route_case({.tokens = 70, .experts = 60, .chosen = 4, .balance = 0, .z = 0}));
  cases.push_back(
      route_case({.tokens = 20, .experts = 40, .chosen = 6, .norm = false, .balance = 0, .z = 1}));
  // Most probabilities vanish in f32: the lowest ids among them.
  cases.push_back(route_case({.tokens = 20, .experts = 40, .chosen = 32, .skewed = true, .range = 4000}));
  cases.push_back(route_case({.tokens = 0, .experts = 4, .chosen = 2}));
  for (const bool totals : {true, false}) {
    for (const int64_t experts : {1, 2, 31, 32, 33, 200})
      cases.push_back(load_case(77, experts, 2, totals, 0));
    cases.push_back(load_case(300, 64, 8, totals, 8));
    cases.push_back(load_case(300, 64, 8, totals, 8, /*padded=*/true));
    cases.push_back(load_case(77, 6, 2, totals, 0, /*padded=*/true));
    cases.push_back(load_case(0, 6, 2, totals, 0));
  }
  cases.push_back(load_case(129, 1024, 32, true, 1));
  cases.push_back(load_case(34000, 2, 1, true, 0));  // chunks longer than their least
  for (const double bad :
       {std::nan(""), std::bit_cast<double>(~uint64_t{0}), std::numeric_limits<double>::infinity()})
    for (const bool whole_row : {true, false}) {
      cases.push_back(not_finite_case(5, 5, bad, whole_row));
      cases.push_back(not_finite_case(70, 8, bad, whole_row));
      cases.push_back(not_finite_case(200, 8, bad, whole_row));
    }
  cases.push_back(not_finite_case(40, 32, -std::numeric_limits<double>::infinity(), true));

  family.fuzz = [](Random& random) {
    const int64_t experts = uniform(random, 1, one_of<int64_t>(random, {16, 140, 1024}));
    const int64_t chosen = uniform(random, 1, std::min(experts, kMaxExpertsPerToken)),
                  tokens = uniform(random, 1, 60);
    switch (uniform(random, 0, 3)) {
      case 0:
        return logits_case(tokens, uniform(random, 1, 90), uniform(random, 1, 140),
                           one_of(random, {Into::overwrite, Into::add}));
      case 1:
        return load_case(uniform(random, 1, 700), experts, chosen, uniform(random, 0, 4) > 0,
                         static_cast<double>(uniform(random, 0, 9)));
      default:
        return route_case({.tokens = tokens,
                           .experts = experts,
                           .chosen = chosen,
                           .norm = uniform(random, 0, 1) == 1,
                           .ties = one_of<int64_t>(random, {1, 1, 2, 7}),
                           .skewed = uniform(random, 0, 3) == 0,
                           .in_place = uniform(random, 0, 1) == 1,
                           .balance = one_of(random, {0.0, 1e-2, 1.0}),
                           .z = one_of(random, {0.0, 1e-3, 1.0})});
    }
  };
  return family;
}

}  // namespace sluice::test
