// The trainer on a GPU, real or emulated, compared with the CPU, including device memory, prefetching,
// graphs, the step policy and checkpoints.
#include <catch2/catch.hpp>
#include <cmath>

#include "analysis/statistics.h"
#include "analysis/summary.h"
#include "config/derived.h"
#include "core/device.h"
#include "eval/cached_model.h"
#include "eval/tiny_checkpoint.h"
#include "support/gpu.h"
#include "support/tiny_training.h"

namespace sluice::test {
namespace {

std::vector<double> losses(TinyTraining& tiny, DeviceChoice device, int64_t steps) {
  tiny.config.train.device = device;
  const Blend data = tiny.blend();
  Trainer trainer(tiny.config, data);
  trainer.initialize();
  std::vector<double> result;
  for (int64_t i = 0; i < steps; ++i) result.push_back(trainer.step().loss);
  return result;
}

struct Variant : TinyTraining {
  Variant(const std::string& name, Precision precision) : TinyTraining(precision) {
    ModelConfig& m = config.model;
    if (precision == Precision::bf16) m.head_dim = 64;  // tensor cores
    m.attention.gates.clear();
    if (name == "gated") m.attention.gates = {GateConfig{}};
    if (name == "shared") m.attention.gates = {{.heads = GateSharing::shared}};
    if (name == "sink") m.attention.kind = AttentionKind::sink;
    if (name == "nanochat") make_nanochat();
    if (name == "selected" || name == "blocks" || name == "warm-up") {  // sparse attention, with two gates
      m.attention.kind = AttentionKind::sparse;
      m.attention.gates = {GateConfig{}, GateConfig{}};
      m.attention.gates[1].position = GatePosition::value;
      SparseConfig& s = m.attention.sparse;
      s.indexer.rope = true;  // equal tokens have different scores, whose order no rounding changes
      s.indexer.heads = 2, s.indexer.head_dim = precision == Precision::bf16 ? 32 : 8;
      s.k = {.policy = BudgetPolicy::inverse, .base = 8, .min = 4, .max = 14};
      s.loss.temperature = 3, s.loss.learn_temperature = true;
      config.data.document_mask = true;
      if (name == "blocks") {
        s.block = 4, s.k = {.policy = BudgetPolicy::fixed, .base = 2};
        s.indexer.head_weights = IndexHeadWeights::none, s.indexer.activation = IndexActivation::relu;
        s.sink = true;
      }
      if (name == "warm-up") s.phase_steps = 5;
    }
    if (name == "exclusive") {
      m.attention.gates = {{.position = GatePosition::value,
                            .granularity = GateGranularity::headwise,
                            .input = GateInput::self},
                           {.activation = GateActivation::two_sigmoid, .input_channels = 3, .bias = 0.5}};
      m.attention.exclusive = ExclusiveAttention::learned;
      m.attention.output_norm = OutputNorm::rmsnorm;
      m.gated_norm.rank = 2;
    }
    if (name == "softpick" || name == "extra key") {
      m.attention.kind = name == "softpick" ? AttentionKind::softpick : AttentionKind::kv_bias;
      m.attention.window = 5, m.attention.window_pattern = 2;
    }
    if (name == "adapted") {  // switch heads, with low-rank adapters of them and of joined matrices
      m.attention.switch_heads = {.num_experts = 4, .num_experts_per_tok = 2, .expert_width = m.head_dim / 2};
      config.lora = {.rank = 8, .alpha = 16};
      config.lora.targets = {"q_proj", "v_proj", "v_switch", "up_proj", "down_proj"};
      config.optimizer.lr = 3e-2;
    }
    if (name == "experts") {  // a dense layer, and an MoE layer with a shared expert
      m.moe.num_experts = 6;
      m.moe.num_experts_per_tok = 2;
      m.moe.moe_intermediate_size = 24;
      m.moe.shared_expert_intermediate_size = 16;
      m.moe.shared_expert_gate = true;
      m.moe.mlp_only_layers = {0};
    }
  }
};

/// The variant with a trainer on the GPU, its weights initialised.
struct OnGpu {
  Variant tiny;
  Blend data;
  Trainer trainer;

