#include "checkpoint/write.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "checkpoint/rotation.h"
#include "checkpoint/stored_tensors.h"
#include "core/build_info.h"
#include "core/io.h"

namespace sluice {
namespace {

constexpr int64_t kPiece = int64_t{8} << 20;

/// Index of the first value whose exponent bits are all ones, or -1.
template <class Bits>
int64_t first_nonfinite(const void* data, int64_t count, Bits exponent) {
  const Bits* values = static_cast<const Bits*>(data);
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    Bits found = 0;
    for (int64_t i = begin; i < end; ++i) found |= static_cast<Bits>((values[i] & exponent) == exponent);
    if (!found) continue;
    for (int64_t i = begin; i < end; ++i)
      if ((values[i] & exponent) == exponent) return i;
  }
  return -1;
}

int64_t first_nonfinite(const SaveItem& item) {
  const int64_t count = item.source.numel();
  switch (item.source.dtype) {
    case DType::f32:
      return first_nonfinite<uint32_t>(item.data(), count, 0x7f800000u);
    case DType::bf16:
      return first_nonfinite<uint16_t>(item.data(), count, 0x7f80u);
    case DType::f64:
      return first_nonfinite<uint64_t>(item.data(), count, 0x7ff0000000000000u);
    case DType::i32:
    case DType::u8:
      return -1;  // every value is finite
  }
  fail(ExitCode::internal, "a tensor of unknown type");
}

int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t numel_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t dim : shape) n *= dim;
  return n;
}

/// Writes one file and its manifest entries, with checksums of the memory.
class FileWriter {
 public:
  FileWriter(const std::string& folder, const std::string& name)
      : file_(folder + "/" + name, io::OutputFile::Mode::create_new), record_{name, 0, {}} {}

  void write(const void* data, int64_t bytes) {
    const char* from = static_cast<const char*>(data);
    for (int64_t done = 0; done < bytes; done += kPiece) {
      const int64_t piece = std::min(kPiece, bytes - done);
      checksum_.update(from + done, piece);
      file_.write(from + done, piece);
    }
    record_.bytes += bytes;
  }
  FileRecord finish() {
    file_.fsync();
    file_.close();
    record_.xxh3_128 = checksum_.hex();
    return record_;
  }

 private:
  io::OutputFile file_;
  Checksum checksum_;
  FileRecord record_;
};

void write_text(const SaveJob& job, const std::string& name, const std::string& text, Manifest& manifest) {
  FileWriter file(job.staging, name);
  file.write(text.data(), std::ssize(text));
  manifest.files.push_back(file.finish());
}

void write_tensors(const SaveJob& job, const std::string& name, std::vector<SaveItem>& items,
                   Manifest& manifest) {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, SaveItem*> by_name;
  for (SaveItem& item : items) {
    entries.push_back({item.record.entry_name(), item.record.dtype, item.record.entry_shape()});
    by_name[entries.back().name] = &item;
  }
  const std::string header = make_safetensors_header(entries);
  FileWriter file(job.staging, name);
  file.write(header.data(), std::ssize(header));
  for (const SafetensorsEntry& entry : entries) {
    SaveItem& item = *by_name.at(entry.name);
    file.write(item.data(), item.bytes());
    item.record.file = name;
    item.record.offset = std::ssize(header) + entry.begin;
    manifest.tensors.push_back(item.record);
  }
  manifest.files.push_back(file.finish());
}

std::string part_name(int rank) { return fmt::format("part-{:05}.json", rank); }
std::string failure_name(int rank) { return fmt::format("failed-{:05}.txt", rank); }

