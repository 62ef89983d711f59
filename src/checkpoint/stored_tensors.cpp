#include "checkpoint/stored_tensors.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/io.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

/// The piece that a manifest record describes. Refuses one outside the bounds of its tensor or file.
StoredPiece piece_of(const std::string& folder, const TensorRecord& t, const FileRecord& file, size_t index) {
  const auto refuse = [&](const char* reason) {
    fail(ExitCode::data, "{}/{}: tensor '{}': {}", folder, kManifestName, printable(t.name), reason);
  };
  const auto whole = safetensors_bytes(t.dtype, t.shape);
  if (!whole) refuse("its type or shape is impossible");
  StoredPiece piece{0, *whole, index, t.offset, t.xxh3_128};
  if (t.is_slice()) {
    const int64_t bits = safetensors_bits(t.dtype);
    if (bits % 8 != 0) refuse("a slice of a type below a byte");
    if (t.begin < 0 || t.end > *whole / (bits / 8)) refuse("its slice is outside its shape");
    piece.begin = t.begin * (bits / 8);
    piece.end = t.end * (bits / 8);
  }
  if (t.offset < 0 || t.offset > file.bytes || piece.end - piece.begin > file.bytes - t.offset)
    refuse("it is outside its file");
  return piece;
}

/// Sorts the pieces and checks that they cover the whole tensor.
void tile(StoredTensor& t) {
  const auto by_begin = [](const StoredPiece& a, const StoredPiece& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  };
  std::stable_sort(t.pieces.begin(), t.pieces.end(), by_begin);
  if (!t.problem.empty()) return;
  const int64_t size = std::max<int64_t>(safetensors_bits(t.dtype) / 8, 1);
  int64_t covered = 0;
  for (const StoredPiece& piece : t.pieces) {
    if (piece.begin > covered)
      t.problem = fmt::format("elements [{}, {}) of {} are in no file", covered / size, piece.begin / size,
                              t.describe());
    else if (piece.begin < covered || (t.bytes == 0 && &piece != &t.pieces.front()))
      t.problem = fmt::format("elements from {} on of {} are stored twice", piece.begin / size, t.describe());
    if (!t.problem.empty()) return;
    covered = piece.end;
  }
  if (covered != t.bytes)
    t.problem =
        fmt::format("elements [{}, {}) of {} are in no file", covered / size, t.bytes / size, t.describe());
}

}  // namespace

int64_t StoredTensor::elements() const {
  int64_t n = 1;
  for (const int64_t dim : shape) n *= dim;
  return n;
}

std::string StoredTensor::describe() const {
  return fmt::format("({}) {}", fmt::join(shape, ", "), printable(dtype));
}

StoredTensors::StoredTensors(const std::string& folder, const Manifest& manifest, const char* kind,
                             Check check)
    : folder_(folder), check_(check) {
  std::map<std::string_view, size_t> index;
  for (const FileRecord& file : manifest.files) {
    if (!is_shard_of(file.name, kind)) continue;
    index[file.name] = files_.size();
    files_.push_back({folder + "/" + file.name, {}, file});
  }
  if (check == Check::checksum) manifest_ = manifest;
  for (const TensorRecord& t : manifest.tensors) {
    const auto file = index.find(t.file);
    if (file == index.end()) continue;
    const StoredPiece piece = piece_of(folder, t, files_[file->second].record, file->second);
    StoredTensor& whole = tensors_[t.name];
    if (whole.name.empty()) {
      whole = {t.name, t.dtype, t.shape, *safetensors_bytes(t.dtype, t.shape), {}, {}};
    } else if (whole.dtype != t.dtype || whole.shape != t.shape) {
      whole.problem = fmt::format("its slices are of {} and of ({}) {}", whole.describe(),
                                  fmt::join(t.shape, ", "), printable(t.dtype));
    }
    whole.pieces.push_back(piece);
  }
  finish();
}

