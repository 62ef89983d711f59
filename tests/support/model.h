#pragma once
// A small transformer with its own memory, for tests of layers and of code that uses them.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "core/parallel_for.h"
#include "nn/transformer.h"
#include "ops/elementwise.h"
#include "support/gradcheck.h"

namespace sluice::test {

inline ModelConfig tiny_config() {
  ModelConfig c;
  c.vocab_size = 11;
  c.hidden_size = 6;
  c.num_hidden_layers = 1;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 4;
  c.intermediate_size = 5;
  c.initializer_range = 0.4;
  // With the usual 1e-6 a norm cancels the scale of its input (for example a sink's factor), whose gradient
  // would then be noise.
  c.rms_norm_eps = 0.05;
  c.attention.sparse.loss.coefficient = 0;  // loss() has no part of the indexer
  return c;
}

/// Tokens of one or more consecutive documents; every token attends only within its document.
struct TokenBatch {
  std::vector<int32_t> tokens, targets, positions, first_key;

  void add(const std::vector<int32_t>& document) {
    const auto start = static_cast<int32_t>(tokens.size());
    for (size_t i = 0; i + 1 < document.size(); ++i) {
      tokens.push_back(document[i]);
      targets.push_back(document[i + 1]);
      positions.push_back(static_cast<int32_t>(i));
      first_key.push_back(start);
    }
  }
  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  Batch view() {
    const auto tensor = [&](std::vector<int32_t>& v) {
      return Tensor(v.data(), DType::i32, {size()}, "batch");
    };
    return {.tokens = tensor(tokens),
            .targets = tensor(targets),
            .positions = tensor(positions),
            .first_key = tensor(first_key)};
  }
};

inline std::vector<int32_t> random_tokens(int64_t count, int64_t vocab_size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_size)));
  return tokens;
}

/// Two documents, and one token without a target.
inline TokenBatch tiny_batch(int64_t vocab_size = 11) {
  TokenBatch b;
  b.add(random_tokens(5, vocab_size, 1));
  b.add(random_tokens(4, vocab_size, 2));
  b.targets[3] = -1;
  return b;
}

/// Tiny models gain nothing from threads, and lose much on a busy machine.
class OneThread {
 public:
  OneThread() { set_num_threads(1); }
  ~OneThread() { set_num_threads(threads_); }

 private:
  int threads_ = num_threads();
};

class TestModel {
 public:
  TestModel(const ModelConfig& config, TokenBatch tokens, DType dtype = DType::f64,
            Recompute recompute = Recompute::none, const ExpertRanks& experts = {},
            const LoraConfig& lora = {}, const std::vector<ParameterRule>& rules = {})
      : batch(std::move(tokens)), store(lora, rules), model(config, store, experts) {
    // Like the trainer: measure everything with a dry step, then allocate.
    Context dry(0);
    Arena none_values("values"), none_grads("gradients"), none_activations("activations");
    build(dry, none_values, none_grads, none_activations, dtype, recompute);
    run(dry);
    values = std::make_unique<Arena>("values", none_values.high_water());
    grads = std::make_unique<Arena>("gradients", none_grads.high_water());
    activations = std::make_unique<Arena>("activations", none_activations.high_water());
    context = std::make_unique<Context>(std::max<int64_t>(dry.scratch.high_water(), 64));
    build(*context, *values, *grads, *activations, dtype, recompute);
    store.initialize(*context, 1234);
    store.pack(*context);
  }

