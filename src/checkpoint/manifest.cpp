#include "checkpoint/manifest.h"

#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <set>

#include "core/strict_json.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "sluice-checkpoint";
// Version 1: whole tensors in model.safetensors and optim.safetensors. Version 2: several files, slices.
// Version 1 is written whenever it suffices.
constexpr int64_t kVersion = 2;
constexpr int64_t kMaxManifest = int64_t{256} << 20;

std::string hex_of(const XXH128_hash_t& hash) {
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string last_line(std::string_view before) {
  return fmt::format("\"xxh3_128\": \"{}\"}}\n", checksum(before));
}

/// Typed access to a parsed manifest; any violation is Error(data) with the file name.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  const json& member(const json& object, const char* key) const {
    if (!object.is_object() || !object.contains(key)) refuse(fmt::format("'{}' is missing", key));
    return object[key];
  }
  std::string text(const json& object, const char* key) const {
    const json& value = member(object, key);
    if (!value.is_string()) refuse(fmt::format("'{}' must be text", key));
    return value.get<std::string>();
  }
  int64_t number(const json& value, const char* key) const {
    constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kMax)
      refuse(fmt::format("'{}' must be a number from 0", key));
    return value.get<int64_t>();
  }
  int64_t number_of(const json& object, const char* key) const { return number(member(object, key), key); }
  const json& list(const json& object, const char* key) const {
    const json& value = member(object, key);
    if (!value.is_array()) refuse(fmt::format("'{}' must be a list", key));
    return value;
  }
  [[noreturn]] void refuse(const std::string& reason) const { fail(ExitCode::data, "{}: {}", path_, reason); }

 private:
  const std::string& path_;
};

std::string record_lines(const std::vector<json>& records) {
  std::string lines;
  for (size_t i = 0; i < records.size(); ++i) lines += (i ? ",\n  " : "\n  ") + records[i].dump();
  return lines;
}

}  // namespace

Checksum::Checksum() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_128bits_reset(state_);
}
Checksum::~Checksum() { XXH3_freeState(state_); }
void Checksum::update(const void* data, int64_t bytes) {
  if (bytes > 0) XXH3_128bits_update(state_, data, static_cast<size_t>(bytes));
}
std::string Checksum::hex() const { return hex_of(XXH3_128bits_digest(state_)); }

std::string checksum(const void* data, int64_t bytes) {
  return hex_of(XXH3_128bits(bytes > 0 ? data : "", static_cast<size_t>(bytes)));
}

std::string Manifest::text() const {
  std::vector<json> file_records, tensor_records;
  for (const FileRecord& f : files)
    file_records.push_back({{"name", f.name}, {"bytes", f.bytes}, {"xxh3_128", f.xxh3_128}});
  bool simple = file(shard_name(kWeightsKind, 0, 1)) && file(shard_name(kOptimizerKind, 0, 1));
  for (const TensorRecord& t : tensors) {
    json& record = tensor_records.emplace_back(json{{"name", t.name},
                                                    {"dtype", t.dtype},
                                                    {"shape", t.shape},
                                                    {"file", t.file},
                                                    {"offset", t.offset},
                                                    {"xxh3_128", t.xxh3_128}});
    if (t.is_slice()) record["slice"] = {t.begin, t.end};
    simple = simple && !t.is_slice();
  }
  const std::string before = fmt::format(
      "{{\"format\": \"{}\", \"version\": {},\n\"step\": {}, \"build\": {}, \"config_hash\": {},\n\"files\": "
      "[{}],\n"
      "\"tensors\": [{}],\n",
      kFormat, simple ? 1 : kVersion, step, json(build).dump(), json(config_hash).dump(),
      record_lines(file_records), record_lines(tensor_records));
  return before + last_line(before);
}

const FileRecord* Manifest::file(std::string_view name) const {
  const auto found =
      std::find_if(files.begin(), files.end(), [&](const FileRecord& f) { return f.name == name; });
  return found == files.end() ? nullptr : &*found;
}

bool is_plain_name(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= 128 && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), plain);
}

std::string shard_name(const char* kind, int i, int count) {
  return count == 1 ? fmt::format("{}.safetensors", kind)
                    : fmt::format("{}-{:05}-of-{:05}.safetensors", kind, i + 1, count);
}

bool is_shard_of(std::string_view file, std::string_view kind) {
  return file.ends_with(".safetensors") && file.starts_with(kind) && file.size() > kind.size() &&
         (file[kind.size()] == '-' || file == fmt::format("{}.safetensors", kind));
}

