#include "hf/open.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <string_view>

#include "checkpoint/manifest.h"
#include "checkpoint/store.h"
#include "config/load.h"
#include "core/io.h"
#include "core/strict_json.h"
#include "data/bpe.h"
#include "hf/folder_tokenizer.h"
#include "hf/layouts.h"

namespace sluice {
namespace {

constexpr int64_t kUsualLength = 1024;

ModelFiles open_folder(const std::string& folder, const OpenOptions& options) {
  const HfModel source = read_hf_config(folder + "/config.json");
  std::vector<std::string> reasons;
  for (const HfModel::Unsupported& u : source.unsupported) reasons.push_back(u.what);
  if (source.lora_rank > 0) reasons.push_back(fmt::format("lora.rank = {}", source.lora_rank));
  if (!reasons.empty())
    fail(ExitCode::usage, "{}/config.json: a model of type {} that Sluice cannot compute:\n  {}", folder,
         source.model_type, fmt::join(reasons, "\n  "));
  ModelFiles files;
  files.path = folder;
  const Config own = hf_folder_config(folder, source);
  files.config = load_resolved_text(
      to_yaml(own), folder + "/config.json, as a configuration",
      with_original_length(with_positions(options.overrides, options.device), [&] { return own; }));
  files.map = weight_map(source.format, files.config.model);
  // Before memory is taken for sizes that only config.json claims.
  compare_weights(folder, model_tensors(files.config.model), {files.map, {}});
  TokenizerConfig tokenizer = files.config.data.tokenizer;
  if (!options.tokenizer.empty()) {
    tokenizer = tokenizer_config(options.tokenizer);
    if (tokenizer.type == TokenizerType::bpe) {
      tokenizer.end_of_document = files.config.data.tokenizer.end_of_document;
      if (tokenizer.end_of_document.empty() && source.end_token)
        tokenizer.end_of_document = bpe_end_of_document(tokenizer.path, *source.end_token);
    }
  } else if (tokenizer.type != TokenizerType::byte && !io::exists(tokenizer.path))
    fail(ExitCode::usage,
         "{}: contains no tokenizer (tokenizer.model, tokenizer.json); give --tokenizer byte|PATH", folder);
  files.tokenizer = make_tokenizer(tokenizer);
  if (files.tokenizer->vocab_size() > files.config.model.vocab_size)
    fail(ExitCode::usage, "{}: the tokenizer {} has {} tokens, the model {}", folder, files.tokenizer->name(),
         files.tokenizer->vocab_size(), files.config.model.vocab_size);
  return files;
}

}  // namespace

bool is_hf_folder(const std::string& path) {
  return io::is_directory(path) && !io::exists(path + "/" + kManifestName) &&
         io::exists(path + "/config.json") && holds_model(path);
}

Config hf_folder_config(const std::string& folder, const HfModel& model) {
  Config config;
  config.model = model.model;
  config.data.seq_len = std::min(model.model.max_position_embeddings.value_or(kUsualLength), kUsualLength);
  // Where none is known, the file that would be one: the model's vocabulary is not that of bytes.
  config.data.tokenizer =
      folder_tokenizer(folder, model)
          .value_or(TokenizerConfig{TokenizerType::sentencepiece, folder + "/" + kTokenizerFile, ""});
  config.data.begin_token = folder_begin_token(folder, model);
  config.train.micro_batch_size = 1;
  config.train.global_batch_size = 1;
  return config;
}

ModelFiles open_model(const std::string& path, const OpenOptions& options) {
  refuse_idle_overrides(options.overrides, options.use);
  if (is_hf_folder(path)) return open_folder(path, options);
  return checkpoint_files(find_checkpoint(path), options.device, options.tokenizer, options.overrides);
}

}  // namespace sluice
