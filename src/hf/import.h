#pragma once
// `sluice import`: a configuration that continues from a Hugging Face folder.
#include <string>
#include <vector>

namespace sluice {

struct Import {
  std::string yaml;                      // sections model, data and train
  std::vector<std::string> report;       // what was mapped, left out and cannot be held; for the terminal
  std::vector<std::string> unsupported;  // what config.json says and Sluice does not have
};

/// Reads config.json and the headers of the weights. Everything that the folder says is in the configuration
/// or in the report. Error(data) where config.json is damaged or of an unknown model type, and where the
/// tensors are not those of the model that it describes.
Import import_folder(const std::string& folder);

}  // namespace sluice
