#pragma once
// RUN/bits.log: what a training computed, bit by bit, step by step, so that two trainings can be compared
// (README.md). JSON lines: {"step": steps done, "loss": ..., "grad_norm": ...} as 16 hexadecimal digits
// of the f64, and at every log.bits-th step "state", a hash of weights and moments.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/store.h"
#include "comm/communicator.h"
#include "core/context.h"

namespace sluice {

/// Of all weights and moments of all ranks, on rank 0; collective. XXH3 of every tensor's name, mixed with
/// the number and the bits of every element and added up: the same for every way the tensors are cut into
/// slices over ranks. What several ranks hold counts once; Error(corruption) names it where they hold
/// different bits.
uint64_t state_hash(Context& ctx, const CheckpointContent& content, Communicator& ranks);

nlohmann::ordered_json bits_line(int64_t step, double loss, double grad_norm);

struct BitsComparison {
  int64_t steps = 0, states = 0;  // that both have
  int64_t last_a = -1, last_b = -1;
  int64_t step = -1;       // first that differs; -1: none
  std::string difference;  // "loss 5.54517 and 5.54518 (40162e42fefa39ef and ...)", "grad_norm ...", "state
                           // ...", "missing from B"
};

/// Of two bits.log files. A step that one lacks, up to the shorter one's end, differs. Error(no_input),
/// Error(data) on what is no such file.
BitsComparison compare_bits(const std::string& a, const std::string& b);

}  // namespace sluice
