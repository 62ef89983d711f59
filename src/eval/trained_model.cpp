#include "eval/trained_model.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "checkpoint/state_reader.h"
#include "config/derived.h"
#include "config/load.h"
#include "config/model_function.h"
#include "core/io.h"
#include "eval/portable.h"

namespace sluice {

CheckpointInfo find_checkpoint(const std::string& path) {
  if (!io::exists(path)) fail(ExitCode::no_input, "no such run or checkpoint: {}", path);
  if (!io::is_directory(path)) {
    std::string hint;
    if (path.ends_with(".yaml") || path.ends_with(".yml")) {
      hint = "; it looks like a configuration";
      try {
        if (const std::string run = load_config(path).run_dir; io::is_directory(run))
          hint += ", whose run is " + run;
      } catch (const Error&) {
      }
    }
    fail(ExitCode::no_input, "{} is a file, but the folder of a run or of a checkpoint is expected{}", path,
         hint);
  }
  if (io::exists(path + "/MANIFEST.json")) return verify_checkpoint(path);
  for (const std::string& folder : {path + "/ckpt", path}) {
    if (!io::is_directory(folder)) continue;
    if (CheckpointInfo info = newest_valid_checkpoint(folder); !info.path.empty()) return info;
  }
  fail(ExitCode::no_input, "{} contains no checkpoint", path);
}

std::vector<std::string> with_positions(std::vector<std::string> overrides, const std::string& device) {
  const auto given = [&](std::string_view key) {
    return std::any_of(overrides.begin(), overrides.end(),
                       [&](const std::string& text) { return text.starts_with(key); });
  };
  if (given("data.seq_len") && !given("model.max_position_embeddings"))
    overrides.push_back("model.max_position_embeddings=null");
  if (!device.empty()) overrides.push_back("train.device=" + device);
  if (!given("parallel.context")) overrides.push_back("parallel.context=1");
  return overrides;
}

std::vector<std::string> with_original_length(std::vector<std::string> overrides,
                                              const std::function<Config()>& own) {
  const auto any = [&](const auto& f) { return std::any_of(overrides.begin(), overrides.end(), f); };
  const bool yarn = any([](const std::string& text) {
    return text.starts_with("model.rope") && text.find("yarn") != std::string::npos;
  });
  const std::string key = "original_max_position_embeddings";
  if (!yarn || any([&](const std::string& text) { return text.find(key) != std::string::npos; }))
    return overrides;
  if (const Config config = own(); config.model.rope.scaling.type == RopeScalingType::none)
    overrides.push_back(fmt::format("model.rope.scaling.{}={}", key, max_positions(config)));
  return overrides;
}

namespace {

Config own_config(const CheckpointInfo& checkpoint) {
  return load_resolved_config(checkpoint.path + "/config.yaml");
}

/// As state.json counts them; an old one does not.
int64_t trained_tokens(const CheckpointInfo& checkpoint) {
  if (const StateReader state(checkpoint.state, checkpoint.path + "/state.json"); state.has("tokens"))
    return state.integer("tokens", 0);
  return checkpoint.step * tokens_per_step(own_config(checkpoint));
}

}  // namespace

Config checkpoint_config(const CheckpointInfo& checkpoint, const std::string& device,
                         const std::vector<std::string>& overrides) {
  Config config = load_resolved_config(
      checkpoint.path + "/config.yaml",
      with_original_length(with_positions(overrides, device), [&] { return own_config(checkpoint); }));
  config.model = model_after(config.model, checkpoint.step);
  return config;
}

ModelFiles checkpoint_files(const CheckpointInfo& checkpoint, const std::string& device,
                            const std::string& tokenizer, const std::vector<std::string>& overrides) {
  ModelFiles files{
      checkpoint.path, checkpoint.step, checkpoint_config(checkpoint, device, overrides), {}, {}};
  files.tokenizer = checkpoint_tokenizer(checkpoint, files.config.data.tokenizer, tokenizer);
  files.tokens = trained_tokens(checkpoint);
  return files;
}

TrainedModel::TrainedModel(const CheckpointInfo& checkpoint, int64_t tokens_at_once,
                           const std::string& device, const std::string& tokenizer,
                           const std::vector<std::string>& overrides)
    : TrainedModel(checkpoint_files(checkpoint, device, tokenizer, overrides), tokens_at_once) {}

TrainedModel::TrainedModel(ModelFiles files, int64_t tokens_at_once, Communicator* sequences,
                           int64_t shared_tokens)
    : config_(std::move(files.config)),
      device_(resolve_device(config_.train.device)),
      tokenizer_(std::move(files.tokenizer)),
      store_(config_.lora) {
  allocate(tokens_at_once, sequences, shared_tokens, [&](Context& ctx) {
    std::vector<NamedTensor> weights;
    weights.reserve(store_.specs().size());
    for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id)
      weights.push_back({store_.specs()[static_cast<size_t>(id)].name, store_.value(id)});
    load_weights(files.path, weights, &ctx, nullptr, {std::move(files.map), {}});
  });
}

TrainedModel::TrainedModel(const Config& config, int64_t tokens_at_once, Communicator* sequences)
    : config_(config),
      device_(Device::cpu),
      tokenizer_(make_tokenizer(TokenizerConfig{})),
      store_(config.lora) {
  allocate(tokens_at_once, sequences, 0, [&](Context& ctx) { store_.initialize(ctx, config_.train.seed); });
}

void TrainedModel::allocate(int64_t tokens_at_once, Communicator* sequences, int64_t shared_tokens,
                            const std::function<void(Context&)>& fill) {
  SLUICE_CHECK(!sequences || device_ == Device::cpu, "TrainedModel: GPUs share no sequences");
  if (sequences)
    sequence_ranks_.emplace(*sequences, shared_tokens > 0 ? shared_tokens : config_.data.seq_len,
                            /*queue=*/nullptr);
  model_ = std::make_unique<Transformer>(config_.model, store_, ExpertRanks{},
                                         sequence_ranks_ ? &*sequence_ranks_ : nullptr);
  const DType dtype = storage_dtype(config_.train.precision);
  const auto take = [&](Context& ctx, Arena& arena) {
    store_.allocate(ctx, dtype, tokens_at_once, arena, nullptr);
    model_->allocate_tables(ctx, arena, dtype, max_positions(config_));
    if (sequence_ranks_)
      sequence_ranks_->allocate(ctx, arena, std::max(tokens_at_once, sequence_ranks_->split().length()));
  };
  Context dry(0, device_);
  Arena measure("parameters", 0, device_);
  take(dry, measure);
  store_.pack(dry);
  parameters_ = std::make_unique<Arena>("parameters", measure.high_water(), device_);
  Context ctx(std::max<int64_t>(dry.scratch.high_water(), 64), device_);
  take(ctx, *parameters_);
  fill(ctx);
  store_.pack(ctx);
  synchronize(ctx);
}

ForwardBuffers make_forward_buffers(const TrainedModel& trained, Arena& arena, Arena& host,
                                    int64_t num_tokens, Recompute recompute) {
  ForwardBuffers b;
  b.allocate_batch(arena, host, num_tokens);
  b.saved = trained.model().make_saved(arena, num_tokens, trained.dtype(), recompute);
  b.losses = arena.alloc("losses", accumulate_dtype(trained.dtype()), {num_tokens});
  return b;
}

}  // namespace sluice
