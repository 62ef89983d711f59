// Attention, its sink and its gate: shapes on and off the tiles, documents, cached keys, every fused output.
#include "ops/attention.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "core/device.h"
#include "ops/cases.h"
#include "ops/level_scores.h"
#include "ops/made_queries.h"
#include "ops/query_places.h"
#include "support/enums.h"
#include "support/gpu.h"
#ifdef SLUICE_EMULATION
#include "seam.h"
#endif

namespace sluice::test {
namespace {

enum class Documents { one, two, short_ones, alone, window };

struct Shape {
  int64_t queries, keys, heads, kv_heads, depth;
  Documents documents = Documents::one;
  int64_t ranks = 1, rank = 0;
  QueryPlaces places() const { return {queries, keys, ranks, rank}; }
};

std::string describe(const Shape& s) {
  return fmt::format("Tq={} Tk={} H={} Hkv={} D={} documents={} rank={}/{}", s.queries, s.keys, s.heads,
                     s.kv_heads, s.depth, static_cast<int>(s.documents), s.rank, s.ranks);
}

/// The first key visible to key position t as a query; does not decrease.
int64_t first_of(const Shape& s, int64_t t) {
  switch (s.documents) {
    case Documents::two:
      return t >= s.keys / 2 ? s.keys / 2 : 0;
    case Documents::short_ones:
      return t / 23 * 23;
    case Documents::alone:
      return t;
    case Documents::window:
      return std::max<int64_t>(0, t - 40);
    case Documents::one:
      break;
  }
  return 0;
}

AttentionInputs inputs(CaseRun& r, const Shape& s) {
  AttentionInputs in;
  in.q = r.input("q", {s.queries, s.heads, s.depth});
  in.k = r.input("k", {s.keys, s.kv_heads, s.depth});
  in.v = r.input("v", {s.keys, s.kv_heads, s.depth});
  in.first_key = s.places().first_key(r, [&](int64_t key) { return first_of(s, key); });
  in.own_key = s.places().own_key(r);
  in.scale = 1 / std::sqrt(static_cast<double>(s.depth));
  return in;
}

AttentionGrads grads(CaseRun& r, const Shape& s, Made made) {
  AttentionGrads d;
  set_queries(r, d, made, s.queries, s.heads, s.depth);
  d.dk = r.output("dk", {s.keys, s.kv_heads, s.depth});
  // In every second shape as columns of a matrix.
  d.dv = s.keys % 2 == 0 ? r.columns("dv", s.keys, s.kv_heads * s.depth).view({s.keys, s.kv_heads, s.depth})
                         : r.output("dv", {s.keys, s.kv_heads, s.depth});
  return d;
}

/// On a GPU the kernels for every GPU since sm_80, where they apply; those for Hopper have a separate family.
AttentionKernel kernel_for(const CaseRun& r, const AttentionInputs& in) {
  const int64_t depth = in.q.dim(2);
  const bool applies = r.ctx.device == Device::cuda && in.weights == AttentionWeights::softmax &&
                       in.q.dtype == DType::bf16 && in.scale > 0 &&
                       (depth == 64 || depth == 128 || depth == 256);
  return applies ? AttentionKernel::mma : AttentionKernel::automatic;
}

OpCase forward_case(const Shape& s, bool z0 = true) {
  return {fmt::format("attention_forward {} z0={}", describe(s), z0), [=](CaseRun& r) {
            const AttentionInputs in = inputs(r, s);
            AttentionState out;
            out.o = r.output("o", {s.queries, s.heads, s.depth});
            out.lse = r.output("lse", r.wide, {s.heads, s.queries});
            if (z0) out.z0 = r.output("z0", r.wide, {s.heads, s.queries});
            attention_forward(r.ctx, out, in, kernel_for(r, in));
          }};
}

OpCase level_scores_case(const Shape& s) {
  return {fmt::format("attention_forward {} scores alike", describe(s)), [=](CaseRun& r) {
            const AttentionInputs in = level_scores(r, s.places(), s.heads, s.kv_heads, s.depth);
            const AttentionState out{r.output("o", {s.queries, s.heads, s.depth}),
                                     r.output("lse", r.wide, {s.heads, s.queries})};
            attention_forward(r.ctx, out, in, kernel_for(r, in));
          }};
}

struct Extras {
  bool dlse = false, coef0 = false, sink = false;
  int gate = 0;  // none, elementwise, headwise
  GateKind kind = {};
  bool deterministic = true;
  Made made = Made::plainly;  // the queries
};

std::string describe(const Extras& e) {
  return fmt::format(
      "dlse={} coef0={} sink={} gate={} activation={} sharing={} combine={} deterministic={} queries made={}",
      e.dlse, e.coef0, e.sink, e.gate, static_cast<int>(e.kind.activation), static_cast<int>(e.kind.sharing),
      static_cast<int>(e.kind.combine), e.deterministic, static_cast<int>(e.made));
}

/// Backward needs o and lse of a forward, which each case computes itself.
OpCase backward_case(const Shape& s, const Extras& e) {
  return {fmt::format("attention_backward {} {}", describe(s), describe(e)), [=](CaseRun& r) {
            const AttentionInputs in = inputs(r, s);
            const int64_t tokens = s.queries;
            const Tensor o = r.output("o", {tokens, s.heads, s.depth}),
                         lse = r.output("lse", r.wide, {s.heads, tokens});
            const Tensor d_o = r.input("d_o", {tokens, s.heads, s.depth});
            const Tensor dlse = e.dlse ? r.input("dlse", r.wide, {s.heads, tokens}) : Tensor();
            const Tensor coef0 = e.coef0 ? r.input("coef0", r.wide, {s.heads, tokens}, 0.1) : Tensor();
            const AttentionGrads d = grads(r, s, e.made);
            const bool was = r.ctx.deterministic;
            r.ctx.deterministic = e.deterministic;
            attention_forward(r.ctx, {o, lse}, in, kernel_for(r, in));
            attention_backward(r.ctx, d, d_o, in, {o, lse}, {dlse, coef0}, kernel_for(r, in));
            r.ctx.deterministic = was;
          }};
}

OpCase gated_case(const Shape& s, const Extras& e, bool backward) {
  return {
      fmt::format("gated_attention_{} {} {}", backward ? "backward" : "forward", describe(s), describe(e)),
      [=](CaseRun& r) {
        const AttentionInputs in = inputs(r, s);
        const int64_t tokens = s.queries;
        AttentionOutput out;
        if (e.sink) out.sink = r.input("sink", {s.heads});
        if (e.gate == 1) out.gate = r.input("gate", {tokens, s.heads, s.depth}, 2.0);
        if (e.gate == 2) out.gate = r.input("gate", {tokens, s.heads}, 2.0);
        out.kind = e.kind;
        if (e.gate != 0 && e.kind.sharing == GateSharing::specific && tokens % 2 == 1)
          out.dhead = r.input("dhead", DType::f64, {s.heads});
        const Tensor y = r.output("y", {tokens, s.heads, s.depth}),
                     o = r.output("o", {tokens, s.heads, s.depth});
        const Tensor lse = r.output("lse", r.wide, {s.heads, tokens}),
                     z0 = r.output("z0", r.wide, {s.heads, tokens});
        gated_attention_forward(r.ctx, y, {o, lse, z0}, in, out, kernel_for(r, in));
        if (!backward) return;
        const Tensor dy = r.input("dy", {tokens, s.heads, s.depth});
        const Tensor dlse = e.dlse ? r.input("dlse", r.wide, {s.heads, tokens}) : Tensor();
        const Tensor coef0 = e.coef0 ? r.input("coef0", r.wide, {s.heads, tokens}, 0.1) : Tensor();
        const bool columns = tokens % 2 == 0;
        Tensor dgate;
        if (e.gate == 1)
          dgate = columns ? r.columns("dgate", tokens, s.heads * s.depth).view({tokens, s.heads, s.depth})
                          : r.output("dgate", {tokens, s.heads, s.depth});
        if (e.gate == 2)
          dgate = columns ? r.columns("dgate", tokens, s.heads) : r.output("dgate", {tokens, s.heads});
        const Tensor dsink = e.sink ? r.inout("dsink", r.wide, {s.heads}) : Tensor();
        AttentionGrads d = grads(r, s, e.made);
        d.dgate = dgate, d.dsink = dsink;
        gated_attention_backward(r.ctx, d, dy, in, {o, lse}, out, {dlse, coef0}, kernel_for(r, in));
      }};
}

OpCase sink_case(int64_t tokens, int64_t heads, int64_t depth) {
  return {fmt::format("sink T={} H={} D={}", tokens, heads, depth), [=](CaseRun& r) {
            const Tensor o = r.input("o", {tokens, heads, depth}), sink = r.input("sink", {heads});
            const Tensor lse = r.input("lse", r.wide, {heads, tokens}, 2.0);
            sink_forward(r.ctx, r.output("y", {tokens, heads, depth}), o, lse, sink);
            const Tensor dy = r.compared("dy, which d_o overwrites", r.input("dy", {tokens, heads, depth}));
            sink_backward(r.ctx, dy, r.output("dlse", r.wide, {heads, tokens}),
                          r.inout("dsink", r.wide, {heads}), dy, o, lse, sink);
          }};
}

/// Twice the table: one unit in the last place of the largest elements, and differences of nearly equal sums
/// (dsink).
OpCase loose(OpCase c, double factor = 2) {
  c.tolerance_factor = factor;
  return c;
}

/// With a sink behind a gate the CPU rounds what lies between them to bf16, a GPU does not: dsink, a sum that
/// all but cancels, shows it.
void push_gated(std::vector<OpCase>& cases, const Shape& s, const Extras& e) {
  OpCase f32 = loose(gated_case(s, e, true)), bf16 = loose(f32, e.sink && e.gate ? 10 : 2);
  f32.bf16 = bf16.f32 = false;
  cases.push_back(f32);
  cases.push_back(bf16);
}

OpCase random_case(Random& random) {
  Shape s;
  s.depth = one_of<int64_t>(random, {8, 16, 24, 64, 64, 128, 128, 256});
  s.kv_heads = uniform(random, 1, 2);
  s.heads = s.kv_heads * one_of<int64_t>(random, {1, 2, 3});
  s.keys = s.queries = uniform(random, 1, 150);
  s.documents = one_of(
      random, {Documents::one, Documents::two, Documents::short_ones, Documents::alone, Documents::window});
  if (uniform(random, 0, 3) == 0) {
    const QueryPlaces p = QueryPlaces::random(random, 40);
    s.queries = p.queries, s.keys = p.keys, s.ranks = p.ranks, s.rank = p.rank;
  }
  Extras e;
  e.dlse = uniform(random, 0, 1), e.coef0 = uniform(random, 0, 1), e.sink = uniform(random, 0, 1);
  e.gate = static_cast<int>(uniform(random, 0, 2));
  e.made = static_cast<Made>(uniform(random, 0, 4));
  e.kind.activation = static_cast<GateActivation>(uniform(random, 0, kCount<GateActivation> - 1));
  e.kind.combine = static_cast<GateCombine>(uniform(random, 0, 1));
  switch (uniform(random, 0, 3)) {
    case 0:
      if (s.ranks == 1) s.keys += uniform(random, 0, 90);
      return loose(forward_case(s, uniform(random, 0, 1)));
    case 1:
      if (s.documents == Documents::alone || s.keys < 3)
        e.dlse = true;  // without it dq and dk are zero, and noise
      return loose(backward_case(s, e));
    default:
      if (s.documents == Documents::alone || s.keys < 3) e.dlse = true;
      if (s.ranks == 1)
        s.queries = s.keys = std::max<int64_t>(s.keys, 2);  // of one token the CPU refuses a gate in f32
      return loose(gated_case(s, e, true), 10);
  }
}

}  // namespace

OpFamily attention_cases() {
  OpFamily family{"attention", {}, {}};
  auto& cases = family.cases;
  for (const int64_t depth : {16, 64, 128, 256})
    for (const int64_t tokens : {1, 17, 130})
      cases.push_back(loose(forward_case({tokens, tokens, 2, 1, depth})));
  cases.push_back(loose(forward_case({200, 200, 4, 4, 64}, false)));
  cases.push_back(loose(forward_case({200, 200, 4, 1, 128, Documents::two})));
  for (const Documents documents : {Documents::short_ones, Documents::alone, Documents::window}) {
    cases.push_back(loose(forward_case({130, 130, 2, 2, 64, documents})));
    cases.push_back(loose(forward_case({70, 70, 2, 1, 128, documents})));
    cases.push_back(loose(forward_case({70, 70, 1, 1, 256, documents})));
    cases.push_back(loose(forward_case({50, 50, 2, 1, 24, documents})));
  }
  cases.push_back(forward_case({1, 200, 4, 2, 64}));  // decoding one token
  cases.push_back(loose(forward_case({17, 150, 2, 1, 128, Documents::two})));
  cases.push_back(loose(forward_case({9, 90, 2, 1, 8, Documents::window})));
  cases.push_back(loose(forward_case({65, 130, 1, 1, 256})));
  for (const int64_t depth : {16, 64, 128, 256})
    cases.push_back(loose(level_scores_case({20, 1000, 2, 1, depth})));
  // A rank's two chunks of a shared sequence, which end within tiles, and keys that none of its queries sees.
  for (const int64_t depth : {24, 64, 128, 256})
    for (const Documents documents : {Documents::one, Documents::short_ones, Documents::window}) {
      cases.push_back(loose(forward_case({100, 200, 2, 1, depth, documents, 2, 0})));
      cases.push_back(
          loose(backward_case({100, 300, 2, 1, depth, documents, 3, 2}, {.dlse = true, .coef0 = true})));
    }
  for (const int64_t depth : {24, 64, 128})
    push_gated(cases, {130, 260, 2, 1, depth, Documents::two, 2, 1}, {.sink = true, .gate = 1});
  cases.push_back(loose(backward_case({90, 180, 4, 2, 128, Documents::two, 2, 0}, {.deterministic = false})));

  for (const int64_t depth : {16, 64, 128, 256})
    for (const int64_t tokens : {1, 17, 130})  // one token alone: dq is dlse's work, beside sums that cancel
      cases.push_back(
          loose(backward_case({tokens, tokens, 2, 1, depth}, {.dlse = tokens == 1}), tokens == 1 ? 8 : 2));
  cases.push_back(loose(backward_case({200, 200, 4, 4, 64}, {.dlse = true})));
  cases.push_back(loose(backward_case({200, 200, 4, 1, 128, Documents::two}, {.coef0 = true})));
  for (const Documents documents : {Documents::short_ones, Documents::alone, Documents::window}) {
    const Extras all = {.dlse = true, .coef0 = true};
    cases.push_back(loose(backward_case({130, 130, 2, 2, 64, documents}, all)));
    cases.push_back(loose(backward_case({70, 70, 2, 1, 128, documents}, all)));
    cases.push_back(loose(backward_case({70, 70, 1, 1, 256, documents}, all)));
    cases.push_back(loose(backward_case({50, 50, 2, 1, 24, documents}, all)));
  }
  for (const int64_t depth : {64, 128, 256})
    cases.push_back(
        loose(backward_case({150, 150, 2, 1, depth}, {.dlse = true, .coef0 = true, .deterministic = false})));

  for_each_value<GateActivation>([&](GateActivation activation) {
    for (const auto combine : {GateCombine::multiply, GateCombine::add})
      for (const int gate : {1, 2})
        push_gated(cases, {33, 33, 2, 1, 64}, {.gate = gate, .kind = {activation, {}, combine}});
  });
  for (const int64_t depth : {16, 64, 128, 256})
    for (const int gate : {0, 1, 2})
      push_gated(cases, {70, 70, 2, 2, depth, Documents::short_ones}, {.sink = true, .gate = gate});
  for (const auto sharing : {GateSharing::shared, GateSharing::shared_before_activation})
    for (const int gate : {1, 2})
      push_gated(cases, {33, 33, 4, 2, 64},
                 {.dlse = true, .sink = gate == 2, .gate = gate, .kind = {{}, sharing, {}}});
  push_gated(cases, {33, 33, 4, 2, 128}, {.dlse = true, .coef0 = true, .sink = true, .gate = 1});
  push_gated(cases, {40, 40, 2, 1, 64}, {});
  for (const int64_t depth : {24, 64})
    for (const Made made : {Made::by_rope, Made::by_norm_rope, Made::by_norm_per_head}) {
      cases.push_back(loose(backward_case({50, 50, 2, 1, depth}, {.dlse = true, .made = made})));
      push_gated(cases, {33, 33, 4, 2, depth}, {.sink = true, .gate = 1, .made = made});
    }
  cases.push_back(loose(gated_case({20, 90, 2, 1, 128}, {.sink = true, .gate = 1}, false)));
  cases.push_back(loose(gated_case({20, 90, 2, 1, 256}, {.sink = true, .gate = 2}, false)));

  for (const int64_t depth : {5, 8, 64, 128, 256, 300}) cases.push_back(sink_case(131, 3, depth));
  family.fuzz = random_case;
  return family;
}

namespace {

/// One run on the GPU: its outputs by name.
std::map<std::string, std::vector<double>> run_on_gpu(const OpCase& c, DType dtype) {
  Context dry(0, Device::cuda);
  Arena measure("case", 0, Device::cuda);
  CaseRun dry_run(dry, dtype, measure);
  c.run(dry_run);
  Arena memory("case", measure.high_water(), Device::cuda);
  Context ctx(std::max<int64_t>(dry.scratch.high_water(), 64), Device::cuda);
  CaseRun run(ctx, dtype, memory);
  c.run(run);
  std::map<std::string, std::vector<double>> result;
  for (const CaseRun::Output& o : run.collect()) {
    std::vector<double>& values = result[o.name];
    for (int64_t i = 0; i < o.host.numel(); ++i) values.push_back(Pool::get(o.host, i));
  }
  return result;
}

}  // namespace

TEST_CASE("a deterministic attention backward gives the same bits under every schedule", "[attention]") {
  if (no_device()) return;
  const Extras all = {.dlse = true, .coef0 = true, .sink = true, .gate = 1};
  for (const int64_t depth : {16, 64, 128, 256}) {
    const OpCase c = gated_case({140, 140, 2, 1, depth}, all, true);
    const auto once = run_on_gpu(c, DType::bf16);
    for (const uint64_t seed : {1, 2}) {
#ifdef SLUICE_EMULATION
      // With one OS thread a block that waits for one that has not been started waits for ever.
      const uint64_t before = emu::seed();
      const int threads = emu::threads();
      emu::set_seed(seed);
      emu::set_threads(1);
#endif
      INFO(c.name << ", schedule " << seed);
      CHECK(run_on_gpu(c, DType::bf16) == once);
#ifdef SLUICE_EMULATION
      emu::set_seed(before);
      emu::set_threads(threads);
#endif
    }
  }
}

TEST_CASE("a named attention kernel that does not apply is refused", "[attention]") {
  if (no_device()) return;
  for (const AttentionKernel kernel : {AttentionKernel::mma, AttentionKernel::hopper, AttentionKernel::cudnn})
    for (const auto& [dtype, depth] : {std::pair(DType::f32, 64), std::pair(DType::bf16, 96)}) {
      const Shape s = {20, 20, 2, 1, depth};
      const OpCase c = {"named", [=](CaseRun& r) {
                          const AttentionInputs in = inputs(r, s);
                          const AttentionState out{r.output("o", {s.queries, s.heads, s.depth}),
                                                   r.output("lse", r.wide, {s.heads, s.queries})};
                          attention_forward(r.ctx, out, in, kernel);
                        }};
      CHECK_THROWS_WITH(run_on_gpu(c, dtype), Catch::Contains("use auto"));
    }
}

TEST_CASE("no logit of a first key exceeds its row's log-sum-exp", "[attention]") {
  if (no_device()) return;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t depth : {16, 64, 128, 256}) {
      const Shape s = {70, 70, 2, 1, depth, Documents::short_ones};
      const OpCase c = {"large logits", [=](CaseRun& r) {
                          AttentionInputs in = inputs(r, s);
                          in.scale = 40.0 / static_cast<double>(s.depth);
                          AttentionState out;
                          out.lse = r.output("lse", r.wide, {s.heads, s.queries});
                          out.z0 = r.output("z0", r.wide, {s.heads, s.queries});
                          out.o = r.output("o", {s.queries, s.heads, s.depth});
                          attention_forward(r.ctx, out, in, kernel_for(r, in));
                        }};
      const auto outputs = run_on_gpu(c, dtype);
      const std::vector<double>&lse = outputs.at("lse"), &z0 = outputs.at("z0");
      double largest = -INFINITY;
      for (size_t i = 0; i < lse.size(); ++i) largest = std::max(largest, z0[i] - lse[i]);
      INFO(dtype_name(dtype) << " D=" << depth);
      CHECK(largest <= 0);
      CHECK(largest > -1e-6);  // attained: a document's first token sees itself alone
    }
}

#ifdef SLUICE_EMULATION
TEST_CASE("attention loads matrices from shared memory without bank conflicts", "[attention]") {
  if (no_device()) return;
  emu::reset_stats();
  for (const int64_t depth : {64, 128, 256}) {
    run_on_gpu(backward_case({130, 130, 2, 1, depth, Documents::short_ones}, {}), DType::bf16);
    CHECK(emu::stats().ldsm_phases > 0);
    CHECK(emu::stats().ldsm_conflicts == 0);
  }
}
#endif

}  // namespace sluice::test
