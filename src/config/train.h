#pragma once
// The training loop, and what weights it begins with.
#include <string>
#include <vector>

#include "config/enum_names.h"

namespace sluice {

enum class DeviceChoice : uint8_t { automatic, cpu, cuda };
enum class Precision : uint8_t { f32, bf16, f64 };
enum class Recompute : uint8_t { none, mlp, block };
enum class BadStepPolicy : uint8_t { stop, skip, count };
enum class InitMissing : uint8_t { refuse, fresh };
enum class MatmulAlgorithm : uint8_t { timed, heuristic };

SLUICE_ENUM_NAMES(DeviceChoice, "auto", "cpu", "cuda");
SLUICE_ENUM_NAMES(Precision, "f32", "bf16", "f64");
SLUICE_ENUM_NAMES(Recompute, "none", "mlp", "block");
SLUICE_ENUM_NAMES(BadStepPolicy, "stop", "skip", "count");
SLUICE_ENUM_NAMES(InitMissing, "refuse", "fresh");
SLUICE_ENUM_NAMES(MatmulAlgorithm, "timed", "heuristic");

/// Low-rank adapters (Hu et al. 2021): W + (alpha / rank) B A, where W is frozen.
struct LoraConfig {
  int64_t rank = 0;
  double alpha = 32.0;
  std::vector<std::string> targets = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                      "gate_proj", "up_proj", "down_proj"};

  template <class V>
  void fields(V& f) {
    f("rank", rank,
      "rank of the adapters; all other weights are then frozen; 0: no adapters, the whole model is trained");
    f("alpha", alpha, "adapter outputs are scaled by alpha / rank");
    f("targets", targets, "matrices that get an adapter, by the last part of their name");
  }
};

struct TrainConfig {
  DeviceChoice device = DeviceChoice::automatic;
  int64_t threads = 0;
  int64_t micro_batch_size = 4;
  int64_t global_batch_size = 16;
  int64_t max_steps = 0;
  int64_t max_tokens = 0;
  uint64_t seed = 1234;
  bool deterministic = true;
  MatmulAlgorithm matmul_algorithm = MatmulAlgorithm::timed;
  Precision precision = Precision::f32;
  Recompute recompute = Recompute::none;
  double max_grad_norm = 1.0;
  BadStepPolicy on_nonfinite = BadStepPolicy::skip;
  BadStepPolicy on_spike = BadStepPolicy::count;
  double divergence_factor = 1.5;
  std::string init_from;
  std::vector<std::string> init_ignore;
  InitMissing init_missing = InitMissing::refuse;
  std::vector<std::string> init_missing_names;
  bool check_limits = true;

  template <class V>
  void fields(V& f) {
    f("device", device, "auto: a GPU if one is visible and this build has CUDA, else the CPU");
    f("threads", threads,
      "CPU threads per rank; 0: OMP_NUM_THREADS if set, otherwise the cores available to this process, "
      "divided among the ranks on its machine");
    f("micro_batch_size", micro_batch_size, "samples per forward and backward pass");
    f("global_batch_size", global_batch_size, "samples per optimizer step; a multiple of micro_batch_size");
    f("max_steps", max_steps, "optimizer steps; give either this or max_tokens");
    f("max_tokens", max_tokens,
      "training tokens (20B, 300M, 1e9), from which the number of steps is computed");
    f("seed", seed, "seed of the initial weights and of the data order");
    f("deterministic", deterministic,
      "on a GPU: use only kernels with a deterministic reduction order; false is faster");
    f("matmul_algorithm", matmul_algorithm,
      "on a GPU: of cuBLASLt's algorithms for a matrix product, the fastest when timed before the first "
      "step, kept in RUN/matmul_algorithms.json (copied into a new run's folder, it gives that run the same "
      "bits), or the one that the library's heuristic prefers, as always with parallel.determinism: exact");
    f("precision", precision,
      "storage of weights and activations; bf16 keeps f32 master weights; f64 is for checks");
    f("recompute", recompute, "activations that backward recomputes instead of storing them");
    f("max_grad_norm", max_grad_norm, "clip the global gradient norm to this; 0: no clipping");
    f("on_nonfinite", on_nonfinite,
      "reaction to a loss or gradient norm that is not finite: stop, or skip the update");
    f("on_spike", on_spike,
      "reaction to a loss or gradient norm more than 6 standard deviations above the mean of the last 128 "
      "steps: count, skip or stop");
    f("divergence_factor", divergence_factor,
      "warn when the smoothed loss exceeds its lowest value by this factor; 0: never");
    f("init_from", init_from, "checkpoint or Hugging Face folder that initialises the weights");
    f("init_ignore", init_ignore,
      "keys that may differ from the configuration of init_from, e.g. [model.rope.theta, data.tokenizer]");
    f("init_missing", init_missing,
      "parameters that init_from lacks: refuse, or fresh: new gates, sinks and shared experts start so that "
      "the function of the weights is kept (by sinks nearly), all others as in a training from scratch");
    f("init_missing_names", init_missing_names,
      "parts of names; only parameters whose name contains one of them may be missing; empty: any");
    f("check_limits", check_limits,
      "refuse to start if the planned memory or disk space exceeds what is available to this process");
  }
};

}  // namespace sluice
