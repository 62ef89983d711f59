#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "core/host_view.h"
#include "core/io.h"
#include "train/checkpoint.h"
#include "train/manifest.h"
#include "train/rotation.h"
#include "train/safetensors.h"
#include "train/strict_json.h"

namespace sluice {
namespace {

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kWeightsIndex = "model.safetensors.index.json";
constexpr const char* kOptimizer = "optim.safetensors";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

std::string base_name(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path.substr(path.rfind('/') + 1);
}

std::string text_of(const io::MappedFile& file) {
  return std::string(reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.size()));
}

/// The manifest and the header of a file must tell the same story.
void compare_tensors(const std::string& path, const SafetensorsHeader& header, const Manifest& manifest,
                     const std::string& file) {
  std::map<std::string_view, const TensorRecord*> records;
  for (const TensorRecord& t : manifest.tensors)
    if (t.file == file) records[t.name] = &t;
  if (records.size() != header.entries.size())
    fail(ExitCode::data, "{}: {} tensors, the manifest says {}", path, header.entries.size(), records.size());
  for (const SafetensorsEntry& entry : header.entries) {
    const auto found = records.find(entry.name);
    const TensorRecord* t = found == records.end() ? nullptr : found->second;
    if (!t || t->dtype != entry.dtype || t->shape != entry.shape ||
        t->offset != header.data_begin + entry.begin)
      fail(ExitCode::data, "{}: tensor '{}' is not the one in the manifest", path, printable(entry.name));
  }
}

CheckpointInfo verify(const std::string& path) {
  const Manifest manifest = read_manifest(path);
  const int64_t named = step_of_folder_name(base_name(path));
  if (named >= 0 && named != manifest.step)
    fail(ExitCode::data, "{}/{}: of step {}, in the folder of step {}", path, kManifestName, manifest.step,
         named);
  for (const char* needed : {kWeights, kOptimizer, "state.json", "config.yaml", "config.json"})
    if (!manifest.file(needed)) fail(ExitCode::data, "{}: its manifest names no {}", path, needed);
  CheckpointInfo info{path, manifest.step, {}, {}};
  for (const FileRecord& record : manifest.files) {
    const io::MappedFile file = open_verified(path, manifest, record);
    if (record.name.ends_with(".safetensors"))
      compare_tensors(file.path(), parse_safetensors(file.data(), file.size(), file.path()), manifest,
                      record.name);
    if (record.name == "state.json") info.state = parse_strict_json(text_of(file), file.path());
    if (record.name == "config.yaml") info.config_yaml = text_of(file);
  }
  return info;
}

/// Where every tensor of a model lies: one file, or several shards.
struct Source {
  std::deque<SafetensorsFile> files;
  std::map<std::string_view, std::pair<const SafetensorsFile*, const SafetensorsEntry*>> tensors;

