// Verifies every byte of a checkpoint against its manifest. The ranks that verify together divide the files.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/manifest.h"
#include "checkpoint/rotation.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/state_reader.h"
#include "checkpoint/store.h"
#include "checkpoint/stored_tensors.h"
#include "comm/collective_errors.h"
#include "core/fingerprint.h"
#include "core/io.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

std::string base_name(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path.substr(path.rfind('/') + 1);
}

std::string text_of(const io::MappedFile& file) {
  return std::string(reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.size()));
}

/// Checks that the header of a file agrees with the manifest.
void compare_tensors(const std::string& path, const SafetensorsHeader& header, const Manifest& manifest,
                     const std::string& file) {
  std::map<std::string, const TensorRecord*> records;
  for (const TensorRecord& t : manifest.tensors)
    if (t.file == file) records[t.entry_name()] = &t;
  if (records.size() != header.entries.size())
    fail(ExitCode::data, "{}: {} tensors, the manifest says {}", path, header.entries.size(), records.size());
  for (const SafetensorsEntry& entry : header.entries) {
    const auto found = records.find(entry.name);
    const TensorRecord* t = found == records.end() ? nullptr : found->second;
    if (!t || t->dtype != entry.dtype || t->entry_shape() != entry.shape ||
        t->offset != header.data_begin + entry.begin)
      fail(ExitCode::data, "{}: tensor '{}' differs from the one in the manifest", path,
           printable(entry.name));
  }
}

/// Checks that the index, by which other programs find shards, agrees with the manifest.
void compare_index(const io::MappedFile& file, const Manifest& manifest) {
  nlohmann::json map = nlohmann::json::object();
  for (const TensorRecord& t : manifest.tensors)
    if (is_shard_of(t.file, kWeightsKind)) map[t.name] = t.file;
  const nlohmann::json index = parse_strict_json(text_of(file), file.path());
  if (!index.is_object() || !index.contains("weight_map") || index["weight_map"] != map)
    fail(ExitCode::data, "{}: its weight_map is not what the manifest says", file.path());
}

/// Assigns files to ranks for hashing: largest first, each to the least loaded rank.
std::vector<int> share_files(const std::vector<FileRecord>& files, int ranks) {
  std::vector<size_t> order(files.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return files[a].bytes > files[b].bytes; });
  std::vector<int64_t> load(static_cast<size_t>(ranks));
  std::vector<int> owner(files.size());
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owner[i] = static_cast<int>(least - load.begin());
    *least += files[i].bytes + 1;
  }
  return owner;
}

/// Checks that the copy of the tokenizer is the one that the training state names.
void compare_tokenizer(const std::string& path, const FileRecord& copy, const nlohmann::json& state) {
  const auto named = state.is_object() ? state.find("tokenizer_fingerprint") : state.end();
  const std::string trained =
      named != state.end() && named->is_string() ? named->get<std::string>() : "(none)";
  const std::string here = std::string(kModelFingerprint) + copy.xxh3_128;
  if (trained != here)
    fail(ExitCode::data, "{}/{}: its fingerprint is {}, but state.json names the tokenizer {}", path,
         copy.name, here, printable(trained));
}

/// Reads what every rank needs, and checks this rank's share of the files.
CheckpointInfo verify_share(const std::string& path, int rank, int ranks) {
  if (!io::is_directory(path))
    fail(io::exists(path) ? ExitCode::data : ExitCode::no_input, "{}: not a checkpoint folder", path);
  const Manifest manifest = read_manifest(path);
  const int64_t named = step_of_folder_name(base_name(path));
  if (named >= 0 && named != manifest.step)
    fail(ExitCode::data, "{}/{}: of step {}, in the folder of step {}", path, kManifestName, manifest.step,
         named);
  for (const char* kind : {kWeightsKind, kOptimizerKind})
    if (const std::string problem = shards_problem(manifest, kind); !problem.empty())
      fail(ExitCode::data, "{}: {}", path, problem);
  for (const char* needed : {"state.json", "config.yaml", "config.json"})
    if (!manifest.file(needed)) fail(ExitCode::data, "{}: its manifest names no {}", path, needed);
  CheckpointInfo info{path, manifest.step, {}, {}, {}};
  const std::vector<int> owner = share_files(manifest.files, ranks);
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const FileRecord& record = manifest.files[i];
    const bool everyone = record.name == "state.json" || record.name == "config.yaml";
    if (!everyone && owner[i] != rank) continue;
    const io::MappedFile file = open_verified(path, manifest, record);
    if (record.name.ends_with(".safetensors"))
      compare_tensors(file.path(), parse_safetensors(file.data(), file.size(), file.path()), manifest,
                      record.name);
    if (record.name == kWeightsIndex) compare_index(file, manifest);
    if (record.name == "state.json") {
      info.state = parse_strict_json(text_of(file), file.path());
      const StateReader state(info.state, file.path());
      if (state.has("step") && state.integer("step", 0) != manifest.step)
        fail(ExitCode::data, "{}: step is {}, the manifest's is {}", file.path(), state.integer("step", 0),
             manifest.step);
    }
    if (record.name == "config.yaml") info.config_yaml = text_of(file);
  }
  for (const char* name : {kTokenizerFile, kBpeTokenizerFile}) {
    const FileRecord* const copy = manifest.file(name);
    if (!copy) continue;
    compare_tokenizer(path, *copy, info.state);
    info.tokenizer_model = path + "/" + name;
  }
  if (const auto problems = coverage_problems(manifest); !problems.empty())
    fail(ExitCode::data, "{}/{}: {}{}", path, kManifestName, problems[0],
         problems.size() > 1 ? fmt::format("; and {} more", problems.size() - 1) : "");
  return info;
}

