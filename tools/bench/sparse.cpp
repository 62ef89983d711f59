// A layer of sparse attention compared with the same layer of dense attention, over lengths and over the
// number of selected keys, in alternation: the whole layer, with projections, indexer and selection, and what
// differs between the two, attention with the choice of its keys and the indexer's loss.
#include <spdlog/fmt/fmt.h>

#include <array>
#include <memory>

#include "bench/bench.h"
#include "core/random.h"
#include "nn/attention.h"
#include "ops/elementwise.h"
#include "ops/rope.h"

namespace sluice::bench {
namespace {

ModelConfig layer_config(bool tiny, int64_t k) {
  ModelConfig c;
  c.vocab_size = 257;
  c.hidden_size = tiny ? 64 : 2048;
  c.num_hidden_layers = 1;
  c.num_attention_heads = tiny ? 4 : 16;
  c.num_key_value_heads = tiny ? 2 : 4;
  c.head_dim = tiny ? 16 : 128;
  c.qk_norm = false;
  if (k == 0) return c;
  c.attention.kind = AttentionKind::sparse;
  c.attention.sparse.k.base = k;
  return c;
}

/// One layer on random inputs, of one sequence.
class LayerRun {
 public:
  LayerRun(const ModelConfig& config, int64_t tokens, DType dtype) : layer_(config, store_, "layer", 0) {
    Memory measured(0, 0, 0, 0);
    build(measured, config, tokens, dtype);
    forward();
    backward();
    memory_ = std::make_unique<Memory>(measured.values.high_water(), measured.grads.high_water(),
                                       measured.rest.high_water(), measured.ctx.scratch.high_water());
    build(*memory_, config, tokens, dtype);
    store_.initialize(memory_->ctx, 1);
    store_.pack(memory_->ctx);
    const RandomStream random(1, "bench");
    for (const Tensor& t : {x_, dy_})
      for (int64_t i = 0; i < t.numel(); ++i) {
        const auto value = static_cast<float>(2 * random.uniform(static_cast<uint64_t>(i)) - 1);
        if (dtype == DType::f32)
          t.as<float>()[i] = value;
        else
          t.as<bf16>()[i] = bf16(value);
      }
    for (int64_t t = 0; t < tokens; ++t) {
      sequence_.positions.as<int32_t>()[t] = static_cast<int32_t>(t);
      sequence_.first_key.as<int32_t>()[t] = 0;
      sequence_.targets.as<int32_t>()[t] = 0;
    }
    rope_table(sequence_.rope_cos, sequence_.rope_sin, 10000, {});
    *load_.gradient_scale.as<double>() = 1.0 / static_cast<double>(tokens);
  }
  void forward() { layer_.forward(*ctx_, x_, sequence_, saved_); }
  void backward() { layer_.backward(*ctx_, dx_, dy_, x_, sequence_, saved_); }
  /// Seconds of the whole layer and, within it, of what differs between the two kinds of attention.
  struct Times {
    double layer = 0, attention = 0;
  };
  /// A forward pass, and the same with the backward pass behind it.
  std::array<Times, 2> measure() {
    Profile profile;
    ctx_->profile = &profile;
    std::array<Times, 2> times;
    const double start = now();
    const auto reached = [&](Times& t) {
      t.layer = now() - start;
      for (const Profile::Entry& e : profile) {
        const std::string op = e.op;
        if (op.find("attention") != op.npos || op == "select_keys" || op == "index_loss")
          t.attention += e.seconds;
      }
    };
    forward();
    reached(times[0]);
    backward();
    reached(times[1]);
    ctx_->profile = nullptr;
    return times;
  }
  double flops(int64_t tokens, bool both) const {
    const Flops f = layer_.flops(tokens);
    return static_cast<double>(tokens) * (f.forward() + (both ? f.backward() : 0));
  }

