#pragma once
#include "core/context.h"
#include "params/spec.h"

namespace sluice {

/// Writes the initial values of elements [begin, begin + count) of a parameter into `part` (count elements):
/// Philox with key (seed, parameter's name), so that they depend neither on the rest of the model nor on the
/// sharding.
void write_initial_values(Context& ctx, const ParamSpec& spec, int64_t begin, int64_t count,
                          const Tensor& part, uint64_t seed);

}  // namespace sluice
