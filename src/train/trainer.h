#pragma once
// The trainer: all memory of a training, and its step. Telling, saving and evaluating are around it
// (run/run.h).
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "comm/device.h"
#include "comm/mesh.h"
#include "comm/queue.h"
#include "config/config.h"
#include "config/derived.h"
#include "core/context.h"
#include "data/loader.h"
#include "nn/forward_buffers.h"
#include "nn/transformer.h"
#include "optim/grad_sync.h"
#include "optim/optimizer.h"
#include "optim/weight_sync.h"
#include "params/param_store.h"
#include "train/replicas.h"
#include "train/step_policy.h"

namespace sluice {

struct StepMetrics {
  double loss =
      0;  // mean over the counted tokens of the global batch, nats; not a number where there is none
  double grad_norm = 0;  // before clipping
  double lr = 0;
  int64_t counted_tokens = 0;  // targets of all ranks; none: nothing was applied
  bool skipped = false;        // the update was not applied
  bool spike = false;
};

/// Bytes of each arena.
struct MemoryPlan {
  int64_t parameters = 0, gradients = 0, optimizer = 0, activations = 0, batch = 0, scratch = 0;
  int64_t snapshot = 0;    // the copy that checkpoints are written from
  int64_t pinned = 0;      // host memory beside a GPU
  int64_t checkpoint = 0;  // on disk: one checkpoint, of all ranks together
  bool on_gpu = false;     // then the total is the device's: the snapshot is the host's
  int64_t total() const {
    return parameters + gradients + optimizer + activations + batch + scratch + (on_gpu ? 0 : snapshot);
  }
};

class Trainer {
 public:
  /// Runs one dry step; nothing is allocated. model.vocab_size must be known. Error(usage) where the ranks
  /// cannot share the training (config/rank_rules.h).
  static MemoryPlan measure(const Config& config, Communicator* ranks = nullptr);

  /// Takes all memory: as much as measure() says. `data` and `ranks` must outlive the trainer; several ranks
  /// share every global batch (data parallelism), each taking its micro-batches that follow each other, and
  /// step together. Error(usage) as measure().
  Trainer(const Config& config, const Blend& data, Communicator* ranks = nullptr);
  /// Weights that are still on their way arrive first.
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Weights from train.seed, or from train.init_from, which `weights` is the resolved path of where given
  /// (run/init_source.h); adapters (lora) from train.seed.
  void initialize(const std::string& weights = "");
  /// Continues from a verified checkpoint.
  void restore(const CheckpointInfo& checkpoint);
  /// What this rank writes of weights, moments and state at this step boundary: with several ranks, all of
  /// them call, and together hold every tensor once (weights whole, moments in slices). Valid until the next
  /// call or step. The caller adds config_yaml and hf_config.
  CheckpointContent content();

  /// One optimizer step. Throws Error(numeric) when the policy says stop, and Error(data) when the samples of
  /// any rank are bad: SharedError, by all ranks; weights, moments and policy are as before the step.
  StepMetrics step();
  /// Whether weights, moments and counters belong together: between two steps, and after an error of a step
  /// that had changed nothing yet. Then content() is what it was before that step.
  bool sound() const { return sound_; }

  int64_t next_step() const { return step_; }  // = steps done
  int64_t max_steps() const { return max_steps_; }
  const Blend& data() const { return *data_; }
  const StepPolicy& policy() const { return policy_; }
  /// After a step that was skipped, or threw: what was wrong with it and, where values were not finite, where
  /// first.
  const std::string& problem() const { return problem_; }
  const MemoryPlan& memory() const { return memory_; }

  /// All ranks, for use between steps.
  Communicator& ranks() { return *ranks_; }
  /// Why communication has no thread of its own; empty where it has one, or needs none.
  std::string queue_problem() const {
    return queue_ && !queue_->problem().empty()
               ? fmt::format("communication: {}; it goes on in turn with the computation", queue_->problem())
               : "";
  }
  /// Nanoseconds spent waiting for other ranks.
  int64_t waited_ns() const { return queue_ ? queue_->waited_ns() : 0; }
  /// How gradients and weights travel between GPUs; empty where there are none.
  std::string transport() const { return device_ranks_ && several() ? device_ranks_->world->name() : ""; }
  /// Collective, between two steps: compares what several ranks hold replicas of. Error(corruption) where
  /// they differ; nothing to do with parallel.verify_every_steps = 0, or where this step's were compared.
  void verify_replicas();
  const ReplicaCheck& replicas() const { return replicas_; }
  /// Collective. Before a forward pass between two steps that not all ranks compute, or weights are looked
  /// at.
  void settle_weights() { weight_sync_.settle(ctx_); }
  /// Whether a forward pass needs all ranks.
  bool forward_needs_all() const { return shared_experts() || config_.parallel.zero_stage >= 3; }
  Context& context() { return ctx_; }
  const Context& context() const { return ctx_; }
  ParamStore& store() { return store_; }
  const Transformer& model() const { return model_; }
  Optimizer& optimizer() { return optimizer_; }
  /// One of the step's losses beside the text's (nn/step_losses.h), as the last step left it.
  template <class Loss>
  const Loss& step_loss() const {
    return losses_.get<Loss>();
  }
  /// What these losses report of the last step.
  std::vector<StepScalar> scalars() const { return losses_.scalars(); }
  /// Shared with the step: valid until the next one.
  ForwardBuffers& micro_batch() { return micro_batch_; }
  /// For analysis, which reads every layer: the micro-batch, or, where training recomputes whole blocks, one
  /// sample whose activations are all kept. Empty (no tokens) without validation sets.
  ForwardBuffers& analysed() { return analysed_; }

