#pragma once
// How ranks share a training.
#include "config/enum_names.h"

namespace sluice {

enum class Determinism : uint8_t { same_layout, exact };
enum class ExactSum : uint8_t { tree, fixed64 };
enum class GradientDtype : uint8_t { f32, bf16 };
enum class Transport : uint8_t { automatic, nccl, host };

SLUICE_ENUM_NAMES(Determinism, "same_layout", "exact");
SLUICE_ENUM_NAMES(ExactSum, "tree", "fixed64");
SLUICE_ENUM_NAMES(GradientDtype, "f32", "bf16");
SLUICE_ENUM_NAMES(Transport, "auto", "nccl", "host");

struct ParallelConfig {
  int64_t tensor = 1;
  int64_t context = 1;
  int64_t expert = 1;
  double expert_capacity = 2;
  int64_t pipeline = 1;
  int64_t zero_stage = 0;
  GradientDtype gradient_dtype = GradientDtype::f32;
  Determinism determinism = Determinism::same_layout;
  ExactSum exact_sum = ExactSum::tree;
  Transport transport = Transport::automatic;
  double timeout_seconds = 300;
  int64_t verify_every_steps = 50;

  template <class V>
  void fields(V& f) {
    f("tensor", tensor, "tensor-parallel size; 1 in this version");
    f("context", context, "ranks that share every sequence; twice their number divides data.seq_len");
    f("expert", expert, "expert-parallel size; divides num_experts and the number of ranks");
    f("expert_capacity", expert_capacity,
      "receive-buffer capacity per round, as a multiple of the rank's own tokens; overflow takes extra "
      "rounds");
    f("pipeline", pipeline, "pipeline-parallel size; 1 in this version");
    f("zero_stage", zero_stage,
      "state that is sharded over the data-parallel ranks (ZeRO): 0 none, 1 moments, 2 gradients too, 3 "
      "weights too");
    f("gradient_dtype", gradient_dtype,
      "type of gradients in transit between ranks; bf16: stochastic rounding, with sums still in f32");
    f("determinism", determinism,
      "same_layout: bitwise reproducible on the same number of ranks; exact: on any number of ranks, also of "
      "those that share sequences");
    f("exact_sum", exact_sum,
      "gradient reduction under exact: a tree over micro-batches (a power of two of them per rank), or "
      "64-bit fixed point");
    f("transport", transport,
      "transport between GPUs; auto: nccl if every rank has its own GPU, else host; host: pinned memory and "
      "MPI");
    f("timeout_seconds", timeout_seconds,
      "end the run after this time without progress and name the rank responsible; 0: never");
    f("verify_every_steps", verify_every_steps,
      "steps between checks that weights and moments hold the bits that were written, on each rank and "
      "across "
      "ranks; 0: never");
  }
};

}  // namespace sluice
