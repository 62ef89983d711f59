#pragma once
// What a step would cost on many GPUs: a model on paper. Parameters, FLOPs and activations are counted on the
// real store and trainer (plan/plan.h); machines, and how much of the communication hides beside computation,
// are assumed. Its figures are expectations, to choose a layout by; nothing in it is measured.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace sluice {

/// Of the machines, and of a program that runs well on them. Defaults: NVIDIA's data sheets of H100 and H200
/// SXM, and shares of them that published programs reach.
struct ScaleAssumptions {
  double peak_tflops = 989;  // of a GPU, bf16, dense
  double gpu_mfu = 0.42;     // share of it that one GPU reaches alone, in FLOPs that count (no recomputation)
  double nvlink_gb_s = 330;  // of a GPU to the others of its node, each way, achieved (of 450)
  double nic_gb_s = 45;      // of a GPU's own NIC to other nodes, each way, achieved (of 50)
  int64_t gpus_per_node = 8;        //
  double memory_gib = 79.6;         // of a GPU
  double hidden_backward = 0.85;    // share of a backward pass beside which gradients are exchanged
  double hidden_forward = 0.85;     // share of a forward pass beside which weights are gathered
  double hidden_all_to_all = 0.75;  // share of an all-to-all's time that hides beside computation
  double hop_us = 60;  // microseconds until an all-to-all flows, per hop (NVLink one; NIC, then NVLink: two)
  int64_t gradient_bytes =
      2;  // of a gradient's element on its way: 2 bf16, 4 f32. It is kept in what adds up (f32)
};

/// What of a configuration matters to the cost.
struct ScaleModel {
  int64_t dense = 0, expert = 0;  // parameters
  int64_t block_dense = 0, block_expert = 0,
          around = 0;  // of the largest block, and around the blocks (embedding, norm, head)
  int64_t experts = 0, per_token = 0, layers_with_experts = 0, hidden = 0;
  double flops_per_token = 0;  // forward and backward
  double again = 0;            // forward FLOPs computed once more in backward, as a share of the forward's
  int64_t passes =
      4;  // all-to-alls of a layer and micro-batch: to the experts and back, forward and backward
  int64_t samples = 0, micro_batch = 0, seq_len = 0;  // of a step, of a micro-batch; tokens
  int64_t weight_bytes = 2, gradient_bytes = 4;       // of an element, as kept
  double optimizer_bytes = 12;                        // the same; on average, for Muon keeps fewer moments
  bool whole_matrices = false;                        // Muon: nothing is cut
  int64_t activation_bytes = 0;                       // of a micro-batch, work memory included
};
/// From a plan: plan.memory's activations are of one rank that holds all experts, which are as large as those
/// of ranks that share them evenly.
ScaleModel scale_model(const Plan& plan);

struct ScaleLayout {
  int64_t gpus = 0, expert = 1, zero = 1;  // GPUs; that share the experts; parallel.zero_stage
};

/// One layout's expectation: seconds of a step, bytes that a GPU sends in it, bytes of its memory.
struct ScaleRow {
  ScaleLayout layout;
  std::string refused;        // why there can be no such training; everything else is 0 then
  int64_t micro_batches = 0;  // of a GPU, per step

  struct Bytes {
    double nvlink = 0, nic = 0;
  };
  Bytes reduce_bytes, gather_bytes, all_to_all_bytes;
  double compute = 0, reduce = 0, gather = 0, all_to_all = 0;       // seconds of each, alone
  double shown_reduce = 0, shown_gather = 0, shown_all_to_all = 0;  // what does not hide
  double step = 0;                                                  // seconds, with overlap
  double step_without_overlap() const { return compute + reduce + gather + all_to_all; }
  double efficiency() const { return step > 0 ? compute / step : 0; }  // of one GPU alone
  double efficiency_without_overlap() const { return step > 0 ? compute / step_without_overlap() : 0; }
  double mfu = 0;  // share of the peak
  double tokens_per_second = 0;
  double weights = 0, gradients = 0, optimizer = 0, activations = 0;
  double memory() const { return weights + gradients + optimizer + activations; }
  bool fits = false;
  std::string bound;  // what a faster one of would help most
};

/// Error(usage) for assumptions that cannot be (shares outside 0..1, speeds not above 0), by name.
void check_assumptions(const ScaleAssumptions& assumptions);

/// ZeRO: 0 sums whole gradients; 1 shares the optimizer: gradients are reduced to their owner after the last
/// micro-batch, weights gathered for the next step's first; 2 keeps a share of the gradients, so that every
/// micro-batch is reduced; 3 keeps a share of the weights, gathered block by block in each forward and again
/// in each backward pass. Two blocks, and what lies around them, are whole then. What is replicated beyond a
/// node is reduced inside it first. A token goes once to every node that holds one of its experts, and from
/// there to the GPUs.
ScaleRow scale(const ScaleModel& model, const ScaleAssumptions& assumptions, const ScaleLayout& layout);

/// Most tokens per second of those that fit, or null.
const ScaleRow* best_layout(const std::vector<ScaleRow>& rows);

std::string scale_text(const ScaleModel& model, const ScaleAssumptions& assumptions,
                       const std::vector<ScaleRow>& rows);
nlohmann::json scale_json(const ScaleModel& model, const ScaleAssumptions& assumptions,
                          const std::vector<ScaleRow>& rows);

}  // namespace sluice