  OnGpu(const std::string& name, Precision precision)
      : tiny(name, precision), data(tiny.blend()), trainer(on_gpu(tiny.config), data) {
    trainer.initialize();
  }
  /// A micro-batch of one token, on the host.
  ForwardBuffers& same_tokens() {
    ForwardBuffers& buffers = trainer.micro_batch();
    for (int64_t t = 0; t < buffers.host.tokens.numel(); ++t) {
      buffers.host.tokens.as<int32_t>()[t] = 1;
      buffers.host.positions.as<int32_t>()[t] = 0;
      buffers.host.first_key.as<int32_t>()[t] = 0;
    }
    return buffers;
  }
  static Config& on_gpu(Config& config) {
    config.train.device = DeviceChoice::cuda;
    return config;
  }
};

}  // namespace

TEST_CASE("ten steps on a GPU give the losses of the CPU", "[cuda_training]") {
  if (no_device()) return;
  for (const Precision precision : {Precision::f32, Precision::bf16})
    for (const std::string variant : {"baseline", "gated", "sink", "exclusive", "softpick", "extra key",
                                      "experts", "nanochat", "adapted", "selected", "blocks", "warm-up"}) {
      const bool selects =
          variant == "adapted" || variant == "selected" || variant == "blocks" || variant == "warm-up";
      if (selects && precision == Precision::bf16)
        continue;  // the same ops, but a selection that depends on rounding
      INFO(variant << (precision == Precision::f32 ? ", f32" : ", bf16"));
      Variant tiny(variant, precision);
      const std::vector<double> cpu = losses(tiny, DeviceChoice::cpu, 10);
      const std::vector<double> gpu = losses(tiny, DeviceChoice::cuda, 10);
      // Softpick's weights are ratios of sums that are small where scores are near 0, as at the start: losses
      // of instruction sets of the CPU differ by 0.01 as well.
      const double tolerance = precision == Precision::f32 ? 1e-4 : variant == "softpick" ? 5e-2 : 2e-2;
      CHECK(cpu.back() < cpu.front() - 0.05);  // it learns; otherwise equal losses would prove nothing
      for (size_t i = 0; i < cpu.size(); ++i) {
        INFO("step " << i << ": CPU " << cpu[i] << ", GPU " << gpu[i]);
        CHECK(std::abs(cpu[i] - gpu[i]) <= tolerance);
      }
    }
}

TEST_CASE("a training on a GPU is bitwise reproducible, also after resuming from a checkpoint",
          "[cuda_training]") {
  if (no_device()) return;
  const std::string variant = GENERATE("gated", "experts", "selected");
  INFO(variant);
  Variant tiny(variant, Precision::bf16);
  tiny.config.train.device = DeviceChoice::cuda;
  const Blend data = tiny.blend();
  Trainer straight(tiny.config, data);
  straight.initialize();
  for (int i = 0; i < 6; ++i) straight.step();

  const std::string folder = tiny.folder / "ckpt";
  {
    Trainer half(tiny.config, data);
    half.initialize();
    for (int i = 0; i < 3; ++i) half.step();
    CheckpointStore store(folder, tiny.config.checkpoint, half.content(), &half.context());
    store.save(half.content());
    REQUIRE(store.wait());
  }
  Trainer resumed(tiny.config, data);
  resumed.restore(newest_valid_checkpoint(folder));
  CHECK(resumed.next_step() == 3);
  for (int i = 0; i < 3; ++i) resumed.step();
  CHECK(all_bits(resumed) == all_bits(straight));

  // The same checkpoint resumes on the CPU.
  tiny.config.train.device = DeviceChoice::cpu;
  Trainer elsewhere(tiny.config, data);
  elsewhere.restore(newest_valid_checkpoint(folder));
  CHECK(std::isfinite(elsewhere.step().loss));
}

TEST_CASE("measurements of a model on a GPU equal those on the CPU", "[cuda_training]") {
  if (no_device()) return;
  for (const std::string variant :
       {"baseline", "gated", "sink", "exclusive", "softpick", "extra key", "selected"}) {
    INFO(variant);
    std::vector<std::vector<double>> measured;
    for (const DeviceChoice device : {DeviceChoice::cpu, DeviceChoice::cuda}) {
      Variant tiny(variant, Precision::f32);
      tiny.config.train.device = device;
      const Blend data = tiny.blend();
      Trainer trainer(tiny.config, data);
      trainer.initialize();
      const ForwardBuffers& b = trainer.analysed();
      data.fill_sequential(0, b.host.tokens.numel() / tiny.config.data.seq_len, b.host.tokens.as<int32_t>(),
                           b.host.targets.as<int32_t>(), b.host.positions.as<int32_t>(),
                           b.host.first_key.as<int32_t>());
      b.upload(trainer.context());
      trainer.model().forward(trainer.context(), b.batch, trainer.analysed().saved);
      synchronize(trainer.context());
      Context ctx(1 << 22, resolve_device(device));
      AnalysisConfig classes;
      classes.query_classes = {{"few", {0, 3, 4}}};
      Statistics sums(trainer.model(), b.batch.tokens.numel(), classes);
      sums.add(ctx, b.batch, b.saved);
      SecondPass second(sums);
      second.add(ctx, b.saved);
      CHECK(second.needed() == (variant == "gated" || variant == "exclusive" || variant == "selected"));
      SummaryAccumulator accumulator(trainer.model(), trainer.store(), classes);
      accumulator.add(ctx, b.batch, b.saved);
      measured.emplace_back();
      for (const LayerSummary& l : accumulator.result().layers) {
        for (const double x :
             {l.value_norm.first, l.value_norm.rest, l.residual_max.first, l.residual_max.rest})
          measured.back().push_back(x);
        measured.back().insert(measured.back().end(), l.heads.later.begin(), l.heads.later.end());
        for (const GateHealth& gate : l.gate_health)
          for (const auto* x : {&gate.below, &gate.above, &gate.shut_tokens, &gate.row_norms})
            measured.back().insert(measured.back().end(), x->begin(), x->end());
      }
      for (const LayerSums& l : sums.layers) {
        for (const auto* x : {&l.first_token.all, &l.first_token.later, &l.first_token.by_class,
                              &l.importance, &l.value_norms})
          measured.back().insert(measured.back().end(), x->begin(), x->end());
        for (const GateSums& g : l.gates)
          for (const double x : {g.count, g.sum, g.squares, g.least, g.largest, g.first_sum})
            measured.back().push_back(x);
        for (const double x : {l.residual.first, l.residual.rest, l.selection.queries, l.selection.mass,
                               l.selection.top, l.selection.divergence, l.selection.overlap})
          measured.back().push_back(x);
        for (const double x : {l.importance_tokens, l.outputs, l.before, l.after, l.first_value_norms,
                               l.attention_output, l.attention_residual, l.ffn_output, l.ffn_residual})
          measured.back().push_back(x);
      }
    }
    REQUIRE(measured[0].size() == measured[1].size());
    for (size_t i = 0; i < measured[0].size(); ++i)
      CHECK(measured[1][i] == Approx(measured[0][i]).epsilon(1e-3).margin(1e-6));
  }
}

TEST_CASE("slices of tensors on a GPU are saved, and loaded with other slice boundaries", "[cuda_training]") {
  if (no_device()) return;
  TemporaryFolder folder;
  const int64_t n = 600000, cut = 123457, other_cut = 400001;  // converted in more than one piece
  Context ctx(1 << 20, Device::cuda);
  Arena arena("tensors", 4 * 4 * n, Device::cuda);
  const Tensor saved = arena.alloc("saved", DType::f32, {n}), filled = arena.alloc("filled", DType::f32, {n}),
               narrow = arena.alloc("narrow", DType::bf16, {n});
  std::vector<float> values(static_cast<size_t>(n)), back(values.size());
  for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i % 251) - 17.5f;
  write_tensor(ctx, saved, values.data());
  const auto slice = [&](const char* name, const Tensor& t, int64_t begin, int64_t end) {
    const Tensor part(t.as<float>() + begin, DType::f32, {end - begin}, "", Device::cuda);
    return NamedTensor{name, part, {n}, begin};
  };
  CheckpointContent content;
  content.weights = {{"w", saved}};
  content.optimizer = {slice("w.m", saved, 0, cut), slice("w.m", saved, cut, n)};
  content.state = content.hf_config = nlohmann::json::object();
  CheckpointStore store(folder / "ckpt", CheckpointConfig{}, content, &ctx);
  store.save(content);
  REQUIRE(store.wait());
  const std::string path = newest_valid_checkpoint(folder / "ckpt").path;
  load_checkpoint(path, {{"w", filled}},
                  {slice("w.m", filled, other_cut, n), slice("w.m", filled, 0, other_cut)}, &ctx);
  read_tensor(ctx, back.data(), filled);
  CHECK(back == values);
  load_weights(path, {{"w", narrow}}, &ctx);
  std::vector<bf16> rounded(static_cast<size_t>(n));
  read_tensor(ctx, rounded.data(), narrow);
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; ++i)
    wrong += static_cast<float>(rounded[static_cast<size_t>(i)]) !=
             static_cast<float>(bf16(values[static_cast<size_t>(i)]));
  CHECK(wrong == 0);
}

