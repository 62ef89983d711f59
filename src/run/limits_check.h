#pragma once
// Check before training: whether the memory and disk space that the run needs are available to this process.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "core/limits.h"
#include "plan/plan.h"

namespace sluice {

/// A part of the need, or a configuration key that lowers it, with the bytes saved.
struct NamedBytes {
  std::string name;
  int64_t bytes = 0;
};

/// The need and what is available.
struct LimitFit {
  std::string what;  // "memory", "disk space"
  int64_t needed = 0, there = 0;
  std::string limit;  // the tightest one
  std::vector<NamedBytes> parts;
  bool fits() const { return needed <= there; }
};

/// How many ranks share a limit with this one.
struct Sharing {
  int machine = 1, group = 1;  // on the machine; in the process's own control group
};

/// Host memory that a rank of this plan needs in addition to what this process already uses, compared with
/// the tightest limit. A limit shared by ranks is divided among them.
LimitFit compare_memory(const Plan& plan, const std::vector<MemoryLimit>& limits,
                        const Sharing& sharing = {});
/// A GPU's arenas compared with its memory; always fits for training on the CPU.
LimitFit compare_gpu_memory(const Plan& plan);
/// Space for keep_last checkpoints and the one being written, minus existing ones that will be removed.
LimitFit compare_disk(const Plan& plan, int64_t free_bytes);

/// The up to three keys that lower the memory most, each measured by a separate plan.
std::vector<NamedBytes> memory_savings(const Plan& plan);

/// Collective. Throws Error(out_of_memory) or Error(cannot_create) with the sum, its parts, the available
/// amount, the limit, and the keys that help most; with train.check_limits: false these are warnings of rank
/// 0. Also warns if permanently kept checkpoints (checkpoint.keep_every_steps) will fill the disk during the
/// run.
void check_limits(const Plan& plan, Communicator& ranks);

/// The same comparison as lines of `sluice plan`, and as JSON.
std::string limits_text(const Plan& plan);
nlohmann::json limits_json(const Plan& plan);

}  // namespace sluice
