#pragma once
// RUN/bits.log records the exact results of every step, so that two runs can be compared bit by bit
// (README.md). JSON lines: {"step": steps done, "loss": ..., "grad_norm": ...} with values as 16 hexadecimal
// digits of the f64, and at every log.bits-th step "state", a hash of weights and moments.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/store.h"
#include "comm/communicator.h"
#include "core/context.h"

namespace sluice {

/// Hash of all weights and moments over all ranks; collective, the result is on rank 0. It is the sum over
/// all elements of a mix of the XXH3 of the tensor's name, the element's index and its bits, so it does not
/// depend on how tensors are sharded over ranks. Replicated elements count once; if their bits differ between
/// ranks, Error(corruption) names the tensor.
uint64_t state_hash(Context& ctx, const CheckpointContent& content, Communicator& ranks);

nlohmann::ordered_json bits_line(int64_t step, double loss, double grad_norm);

struct BitsComparison {
  int64_t steps = 0, states = 0;  // present in both
  int64_t last_a = -1, last_b = -1;
  int64_t step = -1;       // first difference; -1: none
  std::string difference;  // "loss 5.54517 and 5.54518 (40162e42fefa39ef and ...)", "grad_norm ...", "state
                           // ...", "missing from B"
};

/// Compares two bits.log files. A step that only one of them has, up to the end of the shorter one, is a
/// difference. Error(no_input), or Error(data) if a file is not a bits.log.
BitsComparison compare_bits(const std::string& a, const std::string& b);

}  // namespace sluice
