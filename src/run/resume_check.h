#pragma once
// Whether a training may continue from a checkpoint: configuration, data and tokenizer are those that it was
// started with.
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "config/config.h"
#include "data/loader.h"
#include "data/tokenizer.h"

namespace sluice {

/// Error(usage) that lists every key and file that makes it impossible, and every key that needs consent and
/// is not in `allow_change`. Warns, where `warns`, of data that was written to since and is too large to be
/// hashed whole.
void check_resume(const CheckpointInfo& checkpoint, const Config& config,
                  const std::vector<std::string>& allow_change, const Blend& data, const Tokenizer& tokenizer,
                  bool warns);

}  // namespace sluice
