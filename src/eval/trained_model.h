#pragma once
// A trained model, read from a run or a checkpoint: what `sluice eval` and `sluice generate` start from.
#include <memory>
#include <string>

#include "checkpoint/store.h"
#include "config/config.h"
#include "core/context.h"
#include "data/tokenizer.h"
#include "nn/forward_buffers.h"
#include "nn/transformer.h"
#include "params/param_store.h"

namespace sluice {

/// The checkpoint a path stands for: itself, or the newest valid one of a run folder (or of its ckpt).
/// Error(no_input) when there is none.
CheckpointInfo find_checkpoint(const std::string& run_or_checkpoint);

/// Its configuration; device: "auto", "cpu" or "cuda" in the place of its train.device, which may name what
/// this program or machine has not; empty: as it says.
Config checkpoint_config(const CheckpointInfo& checkpoint, const std::string& device = "");

class TrainedModel {
 public:
  /// Loads the weights. tokens_at_once: the usual size of a forward pass. device: as in
  /// checkpoint_config. tokenizer: as in checkpoint_tokenizer.
  TrainedModel(const CheckpointInfo& checkpoint, int64_t tokens_at_once, const std::string& device = "",
               const std::string& tokenizer = "");
  TrainedModel(const TrainedModel&) = delete;
  TrainedModel& operator=(const TrainedModel&) = delete;

  const Config& config() const { return config_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const Transformer& model() const { return *model_; }
  Device device() const { return device_; }
  DType dtype() const { return store_.dtype(); }
  int64_t num_parameters() const { return store_.total(); }

 private:
  Config config_;
  Device device_;  // of train.device
  std::unique_ptr<Tokenizer> tokenizer_;
  ParamStore store_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<Arena> parameters_;
};

/// Buffers of a forward pass over num_tokens, from an arena of the model's device; `host` holds the host's
/// side of a batch on a GPU.
ForwardBuffers make_forward_buffers(const TrainedModel& trained, Arena& arena, Arena& host,
                                    int64_t num_tokens, Recompute recompute);

}  // namespace sluice