 private:
  Trainer(const Config& config, const Blend* data, Communicator* ranks, const MemoryPlan& memory);
  Trainer(const Config& config, const Blend* data, Communicator* ranks, const MemoryPlan& memory,
          Device device);
  bool measuring() const { return ctx_.dry_run; }
  bool on_gpu() const { return ctx_.device == Device::cuda; }
  /// They are alike: one is enough to measure.
  int64_t num_micro_batches() const { return measuring() ? 1 : micro_batches_; }
  bool several() const { return mesh_.data().size() > 1; }
  /// Losses of a step that this rank tells the others: of each micro-batch; a GPU adds them up by itself
  /// where their order is free.
  int64_t losses_here() const { return on_gpu() && !exact() ? 1 : micro_batches_; }
  bool shared_experts() const { return mesh_.expert().size() > 1; }
  StoreLayout layout() const;
  /// No rank alone has all of the summed gradient, or its norm must not tell how it was shared.
  bool norm_needs_ranks() const { return config_.parallel.zero_stage > 0 || shared_experts() || exact(); }
  bool exact() const { return config_.parallel.determinism == Determinism::exact; }
  struct Samples;
  void load(int64_t step);
  void load_ahead();
  void read_samples(Samples& slot, int64_t step) const;
  std::vector<ParamStore::Id> saved_here() const;
  WholeModel whole_model(bool adapters = true) const;
  void collect_tensors(CheckpointContent& content);
  void collect_whole_weights(CheckpointContent& content);
  void weights_changed();
  bool whole_here(ParamStore::Id id) const;
  void weight_targets(std::vector<NamedTensor>& weights, bool adapters = true);
  void optimizer_targets(std::vector<NamedTensor>& tensors, bool own) const;
  void forward_backward();
  void update();
  std::vector<Replica> held_by_several() const;
  std::string common_state() const;
  void flip_bit();
  void collect_losses(int64_t micro_batch);
  void agree_on_losses();
  bool goes_unrecorded(int64_t micro_batch) const;
  const Mesh& moves() const { return device_ranks_ ? *device_ranks_->mesh : mesh_; }
  void once_recorded(Graph& graph, void (Trainer::*ops)());
  void tell_device(double lr);
  std::vector<NamedTensor> held(bool gradients) const;
  std::string first_nonfinite(bool loss_is_finite);
  std::string first_of_ranks(const std::string& mine, const char* otherwise);

  /// The ranks once more, for memory of their GPUs; the queue's.
  struct DeviceRanks {
    DeviceRanks(Communicator& host, CommQueue& queue, const ParallelConfig& config);
    std::unique_ptr<Communicator> world;
    std::unique_ptr<Mesh> mesh;
  };

  Config config_;
  const Blend* data_;
  std::unique_ptr<CommQueue> queue_;  // with several ranks, and with pieces on a GPU
  std::unique_ptr<Communicator> ranks_;
  Mesh mesh_;
  std::unique_ptr<DeviceRanks> device_ranks_;
  int64_t micro_batches_;  // of this rank, per step
  MemoryPlan memory_;
  int64_t max_steps_, step_ = 0;
  bool sound_ = true;
  Arena parameters_, gradients_, optimizer_state_, activations_, batch_memory_, pinned_;
  Context ctx_;
  ParamStore store_;
  std::unique_ptr<Communicator> expert_moves_;  // of rows between GPUs that share experts
  Transformer model_;
  Optimizer optimizer_;
  GradSync grad_sync_;
  WeightSync weight_sync_;
  std::vector<Tensor> piece_values_, piece_grads_;  // what the optimizer updates, with zero_stage 1 and more
  Tensor whole_weights_;                            // with zero_stage 3: those that this rank saves
  ReplicaCheck replicas_;
  StepPolicy policy_;

  /// All micro-batches of a step, (micro-batches, 4, T) i32, as the host fills them and as the device has
  /// them.
  struct Samples {
    Tensor host, device;
    int64_t step = -1;           // whose they are
    int64_t counted_tokens = 0;  // targets that are asked for, of all ranks
  };
  /// On a GPU the next step's are loaded while this one computes; a CPU has one.
  std::array<Samples, 2> samples_;
  Samples& samples(int64_t step) { return samples_[on_gpu() ? static_cast<size_t>(step % 2) : 0]; }
  ForwardBuffers micro_batch_;
  ForwardBuffers analysed_;
  Tensor micro_losses_;  // f64, host: their sums, of all ranks; only where they are needed apart
  Tensor dhidden_;       // (T, C)
  StepLosses losses_;
  Tensor host_control_;  // (kUpdateControl) f64, the host's side of optimizer_.control()
  Graph micro_graph_, update_graph_;
  bool warm_ = false;  // one step was computed: the backend has its plans, and graphs can be recorded
  std::string problem_;
};

}  // namespace sluice
