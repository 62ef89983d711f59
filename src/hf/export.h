#pragma once
// Folders of a Hugging Face model, written from checkpoints.
#include <deque>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "core/io.h"
#include "data/tokenizer.h"

namespace sluice {

/// Files that appear in a folder together, once all of them are complete: whatever fails before, none of them
/// is there afterwards.
class NewFolderContent {
 public:
  /// Makes the folder. Error(cannot_create) when one of `names` is in it already, or when it is a run, its
  /// ckpt or a checkpoint, whose weights would be mistaken for these; Error(usage) when it has no name.
  NewFolderContent(const std::string& folder, const std::vector<std::string>& names);
  io::NewFile& add(const std::string& name);
  void add(const std::string& name, std::string_view content) { add(name).write(content); }
  /// Completes every file, then gives each its name.
  void publish();

 private:
  std::string folder_;
  std::deque<io::NewFile> files_;
};

/// Writes a checkpoint's weights, config.json and tokenizer.model (where the tokenizer is a file) into a
/// folder; returns the files' names. tokenizer: as in checkpoint_tokenizer; a tokenizer whose file is missing
/// is a warning unless it was chosen.
std::vector<std::string> export_checkpoint(const CheckpointInfo& checkpoint, const std::string& folder,
                                           const std::string& tokenizer = "");

}  // namespace sluice
