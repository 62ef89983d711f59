// Whole training steps of named models.
#include <algorithm>
#include <numeric>

#include "bench/bench.h"
#include "core/cpu_features.h"
#include "core/parallel_for.h"
#include "core/random.h"
#include "nn/transformer.h"
#include "ops/elementwise.h"
#include "ops/product_algorithms.h"
#include "ops/reduce.h"
#include "optim/optimizer.h"
#include "train/step_graphs.h"

namespace sluice::bench {
namespace {

struct Model {
  std::string name;
  ModelConfig config;
  int64_t sequence = 256, samples = 4;  // of one micro-batch
  int64_t micro_batches = 1;
};

void add_gate(ModelConfig& c, const std::string& granularity) {
  if (granularity.empty()) return;
  GateConfig gate;
  gate.granularity = granularity == "headwise" ? GateGranularity::headwise : GateGranularity::elementwise;
  c.attention.gates.push_back(gate);
}

/// gates: "", "headwise" or "elementwise".
Model qwen(const std::string& name, const char* gates) {
  Model m;
  m.name = name;
  ModelConfig& c = m.config;
  c.vocab_size = 8192, c.hidden_size = 384, c.num_hidden_layers = 6;
  c.num_attention_heads = 6, c.num_key_value_heads = 2, c.head_dim = 64, c.intermediate_size = 1024;
  add_gate(c, gates);
  return m;
}

/// The dense 1.7B model of the Gated Attention paper, for a GPU: 8 micro-batches of 16,384 tokens per step.
Model dense_1_7b(const std::string& name, const char* gates) {
  Model m;
  m.name = name;
  m.sequence = 4096, m.samples = 4, m.micro_batches = 8;
  ModelConfig& c = m.config;
  c.vocab_size = 151936, c.hidden_size = 2048, c.num_hidden_layers = 28;
  c.num_attention_heads = 16, c.num_key_value_heads = 8, c.head_dim = 128, c.intermediate_size = 6144;
  add_gate(c, gates);
  return m;
}

void add_experts(ModelConfig& c, int64_t experts, int64_t per_token, int64_t width) {
  c.moe.num_experts = experts, c.moe.num_experts_per_tok = per_token, c.moe.moe_intermediate_size = width;
}

Model qwen_moe() {
  Model m = qwen("qwen-moe", "elementwise");
  add_experts(m.config, 16, 2, 256);
  return m;
}

/// One GPU's part of a 15A2B model whose 128 experts are distributed over eight GPUs: 16 experts, each with
/// as many rows as there.
Model moe_slice() {
  Model m;
  m.name = "moe-slice";
  m.sequence = 4096, m.samples = 4, m.micro_batches = 8;
  ModelConfig& c = m.config;
  c.vocab_size = 151936, c.hidden_size = 2048, c.num_hidden_layers = 24, c.tie_word_embeddings = false;
  c.num_attention_heads = 32, c.num_key_value_heads = 4, c.head_dim = 128;
  add_experts(c, 16, 8, 768);
  return m;
}

/// For tests on an emulated device.
Model tiny(const std::string& name) {
  Model m;
  m.name = name;
  m.sequence = 24, m.samples = 2, m.micro_batches = 2;
  ModelConfig& c = m.config;
  c.vocab_size = 61, c.hidden_size = 32, c.num_hidden_layers = 2;
  c.num_attention_heads = 2, c.num_key_value_heads = 1, c.head_dim = 64, c.intermediate_size = 48;
  add_gate(c, "elementwise");
  if (name == "tiny-moe") add_experts(c, 5, 2, 24);
  return m;
}

/// GPT-2's widths with Sluice's layers; the SwiGLU width gives GPT-2's parameter count (3 F = 8 C).
Model gpt2(const std::string& name, int64_t layers, int64_t width, int64_t heads, int64_t vocabulary) {
  Model m;
  m.name = name;
  ModelConfig& c = m.config;
  c.vocab_size = vocabulary, c.hidden_size = width, c.num_hidden_layers = layers;
  c.num_attention_heads = c.num_key_value_heads = heads, c.head_dim = width / heads;
  c.intermediate_size = width * 8 / 3;
  c.qk_norm = false;
  return m;
}

std::vector<Model> models() {
  return {gpt2("small", 6, 384, 6, 8064),
          qwen("qwen", ""),
          qwen("qwen-headwise", "headwise"),
          qwen("qwen-elementwise", "elementwise"),
          gpt2("gpt2-124m", 12, 768, 12, 50304),
          dense_1_7b("1.7b", ""),
          dense_1_7b("1.7b-headwise", "headwise"),
          dense_1_7b("1.7b-elementwise", "elementwise"),
          qwen_moe(),
          moe_slice(),
          tiny("tiny"),
          tiny("tiny-moe")};
}

/// A model with all its memory. Built twice, first without memory to measure it.
struct Training {
  Arena values, gradients, moments, activations;
  Context ctx;
  ParamStore store;
  Transformer transformer;
  Optimizer optimizer;
  Batch batch;
  Transformer::Saved saved;
  Tensor losses, dhidden;
  StepLoad load;
  StepGraphs graphs;  // micro-batches, as a training computes them
  int64_t micro_batches;

