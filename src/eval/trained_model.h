#pragma once
// A trained model loaded from a run or a checkpoint, for `sluice eval`, `generate` and `analyze`.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "config/config.h"
#include "core/context.h"
#include "data/tokenizer.h"
#include "nn/forward_buffers.h"
#include "nn/sequence_ranks.h"
#include "nn/transformer.h"
#include "params/param_store.h"

namespace sluice {

/// The checkpoint at a path: the path itself, or the newest valid checkpoint of a run folder (or of its
/// ckpt). Error(no_input) if there is none.
CheckpointInfo find_checkpoint(const std::string& run_or_checkpoint);

/// The configuration of a checkpoint, whose model computes as it did in the checkpoint's step (model_after).
/// device: "auto", "cpu" or "cuda" replaces its train.device, which this program or machine may not support;
/// empty keeps it. overrides: "key=value", as on the command line; a data.seq_len beyond the positions of the
/// model makes its rotary table longer.
Config checkpoint_config(const CheckpointInfo& checkpoint, const std::string& device = "",
                         const std::vector<std::string>& overrides = {});
/// These overrides and what follows: "model.max_position_embeddings=null" from a data.seq_len, and
/// "parallel.context=1" unless they give it, since only some commands share sequences between ranks.
std::vector<std::string> with_positions(std::vector<std::string> overrides, const std::string& device);

/// These overrides, and, where they scale rope by YaRN and do not say from which length
/// (model.rope.scaling.original_max_position_embeddings), the positions of the model itself. own: its
/// configuration without overrides; a scaling that it has keeps its length.
std::vector<std::string> with_original_length(std::vector<std::string> overrides,
                                              const std::function<Config()>& own);

/// What a trained model is loaded from: a checkpoint, or a folder of another program (hf/open.h).
struct ModelFiles {
  std::string path;   // of the checkpoint or folder
  int64_t step = -1;  // of a checkpoint
  Config config;
  std::unique_ptr<Tokenizer> tokenizer;
  WeightMap map;
  int64_t tokens = 0;  // that a checkpoint was trained on, as it says itself

  /// "  step 1000" of a checkpoint, nothing of a folder.
  std::string step_text() const { return step < 0 ? "" : "  step " + std::to_string(step); }
};
/// tokenizer: as for checkpoint_tokenizer.
ModelFiles checkpoint_files(const CheckpointInfo& checkpoint, const std::string& device = "",
                            const std::string& tokenizer = "",
                            const std::vector<std::string>& overrides = {});

class TrainedModel {
 public:
  /// sequences: the ranks that share every sequence, more than one of them, on CPUs, which outlive this:
  /// forward passes are collective among them; nullptr: whole sequences on this rank. shared_tokens: of a
  /// sequence, which they cut into chunks (comm/sequence_split.h); 0: data.seq_len.
  TrainedModel(ModelFiles files, int64_t tokens_at_once, Communicator* sequences = nullptr,
               int64_t shared_tokens = 0);
  /// Loads the weights. tokens_at_once: the typical size of a forward pass. device, overrides: as for
  /// checkpoint_config. tokenizer: as for checkpoint_tokenizer.
  TrainedModel(const CheckpointInfo& checkpoint, int64_t tokens_at_once, const std::string& device = "",
               const std::string& tokenizer = "", const std::vector<std::string>& overrides = {});
  /// The first weights of a configuration whose vocab_size is known, for measurements: on the CPU, with the
  /// byte tokenizer.
  TrainedModel(const Config& config, int64_t tokens_at_once, Communicator* sequences = nullptr);
  TrainedModel(const TrainedModel&) = delete;
  TrainedModel& operator=(const TrainedModel&) = delete;

  const Config& config() const { return config_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const Transformer& model() const { return *model_; }
  const ParamStore& store() const { return store_; }
  Device device() const { return device_; }
  DType dtype() const { return store_.dtype(); }
  int64_t num_parameters() const { return store_.total(); }

 private:
  void allocate(int64_t tokens_at_once, Communicator* sequences, int64_t shared_tokens,
                const std::function<void(Context&)>& fill);

  Config config_;
  Device device_;  // of train.device
  std::unique_ptr<Tokenizer> tokenizer_;
  ParamStore store_;
  std::optional<SequenceRanks> sequence_ranks_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<Arena> parameters_;
};

/// Buffers of a forward pass over num_tokens, from an arena on the model's device; for a GPU, `host` holds
/// the host copy of a batch.
ForwardBuffers make_forward_buffers(const TrainedModel& trained, Arena& arena, Arena& host,
                                    int64_t num_tokens, Recompute recompute);

}  // namespace sluice
