#include "outputs.h"

#include <filesystem>

#include "analysis/npy.h"
#include "core/error.h"
#include "core/io.h"
#include "data/token_file.h"

namespace sluice {

namespace {

bool same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;  // where one of them does not exist, nothing can be lost
  return std::filesystem::equivalent(a, b, ignored);
}

/// The same for every name of a file, whether it exists or not. What of a relative path does not exist, and
/// so all of it where its first folder is missing, weakly_canonical would leave relative.
std::filesystem::path normal(const std::string& path) {
  return std::filesystem::weakly_canonical(std::filesystem::absolute(path));
}

}  // namespace

void refuse_inputs(const std::string& output, const std::vector<std::string>& inputs,
                   const std::string& instead) {
  for (const std::string& input : inputs)
    for (const char* staged : {"", ".tmp"})
      if (same_file(output + staged, input == "-" ? "/dev/stdin" : input))
        fail(ExitCode::usage, "{}{}: is read as {} and would be overwritten; {}", output, staged,
             input == "-" ? "standard input" : "an input", instead);
}

void check_token_outputs(const std::vector<std::string>& prefixes, const std::vector<std::string>& inputs,
                         bool force) {
  if (!prefixes.empty() && prefixes[0].empty())
    fail(ExitCode::usage, "-o is empty; give the prefix of the token files, such as data/train");
  for (size_t i = 0; i < prefixes.size(); ++i) {
    const std::string& prefix = prefixes[i];
    if (prefix.empty()) continue;
    for (size_t j = 0; j < i; ++j)
      if (!prefixes[j].empty() && normal(prefix) == normal(prefixes[j]))
        fail(ExitCode::usage,
             "-o and --validation-prefix are both {}: held-out documents need separate files", prefixes[j]);
    for (const std::string ending : {".bin", ".idx"})
      if (prefix.ends_with(ending))
        fail(ExitCode::usage,
             "{}: the files' names are PREFIX.bin, PREFIX.idx and PREFIX.json; give the prefix {}", prefix,
             prefix.substr(0, prefix.size() - ending.size()));
    if (const auto last = std::filesystem::path(prefix).filename();
        last.empty() || last == "." || last == "..")
      fail(ExitCode::usage,
           "{}: is a folder, but the files' names are PREFIX.bin, PREFIX.idx and PREFIX.json; give a prefix "
           "in "
           "it, such as {}",
           prefix, (std::filesystem::path(prefix) / "tokens").string());
    const std::string other = "choose another prefix, such as " + prefix + ".tokens";
    for (const char* ending : {".bin", ".idx", ".json"}) refuse_inputs(prefix + ending, inputs, other);
    const std::string description = prefix + ".json";
    if (io::exists(description) && !describes_tokens(description))
      fail(ExitCode::cannot_create,
           "{}: exists and does not describe token files, so it is not replaced, even with --force; {}, or "
           "move it away",
           description, other);
  }
  if (force) return;
  for (const std::string& prefix : prefixes)
    for (const char* ending : {".bin", ".idx", ".json"})
      if (!prefix.empty() && io::exists(prefix + ending))
        fail(ExitCode::cannot_create,
             "{}{}: exists; choose another prefix, or --force to replace {}.bin, {}.idx and {}.json", prefix,
             ending, prefix, prefix, prefix);
}

void check_array_outputs(const std::vector<NamedOutput>& outputs, const std::vector<std::string>& inputs,
                         bool force) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& [option, path] = outputs[i];
    if (path.empty()) continue;
    for (size_t j = 0; j < i; ++j)
      if (!outputs[j].path.empty() && normal(path) == normal(outputs[j].path))
        fail(ExitCode::usage, "{} and {} are both {}; give them different files", outputs[j].option, option,
             path);
    refuse_inputs(path, inputs, "choose another file");
    if (!io::exists(path)) continue;
    if (!is_npy(path))
      fail(ExitCode::cannot_create,
           "{} {}: exists and is not a NumPy array, so it is not replaced, even with --force; choose another "
           "file",
           option, path);
    if (!force) fail(ExitCode::cannot_create, "{} {}: exists; --force replaces it", option, path);
  }
}

}  // namespace sluice
