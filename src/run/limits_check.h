#pragma once
// Before anything is trained: does what it will take fit into what this process may use, in memory and on
// disk?
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "core/limits.h"
#include "plan/plan.h"

namespace sluice {

/// A part of what is needed, or a key that lowers it with what that would save.
struct NamedBytes {
  std::string name;
  int64_t bytes = 0;
};

/// What is needed beside what there is.
struct LimitFit {
  std::string what;  // "memory", "disk space"
  int64_t needed = 0, there = 0;
  std::string limit;  // which one is nearest
  std::vector<NamedBytes> parts;
  bool fits() const { return needed <= there; }
};

/// How many ranks share a limit with this one.
struct Sharing {
  int machine = 1, group = 1;  // of the machine; of the process's own control group
};

/// Host memory that a rank of this plan takes beyond what this process has taken so far, against the limit
/// that leaves least. A limit that ranks share is divided between them.
LimitFit compare_memory(const Plan& plan, const std::vector<MemoryLimit>& limits,
                        const Sharing& sharing = {});
/// A GPU's arenas against its memory; fits where training is on the CPU.
LimitFit compare_gpu_memory(const Plan& plan);
/// keep_last checkpoints and the one being written, less those that are there already and will make room.
LimitFit compare_disk(const Plan& plan, int64_t free_bytes);

/// The keys that lower the memory most, at most three, each measured by a plan of its own.
std::vector<NamedBytes> memory_savings(const Plan& plan);

/// Collective. Error(out_of_memory) or Error(cannot_create) with the sum, its parts, what there is and by
/// which limit, and the keys that help most; with train.check_limits: false warnings of rank 0. Warns where
/// checkpoints kept for ever (checkpoint.keep_every_steps) will fill the disk in the course of the run.
void check_limits(const Plan& plan, Communicator& ranks);

/// The same comparison as lines of `sluice plan`, and as JSON.
std::string limits_text(const Plan& plan);
nlohmann::json limits_json(const Plan& plan);

}  // namespace sluice