TEST_CASE("recomputing activations on a GPU changes no bit, with a document mask", "[cuda_training]") {
  if (no_device()) return;
  const std::string variant = GENERATE("gated", "experts", "selected");
  INFO(variant);
  Variant tiny(variant, Precision::bf16);
  tiny.config.train.device = DeviceChoice::cuda;
  tiny.config.data.document_mask = true;
  const Blend data = tiny.blend();
  std::string kept;
  for (const Recompute recompute : {Recompute::none, Recompute::mlp, Recompute::block}) {
    tiny.config.train.recompute = recompute;
    Trainer trainer(tiny.config, data);
    trainer.initialize();
    for (int i = 0; i < 3; ++i) trainer.step();
    const std::string bits = all_bits(trainer);
    if (kept.empty()) kept = bits;
    CHECK(bits == kept);
  }
}

TEST_CASE("routers on a GPU count the same as on the CPU", "[cuda_training]") {
  if (no_device()) return;
  std::vector<double> totals[2];
  for (const DeviceChoice device : {DeviceChoice::cpu, DeviceChoice::cuda}) {
    Variant tiny("experts", Precision::f32);
    tiny.config.train.device = device;
    const Blend data = tiny.blend();
    Trainer trainer(tiny.config, data);
    trainer.initialize();
    for (int i = 0; i < 3; ++i) trainer.step();  // the last two from graphs: every step counts from zero
    const Tensor counted = trainer.step_loss<RouterBalanceState>().totals();
    std::vector<double>& t = totals[device == DeviceChoice::cuda];
    for (int64_t i = 0; i < counted.numel(); ++i) t.push_back(Pool::get(counted, i));
  }
  const size_t experts = 6, width = 2 * experts + 3;
  REQUIRE(totals[1].size() == 2 * width);
  double pairs = 0;
  for (size_t e = 0; e < experts; ++e) pairs += totals[1][width + e];
  CHECK(pairs == 4 * 32 * 2);  // two per token of the global batch
  for (size_t i = 0; i < 2 * width; ++i) {
    INFO("total " << i << ": CPU " << totals[0][i] << ", GPU " << totals[1][i]);
    CHECK(std::abs(totals[0][i] - totals[1][i]) <= 1e-3 * std::max(1.0, std::abs(totals[0][i])));
  }
}

