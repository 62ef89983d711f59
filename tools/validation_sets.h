#pragma once
// The validation sets of a command.
#include <string>
#include <vector>

#include "command.h"
#include "config/config.h"

namespace sluice {

/// Adds the options --set (into names) and --data.
void add_set_options(Command& command, std::vector<std::string>& names, std::vector<std::string>& data);

/// The sets in `data` ("NAME=PREFIX" each), else those of the configuration, restricted to `names` if it is
/// not empty. Error(usage) for a malformed entry, a name given twice, an unknown name, or an empty result.
std::vector<DataSource> chosen_sets(const std::vector<std::string>& data,
                                    const std::vector<std::string>& names, const Config& config);

/// Adds the argument that names a trained model.
void add_model_argument(Command& command, std::string& path);

/// Adds the option --tokenizer, which replaces the checkpoint's copy or configured file.
void add_tokenizer_option(Command& command, std::string& tokenizer);

}  // namespace sluice
