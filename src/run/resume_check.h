#pragma once
// Whether a run may resume from a checkpoint: its configuration, data and tokenizer must be those that it was
// started with.
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "config/config.h"
#include "config/load.h"
#include "data/loader.h"
#include "data/tokenizer.h"

namespace sluice {

/// Throws Error(usage) where one of these is no key of a configuration that has a value.
void require_known_keys(const std::vector<std::string>& allow_change);

/// Throws Error(usage) that lists every key and file that makes resuming impossible, and every key that needs
/// consent and is not in `allow_change`. With `warns`, warns of data that was modified since and is too large
/// to be hashed completely. Returns the changes that were consented to.
std::vector<ConfigChange> check_resume(const CheckpointInfo& checkpoint, const Config& config,
                                       const std::vector<std::string>& allow_change, const Blend& data,
                                       const Tokenizer& tokenizer, bool warns);

}  // namespace sluice
