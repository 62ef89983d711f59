// The kernels of sparse attention on one device, in alternation with dense attention at the same shapes: the
// choice of keys, attention over them, and the indexer's loss. Neighbouring queries of a trained indexer
// select much the same keys, those of a random one do not; kernels that share rows between neighbours depend
// on it, so both are measured, and the union of eight neighbours' keys stands beside the times.
#include <spdlog/fmt/fmt.h>

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>

#include "analysis/selection.h"
#include "bench/bench.h"
#include "core/random.h"
#include "ops/attention.h"
#include "ops/indexer.h"
#include "ops/sparse_attention.h"

namespace sluice::bench {
namespace {

struct Shape {
  int64_t tokens, heads, kv_heads, depth, index_heads, index_depth, k;
};

/// Rows of the indexer's queries or head weights; when `alike`, consecutive ones are equal but for some
/// noise.
Tensor index_rows(Inputs& in, std::initializer_list<int64_t> dims, bool alike) {
  constexpr int64_t kTogether = 64;
  const int64_t width = std::accumulate(dims.begin() + 1, dims.end(), int64_t{1}, std::multiplies<>());
  const RandomStream shared(1, "bench rows"), noise(1, "bench noise");
  return in.values(DType::bf16, dims, [=](int64_t i) {
    const double own = noise.normal(static_cast<uint64_t>(i));
    const int64_t row = i / width / kTogether;
    return static_cast<float>(
        alike ? shared.normal(static_cast<uint64_t>(row * width + i % width)) + 0.25 * own : own);
  });
}

/// The mean over some queries of |union of eight neighbours' keys| over the mean number of their keys.
double mean_union(Context& ctx, const Selection& keys, int64_t tokens) {
  if (ctx.dry_run) return 0;
  const HostSelection host(ctx, keys);
  double sum = 0;
  constexpr int64_t kQueries = 16;
  for (int64_t i = 1; i <= kQueries; ++i) {
    const int64_t t = i * tokens / kQueries - 1;
    sum += union_over_keys(*host, 0, t, t, 0);
  }
  return sum / kQueries;
}

std::vector<Candidate> candidates(Inputs& in, const Shape& s, bool alike,
                                  const std::shared_ptr<double>& unions) {
  Context& ctx = in.ctx;
  const auto heads = [&](int64_t count) { return in.normal(DType::bf16, {s.tokens, count, s.depth}); };
  const Tensor first_key = in.integers(s.tokens, [](int64_t) { return 0; });
  const AttentionInputs inputs{heads(s.heads), heads(s.kv_heads), heads(s.kv_heads), first_key,
                               1 / std::sqrt(static_cast<double>(s.depth))};
  const AttentionState dense{in.zeros(DType::bf16, {s.tokens, s.heads, s.depth}),
                             in.zeros(DType::f32, {s.heads, s.tokens})},
      sparse{in.zeros(DType::bf16, {s.tokens, s.heads, s.depth}), in.zeros(DType::f32, {s.heads, s.tokens})};
  const Tensor dy = heads(s.heads);
  const AttentionGrads grads{in.zeros(DType::bf16, {s.tokens, s.heads, s.depth}),
                             in.zeros(DType::bf16, {s.tokens, s.kv_heads, s.depth}),
                             in.zeros(DType::bf16, {s.tokens, s.kv_heads, s.depth})};

  IndexInputs index;
  index.q = index_rows(in, {s.tokens, s.index_heads, s.index_depth}, alike);
  index.w = index_rows(in, {s.tokens, s.index_heads}, alike);
  index.k = in.normal(DType::bf16, {s.tokens, s.index_depth}), index.first_key = first_key;
  index.scale = 1 / std::sqrt(static_cast<double>(s.index_depth));
  Budget budget;
  budget.base = s.k, budget.max = s.k;
  Selection keys;
  const int64_t room = selection_room(budget.most(), s.tokens, 1);
  keys.first = in.zeros(DType::i32, {1, s.tokens, room}), keys.count = in.zeros(DType::i32, {1, s.tokens});
  keys.first_key = first_key;
  const IndexGrads of_index{in.zeros(DType::bf16, {s.tokens, s.index_heads, s.index_depth}),
                            in.zeros(DType::bf16, {s.tokens, s.index_depth}),
                            in.zeros(DType::bf16, {s.tokens, s.index_heads})};
  const IndexLoss loss{.gradient_scale = in.numbers({1.0 / static_cast<double>(s.tokens)})};
  const Tensor sums = in.zeros(DType::f64, {kIndexSums});
  const IndexTarget dense_target{inputs.q, inputs.k, dense.lse, inputs.scale, first_key},
      target{inputs.q, inputs.k, sparse.lse, inputs.scale, first_key};

  const auto t = static_cast<double>(s.tokens), k = static_cast<double>(std::min(s.k, s.tokens)),
             all = t * t / 2, selected = k * t - k * k / 2;
  const auto products = [](double pairs, int64_t width) { return 2 * pairs * static_cast<double>(width); };
  const int64_t width = s.heads * s.depth, index_width = s.index_heads * s.index_depth;
  const auto labels = [&](const char* kernel) {
    return nlohmann::json{{"tokens", s.tokens},
                          {"heads", fmt::format("{}/{}", s.heads, s.kv_heads)},
                          {"kernel", kernel},
                          {"k", s.k},
                          {"neighbours", alike ? "alike" : "unlike"}};
  };
  std::vector<Candidate> result;
  const auto add = [&](const char* name, const char* kernel, double flops, std::function<void(int)> run) {
    result.push_back({name, std::move(run), flops, 0, labels(kernel)});
  };
  // In this order, so that each finds what it reads: selected keys, outputs and their statistics.
  add("attention forward", "dense", 2 * products(all, width),
      [=, &ctx](int) { attention_forward(ctx, dense, inputs); });
  add("attention backward", "dense", 5 * products(all, width),
      [=, &ctx](int) { attention_backward(ctx, grads, dy, inputs, dense); });
  add("choice of keys", "sparse", products(all, index_width), [=, &ctx](int turn) {
    select_keys(ctx, keys, index, budget, {}, {}, "bench");
    if (turn == 0) *unions = mean_union(ctx, keys, s.tokens);
  });
  add("attention forward", "sparse", 2 * products(selected, width),
      [=, &ctx](int) { sparse_attention_forward(ctx, sparse, inputs, keys); });
  add("attention backward", "sparse", 5 * products(selected, width),
      [=, &ctx](int) { sparse_attention_backward(ctx, grads, dy, inputs, sparse, keys); });
  add("indexer's loss", "selected keys", products(selected, width) + 3 * products(selected, index_width),
      [=, &ctx](int) { index_loss(ctx, of_index, sums, index, target, &keys, loss); });
  add("indexer's loss", "all keys", products(all, width) + 3 * products(all, index_width),
      [=, &ctx](int) { index_loss(ctx, of_index, sums, index, dense_target, nullptr, loss); });
  return result;
}

}  // namespace

nlohmann::json measure_sparse_kernels(const RaceOptions& given, int64_t longest) {
  std::vector<Shape> shapes;
  for (const int64_t tokens : {8192, 32768, 131072})
    if (tokens <= (given.quick ? 8192 : longest)) shapes.push_back({tokens, 32, 4, 128, 4, 64, 2048});
  if (given.tiny) shapes = {{96, 4, 2, 64, 2, 64, 16}};
  nlohmann::json rows = nlohmann::json::array();
  for (const Shape& s : shapes)
    for (const bool alike : {true, false}) {
      RaceOptions options = given;
      if (s.tokens > 8192) options.samples = std::min(options.samples, 9);
      if (s.tokens > 8192) options.warm_up = std::min(options.warm_up, 0.5);
      const auto unions = std::make_shared<double>(0);
      nlohmann::json measured = race(options, [&](Inputs& in) { return candidates(in, s, alike, unions); });
      for (nlohmann::json& row : measured) {
        row["union_of_8_over_keys"] = *unions;
        // Relative to dense attention in the same turns.
        for (const nlohmann::json& other : measured)
          if (other["kernel"] == "dense" && row["kernel"] == "sparse" && other["name"] == row["name"] &&
              row.contains("us") && other.contains("us"))
            row["of_dense"] = row["us"].get<double>() / other["us"].get<double>();
        rows.push_back(row);
      }
    }
  return rows;
}

}  // namespace sluice::bench
