// Softpick, an extra key behind attention, logits of a sink by query, and windows.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "core/targets.h"
#include "ops/attention.h"
#include "ops/cases.h"
#include "ops/head_importance.h"
#include "ops/made_queries.h"
#include "ops/value_zeroing.h"
#include "ops/window.h"

namespace sluice::test {
namespace {

struct Shape {
  int64_t queries, keys, heads, kv_heads, depth;
  bool documents = false;
};

std::string describe(const Shape& s) {
  return fmt::format("Tq={} Tk={} H={} Hkv={} D={} documents={}", s.queries, s.keys, s.heads, s.kv_heads,
                     s.depth, s.documents);
}

AttentionInputs inputs(CaseRun& r, const Shape& s, AttentionWeights weights) {
  AttentionInputs in;
  in.q = r.input("q", {s.queries, s.heads, s.depth});
  in.k = r.input("k", {s.keys, s.kv_heads, s.depth});
  in.v = r.input("v", {s.keys, s.kv_heads, s.depth});
  in.first_key = r.input("first_key", DType::i32, {s.queries}, [=](int64_t t) {
    return static_cast<double>(s.documents ? (t + s.keys - s.queries) / 23 * 23 : 0);
  });
  in.scale = 1 / std::sqrt(static_cast<double>(s.depth));
  in.weights = weights;
  return in;
}

/// z0 is no output: it is -inf where the first key's score is negative.
OpCase softpick_case(const Shape& s, bool backward) {
  return {fmt::format("softpick backward={} {}", backward, describe(s)), [=](CaseRun& r) {
            const AttentionInputs in = inputs(r, s, AttentionWeights::softpick);
            const Tensor o = r.output("o", {s.queries, s.heads, s.depth}),
                         lse = r.output("lse", r.wide, {s.heads, s.queries});
            attention_forward(r.ctx, {o, lse}, in);
            if (!backward) return;
            const Tensor d_o = r.input("d_o", {s.queries, s.heads, s.depth}),
                         dlse = r.input("dlse", r.wide, {s.heads, s.queries}),
                         coef0 = r.input("coef0", r.wide, {s.heads, s.queries}, 0.01);
            const AttentionGrads d = {r.output("dq", {s.queries, s.heads, s.depth}),
                                      r.output("dk", {s.keys, s.kv_heads, s.depth}),
                                      r.output("dv", {s.keys, s.kv_heads, s.depth})};
            attention_backward(r.ctx, d, d_o, in, {o, lse}, {dlse, coef0});
          }};
}

OpCase extra_case(const Shape& s, int64_t rows, bool value, int gate, bool backward) {
  return {fmt::format("extra key rows={} value={} gate={} backward={} {}", rows, value, gate, backward,
                      describe(s)),
          [=](CaseRun& r) {
            const AttentionInputs in = inputs(r, s, AttentionWeights::softmax);
            const int64_t T = s.queries, H = s.heads, D = s.depth;
            AttentionOutput out;
            out.extra.key = r.input("key", {rows, D});
            if (value) out.extra.value = r.input("value", {rows, D});
            out.extra.logits = r.output("logits", r.wide, {H, T});
            if (gate == 1) out.gate = r.input("gate", {T, H, D}, 2.0);
            if (gate == 2) out.gate = r.input("gate", {T, H}, 2.0);
            const Tensor y = r.output("y", {T, H, D}), o = r.output("o", {T, H, D}),
                         lse = r.output("lse", r.wide, {H, T});
            gated_attention_forward(r.ctx, y, {o, lse}, in, out);
            if (!backward) return;
            const Tensor dy = r.input("dy", {T, H, D}), dlse = r.input("dlse", r.wide, {H, T});
            AttentionGrads d = {
                .dq = {}, .dk = r.output("dk", {T, s.kv_heads, D}), .dv = r.output("dv", {T, s.kv_heads, D})};
            set_queries(r, d, value && D % 2 == 0 ? Made::by_norm_rope : Made::plainly, T, H, D);
            if (gate == 1) d.dgate = r.output("dgate", {T, H, D});
            if (gate == 2) d.dgate = r.output("dgate", {T, H});
            d.dextra_key = r.inout("dkey", r.wide, {rows, D});
            if (value) d.dextra_value = r.inout("dvalue", r.wide, {rows, D});
            gated_attention_backward(r.ctx, d, dy, in, {o, lse}, out, {.dlse = dlse});
          }};
}

/// Importance of heads, and its gradient, from a sink's logits by query.
OpCase importance_case(int64_t tokens, int64_t heads) {
  return {
      fmt::format("head importance by query T={} H={}", tokens, heads), [=](CaseRun& r) {
        HeadGate g;
        g.lse = r.input("lse", r.wide, {heads, tokens}), g.sink = r.input("logits", r.wide, {heads, tokens});
        head_importance(r.ctx, r.output("row", DType::f64, {head_row_size(heads)}), {}, g, tokens);
        head_importance_backward(r.ctx, r.output("dlse", r.wide, {heads, tokens}), {}, {},
                                 r.input("u", DType::f64, {heads}), g);
      }};
}

OpCase take_case(int64_t tokens, int64_t heads, int64_t depth) {
  return {fmt::format("take sink heads by query T={} H={} D={}", tokens, heads, depth), [=](CaseRun& r) {
            const Tensor o = r.compared("o", r.input("o", {tokens, heads, depth}));
            // Odd heads look at the first key; all would, if padding counted.
            const int64_t counted = tokens / 3;
            take_sink_heads(r.ctx, o, r.input("other", {tokens, heads, depth}),
                            r.input("lse", r.wide, {heads, tokens}, 0.1),
                            r.input("z0", r.wide, {heads, tokens},
                                    [=](int64_t i) {
                                      if (i % tokens >= counted) return 3.0;
                                      return i / tokens % 2 ? -0.2 : -3.0;
                                    }),
                            r.input("logits", r.wide, {heads, tokens}, [](int64_t) { return -2.0; }),
                            r.input("first_key", DType::i32, {tokens}, [](int64_t) { return 0.; }),
                            r.input("targets", DType::i32, {tokens},
                                    [=](int64_t t) { return t < counted ? kNoTarget : kPadding; }),
                            0.3);
          }};
}

OpCase window_case(int64_t queries, int64_t keys, int64_t window) {
  return {fmt::format("window Tq={} Tk={} window={}", queries, keys, window), [=](CaseRun& r) {
            const Tensor first = r.input(
                             "first_key", DType::i32, {queries},
                             [=](int64_t t) { return static_cast<double>((t + keys - queries) / 23 * 23); }),
                         seen = r.output("window_first", DType::i32, {queries});
            window_first_key(r.ctx, seen, first, keys, window);
            // Its exponential: no difference of infinities.
            AttentionInputs in = inputs(r, {queries, keys, 2, 1, 16}, AttentionWeights::softmax);
            in.first_key = seen;
            const Tensor o = r.output("o", {queries, 2, 16}), lse = r.output("lse", r.wide, {2, queries}),
                         z0 = r.input("z0", r.wide, {2, queries});
            attention_forward(r.ctx, {o, lse}, in);
            hide_first_logits(r.ctx, z0, first, seen);
            HeadGate g;
            g.lse = lse, g.z0 = z0, g.first_key = first;
            head_importance(r.ctx, r.output("row", DType::f64, {head_row_size(2)}), {}, g, queries);
          }};
}

OpCase loose(OpCase c, double factor) {
  c.tolerance_factor = factor;
  return c;
}

}  // namespace

OpFamily attention_kinds_cases() {
  OpFamily family{"attention_kinds", {}, {}};
  auto& cases = family.cases;
  for (const int64_t depth : {16, 64, 128, 256}) {
    for (const int64_t tokens : {1, 17, 70}) {
      // e^z - 1 of scores near 0 keeps few digits.
      cases.push_back(loose(softpick_case({tokens, tokens, 2, 1, depth}, false), 20));
      cases.push_back(loose(softpick_case({tokens, tokens, 2, 1, depth}, true), 40));
    }
    cases.push_back(loose(softpick_case({50, 50, 4, 2, depth, true}, true), 40));
    cases.push_back(loose(softpick_case({9, 50, 4, 2, depth}, false), 20));
  }
  for (const int64_t depth : {5, 64, 128})
    for (const bool value : {false, true})
      for (const int gate : {0, 1, 2})
        cases.push_back(
            loose(extra_case({150, 150, 4, 2, depth, true}, value ? 2 : 4, value, gate, true), 10));
  cases.push_back(loose(extra_case({10, 40, 4, 2, 64}, 2, true, 1, false), 4));
  for (const int64_t tokens : {1, 300}) cases.push_back(loose(importance_case(tokens, 3), 2));
  cases.push_back(take_case(60, 4, 8));
  for (const int64_t window : {1, 7, 64, 1000}) {
    cases.push_back(loose(window_case(130, 130, window), 2));
    cases.push_back(loose(window_case(9, 90, window), 2));
  }
  return family;
}

}  // namespace sluice::test
