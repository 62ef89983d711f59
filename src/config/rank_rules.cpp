#include "config/rank_rules.h"

#include <spdlog/fmt/fmt.h>

#include <limits>

#include "config/derived.h"
#include "config/problems.h"

namespace sluice {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

void check_receive_buffer(const Config& config, ProblemSink& problem) {
  const MoeConfig& moe = config.model.moe;
  const ParallelConfig& p = config.parallel;
  int64_t tokens = 0;
  const bool sound = moe.num_experts > 0 && moe.num_experts <= kMaxExperts && p.expert > 1 &&
                     moe.num_experts % p.expert == 0 && moe.num_experts_per_tok > 0 &&
                     moe.num_experts_per_tok <= kMaxExpertsPerToken && p.expert_capacity > 0 &&
                     !__builtin_mul_overflow(config.train.micro_batch_size, config.data.seq_len, &tokens) &&
                     tokens > 0 && tokens <= kMaxRows && p.context > 0;
  if (!sound) return;  // reported by itself
  // With exact, backward sends the tokens of whole sequences (nn/moe.h).
  const int64_t parts = p.determinism == Determinism::exact ? 1 : p.context;
  const int64_t rows =
      receive_rows(tokens / parts, moe.num_experts_per_tok, moe.num_experts, p.expert, p.expert_capacity);
  if (rows > kMaxRows)
    problem({"parallel.expert_capacity", "train.micro_batch_size", "data.seq_len"},
            fmt::format("parallel.expert_capacity = {} gives a receive buffer of {} rows, above the {} that "
                        "this version is built for",
                        p.expert_capacity, rows, kMaxRows));
}

void check_experts(const Config& config, int64_t ranks, ProblemSink& problem) {
  const ModelConfig& m = config.model;
  const ParallelConfig& p = config.parallel;
  if (p.expert <= 1) return;
  if (ranks > 0 && ranks % p.expert != 0)
    problem({"parallel.expert"},
            fmt::format("parallel.expert = {}: {} rank{} cannot be divided into groups of that size",
                        p.expert, ranks, ranks == 1 ? "" : "s"));
  // Squares are summed in blocks of 32 elements, which must lie in one expert wherever it is. A width that
  // match_parameters_of has yet to choose is checked when it is known.
  const int64_t hidden = m.hidden_size, width = m.moe.moe_intermediate_size;
  if (p.determinism != Determinism::exact || m.moe.num_experts == 0 || !m.match_parameters_of.empty()) return;
  const std::vector<std::string> keys{"model.moe.moe_intermediate_size", "model.hidden_size",
                                      "parallel.determinism", "parallel.expert", "model.moe.num_experts"};
  const std::string exact =
      fmt::format("parallel.determinism: exact with parallel.expert = {} needs experts ", p.expert);
  if ((hidden % 32) * (width % 32) % 32 != 0)
    problem(keys, exact + fmt::format(
                              "of a multiple of 32 elements; hidden_size x moe_intermediate_size is {} x {}",
                              hidden, width));
  else if (m.moe.bias && (hidden % 32 != 0 || width % 32 != 0))
    problem(keys, exact + fmt::format("whose biases have multiples of 32 elements; hidden_size is {} and "
                                      "moe_intermediate_size {}",
                                      hidden, width));
}

void check_batch(const Config& config, int64_t all_ranks, ProblemSink& problem) {
  const TrainConfig& t = config.train;
  const ParallelConfig& p = config.parallel;
  if (p.context < 1) return;  // reported by itself
  const int64_t ranks = all_ranks / p.context;
  if (all_ranks > 0 && ranks * p.context != all_ranks)
    problem({"parallel.context"},
            fmt::format("parallel.context = {}: {} rank{} cannot be divided into groups of that size",
                        p.context, all_ranks, all_ranks == 1 ? "" : "s"));
  if (ranks < 1 || t.micro_batch_size < 1 || t.micro_batch_size > kMaxRows || t.global_batch_size < 1 ||
      t.global_batch_size % t.micro_batch_size != 0)
    return;  // reported by itself
  const int64_t all = t.global_batch_size / t.micro_batch_size, each = all / ranks;
  if (each * ranks != all) {
    problem({"train.global_batch_size", "train.micro_batch_size"},
            fmt::format("train.global_batch_size = {} is {} micro-batches of {}, which {} {} cannot "
                        "share evenly; use a multiple of {}, or another number of ranks",
                        t.global_batch_size, all, t.micro_batch_size, ranks,
                        p.context > 1 ? fmt::format("groups of {} ranks", p.context) : "ranks",
                        ranks * t.micro_batch_size));
  } else if (p.determinism == Determinism::exact && p.exact_sum == ExactSum::tree &&
             (each & (each - 1)) != 0) {
    problem(
        {"parallel.exact_sum", "parallel.determinism", "train.global_batch_size", "train.micro_batch_size"},
        fmt::format("parallel.exact_sum: tree needs a power of two of micro-batches on every rank; {} "
                    "micro-batches over {} rank{} are {} each; use fixed64",
                    all, ranks, ranks == 1 ? "" : "s", each));
  }
}

/// With zero_stage 0 and 1 the gradients of an expert are summed within a group of expert-parallel ranks
/// first: a subtree of that over all micro-batches only where the group's are a power of two.
void check_expert_sums(const Config& config, int64_t ranks, ProblemSink& problem) {
  const ParallelConfig& p = config.parallel;
  if (p.determinism != Determinism::exact || p.exact_sum != ExactSum::tree || p.zero_stage > 1 ||
      p.expert < 1 || p.context < 1 || ranks <= p.expert)
    return;
  const int64_t apart = p.expert / std::min(p.context, p.expert);  // ranks of a group with other sequences
  if ((apart & (apart - 1)) == 0) return;
  problem(
      {"parallel.exact_sum", "parallel.determinism", "parallel.expert", "parallel.zero_stage"},
      fmt::format("parallel.exact_sum: tree with parallel.zero_stage = {} sums an expert's gradient within "
                  "its group of parallel.expert = {} ranks first, which gives the bits of other layouts "
                  "only where a power of two of them have sequences of their own; {} have; use fixed64, "
                  "or zero_stage 2 or 3",
                  p.zero_stage, p.expert, apart));
}

}  // namespace

void check_rank_rules(const Config& config, int64_t ranks, ProblemSink& problem) {
  check_experts(config, ranks, problem);
  check_receive_buffer(config, problem);
  check_batch(config, ranks, problem);
  check_expert_sums(config, ranks, problem);
  const LoadBalanceConfig& balance = config.model.moe.load_balance;
  if (config.model.moe.num_experts > 0 && balance.scope == BalanceScope::global_batch &&
      balance.coefficient > 0 && config.parallel.determinism == Determinism::exact)
    problem({"model.moe.load_balance.scope", "parallel.determinism", "model.moe.load_balance.coefficient",
             "model.moe.num_experts"},
            "model.moe.load_balance.scope: global_batch counts the step's micro-batches as they are "
            "computed, which depends on the parallel layout; with parallel.determinism: exact use "
            "previous_step or micro_batch");
}

void require_rank_rules(const Config& config, int64_t ranks, const KeyPlaces& places) {
  ProblemList problems;
  check_rank_rules(config, ranks, problems);
  problems.raise(places);
}

}  // namespace sluice