  Training(const Model& model, Device device, DType dtype, const Training* measured)
      : values("values", measured ? measured->values.high_water() : 0, device),
        gradients("gradients", measured ? measured->gradients.high_water() : 0, device),
        moments("moments", measured ? measured->moments.high_water() : 0, device),
        activations("activations", measured ? measured->activations.high_water() : 0, device),
        ctx(measured ? std::max<int64_t>(measured->ctx.scratch.high_water(), 64) : 0, device),
        transformer(model.config, store),
        optimizer(OptimizerConfig{}, store),
        graphs(measured && device == Device::cuda),
        micro_batches(model.micro_batches) {
    const int64_t tokens = model.sequence * model.samples;
    store.allocate(ctx, dtype, tokens, values, &gradients);
    transformer.allocate_tables(ctx, values, dtype, model.sequence);
    optimizer.allocate(ctx, moments);
    saved = transformer.make_saved(activations, tokens, dtype, Recompute::none);
    losses = activations.alloc("losses", accumulate_dtype(dtype), {tokens});
    dhidden = activations.alloc("dhidden", dtype, {tokens, model.config.hidden_size});
    for (Tensor* t : {&batch.tokens, &batch.targets, &batch.positions, &batch.first_key})
      *t = activations.alloc("batch", DType::i32, {tokens});
    load.routers.totals = make_router_totals(model.config, activations);
    if (!measured) return;
    const RandomStream random(1, "bench");
    std::vector<int32_t> host(static_cast<size_t>(tokens));
    const auto write = [&](const Tensor& t, const auto& element) {
      for (int64_t i = 0; i < tokens; ++i) host[static_cast<size_t>(i)] = static_cast<int32_t>(element(i));
      write_tensor(ctx, t, host.data());
    };
    const auto word = [&](int64_t i) {
      return random.bits(static_cast<uint64_t>(i)) % static_cast<uint64_t>(model.config.vocab_size);
    };
    write(batch.tokens, word);
    write(batch.targets, [&](int64_t i) { return word(i + 1); });
    write(batch.positions, [&](int64_t i) { return i % model.sequence; });
    write(batch.first_key, [&](int64_t i) { return i - i % model.sequence; });
    store.initialize(ctx, 1);
    optimizer.sync_master(ctx);
    store.pack(ctx);
  }

  /// Mean loss.
  double step() {
    ScratchScope t(ctx.scratch);
    const Tensor scale = t.alloc("scale", DType::f64, {1}), loss = t.alloc("loss", DType::f64, {1});
    const auto counted = static_cast<double>(losses.dim(0) * micro_batches);
    fill(ctx, scale, 1 / counted);
    fill(ctx, loss, 0.0);
    // As GradSync (src/optim/grad_sync.h).
    if (ctx.device == Device::cpu)
      for (int unit = 0; unit < store.num_units(); ++unit) store.begin_sums(ctx, unit);
    else
      store.zero_grads(ctx);
    if (load.routers.totals) fill(ctx, load.routers.totals, 0.0);
    for (int64_t i = 0; i < micro_batches; ++i) {
      graphs.replay_or_run(ctx, StepGraphs::Part::micro_batch, [&] {
        transformer.forward(ctx, batch, saved, load);
        transformer.loss_forward_backward(ctx, losses, dhidden, batch, saved, scale, load);
        sum(ctx, loss, losses, Into::add);
        transformer.backward(ctx, dhidden, batch, saved, load);
      });
      for (int unit = 0; unit < store.num_units(); ++unit) store.end_sums(ctx, unit);
    }
    graphs.step_done();
    optimizer.step(ctx, 1e-4, 1.0);
    store.pack(ctx);
    return read_scalar(ctx, loss) / counted;
  }
};

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Model& m : models()) names.push_back(m.name);
  return names;
}

