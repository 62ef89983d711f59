#pragma once
// The trained model and validation sets of a command that may run on several ranks.
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "hf/open.h"
#include "run/start_agreement.h"

namespace sluice {

struct ModelInputs {
  ModelFiles files;
  Config config;  // that of `files`, which a model takes
};

/// Within agree_on_start (run/start_agreement.h): opens the model at a path.
/// On several ranks it states what they must have in common for a forward pass. Error(usage) if
/// parallel.context is above 1 on a GPU; `command`: who says so.
ModelInputs read_model(StartFacts& facts, const Communicator& ranks, const std::string& command,
                       const std::string& path, const OpenOptions& how);

/// Likewise: the names and contents of validation sets.
void state_sets(StartFacts& facts, const std::vector<DataSource>& sets, const Config& config);

/// Error(usage) unless all ranks share every sample, that is, are parallel.context in number.
void require_sharing(const Communicator& ranks, const std::string& command, const Config& config);

}  // namespace sluice
