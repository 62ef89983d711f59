#include "eval/portable.h"

#include <spdlog/fmt/fmt.h>

#include "checkpoint/manifest.h"
#include "core/io.h"
#include "data/token_file.h"

namespace sluice {
namespace {

/// The tokenizer's fingerprint in state.json; empty if there is none.
std::string trained_fingerprint(const CheckpointInfo& checkpoint) {
  if (!checkpoint.state.is_object()) return "";
  const auto found = checkpoint.state.find("tokenizer_fingerprint");
  return found != checkpoint.state.end() && found->is_string() ? found->get<std::string>() : "";
}

bool has_token_files(const std::string& path) {
  if (io::exists(path) || io::exists(path + ".bin")) return true;
  return path.find_first_of("*?[") != std::string::npos && !io::glob(path).empty();
}

void require_files(const DataSource& source, const std::string& key, const std::string& remedy) {
  if (has_token_files(source.path)) return;
  refuse_text(source.path);
  fail(ExitCode::no_input, "{} ({}): there are no token files {} (.bin and .idx); if they were moved, {}",
       key, source.name, source.path, remedy);
}

}  // namespace

std::unique_ptr<Tokenizer> checkpoint_tokenizer(const CheckpointInfo& checkpoint,
                                                const TokenizerConfig& configured,
                                                const std::string& chosen) {
  TokenizerConfig config = chosen.empty() ? configured : tokenizer_config(chosen);
  if (config.type == TokenizerType::bpe) config.end_of_document = configured.end_of_document;
  const bool from_file = chosen.empty() && config.type != TokenizerType::byte;
  if (from_file && !checkpoint.tokenizer_model.empty()) config.path = checkpoint.tokenizer_model;
  if (from_file && !io::exists(config.path))
    fail(ExitCode::no_input,
         "{}: contains no tokenizer (an older version wrote it), and the file that its configuration names, "
         "{}, does not exist here; give its path with --tokenizer PATH",
         checkpoint.path, config.path);
  auto tokenizer = make_tokenizer(config);
  const std::string trained = trained_fingerprint(checkpoint);
  if (!trained.empty() && trained != tokenizer->fingerprint())
    fail(chosen.empty() ? ExitCode::data : ExitCode::usage,
         "{}: was trained with another tokenizer than {}{}: its fingerprint is {}, the checkpoint's {}",
         checkpoint.path, chosen.empty() ? "" : "--tokenizer ", tokenizer->name(), tokenizer->fingerprint(),
         trained);
  return tokenizer;
}

std::unique_ptr<Tokenizer> training_tokenizer(const Config& config) {
  TokenizerConfig tokenizer = config.data.tokenizer;
  if (tokenizer.type == TokenizerType::byte || tokenizer.path.empty() || io::exists(tokenizer.path))
    return make_tokenizer(tokenizer);
  // Only if training has started: in a folder without checkpoints the copy may be from another run.
  const std::vector<std::string> checkpoints = list_checkpoints(config.run_dir + "/ckpt");
  std::vector<std::string> folders = checkpoints;
  if (!checkpoints.empty()) folders.insert(folders.begin(), config.run_dir);
  for (const std::string& folder : folders) {
    const bool bpe = tokenizer.type == TokenizerType::bpe;
    const std::string copy = folder + "/" + (bpe ? kBpeTokenizerFile : kTokenizerFile);
    if (!io::exists(copy)) continue;
    tokenizer.path = copy;
    return make_tokenizer(tokenizer);
  }
  fail(ExitCode::no_input,
       "data.tokenizer.path: {} does not exist; if it was moved, give its new path: data.tokenizer.path=PATH",
       tokenizer.path);
}

void require_training_data(const Config& config) {
  const auto require = [](const std::vector<DataSource>& sources, const char* list) {
    for (size_t i = 0; i < sources.size(); ++i) {
      const std::string key = fmt::format("{}[{}].path", list, i);
      require_files(sources[i], key, fmt::format("give their new path: {}=PREFIX", key));
    }
  };
  require(config.data.train, "data.train");
  require(config.data.validation, "data.validation");
}

void require_validation_data(const std::vector<DataSource>& sets) {
  for (const DataSource& set : sets)
    require_files(set, "validation set", fmt::format("give their new path: --data {}=PREFIX", set.name));
}

}  // namespace sluice
