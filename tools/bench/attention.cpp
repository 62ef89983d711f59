// Sluice's attention kernels compared with cuDNN's, in alternation: without a gate, with a headwise and with
// an elementwise gate (fused if the kernel supports it; after cuDNN by a separate kernel), with documents,
// with a sink, with sums of dq in any order, with the norm and the rotary embedding of queries behind
// backward, by a kernel of their own and by attention's. TFLOP/s count the visible half. Their results are
// compared as well, at the size that is timed, where a block has more tiles than in any test.
#include "ops/attention.h"

#include <spdlog/fmt/fmt.h>

#include <array>
#include <cmath>
#include <memory>

#include "bench/bench.h"
#include "core/device.h"
#include "core/error.h"

namespace sluice::bench {
namespace {

constexpr int kTurns = 3;  // sets of buffers; together larger than an L2 cache of 60 MB
using Rotating = std::array<Tensor, kTurns>;
const Tensor& of(const Rotating& r, int turn) { return r[static_cast<size_t>(turn % kTurns)]; }

enum class Norm { none, apart, along };  // of the queries, in backward: not computed, an op, by attention

struct Shape {
  int64_t tokens, heads, kv_heads, depth;
  std::string gate = "none";
  int64_t document = 0;  // tokens; 0: one document
  bool sink = false, any_order = false;
  Norm norm = Norm::none;

  std::string with() const {
    if (norm != Norm::none) return norm == Norm::apart ? "queries' norm, apart" : "queries' norm";
    return sink ? "sink" : any_order ? "any order" : document ? fmt::format("documents of {}", document) : "";
  }
  bool plain() const { return gate == "none" && !sink; }
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

/// The tensors of a shape, and the calls.
struct Layer {
  Layer(Inputs& in, const Shape& shape) : s(shape), ctx(in.ctx) {
    const auto rotating = [&](int64_t heads) {
      Rotating r;
      for (Tensor& t : r) t = in.normal(DType::bf16, {s.tokens, heads, s.depth});
      return r;
    };
    q = rotating(s.heads), k = rotating(s.kv_heads), v = rotating(s.kv_heads), o = rotating(s.heads);
    y = rotating(s.heads), dy = rotating(s.heads), dq = rotating(s.heads), dk = rotating(s.kv_heads);
    dv = rotating(s.kv_heads);
    for (Tensor& t : lse) t = in.zeros(DType::f32, {s.heads, s.tokens});
    for (int i = 0; i < kTurns; ++i) {
      const auto at = static_cast<size_t>(i);
      if (s.gate == "elementwise")
        z[at] = in.normal(DType::bf16, {s.tokens, s.heads, s.depth}),
        dz[at] = in.zeros(DType::bf16, {s.tokens, s.heads, s.depth});
      else if (s.gate == "headwise")
        z[at] = in.normal(DType::bf16, {s.tokens, s.heads}),
        dz[at] = in.zeros(DType::bf16, {s.tokens, s.heads});
    }
    const int64_t document = s.document ? s.document : s.tokens;
    first = in.integers(s.tokens, [=](int64_t t) { return static_cast<int32_t>(t / document * document); });
    if (s.sink) sink = in.normal(DType::bf16, {s.heads}), dsink = in.zeros(DType::f32, {s.heads});
    if (s.norm == Norm::none) return;
    for (Tensor& t : x) t = in.normal(DType::bf16, {s.tokens, s.heads, s.depth});
    weight = in.normal(DType::bf16, {s.depth}), dweight = in.zeros(DType::f32, {s.depth});
    rstd = in.zeros(DType::f32, {s.tokens * s.heads});
    positions = in.integers(s.tokens, [](int64_t t) { return static_cast<int32_t>(t); });
    cos = in.normal(DType::f32, {s.tokens, s.depth / 2}),
    sin = in.normal(DType::f32, {s.tokens, s.depth / 2});
    norm_rope_forward(ctx, o[0], rstd, x[0], weight, 1e-6, positions, cos, sin);  // rstd is read by backward
  }
  AttentionInputs inputs(int turn) const {
    return {of(q, turn), of(k, turn), of(v, turn), first, 1 / std::sqrt(static_cast<double>(s.depth))};
  }
  AttentionState state(int turn) const { return {of(o, turn), of(lse, turn)}; }
  AttentionOutput output(int turn) const {
    AttentionOutput out;
    out.sink = sink, out.gate = of(z, turn);
    return out;
  }
  void forward(int turn, AttentionKernel kernel) const {
    if (s.plain())
      attention_forward(ctx, state(turn), inputs(turn), kernel);
    else
      gated_attention_forward(ctx, of(y, turn), state(turn), inputs(turn), output(turn), kernel);
  }
  void backward(int turn, AttentionKernel kernel) const {
    AttentionGrads grads = {of(dq, turn), of(dk, turn), of(dv, turn), of(dz, turn)};
    grads.dsink = dsink;
    const PositionBackward made = {of(dq, turn), dweight, of(x, turn), weight, rstd, positions, cos, sin};
    if (s.norm == Norm::along) grads.queries = made;
    ctx.deterministic = !s.any_order;
    if (s.plain())
      attention_backward(ctx, grads, of(dy, turn), inputs(turn), state(turn), {}, kernel);
    else
      gated_attention_backward(ctx, grads, of(dy, turn), inputs(turn), state(turn), output(turn), {}, kernel);
    if (s.norm == Norm::apart) position_backward(ctx, made, grads.dq);
  }
  /// What the first turn wrote.
  std::vector<std::pair<const char*, Tensor>> results() const {
    return {{"output", s.plain() ? o[0] : y[0]}, {"dq", dq[0]}, {"dk", dk[0]}, {"dv", dv[0]}};
  }

