// Whole training steps of named models.
#include <algorithm>
#include <numeric>

#include "bench.h"
#include "core/parallel_for.h"
#include "core/random.h"
#include "nn/transformer.h"
#include "ops/reduce.h"
#include "optim/optimizer.h"

namespace sluice::bench {
namespace {

struct Model {
  std::string name;
  ModelConfig config;
  int64_t sequence = 256, samples = 4;
};

/// gates: "", "headwise" or "elementwise".
Model qwen(const std::string& name, const char* gates) {
  Model m;
  m.name = name;
  ModelConfig& c = m.config;
  c.vocab_size = 8192, c.hidden_size = 384, c.num_hidden_layers = 6;
  c.num_attention_heads = 6, c.num_key_value_heads = 2, c.head_dim = 64, c.intermediate_size = 1024;
  if (*gates) {
    GateConfig gate;
    gate.granularity = std::string(gates) == "headwise" ? GateGranularity::headwise : GateGranularity::elementwise;
    c.attention.gates.push_back(gate);
  }
  return m;
}

/// GPT-2's widths with this house's layers: SwiGLU as wide as gives GPT-2's parameters (3 F = 8 C).
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
  return {gpt2("small", 6, 384, 6, 8064), qwen("qwen", ""), qwen("qwen-headwise", "headwise"),
          qwen("qwen-elementwise", "elementwise"), gpt2("gpt2-124m", 12, 768, 12, 50304)};
}

/// A model with all its memory. Built twice: without memory to measure, and real.
struct Training {
  Arena values, gradients, moments, activations;
  Context ctx;
  ParamStore store;
  Transformer transformer;
  Optimizer optimizer;
  Batch batch;
  Transformer::Saved saved;
  Tensor losses, dhidden;

  Training(const Model& model, DType dtype, const Training* measured)
      : values("values", measured ? measured->values.high_water() : 0),
        gradients("gradients", measured ? measured->gradients.high_water() : 0),
        moments("moments", measured ? measured->moments.high_water() : 0),
        activations("activations", measured ? measured->activations.high_water() : 0),
        ctx(measured ? std::max<int64_t>(measured->ctx.scratch.high_water(), 64) : 0),
        transformer(model.config, store),
        optimizer(OptimizerConfig{}, store) {
    const int64_t tokens = model.sequence * model.samples;
    store.allocate(ctx, dtype, tokens, values, &gradients);
    transformer.allocate_tables(values, dtype, model.sequence);
    optimizer.allocate(moments);
    saved = transformer.make_saved(activations, tokens, dtype, Recompute::none);
    losses = activations.alloc("losses", accumulate_dtype(dtype), {tokens});
    dhidden = activations.alloc("dhidden", dtype, {tokens, model.config.hidden_size});
    for (Tensor* t : {&batch.tokens, &batch.targets, &batch.positions, &batch.first_key})
      *t = activations.alloc("batch", DType::i32, {tokens});
    if (!measured) return;
    const RandomStream random(1, "bench");
    for (int64_t t = 0; t < tokens; ++t) {
      const auto word = [&](int64_t i) {
        return static_cast<int32_t>(random.bits(static_cast<uint64_t>(i)) % static_cast<uint64_t>(model.config.vocab_size));
      };
      batch.tokens.as<int32_t>()[t] = word(t);
      batch.targets.as<int32_t>()[t] = word(t + 1);
      batch.positions.as<int32_t>()[t] = static_cast<int32_t>(t % model.sequence);
      batch.first_key.as<int32_t>()[t] = static_cast<int32_t>(t - t % model.sequence);
    }
    store.initialize(1);
    optimizer.sync_master(ctx);
    store.pack(ctx);
  }

  /// Mean loss.
  double step() {
    const double tokens = static_cast<double>(losses.dim(0));
    store.zero_grads(ctx);
    transformer.forward(ctx, batch, saved);
    transformer.loss_forward_backward(ctx, losses, dhidden, batch, saved, 1 / tokens);
    double loss = 0;
    sum(ctx, &loss, losses);
    transformer.backward(ctx, dhidden, batch, saved);
    const double norm = gradient_norm(ctx, store);
    optimizer.step(ctx, 1e-4, norm > 1 ? 1 / norm : 1);
    store.pack(ctx);
    return loss / tokens;
  }
};

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Model& m : models()) names.push_back(m.name);
  return names;
}

nlohmann::json measure_step(const std::string& name, DType dtype, double seconds, bool profile) {
  const std::vector<Model> all = models();
  const Model& model = *std::find_if(all.begin(), all.end(), [&](const Model& m) { return m.name == name; });
  Training dry(model, dtype, nullptr);
  dry.step();
  Training training(model, dtype, &dry);

  int64_t matrix = 0;  // parameters in products
  for (size_t i = 0; i < training.store.specs().size(); ++i)
    if (training.store.specs()[i].packed) matrix += training.store.numel(static_cast<int>(i));
  const ModelConfig& c = model.config;
  const double flops = 6.0 * static_cast<double>(matrix) +
                       6.0 * static_cast<double>(c.num_hidden_layers * model.sequence * c.num_attention_heads * c.head_dim);

  double loss = 0;
  for (int i = 0; i < 2; ++i) loss = training.step();
  Profile times;
  std::vector<double> steps, peaks{fma_peak(num_threads(), 0.05)};
  const double begin = now();
  // The peak is taken between the steps, so that both see the same clock.
  while (steps.size() < 10 || now() - begin < seconds) {
    training.ctx.profile = profile ? &times : nullptr;
    const double start = now();
    loss = training.step();
    steps.push_back(now() - start);
    if (steps.size() % 5 == 0) peaks.push_back(fma_peak(num_threads(), 0.02));
  }
  std::sort(steps.begin(), steps.end());
  std::sort(peaks.begin(), peaks.end());
  const double median = steps[steps.size() / 2], peak = peaks[peaks.size() / 2];
  const double tokens = static_cast<double>(model.sequence * model.samples);
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
                     {"fma_peak_gflops", peak},
                     {"percent_of_peak", 100 * gflops / peak},
                     {"loss", loss}};
  if (profile) {
    std::vector<Profile::Entry> entries(times.begin(), times.end());
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
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
