#pragma once
// What makes a run, or a checkpoint that was copied alone, work on another machine: the tokenizer comes from
// the copy beside the weights, and what a configuration names and is not there is told with the key or option
// that gives another place.
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "config/config.h"
#include "data/tokenizer.h"

namespace sluice {

/// The tokenizer that a checkpoint was trained with: `chosen` ("byte", or a model file; Error(usage) where it
/// is another), or the checkpoint's own copy, or, where it has none, the file that its configuration names
/// (Error(data) where that is another by now, Error(no_input) where it does not exist).
std::unique_ptr<Tokenizer> checkpoint_tokenizer(const CheckpointInfo& checkpoint,
                                                const TokenizerConfig& configured,
                                                const std::string& chosen = "");

/// The tokenizer of a training: the file that its configuration names; where that does not exist, the copy
/// that the run folder or one of its checkpoints holds.
std::unique_ptr<Tokenizer> training_tokenizer(const Config& config);

/// Error(no_input) for the first source whose token files do not exist: with its key, data.train[i].path or
/// data.validation[i].path, by which another place is given.
void require_training_data(const Config& config);
/// The same of validation sets that a checkpoint's configuration names, for which --data gives another place.
void require_validation_data(const std::vector<DataSource>& sets);

/// Writes the tokenizer's model, if it has one, as tokenizer.model into a folder in which that name is free.
void write_tokenizer(const std::string& folder, const Tokenizer& tokenizer);

}  // namespace sluice