/// Checks that all ranks see the same file system.
void require_same_manifest(const std::string& path, Communicator& ranks) {
  struct Seen {
    char checksum[32];
  };
  Seen mine{};
  std::string text;
  try {
    text = checksum(io::read_file(path + "/" + kManifestName));
  } catch (const Error&) {  // removed after it was verified: reported below, on all ranks
  }
  std::copy_n(text.begin(), std::min(text.size(), sizeof(mine.checksum)), mine.checksum);
  std::vector<Seen> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(all.data(), &mine, sizeof(mine));
  for (const Seen& seen : all)
    if (!std::equal(seen.checksum, seen.checksum + sizeof(seen.checksum), all[0].checksum))
      fail(ExitCode::data,
           "{}: ranks see different manifests: is it on a file system that all of them share?", path);
}

}  // namespace

std::vector<std::string> list_checkpoints(const std::string& folder) {
  std::vector<std::pair<int64_t, std::string>> found;
  if (io::is_directory(folder))
    for (const std::string& name : io::list_directory(folder))
      if (const int64_t step = step_of_folder_name(name); step >= 0)
        found.emplace_back(step, folder + "/" + name);
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> paths;
  paths.reserve(found.size());
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

bool holds_checkpoints(const std::string& folder) {
  return !list_checkpoints(folder + "/ckpt").empty() || !list_checkpoints(folder).empty();
}

bool holds_model(const std::string& folder) {
  return !holds_checkpoints(folder) && (io::exists(folder + "/" + shard_name(kWeightsKind, 0, 1)) ||
                                        io::exists(folder + "/" + kWeightsIndex));
}

CheckpointInfo verify_checkpoint(const std::string& path, Communicator* ranks) {
  const int rank = ranks ? ranks->rank() : 0, size = ranks ? ranks->size() : 1;
  CheckpointInfo info;
  std::string problem;
  ExitCode code = ExitCode::data;
  try {
    info = verify_share(path, rank, size);
  } catch (const io::IoError& error) {
    problem = error.what();  // unreadable counts as damaged
  } catch (const Error& error) {
    problem = error.what();
    code = error.code();
  }
  if (size > 1) {
    problem = first_problem(*ranks, problem);
    code = ExitCode::data;
  }
  if (!problem.empty()) fail(code, "{}", problem);
  if (size > 1) require_same_manifest(path, *ranks);
  return info;
}

CheckpointInfo newest_valid_checkpoint(const std::string& folder, Communicator* ranks) {
  const bool several = ranks && ranks->size() > 1, leads = !several || ranks->rank() == 0;
  // Rank 0 lists the checkpoints; a listing on another rank may be stale.
  std::vector<std::string> all;
  std::string names, first;
  if (leads) {
    all = list_checkpoints(folder);
    if (all.empty() && io::exists(folder + "/LATEST"))
      first = fmt::format("{}/LATEST names one, but none exists", folder);
    for (const std::string& path : all) names += path + "\n";
  }
  if (several) {
    broadcast_text(*ranks, names, 0);
    broadcast_text(*ranks, first, 0);
    all.clear();
    for (size_t begin = 0, end; begin < names.size(); begin = end + 1) {
      end = names.find('\n', begin);
      all.push_back(names.substr(begin, end - begin));
    }
  }
  for (const std::string& path : all) {
    try {
      std::string link = leads && io::is_link(path) ? fmt::format("{}: it is a symbolic link", path) : "";
      if (several) broadcast_text(*ranks, link, 0);
      if (!link.empty()) fail(ExitCode::data, "{}", link);
      return verify_checkpoint(path, ranks);
    } catch (const Error& error) {
      if (error.code() == ExitCode::hang) throw;  // a lost rank says nothing about the checkpoint
      if (leads) spdlog::warn("checkpoint skipped: {}", error.what());
      if (first.empty()) first = error.what();
    }
  }
  if (!first.empty())
    fail(ExitCode::data, "{}: no valid checkpoint; refusing to start from scratch ({} found; {})", folder,
         all.size(), first);
  return {};
}

}  // namespace sluice
