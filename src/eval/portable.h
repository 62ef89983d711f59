#pragma once
// Lets a run, or a checkpoint copied alone, work on another machine: the tokenizer is the copy beside the
// weights, and for a missing file the error names the key or option that gives another path.
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "config/config.h"
#include "data/tokenizer.h"

namespace sluice {

/// The tokenizer that a checkpoint was trained with: `chosen` ("byte" or a model file; Error(usage) if it is
/// another tokenizer), else the checkpoint's copy, else the file that its configuration names (Error(data) if
/// that is now another tokenizer, Error(no_input) if it does not exist).
std::unique_ptr<Tokenizer> checkpoint_tokenizer(const CheckpointInfo& checkpoint,
                                                const TokenizerConfig& configured,
                                                const std::string& chosen = "");

/// The tokenizer for training: the file that the configuration names; if that does not exist, the copy in the
/// run folder or in one of its checkpoints.
std::unique_ptr<Tokenizer> training_tokenizer(const Config& config);

/// Throws Error(no_input) for the first source without token files. The message names the key that gives
/// another path, data.train[i].path or data.validation[i].path.
void require_training_data(const Config& config);
/// The same for the validation sets in a checkpoint's configuration, for which --data gives another path.
void require_validation_data(const std::vector<DataSource>& sets);

}  // namespace sluice