std::string shards_problem(const Manifest& manifest, const char* kind) {
  const auto count =
      static_cast<int>(std::count_if(manifest.files.begin(), manifest.files.end(),
                                     [&](const FileRecord& f) { return is_shard_of(f.name, kind); }));
  for (int i = 0; i < std::max(count, 1); ++i)
    if (const std::string name = shard_name(kind, i, std::max(count, 1)); !manifest.file(name))
      return fmt::format("its manifest names no {}", name);
  if (kind == kWeightsKind && count > 1 && !manifest.file(kWeightsIndex))
    return fmt::format("its manifest names no {}", kWeightsIndex);
  return "";
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  if (!io::exists(path)) fail(ExitCode::data, "{}: no {}: not a complete checkpoint", folder, kManifestName);
  return read_manifest_file(path);
}

Manifest read_manifest_file(const std::string& path) {
  const io::MappedFile file(path, false);
  const Reader read(path);
  if (file.size() > kMaxManifest) read.refuse("too large");
  const std::string_view text(reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.size()));

  // The checksum is verified before anything is parsed.
  const size_t newline = text.size() < 2 ? std::string_view::npos : text.rfind('\n', text.size() - 2);
  if (newline == std::string_view::npos || text.substr(newline + 1) != last_line(text.substr(0, newline + 1)))
    read.refuse("damaged: its checksum does not match");

  const json parsed = parse_strict_json(text, path, 8);
  if (read.text(parsed, "format") != kFormat) read.refuse("not the manifest of a checkpoint");
  const int64_t version = read.number_of(parsed, "version");
  if (version < 1 || version > kVersion)
    read.refuse(
        fmt::format("version {} of the format; this program reads versions up to {}", version, kVersion));
  Manifest manifest;
  manifest.step = read.number_of(parsed, "step");
  manifest.build = read.text(parsed, "build");
  manifest.config_hash = read.text(parsed, "config_hash");
  std::set<std::string> names;
  for (const json& f : read.list(parsed, "files")) {
    manifest.files.push_back({read.text(f, "name"), read.number_of(f, "bytes"), read.text(f, "xxh3_128")});
    const std::string& name = manifest.files.back().name;
    if (!is_plain_name(name) || name == kManifestName)
      read.refuse(fmt::format("'{}' cannot be a file of a checkpoint", printable(name)));
    if (!names.insert(name).second) read.refuse(fmt::format("file '{}' is listed twice", name));
  }
  for (const json& t : read.list(parsed, "tensors")) {
    TensorRecord record{read.text(t, "name"),        read.text(t, "dtype"),    {}, read.text(t, "file"),
                        read.number_of(t, "offset"), read.text(t, "xxh3_128"), 0,  -1};
    for (const json& dim : read.list(t, "shape")) record.shape.push_back(read.number(dim, "shape"));
    if (t.contains("slice")) {
      const json& slice = read.list(t, "slice");
      if (slice.size() != 2) read.refuse("'slice' must be two numbers");
      record.begin = read.number(slice[0], "slice");
      record.end = read.number(slice[1], "slice");
      if (record.end <= record.begin)
        read.refuse(fmt::format("tensor '{}': an empty slice", printable(record.name)));
    }
    if (!names.count(record.file))
      read.refuse(fmt::format("tensor '{}' is in no file", printable(record.name)));
    manifest.tensors.push_back(std::move(record));
  }
  return manifest;
}

io::MappedFile open_recorded(const std::string& folder, const FileRecord& record) {
  const std::string path = folder + "/" + record.name;
  if (!io::exists(path)) fail(ExitCode::data, "{}: missing", path);
  io::MappedFile file(path, false);
  if (file.size() != record.bytes)
    fail(ExitCode::data, "{}: {} bytes, the manifest says {}", path, file.size(), record.bytes);
  return file;
}

io::MappedFile open_verified(const std::string& folder, const Manifest& manifest, const FileRecord& record) {
  io::MappedFile file = open_recorded(folder, record);
  const std::string& path = file.path();
  if (checksum(file.data(), file.size()) == record.xxh3_128) return file;
  // Find the damaged part. The length of a tensor is the distance to the next one.
  std::vector<const TensorRecord*> tensors;
  for (const TensorRecord& t : manifest.tensors)
    if (t.file == record.name) tensors.push_back(&t);
  std::sort(tensors.begin(), tensors.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
  std::string damaged;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t begin = tensors[i]->offset,
                  end = i + 1 < tensors.size() ? tensors[i + 1]->offset : file.size();
    if (begin <= end && end <= file.size() &&
        checksum(file.data() + begin, end - begin) != tensors[i]->xxh3_128)
      damaged += (damaged.empty() ? ": tensor " : ", ") + printable(tensors[i]->entry_name());
    if (damaged.size() > 300) break;
  }
  fail(ExitCode::data, "{}: damaged: its checksum does not match{}", path, damaged);
}

}  // namespace sluice
