#pragma once
// The validation sets that a command reads.
#include <string>
#include <vector>

#include "command.h"
#include "config/config.h"

namespace sluice {

/// --set, into names, and --data.
void add_set_options(Command& command, std::vector<std::string>& names, std::vector<std::string>& data);

/// Those of `data`, "NAME=PREFIX" each, else the configuration's; of these the ones whose name is in `names`,
/// else all. Error(usage) for a malformed one, an unknown name, or none left.
std::vector<DataSource> chosen_sets(const std::vector<std::string>& data,
                                    const std::vector<std::string>& names, const Config& config);

/// --tokenizer, for a checkpoint whose own copy or configured file is not to be used.
void add_tokenizer_option(Command& command, std::string& tokenizer);

}  // namespace sluice