TEST_CASE("a training with head balance on a GPU reports the same as on the CPU", "[cuda_training][heads]") {
  if (no_device()) return;
  for (const std::string variant : {"baseline", "sink", "gated"}) {
    INFO(variant);
    std::vector<double> reported[2];
    for (const DeviceChoice device : {DeviceChoice::cpu, DeviceChoice::cuda}) {
      Variant tiny(variant, Precision::f32);
      tiny.config.model.num_attention_heads = 4;
      HeadBalanceConfig& b = tiny.config.model.attention.head_balance;
      b.coefficient = 0.3;
      // Scalars set by the host between steps, and a second forward pass of the blocks.
      if (variant == "sink") b.shared_heads = 1, b.calibration_samples = 4;
      if (variant != "baseline")
        b.scope = HeadBalanceScope::previous_step;
      else
        tiny.config.train.recompute = Recompute::block;
      tiny.config.train.device = device;
      const Blend data = tiny.blend();
      Trainer trainer(tiny.config, data);
      trainer.initialize();
      for (int i = 0; i < 3; ++i) trainer.step();  // the last two from graphs
      const HeadSummary s = *trainer.step_loss<HeadBalanceState>().summary();
      reported[device == DeviceChoice::cuda] = {s.imbalance, s.importance, s.balance_loss,
                                                s.layers[0].imbalance, s.layers[1].imbalance};
    }
    for (size_t i = 0; i < reported[0].size(); ++i) {
      INFO("number " << i << ": CPU " << reported[0][i] << ", GPU " << reported[1][i]);
      CHECK(reported[0][i] > 0);
      CHECK(std::abs(reported[0][i] - reported[1][i]) <= 1e-3 * reported[0][i]);
    }
  }
}

TEST_CASE("a non-finite step is skipped on a GPU, and its origin is reported", "[cuda_training]") {
  if (no_device()) return;
  OnGpu gpu("baseline", Precision::f32);
  Trainer& trainer = gpu.trainer;
  trainer.step();
  trainer.step();
  const float bad = NAN;
  const Tensor weight = trainer.store().value(1);
  write_tensor(trainer.context(), weight.view({weight.numel()}).rows(0, 1), &bad);
  const std::string before = all_bits(trainer);
  const StepMetrics m = trainer.step();
  CHECK(m.skipped);
  CHECK(std::isnan(m.loss));
  CHECK(all_bits(trainer) == before);
  CHECK(trainer.problem() ==
        "step 3: loss is not finite; first in the weight " + trainer.store().specs()[1].name);
}