  Shape s;
  Context& ctx;
  Rotating q, k, v, o, y, dy, dq, dk, dv, z{}, dz{}, lse, x{};
  Tensor first, sink, dsink, weight, dweight, rstd, positions, cos, sin;
};

std::vector<Candidate> candidates(Inputs& in, const Shape& s) {
  const auto layer = std::make_shared<Layer>(in, s);
  // Two products over the visible half of the scores forward, five backward.
  const int64_t document = s.document ? s.document : s.tokens;
  const double flops = 2.0 * static_cast<double>(s.tokens) * static_cast<double>(document) *
                       static_cast<double>(s.heads * s.depth);
  std::vector<Candidate> result;
  for (const Way& way : ways(in.ctx.device)) {
    const AttentionKernel kernel = way.kernel;
    // Forward is run on every set of buffers before backward is timed, so that its statistics match its
    // queries.
    const auto backward = [=](int i) {
      if (i < kTurns) layer->forward(i, kernel);
      layer->backward(i, kernel);
    };
    nlohmann::json labels{{"tokens", s.tokens},
                          {"heads", fmt::format("{}/{}", s.heads, s.kv_heads)},
                          {"depth", s.depth},
                          {"gate", s.gate},
                          {"kernel", way.name}};
    if (!s.with().empty()) labels["with"] = s.with();
    result.push_back({"attention forward", [=](int i) { layer->forward(i, kernel); }, flops, 0, labels});
    result.push_back({"attention backward", backward, 2.5 * flops, 0, labels});
  }
  return result;
}

std::vector<float> on_host(Context& ctx, const Tensor& t) {
  std::vector<bf16> raw(static_cast<size_t>(t.numel()));
  read_tensor(ctx, raw.data(), t);
  return {raw.begin(), raw.end()};
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    difference += (x - y) * (x - y), norm += y * y;
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

constexpr double kLargestDifference = 1e-2;  // of bf16 kernels: twice their usual one

/// Every kernel's results against those of the last one that runs here, and the kernel's own bits in a second
/// run. One row per kernel: `difference`, the largest relative L2 norm of one of its results, `of`, which
/// one, `same_bits`; or `skipped`.
nlohmann::json cross_check(Device device, const Shape& s) {
  int64_t scratch_bytes = 64, memory_bytes = 64;
  const std::vector<Way> all = ways(device);
  const auto run = [](const Layer& layer, AttentionKernel kernel) {
    layer.forward(0, kernel);
    layer.backward(0, kernel);
  };
  {
    Context dry(0, device);
    Arena measure("bench", 0, device);
    Inputs inputs(dry, measure);
    const Layer layer(inputs, s);
    for (const Way& way : all) try {
        run(layer, way.kernel);
      } catch (const Error& e) {
        if (e.code() != ExitCode::usage) throw;
      }
    scratch_bytes = std::max(scratch_bytes, dry.scratch.high_water());
    memory_bytes = std::max(memory_bytes, measure.high_water());
  }
  Context ctx(scratch_bytes, device);
  Arena memory("bench", memory_bytes, device);
  Inputs inputs(ctx, memory);
  const Layer layer(inputs, s);
  nlohmann::json rows = nlohmann::json::array();
  std::vector<std::vector<float>> reference;
  for (auto way = all.rbegin(); way != all.rend(); ++way) {
    nlohmann::json row{{"kernel", way->name}, {"tokens", s.tokens}, {"gate", s.gate}, {"depth", s.depth}};
    try {
      std::vector<std::vector<float>> found[2];
      for (auto& results : found) {
        run(layer, way->kernel);
        for (const auto& [name, tensor] : layer.results()) results.push_back(on_host(ctx, tensor));
      }
      row["same_bits"] = found[0] == found[1];
      if (reference.empty()) reference = found[0], row["reference"] = true;
      row["difference"] = 0.0, row["of"] = "none";
      for (size_t i = 0; i < reference.size(); ++i) {
        const double d = relative_difference(found[0][i], reference[i]);
        if (!(d <= row["difference"].get<double>()))
          row["difference"] = d, row["of"] = layer.results()[i].first;
      }
    } catch (const Error& e) {
      if (e.code() != ExitCode::usage) throw;
      row["skipped"] = e.what();
    }
    rows.push_back(row);
  }
  return rows;
}

void require_agreement(const nlohmann::json& rows) {
  for (const nlohmann::json& row : rows) {
    if (row.contains("skipped")) continue;
    const auto name = row["kernel"].get<std::string>();
    const double difference = row["difference"].get<double>();
    if (!(difference <= kLargestDifference))
      fail(ExitCode::numeric,
           "bench: attention kernel {} differs from the reference by {:.1e} in {}, at {} tokens", name,
           difference, row["of"].get<std::string>(), row["tokens"].get<int64_t>());
    // cuDNN sums dq in any order.
    if (name != "cudnn" && !row["same_bits"].get<bool>())
      fail(ExitCode::numeric, "bench: attention kernel {} has other bits in a second run, at {} tokens", name,
           row["tokens"].get<int64_t>());
  }
}

std::vector<Shape> shapes_of(const RaceOptions& options) {
  std::vector<Shape> shapes;
  const auto variants = [&](const Shape& s, int64_t document) {
    for (const char* gate : {"none", "headwise", "elementwise"}) {
      shapes.push_back(s);
      shapes.back().gate = gate;
    }
    Shape with = s;
    with.document = document, shapes.push_back(with);
    with = s, with.sink = true, shapes.push_back(with);
    with = s, with.any_order = true, shapes.push_back(with);
    with = s, with.norm = Norm::apart, shapes.push_back(with);
    with = s, with.norm = Norm::along, shapes.push_back(with);
  };
  if (options.tiny) {
    variants({40, 2, 1, 64}, 8);
  } else if (options.quick) {
    variants({8192, 16, 8, 128}, 1024);
    shapes.push_back({8192, 16, 8, 64});
    shapes.push_back({4096, 64, 8, 128});
  } else {
    for (const int64_t tokens : {4096, 8192, 16384})
      for (const int64_t heads : {64, 16}) variants({tokens, heads, 8, 128}, 1024);
    shapes.push_back({8192, 32, 8, 64});
  }
  return shapes;
}

}  // namespace

nlohmann::json measure_attention(const RaceOptions& options) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Shape& s : shapes_of(options))
    for (const nlohmann::json& row : race(options, [&](Inputs& in) { return candidates(in, s); }))
      rows.push_back(row);
  // Relative to cuDNN at the same shape, in the same turns.
  for (nlohmann::json& row : rows)
    for (const nlohmann::json& other : rows) {
      const auto same = [&](const char* key) {
        return row.value(key, nlohmann::json()) == other.value(key, nlohmann::json());
      };
      if (other["kernel"] == "cudnn" && same("name") && same("tokens") && same("heads") && same("gate") &&
          same("depth") && same("with") && row.contains("us") && other.contains("us"))
        row["of_cudnn"] = other["us"].get<double>() / row["us"].get<double>();
    }
  return rows;
}

nlohmann::json check_attention(const RaceOptions& options) {
  std::vector<Shape> shapes = {{16384, 16, 8, 128}, {16384, 16, 8, 64, "elementwise"}};
  if (options.quick) shapes = {{8192, 16, 8, 128, "elementwise"}, {8192, 16, 8, 64}};
  if (options.tiny || options.device == Device::cpu) shapes = {{40, 2, 1, 64, "elementwise"}};
  for (Shape& s : shapes)
    if (!s.plain()) s.norm = Norm::along;
  nlohmann::json rows = nlohmann::json::array();
  for (const Shape& s : shapes)
    for (const nlohmann::json& row : cross_check(options.device, s)) rows.push_back(row);
  require_agreement(rows);
  return rows;
}

}  // namespace sluice::bench
