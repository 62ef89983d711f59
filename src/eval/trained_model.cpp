#include "eval/trained_model.h"

#include "config/derived.h"
#include "config/load.h"
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

Config checkpoint_config(const CheckpointInfo& checkpoint, const std::string& device) {
  std::vector<std::string> overrides;
  if (!device.empty()) overrides.push_back("train.device=" + device);
  return load_resolved_config(checkpoint.path + "/config.yaml", overrides);
}

TrainedModel::TrainedModel(const CheckpointInfo& checkpoint, int64_t tokens_at_once,
                           const std::string& device, const std::string& tokenizer)
    : config_(checkpoint_config(checkpoint, device)),
      device_(resolve_device(config_.train.device)),
      tokenizer_(checkpoint_tokenizer(checkpoint, config_.data.tokenizer, tokenizer)),
      store_(config_.lora) {
  model_ = std::make_unique<Transformer>(config_.model, store_);
  const DType dtype = storage_dtype(config_.train.precision);
  const auto allocate = [&](Context& ctx, Arena& arena) {
    store_.allocate(ctx, dtype, tokens_at_once, arena, nullptr);
    model_->allocate_tables(ctx, arena, dtype, max_positions(config_));
  };
  Context dry(0, device_);
  Arena measure("parameters", 0, device_);
  allocate(dry, measure);
  store_.pack(dry);
  parameters_ = std::make_unique<Arena>("parameters", measure.high_water(), device_);
  Context ctx(std::max<int64_t>(dry.scratch.high_water(), 64), device_);
  allocate(ctx, *parameters_);

  std::vector<NamedTensor> weights;
  for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id)
    weights.push_back({store_.specs()[static_cast<size_t>(id)].name, store_.value(id)});
  load_weights(checkpoint.path, weights, &ctx);
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
