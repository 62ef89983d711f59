// Sluice's attention kernels compared with cuDNN's, in alternation: without a gate, with a headwise and with
// an elementwise gate (fused if the kernel supports it; after cuDNN by a separate kernel). TFLOP/s count the
// causal half.
#include "ops/attention.h"

#include <spdlog/fmt/fmt.h>

#include <array>
#include <cmath>

#include "bench/bench.h"

namespace sluice::bench {
namespace {

constexpr int kTurns = 3;  // sets of buffers; together larger than an L2 cache of 60 MB
using Rotating = std::array<Tensor, kTurns>;
const Tensor& of(const Rotating& r, int turn) { return r[static_cast<size_t>(turn % kTurns)]; }

struct Shape {
  int64_t tokens, heads, kv_heads, depth;
};

struct Way {
  const char* name;
  AttentionKernel kernel;
};

std::vector<Way> ways(Device device) {
  if (device == Device::cpu) return {{"cpu", AttentionKernel::automatic}};
  return {
      {"hopper", AttentionKernel::hopper}, {"mma", AttentionKernel::mma}, {"cudnn", AttentionKernel::cudnn}};
}

std::vector<Candidate> candidates(Inputs& in, const Shape& s, const std::string& gate) {
  const auto rotating = [&](int64_t heads) {
    Rotating r;
    for (Tensor& t : r) t = in.normal(DType::bf16, {s.tokens, heads, s.depth});
    return r;
  };
  const Rotating q = rotating(s.heads), k = rotating(s.kv_heads), v = rotating(s.kv_heads),
                 o = rotating(s.heads), y = rotating(s.heads), dy = rotating(s.heads), dq = rotating(s.heads),
                 dk = rotating(s.kv_heads), dv = rotating(s.kv_heads);
  Rotating z{}, dz{}, lse;
  for (Tensor& t : lse) t = in.zeros(DType::f32, {s.heads, s.tokens});
  for (int i = 0; i < kTurns; ++i) {
    const auto at = static_cast<size_t>(i);
    if (gate == "elementwise")
      z[at] = in.normal(DType::bf16, {s.tokens, s.heads, s.depth}),
      dz[at] = in.zeros(DType::bf16, {s.tokens, s.heads, s.depth});
    else if (gate == "headwise")
      z[at] = in.normal(DType::bf16, {s.tokens, s.heads}),
      dz[at] = in.zeros(DType::bf16, {s.tokens, s.heads});
  }
  const Tensor first = in.integers(s.tokens, [](int64_t) { return 0; });
  const double scale = 1 / std::sqrt(static_cast<double>(s.depth));
  // Two products over the visible half of the scores forward, five backward.
  const double flops = 2.0 * static_cast<double>(s.tokens) * static_cast<double>(s.tokens) *
                       static_cast<double>(s.heads * s.depth);

  std::vector<Candidate> result;
  Context& ctx = in.ctx;
  for (const Way& way : ways(ctx.device)) {
    const AttentionKernel kernel = way.kernel;
    const auto output = [=](int turn) {
      AttentionOutput out;
      out.gate = of(z, turn);
      return out;
    };
    const auto inputs = [=](int turn) {
      return AttentionInputs{of(q, turn), of(k, turn), of(v, turn), first, scale};
    };
    const auto state = [=](int turn) { return AttentionState{of(o, turn), of(lse, turn)}; };
    const auto forward = [=, &ctx](int i) {
      if (gate == "none")
        attention_forward(ctx, state(i), inputs(i), kernel);
      else
        gated_attention_forward(ctx, of(y, i), state(i), inputs(i), output(i), kernel);
    };
    // Forward is run on every set of buffers before backward is timed, so that its statistics match its
    // queries.
    const auto backward = [=, &ctx](int i) {
      if (i < kTurns) forward(i);
      const AttentionGrads grads = {of(dq, i), of(dk, i), of(dv, i), of(dz, i)};
      if (gate == "none")
        attention_backward(ctx, grads, of(dy, i), inputs(i), state(i), {}, kernel);
      else
        gated_attention_backward(ctx, grads, of(dy, i), inputs(i), state(i), output(i), {}, kernel);
    };
    const nlohmann::json labels{{"tokens", s.tokens},
                                {"heads", fmt::format("{}/{}", s.heads, s.kv_heads)},
                                {"gate", gate},
                                {"kernel", way.name}};
    result.push_back({"attention forward", forward, flops, 0, labels});
    result.push_back({"attention backward", backward, 2.5 * flops, 0, labels});
  }
  return result;
}

}  // namespace

nlohmann::json measure_attention(const RaceOptions& options) {
  std::vector<Shape> shapes;
  for (const int64_t tokens : {4096, 8192, 16384})
    for (const int64_t heads : {64, 16}) shapes.push_back({tokens, heads, 8, 128});
  if (options.tiny) shapes = {{40, 2, 1, 64}};
  nlohmann::json rows = nlohmann::json::array();
  for (const Shape& s : shapes)
    for (const char* gate : {"none", "headwise", "elementwise"})
      for (const nlohmann::json& row : race(options, [&](Inputs& in) { return candidates(in, s, gate); }))
        rows.push_back(row);
  // Relative to cuDNN with the same gate, in the same turns.
  for (nlohmann::json& row : rows)
    for (const nlohmann::json& other : rows) {
      const auto same = [&](const char* key) { return row[key] == other[key]; };
      if (other["kernel"] == "cudnn" && same("name") && same("tokens") && same("heads") && same("gate") &&
          row.contains("us") && other.contains("us"))
        row["of_cudnn"] = other["us"].get<double>() / row["us"].get<double>();
    }
  return rows;
}

}  // namespace sluice::bench
