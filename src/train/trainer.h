#pragma once
// The trainer: all memory of a training, and its step. Reporting, saving and evaluating are around it
// (run/run.h).
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "config/config.h"
#include "core/context.h"
#include "data/loader.h"
#include "nn/forward_buffers.h"
#include "nn/sequence_ranks.h"
#include "nn/step_losses.h"
#include "nn/transformer.h"
#include "optim/grad_sync.h"
#include "optim/optimizer.h"
#include "optim/weight_sync.h"
#include "params/param_store.h"
#include "train/communication.h"
#include "train/fresh_start.h"
#include "train/loss_sum.h"
#include "train/replicas.h"
#include "train/sample_loader.h"
#include "train/step_graphs.h"
#include "train/step_plan.h"
#include "train/step_policy.h"
#include "train/trainer_memory.h"

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

class Trainer {
 public:
  /// Runs one dry step; nothing is allocated. model.vocab_size must be known. Error(usage) where the ranks
  /// cannot share the training (config/rank_rules.h).
  static MemoryPlan measure(const Config& config, Communicator* ranks = nullptr);

  /// Takes all memory: as much as measure() says. `data` and `ranks` must outlive the trainer; several ranks
  /// share every global batch (data parallelism), each taking its micro-batches that follow each other, and
  /// step together. Error(usage) as measure().
  Trainer(const Config& config, const Blend& data, Communicator* ranks = nullptr);
  /// The same with what measure() has said.
  Trainer(const Config& config, const Blend& data, Communicator* ranks, const MemoryPlan& measured);
  /// Weights that are still on their way arrive first.
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Weights from train.seed, or from train.init_from, which `weights` is the resolved path of where given
  /// (run/init_source.h); adapters (lora) from train.seed.
  /// map: how their files name and order the tensors. Parameters that they lack start as train.init_missing
  /// says; what was done about them is returned.
  FreshStart initialize(const std::string& weights = "", const WeightMap& map = {});
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
  const StepPlan& plan() const { return plan_; }
  const MemoryPlan& memory() const { return memory_plan_; }

  const Communication& communication() const { return communication_; }
  /// All ranks, for use between steps.
  Communicator& ranks() const { return communication_.world(); }
  /// Collective, between two steps: whether memory holds what was written to it, and whether what several
  /// ranks hold replicas of is equal. Error(corruption) where it is not; nothing to do with
  /// parallel.verify_every_steps = 0, or where this step's were compared.
  void verify_replicas();
  const ReplicaCheck& replicas() const { return replicas_; }
  /// Collective. Before weights are read, or a forward pass that not all ranks compute, between two steps:
  /// waits for the all-gather of updated shards.
  void wait_for_weights() { weight_sync_.settle(ctx_); }
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
  void allocate_parameters();
  void allocate_optimizer();
  void allocate_buffers();
  MemoryPlan measured();

  void attend_densely(bool dense);
  // A step, in this order (trainer.cpp).
  void begin_step(double lr);
  void upload_step_control(double lr);
  void compute_micro_batch(int64_t i);
  void forward_backward();
  void sum_over_ranks();
  void compare_replicas();
  void update_weights();
  void update();
  void fetch_results();
  void read_results(StepMetrics& m);
  void skip_empty_step(StepMetrics& m);
  void decide_step(StepMetrics& m);
  /// One number of the step's control block, on the device.
  Tensor control(double UpdateControl::*field) const { return update_field(optimizer_.control(), field); }

  // What goes into a checkpoint and comes out of one (trainer_state.cpp).
  std::vector<ParamStore::Id> saved_here() const;
  WholeModel whole_model(bool adapters = true) const;
  void load_masters(const std::string& path, const WeightAdoption& adoption, const FreshStart& fresh);
  void collect_tensors(CheckpointContent& content);
  void collect_whole_weights(CheckpointContent& content);
  void weights_changed();
  bool whole_here(ParamStore::Id id) const;
  void weight_targets(std::vector<NamedTensor>& weights, bool adapters = true);
  void optimizer_targets(std::vector<NamedTensor>& tensors, bool own) const;

  // What is wrong, and where (trainer_checks.cpp).
  std::vector<Replica> replicated_tensors() const;
  std::string common_state() const;
  std::string changed_bits();
  void flip_bit();
  std::vector<NamedTensor> held(bool gradients) const;
  std::string first_nonfinite(bool loss_is_finite);
  std::string first_of_ranks(const std::string& mine, const char* otherwise);

  Config config_;
  const Blend* data_;  // nullptr in a dry run
  Communication communication_;
  StepPlan plan_;
  MemoryPlan memory_plan_;
  TrainerMemory memory_;
  Context ctx_;

  ParamStore store_;
  std::unique_ptr<Communicator> expert_gpus_;    // of rows between GPUs with expert parallelism
  std::unique_ptr<Communicator> sequence_gpus_;  // of keys and values with context parallelism
  std::optional<SequenceRanks> sequence_ranks_;  // with context parallelism
  Transformer model_;
  Optimizer optimizer_;
  GradSync grad_sync_;
  WeightSync weight_sync_;
  ReplicaCheck replicas_;
  /// This rank's parts of what is sharded, as tensors.
  struct Shards {
    std::vector<Tensor> values, grads;  // what the optimizer updates, with zero_stage 1 and more
    Tensor to_save;                     // with zero_stage 3: copies of the whole weights that this rank saves
  } shards_;

  SampleLoader samples_;
  ForwardBuffers micro_batch_, analysed_;
  Tensor dhidden_;        // (T, C)
  Tensor summed_losses_;  // of the tokens that the micro-batch's sums are over: (T), or of whole sequences
  Tensor host_control_;   // (kUpdateControl) f64, the host's side of optimizer_.control()
  LossSum loss_sum_;
  StepLosses losses_;
  StepGraphs graphs_;

  StepPolicy policy_;
  int64_t max_steps_, step_ = 0;
  bool sound_ = true;
  std::string problem_;
};

}  // namespace sluice