/// Weights, then optimizer state, each by file number, then other files: the order does not depend on which
/// rank came first.
void put_in_order(Manifest& manifest) {
  const auto key = [](const std::string& file) {
    const int kind = is_shard_of(file, kWeightsKind) ? 0 : is_shard_of(file, kOptimizerKind) ? 1 : 2;
    return std::make_pair(kind, kind == 2 ? std::string() : file);
  };
  std::stable_sort(manifest.files.begin(), manifest.files.end(),
                   [&](const FileRecord& a, const FileRecord& b) { return key(a.name) < key(b.name); });
  std::stable_sort(manifest.tensors.begin(), manifest.tensors.end(),
                   [&](const TensorRecord& a, const TensorRecord& b) { return key(a.file) < key(b.file); });
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The index by which Hugging Face finds the shards.
std::string weights_index(const Manifest& manifest) {
  nlohmann::json map = nlohmann::json::object();
  int64_t bytes = 0;
  for (const TensorRecord& t : manifest.tensors) {
    if (!is_shard_of(t.file, kWeightsKind)) continue;
    map[t.name] = t.file;
    bytes += safetensors_bytes(t.dtype, t.shape).value_or(0);
  }
  return nlohmann::json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
}

}  // namespace

int64_t snapshot_bytes(const CheckpointContent& content) {
  int64_t bytes = 0;
  for (const NamedTensor& t : content.weights) bytes += padded(t.tensor.bytes());
  for (const NamedTensor& t : content.optimizer) bytes += padded(t.tensor.bytes());
  return bytes;
}

std::vector<SaveItem> take_items(const std::vector<NamedTensor>& tensors, bool slices_allowed, Arena* memory,
                                 Context* ctx) {
  std::vector<SaveItem> items;
  items.reserve(tensors.size());
  for (const NamedTensor& t : tensors) {
    check_slice(t);
    SLUICE_CHECK(slices_allowed || !is_slice(t), "checkpoint: {} is written whole, for other programs",
                 t.name);
    if (is_slice(t) && t.tensor.numel() == 0) continue;  // an empty share of a small tensor
    SaveItem& item = items.emplace_back();
    item.record.name = t.name;
    item.record.dtype = safetensors_dtype(t.tensor.dtype);
    item.record.shape = whole_shape(t);
    if (is_slice(t) && t.tensor.numel() < numel_of(t.shape)) {
      item.record.begin = t.begin;
      item.record.end = t.begin + t.tensor.numel();
    }
    item.source = t.tensor;
    if (memory && item.bytes())
      item.copy =
          static_cast<unsigned char*>(memory->alloc_temporary("snapshot", DType::u8, {item.bytes()}).data);
  }
  for (SaveItem& item : items)
    if (item.copy && item.source.device != Device::cpu) read_tensor(*ctx, item.copy, item.source);
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < items.size(); ++i) {
    SaveItem& item = items[i];
    if (item.copy && item.source.device == Device::cpu)
      std::memcpy(item.copy, item.source.data, static_cast<size_t>(item.bytes()));
    item.nonfinite = first_nonfinite(item);
    item.record.xxh3_128 = checksum(item.data(), item.bytes());
  }
  for (const SaveItem& item : items)
    if (item.nonfinite >= 0)
      fail(ExitCode::numeric, "refused: {} holds a value that is not finite (element {} of {})",
           item.record.name, item.record.begin + item.nonfinite, numel_of(item.record.shape));
  return items;
}

Manifest write_files(SaveJob& job) {
  io::make_directories(job.staging);
  if (job.rank == 0) io::fsync_directory(job.folder);
  Manifest manifest;
  manifest.step = job.step;
  manifest.build = build_info().version;
  if (!job.weights_file.empty()) write_tensors(job, job.weights_file, job.weights, manifest);
  if (!job.optimizer_file.empty()) write_tensors(job, job.optimizer_file, job.optimizer, manifest);
  if (job.rank > 0) return manifest;
  manifest.config_hash = checksum(job.config_yaml);
  write_text(job, "state.json", job.state, manifest);
  write_text(job, "config.yaml", job.config_yaml, manifest);
  write_text(job, "config.json", job.hf_config, manifest);
  if (!job.tokenizer_model.empty())
    write_text(job, tokenizer_file(job.tokenizer_model), job.tokenizer_model, manifest);
  return manifest;
}

/// Atomic, but without syncing the folder: rank 0 does this once for all files, and may already have renamed
/// it.
void write_part(const SaveJob& job, const Manifest& part) {
  const std::string name = part_name(job.rank), temporary = name + ".tmp", text = part.text();
  FileWriter file(job.staging, temporary);
  file.write(text.data(), std::ssize(text));
  file.finish();
  io::rename(job.staging + "/" + temporary, job.staging + "/" + name);
}

