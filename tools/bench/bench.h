#pragma once
// The measurements behind `sluice bench`.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/race.h"
#include "core/cpu_features.h"
#include "core/dtype.h"

namespace sluice::bench {

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds per call of f: the minimum over at least three rounds, which take `seconds` in total, after one
/// warm-up call.
template <class F>
double best_time(double seconds, F&& f) {
  f();
  double best = 1e30;
  const double begin = now();
  for (int round = 0; round < 3 || now() - begin < seconds; ++round) {
    const double start = now();
    f();
    best = std::min(best, now() - start);
  }
  return best;
}

struct Peak {
  double fma_one_thread = 0, fma = 0;    // f32 GFLOP/s, one and all threads
  double bf16_one_thread = 0, bf16 = 0;  // bf16_peak of AVX512-BF16
  double amx_one_thread = 0, amx = 0;    // and of AMX
  double copy = 0, triad = 0;            // GB/s over all threads, bytes read and written
};
/// FLOP/s of independent chains of fused multiply-adds, in the widest vectors the kernels may use.
double fma_peak(int threads, double seconds);
/// GFLOP/s of independent chains of products of bf16 by AVX512-BF16 or AMX; 0 without it.
double bf16_peak(Bf16Unit unit, int threads, double seconds);
/// The peak of products of a type on all threads: of bf16 where the kernels multiply it in hardware
/// (bf16_unit), else of FMA.
struct ProductsPeak {
  explicit ProductsPeak(DType dtype);
  double measure(double seconds) const;  // GFLOP/s
  const char* name() const { return in_bf16 ? "bf16 peak" : "FMA peak"; }

  bool in_bf16;
};
/// GB/s, read and written, of all threads that copy 256 MiB.
double copy_rate(double seconds);
Peak measure_peak(double seconds);

/// Every op of a training step, at the shapes of models typical of this kind of machine (or tiny); one JSON
/// object per row. peak_gflops: of products of that type, to which the rows' percent_of_peak refers.
nlohmann::json measure_ops(DType dtype, bool tiny, double peak_gflops, double seconds);

/// At GPU sizes (or tiny); rows of race().
nlohmann::json measure_kernels(const RaceOptions& options);
/// On a GPU in pairs of `algorithm` heuristic and timed (ops/product_algorithms.h), the latter with
/// `of_heuristic`, their ratio. On a CPU products of bf16 of small models, if its kernels have them, with
/// `library` own, with `of_onednn`, and oneDNN's.
nlohmann::json measure_matmul(const RaceOptions& options);
nlohmann::json measure_attention(const RaceOptions& options);
/// Compares the results of the attention kernels with each other, and each one's bits in two runs, at sizes
/// at which all of a GPU's blocks have several tiles. Error(numeric) where they differ.
nlohmann::json check_attention(const RaceOptions& options);
/// An MoE layer compared with a dense feed-forward network of the same active width, forward and backward.
/// Rows of race(); those of the MoE layer have `of_dense`, their time divided by that of the dense network.
nlohmann::json measure_moe(const RaceOptions& options, const std::vector<DType>& types);
/// A layer of sparse attention over lengths up to `longest` and selected keys, on a CPU: rows like those of
/// race(), with `of_dense`, the time divided by that of dense attention.
nlohmann::json measure_sparse(bool tiny, const std::vector<DType>& types, int64_t longest, double seconds);
/// The kernels of sparse attention in bf16 at the shapes of a large model, over lengths up to `longest`, for
/// queries whose neighbours select alike and unlike: rows of race(), with `union_of_8_over_keys`, and for
/// attention `of_dense`.
nlohmann::json measure_sparse_kernels(const RaceOptions& options, int64_t longest);
/// A small dense model with ranks as threads of this process: ratios of step times, the hidden fraction of a
/// slow exchange, and the cost of the watchdog and of saves.
nlohmann::json measure_ranks(const RaceOptions& options);

/// A small model without and with a gate and with sparse attention, and a larger one in bf16: tokens per
/// second of a prompt of each length up to `longest`, and behind it of one sequence and of several at once;
/// bytes of keys and values; and, without sparse attention, the bytes of weights, keys and values over the
/// time of a step, beside the rate of a copy.
nlohmann::json measure_decode(bool tiny, int64_t longest);

/// Names for measure_step.
std::vector<std::string> model_names();
/// Whole training steps (forward, backward, gradient norm, AdamW, repacking) on random tokens; on a GPU with
/// timed products, as a training has them.
nlohmann::json measure_step(const std::string& model, Device device, DType dtype, double seconds,
                            bool profile);

}  // namespace sluice::bench