  /// Values different from all defaults: norms around 1, constants and sinks around 0.
  void randomize(uint32_t seed = 5) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < store.specs().size(); ++i) {
      const ParamSpec& spec = store.specs()[i];
      const bool norm = spec.init.kind == Init::Kind::constant && spec.init.value == 1;
      const Tensor value = store.value(static_cast<ParamStore::Id>(i));
      for (int64_t j = 0; j < value.numel(); ++j)
        Pool::set(value, j, norm ? 1 + 0.2 * normal(random) : 0.45 * normal(random));
    }
    store.pack(*context);
  }

  /// Mean loss of the counted tokens, plus the head balance loss and the z-loss of the logits.
  double loss() {
    store.pack(*context);
    const Batch b = batch.view();
    zero_heads(*context);
    model.forward(*context, b, saved, load);
    model.loss_forward(*context, losses, b, saved);
    balance_heads(*context, model.config().attention.head_balance, load.heads);
    return mean_loss() + z_loss();
  }
  /// The same (without the z-loss), and its gradient in the store.
  double loss_and_gradient() {
    store.pack(*context);
    store.zero_grads(*context);
    run(*context);
    return mean_loss();
  }
  /// Adds the gradient to the gradients in the store.
  void add_gradient() { run(*context); }
  std::vector<double> logits() {
    loss();
    return last_logits();
  }
  std::vector<double> last_logits() {
    Pool pool;
    const Tensor out = pool.zeros(accumulate_dtype(store.dtype()), {batch.size(), model.config().vocab_size});
    Context wide(1 << 20);
    model.logits(wide, out, saved.hidden);
    std::vector<double> all;
    for (int64_t i = 0; i < out.numel(); ++i) all.push_back(Pool::get(out, i));
    return all;
  }

  ParamStore::Id id(const std::string& name) const {
    for (size_t i = 0; i < store.specs().size(); ++i)
      if (store.specs()[i].name == name) return static_cast<ParamStore::Id>(i);
    throw std::runtime_error("no parameter " + name);
  }
  /// Copies the values of all parameters that both models have, with conversion.
  void copy_from(const TestModel& other) {
    for (size_t i = 0; i < store.specs().size(); ++i)
      for (size_t j = 0; j < other.store.specs().size(); ++j) {
        if (store.specs()[i].name != other.store.specs()[j].name) continue;
        const Tensor to = store.value(static_cast<ParamStore::Id>(i)),
                     from = other.store.value(static_cast<ParamStore::Id>(j));
        if (to.numel() != from.numel()) continue;
        for (int64_t k = 0; k < to.numel(); ++k) Pool::set(to, k, Pool::get(from, k));
      }
  }

  TokenBatch batch;
  ParamStore store;
  Transformer model;
  std::unique_ptr<Arena> values, grads, activations;
  std::unique_ptr<Context> context;
  Transformer::Saved saved;
  Tensor losses, dhidden;
  StepLoad load;  // heads, where model.attention.head_balance asks for it

 private:
  void build(Context& ctx, Arena& v, Arena& g, Arena& a, DType dtype, Recompute recompute) {
    const int64_t T = batch.size();
    store.allocate(ctx, dtype, T, v, &g);
    model.allocate_tables(ctx, v, dtype, std::max<int64_t>(T, 64));
    saved = model.make_saved(a, T, dtype, recompute);
    losses = a.alloc("losses", accumulate_dtype(dtype), {T});
    dhidden = a.alloc("dhidden", dtype, {T, model.config().hidden_size});
    load.heads = make_head_load(model.config(), a, a, nullptr);
    if (model.config().attention.sparse.loss.coefficient > 0)
      load.indexers = make_indexer_load(model.config(), a);
    load.logits.coefficient = model.config().logit_z_loss_coefficient;
  }
  void zero_heads(Context& ctx) {
    if (load.heads.totals) fill(ctx, load.heads.totals, 0.0);
    if (load.indexers.sums) fill(ctx, load.indexers.sums, 0.0);
  }
  void run(Context& ctx) {
    const Batch b = batch.view();
    zero_heads(ctx);
    model.forward(ctx, b, saved, load);
    double scale = 1.0 / static_cast<double>(counted());
    load.indexers.gradient_scale = scalar(scale);
    model.loss_forward_backward(ctx, losses, dhidden, b, saved, scalar(scale), load);
    model.backward(ctx, dhidden, b, saved, load);
  }
  int64_t counted() const {
    return std::count_if(batch.targets.begin(), batch.targets.end(), [](int32_t t) { return t >= 0; });
  }
  /// By its definition, from the logits of the last forward pass.
  double z_loss() {
    const double coefficient = model.config().logit_z_loss_coefficient;
    if (coefficient == 0) return 0;
    const std::vector<double> z = last_logits();
    const auto V = static_cast<size_t>(model.config().vocab_size);
    double squares = 0;
    for (size_t t = 0; t < batch.targets.size(); ++t) {
      if (batch.targets[t] < 0) continue;
      double sum = 0;
      for (size_t v = 0; v < V; ++v) sum += std::exp(z[t * V + v]);
      squares += std::log(sum) * std::log(sum);
    }
    return coefficient * squares / static_cast<double>(counted());
  }
  double mean_loss() const {
    double total = 0;
    for (int64_t i = 0; i < losses.numel(); ++i) total += Pool::get(losses, i);
    total /= static_cast<double>(counted());
    const Tensor& rows = load.heads.batch;
    for (int64_t l = 0; rows && l < rows.dim(0); ++l)
      total += model.config().attention.head_balance.coefficient * Pool::get(rows, (l + 1) * rows.dim(1) - 1);
    return total;
  }
};

}  // namespace sluice::test