StoredTensors::StoredTensors(const std::string& path) {
  add(SafetensorsFile(path), true);
  finish();
}

StoredTensors StoredTensors::from_index(const std::string& folder) {
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
  StoredTensors all;
  for (const auto& [file, names] : names_of) {
    const SafetensorsFile shard(folder + "/" + file, false);
    for (const std::string& name : names)
      if (!shard.find(name))
        fail(ExitCode::data, "{}: no tensor '{}', although the index lists it", shard.path(),
             printable(name));
    for (const SafetensorsEntry& entry : shard.entries())
      if (!names.count(entry.name))
        fail(ExitCode::data, "{}: tensor '{}' is not in the index", shard.path(), printable(entry.name));
    all.add(shard, false);
  }
  all.finish();
  return all;
}

/// Only the header is read here; the data is mapped when it is needed.
void StoredTensors::add(const SafetensorsFile& file, bool follow_links) {
  files_.push_back({file.path(), {}, {"", file.file().size(), ""}, follow_links});
  for (const SafetensorsEntry& entry : file.entries()) {
    StoredTensor& whole = tensors_[entry.name];
    if (!whole.pieces.empty())
      fail(ExitCode::data, "{}: tensor '{}' is also in another shard", file.path(), printable(entry.name));
    const int64_t bytes = entry.end - entry.begin;
    const int64_t offset = file.bytes(entry) - file.file().data();
    whole = {entry.name, entry.dtype, entry.shape, bytes, {{0, bytes, files_.size() - 1, offset, ""}}, ""};
  }
}

void StoredTensors::finish() {
  for (auto& [name, tensor] : tensors_) tile(tensor);
}

const StoredTensor* StoredTensors::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const unsigned char* StoredTensors::data(const StoredPiece& piece) {
  File& file = files_[piece.file];
  if (!file.mapped) {
    if (check_ == Check::checksum) {
      file.mapped = open_verified(folder_, *manifest_, file.record);
    } else if (!file.record.name.empty()) {
      file.mapped = open_recorded(folder_, file.record);
    } else {
      file.mapped = io::MappedFile(file.path, file.follow_links);
      if (file.mapped->size() != file.record.bytes)
        fail(ExitCode::data, "{}: the file changed while it was read", file.path);
    }
  }
  return file.mapped->data() + piece.offset;
}

const unsigned char* StoredTensors::read(const StoredTensor& tensor, int64_t begin, int64_t bytes,
                                         std::vector<unsigned char>& buffer) {
  const int64_t end = begin + bytes;
  auto piece = std::upper_bound(tensor.pieces.begin(), tensor.pieces.end(), begin,
                                [](int64_t at, const StoredPiece& p) { return at < p.end; });
  SLUICE_CHECK(piece != tensor.pieces.end() && begin >= piece->begin, "{}: no byte {}", tensor.name, begin);
  if (end <= piece->end) return data(*piece) + (begin - piece->begin);
  buffer.resize(static_cast<size_t>(bytes));
  for (int64_t at = begin; at < end; at = std::min(piece->end, end), ++piece) {
    SLUICE_CHECK(piece != tensor.pieces.end(), "{}: no byte {}", tensor.name, at);
    const int64_t n = std::min(piece->end, end) - at;
    std::memcpy(buffer.data() + (at - begin), data(*piece) + (at - piece->begin), static_cast<size_t>(n));
  }
  return buffer.data();
}

std::vector<std::string> coverage_problems(const Manifest& manifest) {
  std::vector<std::string> problems;
  for (const char* kind : {kWeightsKind, kOptimizerKind}) {
    const StoredTensors stored("", manifest, kind, StoredTensors::Check::size);
    for (const auto& [name, tensor] : stored.tensors())
      if (!tensor.problem.empty()) problems.push_back(fmt::format("{}: {}", printable(name), tensor.problem));
  }
  return problems;
}

}  // namespace sluice
