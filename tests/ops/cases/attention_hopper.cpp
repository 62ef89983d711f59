// Attention at the shapes where the Hopper kernels have their seams: several tiles of 128 queries and keys,
// documents that begin on, before and after a tile's edge, groups of up to eight query heads, more tiles than
// blocks. On other GPUs the same cases run the kernel that attention selects.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "ops/attention.h"
#include "ops/cases.h"
#include "ops/level_scores.h"
#include "ops/made_queries.h"
#include "ops/query_places.h"
#include "support/enums.h"

namespace sluice::test {
namespace {

struct Shape {
  int64_t queries, keys, heads, kv_heads, depth;
  std::vector<int64_t> documents;  // where later ones begin, in keys
  int64_t ranks = 1, rank = 0;
  int64_t window = 0;  // keys that a query sees at most; 0: all of its document
  QueryPlaces places() const { return {queries, keys, ranks, rank}; }
};

std::string describe(const Shape& s) {
  return fmt::format("Tq={} Tk={} H={} Hkv={} D={} documents at [{}] rank={}/{} window={}", s.queries, s.keys,
                     s.heads, s.kv_heads, s.depth, fmt::join(s.documents, " "), s.rank, s.ranks, s.window);
}

struct Output {
  int gate = 0;  // none, elementwise, headwise
  bool sink = false;
  GateKind kind = {};
};

AttentionInputs inputs(CaseRun& r, const Shape& s) {
  AttentionInputs in;
  in.q = r.input("q", {s.queries, s.heads, s.depth});
  in.k = r.input("k", {s.keys, s.kv_heads, s.depth});
  in.v = r.input("v", {s.keys, s.kv_heads, s.depth});
  in.first_key = s.places().first_key(r, [&](int64_t key) {
    int64_t first = 0;
    for (const int64_t d : s.documents)
      if (d <= key) first = d;
    return s.window > 0 ? std::max(first, key + 1 - s.window) : first;
  });
  in.own_key = s.places().own_key(r);
  in.scale = 1 / std::sqrt(static_cast<double>(s.depth));
  return in;
}

AttentionOutput output(CaseRun& r, const Shape& s, const Output& e) {
  AttentionOutput output;
  if (e.sink) output.sink = r.input("sink", {s.heads});
  if (e.gate == 1) output.gate = r.input("gate", {s.queries, s.heads, s.depth}, 2.0);
  if (e.gate == 2) output.gate = r.input("gate", {s.queries, s.heads}, 2.0);
  output.kind = e.kind;
  return output;
}

/// bf16 only: f32 has a kernel without tiles. Twice the table, as in attention.cpp: one unit in the last
/// place of the largest elements.
OpCase tiled(std::string name, std::function<void(CaseRun&)> run, double factor = 2) {
  OpCase c{std::move(name), std::move(run), factor};
  c.f32 = false;
  return c;
}

OpCase forward_case(const Shape& s, const Output& e) {
  return tiled(
      fmt::format("gated_attention_forward {} gate={} sink={} activation={} combine={}", describe(s), e.gate,
                  e.sink, static_cast<int>(e.kind.activation), static_cast<int>(e.kind.combine)),
      [=](CaseRun& r) {
        const AttentionInputs in = inputs(r, s);
        const AttentionOutput out = output(r, s, e);
        const Tensor y = r.output("y", {s.queries, s.heads, s.depth});
        const Tensor o = r.output("o", {s.queries, s.heads, s.depth});
        const Tensor lse = r.output("lse", r.wide, {s.heads, s.queries});
        const Tensor z0 = r.output("z0", r.wide, {s.heads, s.queries});
        gated_attention_forward(r.ctx, y, {o, lse, z0}, in, out);
      },
      // The CPU rounds o to bf16 before a gate whose scores may be large; a GPU does not.
      e.gate ? 5 : 2);
}

OpCase level_scores_case(const Shape& s) {
  return tiled(fmt::format("attention_forward {} scores alike", describe(s)), [=](CaseRun& r) {
    const AttentionInputs in = level_scores(r, s.places(), s.heads, s.kv_heads, s.depth);
    const AttentionState out{r.output("o", {s.queries, s.heads, s.depth}),
                             r.output("lse", r.wide, {s.heads, s.queries})};
    attention_forward(r.ctx, out, in);
  });
}

OpCase backward_case(const Shape& s, bool coef0, bool deterministic = true, Made made = Made::plainly) {
  return tiled(
      fmt::format("attention_backward {} coef0={} deterministic={} queries made={}", describe(s), coef0,
                  deterministic, static_cast<int>(made)),
      [=](CaseRun& r) {
        const AttentionInputs in = inputs(r, s);
        const Tensor o = r.output("o", {s.queries, s.heads, s.depth});
        const Tensor lse = r.output("lse", r.wide, {s.heads, s.queries});
        const Tensor d_o = r.input("d_o", {s.queries, s.heads, s.depth});
        const Tensor dlse = r.input("dlse", r.wide, {s.heads, s.queries});
        const Tensor c = coef0 ? r.input("coef0", r.wide, {s.heads, s.queries}, 0.1) : Tensor();
        AttentionGrads grads;
        set_queries(r, grads, made, s.queries, s.heads, s.depth);
        grads.dk = r.output("dk", {s.keys, s.kv_heads, s.depth});
        // In every second shape as columns of a matrix.
        grads.dv = s.keys % 2 == 0
                       ? r.columns("dv", s.keys, s.kv_heads * s.depth).view({s.keys, s.kv_heads, s.depth})
                       : r.output("dv", {s.keys, s.kv_heads, s.depth});
        const bool was = r.ctx.deterministic;
        r.ctx.deterministic = deterministic;
        attention_forward(r.ctx, {o, lse}, in);
        attention_backward(r.ctx, grads, d_o, in, {o, lse}, {dlse, c});
        r.ctx.deterministic = was;
      },
      // The CPU rounds dq before it goes on to what queries were made from; Hopper's kernels do not.
      made == Made::plainly ? 2 : 4);
}

Shape random_shape(Random& random) {
  Shape s;
  s.depth = one_of<int64_t>(random, {64, 128});
  s.kv_heads = uniform(random, 1, 2);
  s.heads = s.kv_heads * one_of<int64_t>(random, {1, 3, 8});
  s.queries = s.keys = uniform(random, 100, 300);
  if (uniform(random, 0, 2) == 0) {
    const QueryPlaces p = QueryPlaces::random(random, 90);
    s.queries = p.queries, s.keys = p.keys, s.ranks = p.ranks, s.rank = p.rank;
  }
  const int64_t edge = one_of<int64_t>(random, {1, 1, 128});  // tiles of keys, backward
  for (int64_t d = uniform(random, 1, 200); d < s.keys; d += uniform(random, 1, 200))
    s.documents.push_back((d + edge - 1) / edge * edge);
  if (uniform(random, 0, 2) == 0) s.window = uniform(random, 1, 200);
  return s;
}

OpCase random_case(Random& random) {
  Shape s = random_shape(random);
  if (uniform(random, 0, 1))
    return backward_case(s, uniform(random, 0, 1), uniform(random, 0, 1),
                         static_cast<Made>(uniform(random, 0, 4)));
  if (s.ranks == 1) s.keys += uniform(random, 0, 200);
  Output e{static_cast<int>(uniform(random, 0, 2)), uniform(random, 0, 1) == 1, {}};
  e.kind.activation = static_cast<GateActivation>(uniform(random, 0, kCount<GateActivation> - 1));
  e.kind.combine = static_cast<GateCombine>(uniform(random, 0, 1));
  return forward_case(s, e);
}

}  // namespace

OpFamily attention_hopper_cases() {
  OpFamily family{"attention_hopper", {}, {}};
  auto& cases = family.cases;
  const auto silu_add = GateKind{GateActivation::silu, {}, GateCombine::add};
  const auto ns_sigmoid = GateKind{GateActivation::ns_sigmoid, {}, {}};
  cases.push_back(forward_case({128, 128, 1, 1, 128, {}}, {}));  // one tile
  cases.push_back(
      forward_case({385, 385, 2, 1, 128, {127, 256}}, {1, true, {}}));  // one row in the last tile
  cases.push_back(forward_case({260, 260, 8, 1, 64, {128}}, {1, false, silu_add}));  // a group of eight
  cases.push_back(forward_case({200, 513, 4, 1, 128, {129, 400}}, {2, true, {}}));  // a cache of earlier keys
  cases.push_back(forward_case({129, 640, 1, 1, 64, {}}, {2, false, ns_sigmoid}));  // five key tiles
  cases.push_back(
      forward_case({64, 64, 12, 12, 64, {5, 6}}, {1, true, ns_sigmoid}));  // half a tile, many heads
  cases.push_back(forward_case({260, 520, 2, 1, 128, {}, 2, 1}, {1, true, {}}));
  cases.push_back(forward_case({200, 600, 2, 1, 64, {100, 130, 333}, 3, 0}, {2, true, {}}));
  for (const int64_t depth : {64, 128})
    cases.push_back(level_scores_case({20, 2000, 2, 1, depth, {}}));  // sixteen key tiles
  // Windows: rows of one tile begin in different tiles of keys.
  cases.push_back(forward_case({300, 300, 2, 1, 128, {}, 1, 0, 100}, {1, true, {}}));
  cases.push_back(forward_case({200, 500, 2, 1, 64, {140}, 1, 0, 129}, {2, false, {}}));
  for (const bool deterministic : {true, false}) {
    cases.push_back(backward_case({300, 300, 2, 1, 128, {}, 1, 0, 100}, true, deterministic));
    cases.push_back(backward_case({300, 600, 2, 1, 64, {140}, 2, 1, 150}, true, deterministic));
    cases.push_back(backward_case({385, 385, 2, 1, 128, {100, 256}}, true, deterministic));
    cases.push_back(backward_case({520, 520, 1, 1, 64, {3, 64, 129, 400}}, true, deterministic));
    // Key tiles are taken in another order than theirs: the third first, with which a document begins.
    cases.push_back(backward_case({650, 650, 2, 1, 64, {128, 256, 300}}, true, deterministic));
    // Two chunks of a shared sequence: tiles of keys that no query of this rank sees, and whole documents.
    cases.push_back(backward_case({200, 600, 2, 1, 64, {250, 300, 500}, 3, 1}, true, deterministic));
    cases.push_back(backward_case({300, 600, 2, 1, 128, {}, 2, 0}, true, deterministic));
  }
  // What queries were made from: in place, as columns, as a tensor; blocks with one and with two tiles.
  for (const Made made :
       {Made::by_rope, Made::by_norm_rope, Made::by_norm_per_head, Made::by_norm_without_weight}) {
    cases.push_back(backward_case({300, 300, 2, 1, 128, {100}}, true, true, made));
    cases.push_back(backward_case({50, 50, 3, 3, 64, {}}, true, true, made));
    cases.push_back(backward_case({325, 325, 2, 1, 64, {}}, true, false, made));
  }
  cases.push_back(
      backward_case({200, 600, 2, 1, 128, {250, 300, 500}, 3, 1}, true, true, Made::by_norm_rope));
  cases.push_back(backward_case({130, 130, 8, 1, 128, {}}, false));
  cases.push_back(backward_case({150, 150, 4, 4, 64, {128}}, true));
  cases.push_back(backward_case({256, 256, 1, 1, 128, {}}, false));
  family.fuzz = random_case;
  return family;
}

}  // namespace sluice::test