nlohmann::json measure_step(const std::string& name, Device device, DType dtype, double seconds,
                            bool profile) {
  const std::vector<Model> all = models();
  const Model& model = *std::find_if(all.begin(), all.end(), [&](const Model& m) { return m.name == name; });
  const bool gpu = device == Device::cuda;
  Training dry(model, device, dtype, nullptr);
  dry.micro_batches = 1;  // all are alike
  std::set<GpuProduct> products;
  dry.ctx.products = &products;
  dry.step();
  const ProductAlgorithms algorithms = time_products(products, dry.ctx.deterministic);
  Training training(model, device, dtype, &dry);
  training.ctx.algorithms = &algorithms;

  const Flops of_token = training.transformer.flops(model.sequence);
  const double flops = of_token.forward() + of_token.backward();

  double loss = 0;
  for (int i = 0; i < 2; ++i) loss = training.step();
  Profile times;
  // The peak of a CPU is measured between the steps, so that both run at the same clock frequency. A step
  // waits for its loss, also on a GPU.
  const ProductsPeak of_products(dtype);
  constexpr double kTensorCores = 989e3;  // GFLOP/s, H100 and H200 SXM, dense bf16, by their data sheet
  std::vector<double> steps, peaks{gpu ? kTensorCores : of_products.measure(0.05)};
  const double begin = now();
  while (steps.size() < (seconds > 0 ? 10 : 2) || now() - begin < seconds) {
    training.ctx.profile = profile ? &times : nullptr;
    const double start = now();
    loss = training.step();
    steps.push_back(now() - start);
    if (steps.size() % 5 == 0 && !gpu) peaks.push_back(of_products.measure(0.02));
  }
  std::sort(steps.begin(), steps.end());
  std::sort(peaks.begin(), peaks.end());
  const double median = steps[steps.size() / 2], peak = peaks[peaks.size() / 2];
  const double tokens = static_cast<double>(model.sequence * model.samples * model.micro_batches);
  const double gflops = flops * tokens / median * 1e-9;
  nlohmann::json row{{"model", name},
                     {"precision", dtype_name(dtype)},
                     {"parameters", training.store.total()},
                     {"tokens_per_step", tokens},
                     {"flops_per_token", flops},
                     {"steps", steps.size()},
                     {"ms", median * 1e3},
                     {"best_ms", steps[0] * 1e3},
                     {"tokens_per_second", tokens / median},
                     {"gflops", gflops},
                     {"peak_gflops", peak},
                     {"peak", gpu ? "989 TFLOP/s" : of_products.name()},
                     {"memory_bytes", training.values.capacity() + training.gradients.capacity() +
                                          training.moments.capacity() + training.activations.capacity() +
                                          training.ctx.scratch.capacity()},
                     {"percent_of_peak", 100 * gflops / peak},
                     {"loss", loss}};
  if (profile) {
    std::vector<Profile::Entry> entries(times.begin(), times.end());
    std::sort(entries.begin(), entries.end(),
              [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
    const double total = std::accumulate(steps.begin(), steps.end(), 0.0);
    double seen = 0;
    for (const Profile::Entry& e : entries) {
      row["profile"].push_back({{"op", e.op},
                                {"ms", e.seconds * 1e3 / static_cast<double>(steps.size())},
                                {"calls", static_cast<double>(e.calls) / static_cast<double>(steps.size())},
                                {"percent", 100 * e.seconds / total}});
      seen += e.seconds;
    }
    row["profile"].push_back({{"op", "between ops"},
                              {"ms", (total - seen) * 1e3 / static_cast<double>(steps.size())},
                              {"calls", 1},
                              {"percent", 100 * (total - seen) / total}});
  }
  return row;
}

}  // namespace sluice::bench
