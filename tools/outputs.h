#pragma once
// What a command is about to write, compared with what is there: no input may be lost to it.
#include <string>
#include <vector>

namespace sluice {

/// Throws Error(usage) if `output`, or the file of its name with .tmp behind it that is written first, is one
/// of the inputs, under whatever name ("-" is standard input). instead: what to give instead, such as "choose
/// another prefix".
void refuse_inputs(const std::string& output, const std::vector<std::string>& inputs,
                   const std::string& instead);

/// Checks the prefixes of token files that a command is about to write; empty ones are passed over. Existing
/// token files are replaced only with `force`: a second call with other options would put other documents, or
/// held-out documents, into the training data. Error(usage): two of the prefixes are the same, one ends as
/// the files do (data/x.bin) or is a folder (data/), the first is empty, or one of the files is an input.
/// Error(cannot_create): one of the files exists, without `force`, or PREFIX.json does not describe token
/// files, even with it.
void check_token_outputs(const std::vector<std::string>& prefixes, const std::vector<std::string>& inputs,
                         bool force);

/// A file that a command is about to write, and the option that names it.
struct NamedOutput {
  std::string option, path;
};

/// Checks the NumPy arrays that a command is about to write; empty paths are passed over. Error(usage): two
/// are the same file, or one is an input. Error(cannot_create): one exists, without `force`, or is something
/// other than a NumPy array, even with it.
void check_array_outputs(const std::vector<NamedOutput>& outputs, const std::vector<std::string>& inputs,
                         bool force);

}  // namespace sluice