  void add(SafetensorsFile file) {
    files.push_back(std::move(file));
    for (const SafetensorsEntry& entry : files.back().entries())
      if (!tensors.emplace(entry.name, std::make_pair(&files.back(), &entry)).second)
        fail(ExitCode::data, "{}: tensor '{}' lies in another shard, too", files.back().path(),
             printable(entry.name));
  }
  const unsigned char* bytes(std::string_view name) const {
    const auto& [file, entry] = tensors.at(name);
    return file->bytes(*entry);
  }
};

std::string shape_text(const Tensor& t) {
  return fmt::format("({})", fmt::join(t.shape.begin(), t.shape.begin() + t.rank, ", "));
}

/// A head that repeats the embedding, as some writers of tied models store it.
bool is_tied_copy(const Source& source, std::string_view name) {
  const auto head = source.tensors.find(name), embedding = source.tensors.find(kEmbedding);
  if (name != kHead || embedding == source.tensors.end()) return false;
  const SafetensorsEntry &a = *head->second.second, &b = *embedding->second.second;
  return a.dtype == b.dtype && a.shape == b.shape &&
         std::memcmp(source.bytes(kHead), source.bytes(kEmbedding), static_cast<size_t>(a.end - a.begin)) ==
             0;
}

/// Throws one Error(data) with every difference between what is wanted and what is there.
void compare_names(const std::string& path, const Source& source, const std::vector<NamedTensor>& wanted,
                   bool exact) {
  std::vector<std::string> problems;
  std::set<std::string_view> names;
  for (const NamedTensor& w : wanted) {
    SLUICE_CHECK(names.insert(w.name).second, "tensor '{}' is asked for twice", w.name);
    const auto found = source.tensors.find(w.name);
    if (found == source.tensors.end()) {
      problems.push_back(fmt::format("missing: {} {}", w.name, shape_text(w.tensor)));
      continue;
    }
    const SafetensorsEntry& entry = *found->second.second;
    const bool same_shape = std::equal(entry.shape.begin(), entry.shape.end(), w.tensor.shape.begin(),
                                       w.tensor.shape.begin() + w.tensor.rank);
    if (!same_shape)
      problems.push_back(
          fmt::format("shape: {} is {}, the model wants {}", w.name, describe(entry), shape_text(w.tensor)));
    else if (exact ? entry.dtype != safetensors_dtype(w.tensor.dtype) : !convertible(entry, w.tensor.dtype))
      problems.push_back(fmt::format("type: {} is {}, the model wants {}", w.name, printable(entry.dtype),
                                     dtype_name(w.tensor.dtype)));
  }
  for (const auto& [name, place] : source.tensors)
    if (!names.count(name) && !is_tied_copy(source, name))
      problems.push_back(fmt::format("unexpected: {} {}", printable(name), describe(*place.second)));
  if (problems.empty()) return;
  constexpr size_t kShown = 400;
  std::string text;
  for (size_t i = 0; i < std::min(problems.size(), kShown); ++i) text += "\n  " + problems[i];
  if (problems.size() > kShown) text += fmt::format("\n  and {} more", problems.size() - kShown);
  fail(ExitCode::data, "{} does not fit the model ({} tensors):{}", path, problems.size(), text);
}

/// `filled` sees every tensor in host memory after it was read.
template <class Filled>
void fill(const std::string& path, const Source& source, const std::vector<NamedTensor>& wanted, bool exact,
          Context* ctx, Filled&& filled) {
  compare_names(path, source, wanted, exact);
  Context host(0);
  for (const NamedTensor& w : wanted) {
    SLUICE_CHECK(ctx || w.tensor.device == Device::cpu, "{}: a tensor on a GPU needs a context", w.name);
    const auto& [file, entry] = source.tensors.at(w.name);
    HostView view(ctx ? *ctx : host, w.tensor, HostView::Content::uninitialized);
    convert_values(file->bytes(*entry), *entry, view.tensor());
    filled(w, view.tensor());
    view.write_back();
  }
}

/// The checksum is taken again from the memory that was filled: what the run starts from is what was saved.
void load_exact(const std::string& folder, const Manifest& manifest, const char* file,
                const std::vector<NamedTensor>& wanted, Context* ctx) {
  Source source;
  source.add(SafetensorsFile(folder + "/" + file, false));
  std::map<std::string_view, const TensorRecord*> records;
  for (const TensorRecord& t : manifest.tensors)
    if (t.file == file) records[t.name] = &t;
  fill(folder + "/" + file, source, wanted, true, ctx, [&](const NamedTensor& w, const Tensor& host) {
    const auto found = records.find(w.name);
    if (found == records.end() || checksum(host.data, host.bytes()) != found->second->xxh3_128)
      fail(ExitCode::data, "{}/{}: tensor {} was read with another checksum than the manifest's", folder,
           file, w.name);
  });
}

void open_shards(const std::string& folder, Source& source) {
  const std::string path = folder + "/" + kWeightsIndex;
  const nlohmann::json index = parse_strict_json(io::read_file(path, int64_t{64} << 20), path);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object())
    fail(ExitCode::data, "{}: no weight_map", path);
  std::map<std::string, std::set<std::string>> names_of;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string() || !is_plain_name(file.get<std::string>()))
      fail(ExitCode::data, "{}: '{}' cannot be the name of a shard", path, printable(file.dump()));
    names_of[file.get<std::string>()].insert(name);
  }
  for (const auto& [file, names] : names_of) {
    source.add(SafetensorsFile(folder + "/" + file, false));
    const SafetensorsFile& shard = source.files.back();
    for (const std::string& name : names)
      if (!shard.find(name))
        fail(ExitCode::data, "{}: no tensor '{}', which the index promises", shard.path(), printable(name));
    for (const SafetensorsEntry& entry : shard.entries())
      if (!names.count(entry.name))
        fail(ExitCode::data, "{}: tensor '{}' is not in the index", shard.path(), printable(entry.name));
  }
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
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

