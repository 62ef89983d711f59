// Importance of heads: every mechanism, tokens in one chunk and in two, documents of one token, heads left
// out. Also value zeroing, for all heads or some.
#include "ops/head_importance.h"

#include <spdlog/fmt/fmt.h>

#include <cmath>

#include "core/targets.h"
#include "ops/cases.h"
#include "ops/value_zeroing.h"

namespace sluice::test {
namespace {

constexpr const char* kMechanisms[] = {"softmax", "sink", "headwise gate", "elementwise gate",
                                       "constant gate"};

OpCase importance_case(int mechanism, int64_t tokens, int64_t heads, int64_t width, bool plain) {
  return {
      fmt::format("head_importance {} T={} H={} D={}{}", kMechanisms[mechanism], tokens, heads, width,
                  plain ? "" : " otherwise"),
      [=](CaseRun& r) {
        HeadGate g;
        g.skip_first = plain;
        if (mechanism < 2) g.lse = r.input("lse", r.wide, {heads, tokens});
        if (mechanism == 0) {
          // Every 13th token starts a document; z0 is far enough below lse anywhere.
          g.first_key = r.input("first_key", DType::i32, {tokens},
                                [](int64_t t) { return static_cast<double>(t / 13 * 13); });
          g.z0 = r.input("z0", r.wide, {heads, tokens},
                         [](int64_t i) { return -8.0 + static_cast<double>(i % 17) / 8; });
        }
        if (mechanism == 1) g.sink = r.input("sink", {heads});
        if (mechanism == 2) g.logits = r.input("z", {tokens, heads}, 2);
        if (mechanism == 3) g.logits = r.input("z", {tokens, heads, width}, 2);
        if (mechanism == 4) g.logits = r.input("z", {1, heads, width}, 2);
        if (!plain) {
          g.kind.activation = GateActivation::ns_sigmoid;
          g.targets = r.input("targets", DType::i32, {tokens},
                              [](int64_t t) { return t % 5 == 3 ? kPadding : t % 3 - 1.; });
        }
        const Tensor batch = plain ? r.output("batch", DType::f64, {head_row_size(heads)}) : Tensor();
        head_importance(r.ctx, batch, r.inout("totals", DType::f64, {head_row_size(heads)}, 10), g, tokens);
        if (g.logits) return;
        const Tensor u = r.input("u", DType::f64, {heads});
        const Tensor dlse = r.output("dlse", r.wide, {heads, tokens});
        head_importance_backward(r.ctx, dlse, g.sink ? Tensor() : r.output("coef0", r.wide, {heads, tokens}),
                                 g.sink ? r.inout("dsink", r.wide, {heads}) : Tensor(), u, g);
      }};
}

OpCase balance_case(int64_t layers, int64_t heads, int64_t shared_heads, bool given, int64_t ddof) {
  OpCase c{fmt::format("head_balance L={} H={} without {}{} ddof {}", layers, heads, shared_heads,
                       given ? " given" : "", ddof),
           [=](CaseRun& r) {
             const int64_t size = head_row_size(heads);
             const Tensor seen = r.input("seen", DType::f64, {layers, size}, [=](int64_t i) {
               const int64_t h = i % size;
               return h == heads ? 64.0 : h == heads + 1 ? 2.0 : 3.0 + static_cast<double>(i * 37 % 29);
             });
             const Tensor shared =
                 given ? r.input("shared", DType::f64, {layers, heads},
                                 [=](int64_t i) { return i * 3 % heads < shared_heads ? 1.0 : 0.0; })
                       : Tensor();
             head_balance(
                 r.ctx, r.output("u", DType::f64, {layers, heads}),
                 r.inout("batch", DType::f64, {layers, size}), r.inout("totals", DType::f64, {layers, size}),
                 seen, shared,
                 {.coefficient = 0.3, .token_fraction = 0.25, .shared_heads = shared_heads, .ddof = ddof});
           }};
  c.bf16 = false;
  return c;
}

OpCase zeroing_case(int64_t tokens, int64_t heads, int64_t depth, bool sink, double threshold) {
  return {
      fmt::format("value_zeroing T={} H={} D={}{} above {}", tokens, heads, depth, sink ? " sink" : "",
                  threshold),
      [=](CaseRun& r) {
        const Tensor v = r.input("v", {tokens, heads, depth}), out = r.output("out", {tokens, heads, depth});
        const Tensor first = r.input("first_key", DType::i32, {tokens},
                                     [](int64_t t) { return static_cast<double>(t / 7 * 7); });
        zero_first_values(r.ctx, out, v, first);
        zero_first_values(r.ctx, r.compared("in place", v), v, first);
        // Heads look at the first key 0.1, 0.2, ... of the time in every other sequence, and the other way
        // round in the rest: far from the threshold, and always above it if padding counted.
        const Tensor targets = r.input("targets", DType::i32, {tokens},
                                       [](int64_t t) { return t % 7 < 2 ? t % 7 - 1. : kPadding; });
        const Tensor lse =
            r.input("lse", r.wide, {heads, tokens}, [](int64_t i) { return static_cast<double>(i % 5); });
        const Tensor z0 = r.input("z0", r.wide, {heads, tokens}, [=](int64_t i) {
          const int64_t h = i / tokens, t = i % tokens, rank = t / 7 % 2 ? heads - 1 - h : h;
          const double share = t % 7 < 2 ? 0.1 * static_cast<double>(1 + rank) : 1;
          return static_cast<double>(i % 5) + std::log(share);
        });
        take_sink_heads(r.ctx, r.inout("o", r.dtype, {tokens, heads, depth}), out, lse, z0,
                        sink ? r.input("sink", {heads}) : Tensor(), first, targets, threshold);
      }};
}

}  // namespace

OpFamily head_importance_cases() {
  OpFamily family{"head_importance", {}, {}};
  for (int mechanism = 0; mechanism < 5; ++mechanism)
    for (const bool plain : {true, false}) {
      family.cases.push_back(importance_case(mechanism, 37, 3, 10, plain));
      family.cases.push_back(importance_case(mechanism, mechanism < 3 ? 4100 : 300, 2, 64, plain));
    }
  for (const bool given : {false, true})
    for (const int64_t shared_heads : {0, 1, 3, 5})
      family.cases.push_back(balance_case(3, 6, shared_heads, given, shared_heads % 2));
  for (const bool sink : {false, true})
    for (const double threshold : {0.0, 0.25, 1.0})
      family.cases.push_back(zeroing_case(300, 4, sink ? 10 : 64, sink, threshold));
  family.fuzz = [](Random& random) {
    const int64_t heads = uniform(random, 1, 40);
    if (uniform(random, 0, 3) == 0)
      return balance_case(uniform(random, 1, 5), heads, uniform(random, 0, heads), uniform(random, 0, 1) == 1,
                          uniform(random, 0, 1));
    return importance_case(static_cast<int>(uniform(random, 0, 4)), uniform(random, 1, 300), heads,
                           uniform(random, 1, 70), uniform(random, 0, 1) == 1);
  };
  return family;
}

}  // namespace sluice::test