 private:
  struct Memory {
    Arena values, grads, rest;
    Context ctx;
    Memory(int64_t v, int64_t g, int64_t r, int64_t scratch)
        : values("values", v), grads("gradients", g), rest("activations", r), ctx(scratch) {}
  };
  void build(Memory& m, const ModelConfig& config, int64_t tokens, DType dtype) {
    store_.allocate(m.ctx, dtype, tokens, m.values, &m.grads);
    saved_ = layer_.make_saved(m.rest, "layer", tokens, dtype);
    for (Tensor* t : {&x_, &dy_, &dx_}) *t = m.rest.alloc("x", dtype, {tokens, config.hidden_size});
    for (Tensor* t : {&sequence_.positions, &sequence_.first_key, &sequence_.targets})
      *t = m.rest.alloc("tokens", DType::i32, {tokens});
    for (Tensor* t : {&sequence_.rope_cos, &sequence_.rope_sin})
      *t = m.rest.alloc("rope", accumulate_dtype(dtype), {tokens, config.head_dim / 2});
    load_ = make_indexer_load(config, m.rest);
    load_.gradient_scale = m.rest.alloc("scale", DType::f64, {1});
    sequence_.indexers = load_.sums ? &load_ : nullptr;
    ctx_ = &m.ctx;
  }

  ParamStore store_;
  Attention layer_;
  std::unique_ptr<Memory> memory_;
  Context* ctx_ = nullptr;
  Attention::Saved saved_;
  Tensor x_, dy_, dx_;
  IndexerLoad load_;
  Sequence sequence_;
};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

/// Rows of a dense layer (k = 0) and of sparse ones, which take turns; ratios to the dense layer are medians
/// over turns.
void race_layers(nlohmann::json& rows, const std::vector<int64_t>& budgets, DType dtype, int64_t tokens,
                 bool tiny, double seconds) {
  struct Runner {
    int64_t k;
    std::unique_ptr<LayerRun> layer;
    std::vector<double> seconds[2][2], ratios[2][2];  // without and with backward; layer and attention
  };
  std::vector<Runner> runners;
  for (const int64_t k : budgets)
    if (k < tokens)
      runners.push_back({k, std::make_unique<LayerRun>(layer_config(tiny, k), tokens, dtype), {}, {}});
  const double begin = now();
  for (int turn = 0; turn < 3 || now() - begin < seconds; ++turn) {
    std::array<LayerRun::Times, 2> dense;
    for (Runner& r : runners) {
      const std::array<LayerRun::Times, 2> times = r.layer->measure();
      if (r.k == 0) dense = times;
      for (const int both : {0, 1}) {
        r.seconds[both][0].push_back(times[both].layer);
        r.seconds[both][1].push_back(times[both].attention);
        r.ratios[both][0].push_back(times[both].layer / dense[both].layer);
        r.ratios[both][1].push_back(times[both].attention / dense[both].attention);
      }
    }
  }
  for (const Runner& r : runners)
    for (const int both : {0, 1})
      for (const int part : {0, 1}) {
        const double time = median(r.seconds[both][part]);
        nlohmann::json row{{"tokens", tokens},
                           {"precision", dtype_name(dtype)},
                           {"name", std::string(part ? "attention" : "layer") +
                                        (both ? ", forward and backward" : ", forward")},
                           {"us", time * 1e6},
                           {"kernel", r.k ? fmt::format("k {}", r.k) : std::string("dense")}};
        if (!part) row["tflops"] = r.layer->flops(tokens, both) / time * 1e-12;
        if (r.k) row["k"] = r.k, row["of_dense"] = median(r.ratios[both][part]);
        rows.push_back(row);
      }
}

}  // namespace

nlohmann::json measure_sparse(bool tiny, const std::vector<DType>& types, int64_t longest, double seconds) {
  std::vector<int64_t> lengths = {1024, 2048, 4096, 8192, 16384, 32768}, budgets = {0, 256, 512, 1024, 2048};
  if (tiny) lengths = {96}, budgets = {0, 16};
  nlohmann::json rows = nlohmann::json::array();
  for (const DType dtype : types)
    for (const int64_t tokens : lengths)
      if (tokens <= longest) race_layers(rows, budgets, dtype, tokens, tiny, seconds);
  return rows;
}

}  // namespace sluice::bench