CheckpointInfo verify_checkpoint(const std::string& path) {
  if (!io::is_directory(path))
    fail(io::exists(path) ? ExitCode::data : ExitCode::no_input, "{}: not a checkpoint folder", path);
  try {
    return verify(path);
  } catch (const io::IoError& error) {
    fail(ExitCode::data, "{}", error.what());  // unreadable is damaged
  }
}

CheckpointInfo newest_valid_checkpoint(const std::string& folder) {
  const std::vector<std::string> all = list_checkpoints(folder);
  std::string first;
  for (const std::string& path : all) {
    try {
      if (io::is_link(path)) fail(ExitCode::data, "{}: it is a symbolic link", path);
      return verify_checkpoint(path);
    } catch (const Error& error) {
      spdlog::warn("checkpoint passed over: {}", error.what());
      if (first.empty()) first = error.what();
    }
  }
  const std::string latest = folder + "/LATEST";
  if (all.empty() && io::exists(latest)) first = fmt::format("{} names one, but there is none", latest);
  if (!first.empty())
    fail(ExitCode::data, "{}: no valid checkpoint; refusing to start from scratch ({} found; {})", folder,
         all.size(), first);
  return {};
}

void load_checkpoint(const std::string& path, const std::vector<NamedTensor>& weights,
                     const std::vector<NamedTensor>& optimizer, Context* ctx) {
  const Manifest manifest = read_manifest(path);
  load_exact(path, manifest, kWeights, weights, ctx);
  load_exact(path, manifest, kOptimizer, optimizer, ctx);
}

void load_weights(const std::string& path, const std::vector<NamedTensor>& weights, Context* ctx) {
  Source source;
  if (!io::is_directory(path)) {
    source.add(SafetensorsFile(path));
  } else if (io::exists(path + "/" + kManifestName)) {
    const Manifest manifest = read_manifest(path);
    const FileRecord* record = manifest.file(kWeights);
    if (!record) fail(ExitCode::data, "{}: its manifest names no {}", path, kWeights);
    open_verified(path, manifest, *record);
    source.add(SafetensorsFile(path + "/" + kWeights, false));
  } else if (io::exists(path + "/" + kWeights)) {
    source.add(SafetensorsFile(path + "/" + kWeights));
  } else if (io::exists(path + "/" + kWeightsIndex)) {
    open_shards(path, source);
  } else {
    // The folder of a run, or of its checkpoints.
    const std::string folder = io::is_directory(path + "/ckpt") ? path + "/ckpt" : path;
    const CheckpointInfo newest = newest_valid_checkpoint(folder);
    if (newest.path.empty())
      fail(ExitCode::data, "{}: neither a checkpoint nor a model: no {}, {} or {}", path, kManifestName,
           kWeights, kWeightsIndex);
    return load_weights(newest.path, weights, ctx);
  }
  fill(path, source, weights, false, ctx, [](const NamedTensor&, const Tensor&) {});
}

}  // namespace sluice