void write_failure(const SaveJob& job, const std::string& reason) {
  try {
    if (io::is_directory(job.staging))
      io::write_file_atomic(job.staging + "/" + failure_name(job.rank), reason);
  } catch (const Error&) {  // rank 0 learns it at the next communication or by its timeout
  }
}

Manifest collect_parts(const SaveJob& job, Manifest mine, const Patience& patience) {
  std::set<int> missing;
  for (int rank = 0; rank < job.ranks; ++rank)
    if (rank != job.rank) missing.insert(rank);
  double last = now();
  for (auto pause = std::chrono::milliseconds(1); !missing.empty();
       pause = std::min(pause * 2, std::chrono::milliseconds(100))) {
    const bool ended = patience.ended;  // read before looking, so that parts present at the end are counted
    const std::vector<std::string> names = io::list_directory(job.staging);
    const auto there = [&](const std::string& name) {
      return std::binary_search(names.begin(), names.end(), name);
    };
    std::vector<int> came;
    for (const int rank : missing)
      if (there(part_name(rank))) came.push_back(rank);
    for (const int rank : came) {
      const Manifest part = read_manifest_file(job.staging + "/" + part_name(rank));
      if (part.step != mine.step) fail(ExitCode::save_failed, "rank {} has written step {}", rank, part.step);
      mine.files.insert(mine.files.end(), part.files.begin(), part.files.end());
      mine.tensors.insert(mine.tensors.end(), part.tensors.begin(), part.tensors.end());
      missing.erase(rank);
      last = now();
    }
    if (missing.empty()) break;
    for (const int rank : missing)
      if (there(failure_name(rank)))
        fail(ExitCode::save_failed, "rank {}: {}", rank,
             io::read_file(job.staging + "/" + failure_name(rank), 1 << 16));
    if (ended) fail(ExitCode::save_failed, "no part from rank {}", *missing.begin());
    if (now() - last > patience.seconds)
      fail(ExitCode::save_failed, "rank{} {} did not write {} part within {} s",
           missing.size() > 1 ? "s" : "", fmt::join(missing, ", "), missing.size() > 1 ? "their" : "its",
           patience.seconds.load());
    std::this_thread::sleep_for(pause);
  }
  put_in_order(mine);
  if (const auto problems = coverage_problems(mine); !problems.empty())
    fail(ExitCode::internal, "the ranks' parts do not contain every tensor exactly once: {}",
         fmt::join(problems, "; "));
  return mine;
}

void finish_staging(const SaveJob& job, Manifest& manifest) {
  const auto shards = std::count_if(manifest.files.begin(), manifest.files.end(),
                                    [](const FileRecord& f) { return is_shard_of(f.name, kWeightsKind); });
  if (shards > 1) write_text(job, kWeightsIndex, weights_index(manifest), manifest);
  if (job.ranks > 1)  // remove the parts, which the manifest replaces
    for (const std::string& name : io::list_directory(job.staging))
      if (!manifest.file(name)) io::remove_file(job.staging + "/" + name);
  const std::string text = manifest.text();
  FileWriter file(job.staging, kManifestName);
  file.write(text.data(), std::ssize(text));
  file.finish();
  io::fsync_directory(job.staging);
}

/// An old checkpoint of the same step (damaged, or from an abandoned branch) is swapped out atomically, so
/// that one of the two always exists. Only if the file system cannot swap, it is removed first.
void publish(const SaveJob& job, const std::string& final_path) {
  if (!io::exists(final_path) && !io::is_link(final_path)) {
    io::rename(job.staging, final_path);
  } else if (!io::exchange(job.staging, final_path)) {
    io::rename(final_path, fmt::format("{}/{}{}-{}", job.folder, kTrashPrefix, "replaced", ::getpid()));
    io::rename(job.staging, final_path);
  }
  io::fsync_directory(job.folder);
}

}  // namespace sluice