TEST_CASE("a profile of a step on a GPU has the device's times of its ops", "[cuda_training]") {
  if (no_device()) return;
  const std::string variant = GENERATE("gated", "shared");  // the second one's ops call others
  INFO(variant);
  OnGpu gpu(variant, Precision::f32);
  Trainer& trainer = gpu.trainer;
  trainer.step();
  Profile profile;
  profile.keep_timeline();
  trainer.context().profile = &profile;
  trainer.step();
  trainer.context().profile = nullptr;
  int64_t attention = 0;
  for (const Profile::Slice& slice : profile.timeline()) {
    CHECK(slice.seconds >= 0);
    attention += std::string(slice.op) == "gated_attention_forward";
    CHECK(std::string(slice.op) != "gate_forward");
  }
  CHECK(attention == 2 * 2);  // layers times micro-batches
  // Then graphs again, which are not profiled.
  const size_t before = profile.timeline().size();
  trainer.step();
  CHECK(profile.timeline().size() == before);
}

TEST_CASE("a cached model on a GPU gives the logits of the CPU, prompt after prompt", "[cuda_training]") {
  if (no_device()) return;
  TinyTraining tiny(Precision::f32);
  tiny.config.model.initializer_range = 0.3;  // every position affects the next token
  tiny.config.model.max_position_embeddings = 300;
  const CheckpointInfo checkpoint = find_checkpoint(trained_checkpoint(tiny, 0));
  std::vector<float> of_cpu, of_gpu;
  for (const std::string device : {"cpu", "cuda"}) {
    const TrainedModel trained(checkpoint, 64, device);
    CachedModel model(trained, {.context = 300, .sequences = 2, .chunk = 128});
    std::vector<float>& all = device == "cpu" ? of_cpu : of_gpu;
    const auto keep = [&](std::span<const float> logits) {
      all.insert(all.end(), logits.begin(), logits.end());
    };
    // Passes of 128, 64 and one tokens, each on a stream of its own; those of the first prompt are being
    // made.
    for (int32_t prompt = 0; prompt < 3; ++prompt) {
      std::vector<int32_t> tokens;
      for (int32_t i = 0; i < 180; ++i) tokens.push_back((i * (7 + 2 * prompt) + prompt) % 257);
      model.truncate(0, 0);
      keep(model.prefill(0, tokens));
      model.copy_sequence(0, 1);
      for (int32_t i = 0; i < 2; ++i) {
        const CachedModel::Next next[] = {{0, i}, {1, 9 + i}};
        keep(model.step(next));
      }
    }
  }
  REQUIRE(of_cpu.size() == of_gpu.size());
  for (size_t i = 0; i < of_cpu.size(); ++i) {
    INFO("logit " << i);
    REQUIRE(of_gpu[i] == Approx(of_cpu[i]).margin(2e-4));
  }
}

TEST_CASE("tokens outside the vocabulary are refused on a GPU, too", "[cuda_training]") {
  if (no_device()) return;
  OnGpu gpu("baseline", Precision::f32);
  Trainer& trainer = gpu.trainer;
  ForwardBuffers& buffers = gpu.same_tokens();
  buffers.host.tokens.as<int32_t>()[7] = 99;
  buffers.upload(trainer.context());
  trainer.model().forward(trainer.context(), buffers.batch, buffers.saved);
  CHECK(message_of([&] { synchronize(trainer.context()); }) == "token 99 is outside the vocabulary");
  CHECK_NOTHROW(synchronize(trainer.context()));
}

TEST_CASE("an index score that is not a number names its layer on a GPU, too", "[cuda_training]") {
  if (no_device()) return;
  OnGpu gpu("selected", Precision::f32);
  Trainer& trainer = gpu.trainer;
  ForwardBuffers& buffers = gpu.same_tokens();
  buffers.upload(trainer.context());
  const ParamStore& store = trainer.store();
  for (size_t i = 0; i < store.specs().size(); ++i) {
    if (store.specs()[i].name != "model.layers.1.self_attn.indexer.key_proj.weight") continue;
    const Tensor weight = store.value(static_cast<ParamStore::Id>(i));
    const std::vector<float> bad(static_cast<size_t>(weight.numel()), NAN);
    write_tensor(trainer.context(), weight, bad.data());
  }
  trainer.model().forward(trainer.context(), buffers.batch, buffers.saved);
  CHECK(message_of([&] { synchronize(trainer.context()); }) ==
        "model.layers.1.self_attn.indexer: a score of the indexer is not a number");
  CHECK_NOTHROW(synchronize(trainer.context()));
}

}  // namespace sluice::test
