#pragma once
// An analytic model of the cost of a step on many GPUs. Parameters, FLOPs and activations are counted on the
// real store and trainer (plan/plan.h); machines, and the fraction of communication that overlaps
// computation, are assumptions. The results are estimates for choosing a layout; nothing is measured.
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace sluice {

/// Assumptions on the machines and on the efficiency of the program. Defaults: NVIDIA's data sheets of H100
/// and H200 SXM, and the fractions of them that published programs achieve.
struct ScaleAssumptions {
  double peak_tflops = 989;  // of a GPU, bf16, dense
  double gpu_mfu = 0.42;  // fraction of the peak that a single GPU achieves, without counting recomputation
  double nvlink_gb_s = 330;         // achieved by a GPU within its node, each way (of 450)
  double nic_gb_s = 45;             // achieved by a GPU's NIC to other nodes, each way (of 50)
  int64_t gpus_per_node = 8;        //
  double memory_gib = 79.6;         // of a GPU
  double hidden_backward = 0.85;    // fraction of a backward pass that gradient reduction can overlap
  double hidden_forward = 0.85;     // fraction of a forward pass that the all-gather of weights can overlap
  double hidden_all_to_all = 0.75;  // fraction of an all-to-all that is hidden behind computation
  double hidden_context = 0.5;      // likewise of the all-gathers of keys and values (parallel.context)
  double hop_us = 60;  // start-up latency in microseconds of an all-to-all of tokens, or of a transfer of
                       // keys or values, per hop (NVLink: one; NIC, then NVLink: two)
  int64_t gradient_bytes = 2;  // bytes of a gradient element in transit: 2 bf16, 4 f32; sums are always f32
};

/// The properties of a configuration that affect the cost.
struct ScaleModel {
  int64_t dense = 0, expert = 0;  // parameters
  int64_t block_dense = 0, block_expert = 0,
          around = 0;  // parameters of the largest block, and outside of blocks (embedding, norm, head)
  int64_t experts = 0, per_token = 0, layers_with_experts = 0, hidden = 0;
  double flops_per_token = 0;      // forward and backward
  double forward_share = 1.0 / 3;  // of flops_per_token that is the forward pass
  double again = 0;                // recomputed FLOPs, as a fraction of the forward FLOPs
  int64_t passes = 4;  // all-to-alls per layer and micro-batch: dispatch and combine, forward and backward
  int64_t samples = 0, micro_batch = 0,
          seq_len = 0;                           // samples per step and per micro-batch; tokens per sample
  int64_t weight_bytes = 2, gradient_bytes = 4;  // bytes per stored element
  double optimizer_bytes = 12;                   // likewise, averaged, because Muon keeps fewer moments
  bool whole_matrices = false;                   // Muon: matrices are not sharded
  int64_t activation_bytes = 0;                  // of a micro-batch, including workspace
  std::map<int64_t, int64_t> shared_activation_bytes = {};  // the same by parallel.context, above 1
  int64_t layers = 0;
  int64_t key_value_bytes = 0;   // of a token in all layers, with an indexer's keys: what ranks that share
                                 // sequences gather, and the gradients that they scatter
  double key_value_gathers = 2;  // forward and backward, and in what is computed again
};
/// From a plan. The activations are measured by dry runs of one rank with all experts, of whole sequences and
/// of those shared by as many ranks as each of `contexts` says, whatever the configuration's own parallel.*;
/// they are as large as on expert-parallel ranks with balanced load. Sizes that do not divide the sequence
/// are passed over: scale() refuses them. Error(usage) for what has no row in the table: adapters, frozen
/// parameters.
ScaleModel scale_model(const Plan& plan, const std::vector<int64_t>& contexts = {});

struct ScaleLayout {
  int64_t gpus = 0, expert = 1, zero = 1;  // number of GPUs; expert-parallel size; parallel.zero_stage
  int64_t context = 1;                     // parallel.context: GPUs that share every sequence
};

/// The estimate for one layout: seconds per step, bytes that a GPU sends per step, memory of a GPU.
struct ScaleRow {
  ScaleLayout layout;
  std::string refused;        // why the layout is impossible; everything else is then 0
  int64_t micro_batches = 0;  // per group of GPUs that share sequences, and step

  struct Bytes {
    double nvlink = 0, nic = 0;
  };
  Bytes reduce_bytes, gather_bytes, all_to_all_bytes, context_bytes;
  /// All together.
  Bytes bytes() const {
    return {reduce_bytes.nvlink + gather_bytes.nvlink + all_to_all_bytes.nvlink + context_bytes.nvlink,
            reduce_bytes.nic + gather_bytes.nic + all_to_all_bytes.nic + context_bytes.nic};
  }
  double compute = 0, reduce = 0, gather = 0, all_to_all = 0, context = 0;  // seconds of each in isolation
  double shown_reduce = 0, shown_gather = 0, shown_all_to_all = 0, shown_context = 0;  // that are not hidden
  double step = 0;  // seconds, with overlap
  double step_without_overlap() const { return compute + reduce + gather + all_to_all + context; }
  double efficiency() const { return step > 0 ? compute / step : 0; }  // relative to a single GPU
  double efficiency_without_overlap() const { return step > 0 ? compute / step_without_overlap() : 0; }
  double mfu = 0;  // share of the peak
  double tokens_per_second = 0;
  double weights = 0, gradients = 0, optimizer = 0, activations = 0;
  double memory() const { return weights + gradients + optimizer + activations; }
  bool fits = false;
  std::string bound;  // the resource that limits the speed
};

/// Error(usage), which names the value, for impossible assumptions (fractions outside [0, 1], speeds not
/// above 0).
void check_assumptions(const ScaleAssumptions& assumptions);

/// ZeRO 0 all-reduces whole gradients. 1 shards the optimizer state: a reduce-scatter of gradients after the
/// last micro-batch, and an all-gather of weights for the next step. 2 also shards gradients, so that every
/// micro-batch is reduced. 3 also shards weights, which are all-gathered block by block in each forward and
/// again in each backward pass; two blocks and the parameters outside of blocks are then held whole. Replicas
/// across nodes are reduced within each node first. A token is sent once to every node that has one of its
/// experts, and from there to the GPUs. GPUs that share sequences are neighbours; each gathers the keys and
/// values of all of them, layer by layer, once more in backward and in what is computed again, and sends the
/// gradients of theirs to each, which nothing hides.
/// layout.context: 1, or one of the contexts that scale_model was given.
ScaleRow scale(const ScaleModel& model, const ScaleAssumptions& assumptions, const ScaleLayout& layout);

/// The estimate with the most tokens per second among those that fit, or null.
const ScaleRow* best_layout(const std::vector<ScaleRow>& rows);

std::string scale_text(const ScaleModel& model, const ScaleAssumptions& assumptions,
                       const std::vector<ScaleRow>& rows);
nlohmann::json scale_json(const ScaleModel& model, const ScaleAssumptions& assumptions,
                          const std::vector<ScaleRow>& rows);

}  // namespace sluice
