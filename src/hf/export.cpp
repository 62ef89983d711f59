#include "hf/export.h"

#include <spdlog/spdlog.h>

#include <filesystem>
#include <memory>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/stored_tensors.h"
#include "eval/portable.h"
#include "eval/trained_model.h"

namespace sluice {

namespace {

/// The tokenizer of a checkpoint without a copy of it; none, with a warning, if the tokenizer's file does not
/// exist.
std::unique_ptr<Tokenizer> tokenizer_from_elsewhere(const CheckpointInfo& checkpoint,
                                                    const std::string& chosen) {
  const TokenizerConfig configured = checkpoint_config(checkpoint, "auto").data.tokenizer;
  try {
    return checkpoint_tokenizer(checkpoint, configured, chosen);
  } catch (const Error& error) {
    if (!chosen.empty() || error.code() != ExitCode::no_input) throw;
    spdlog::warn("exported without a tokenizer: {}", error.what());
    return nullptr;
  }
}

}  // namespace

NewFolderContent::NewFolderContent(const std::string& folder, const std::vector<std::string>& names)
    : folder_(folder) {
  if (folder.empty()) fail(ExitCode::usage, "the output folder has no name; give one, such as -o exported");
  if (io::exists(folder + "/" + kManifestName) || holds_checkpoints(folder))
    fail(ExitCode::cannot_create,
         "{}: holds the checkpoints of a run, among which an export would be taken for one; choose another "
         "folder, such as {}-export",
         folder, std::filesystem::path(folder + "/.").lexically_normal().parent_path().string());
  for (const std::string& name : names)
    if (const std::string path = folder + "/" + name; io::exists(path))
      fail(ExitCode::cannot_create, "{} exists; nothing was written", path);
  io::make_directories(folder);
}

io::NewFile& NewFolderContent::add(const std::string& name) {
  return files_.emplace_back(folder_ + "/" + name);
}

void NewFolderContent::publish() {
  for (io::NewFile& file : files_) file.complete();
  for (io::NewFile& file : files_) file.publish();
}

std::vector<std::string> export_checkpoint(const CheckpointInfo& checkpoint, const std::string& folder,
                                           const std::string& chosen) {
  const Manifest manifest = read_manifest(checkpoint.path);
  std::vector<std::string> names;
  for (const FileRecord& f : manifest.files)
    if (is_shard_of(f.name, kWeightsKind) || f.name == kWeightsIndex || f.name == "config.json" ||
        f.name == kTokenizerFile || f.name == kBpeTokenizerFile)
      names.push_back(f.name);
  std::unique_ptr<Tokenizer> tokenizer;
  if (checkpoint.tokenizer_model.empty() || !chosen.empty())
    tokenizer = tokenizer_from_elsewhere(checkpoint, chosen);
  if (tokenizer && !tokenizer->model().empty() && checkpoint.tokenizer_model.empty())
    names.push_back(tokenizer_file(tokenizer->model()));
  NewFolderContent content(folder, names);
  for (const std::string& name : names) {
    if (const FileRecord* stored = manifest.file(name)) {
      const io::MappedFile source = open_verified(checkpoint.path, manifest, *stored);
      content.add(name).write(source.data(), source.size());
    } else {
      content.add(name, tokenizer->model());
    }
  }
  content.publish();
  return names;
}

}  // namespace sluice
