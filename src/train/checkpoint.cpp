#include "train/checkpoint.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "core/io.h"
#include "train/manifest.h"
#include "train/rotation.h"
#include "train/safetensors.h"

namespace sluice {
namespace {

constexpr int64_t kPiece = int64_t{8} << 20;

/// One tensor of a save: a private copy (or, without async, live memory) and the checksum taken from it.
struct Item {
  SafetensorsEntry entry;
  Tensor source;
  unsigned char* copy = nullptr;
  int64_t nonfinite = -1;  // index of the first such value
  std::string xxh3_128;

  const void* data() const { return copy ? copy : source.data; }
  int64_t bytes() const { return source.bytes(); }
};

/// Everything the writer needs; nothing in it refers to live memory when the save is asynchronous.
struct Job {
  int64_t step = 0;
  std::vector<Item> weights, optimizer;
  std::string state, config_yaml, hf_config;
};

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

int64_t first_nonfinite(const Item& item) {
  const int64_t count = item.source.numel();
  switch (item.source.dtype) {
    case DType::f32:
      return first_nonfinite<uint32_t>(item.data(), count, 0x7f800000u);
    case DType::bf16:
      return first_nonfinite<uint16_t>(item.data(), count, 0x7f80u);
    case DType::f64:
      return first_nonfinite<uint64_t>(item.data(), count, 0x7ff0000000000000u);
    default:
      return -1;
  }
}

int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t snapshot_bytes(const CheckpointContent& content) {
  int64_t bytes = 0;
  for (const NamedTensor& t : content.weights) bytes += padded(t.tensor.bytes());
  for (const NamedTensor& t : content.optimizer) bytes += padded(t.tensor.bytes());
  return bytes;
}

/// Copies into `memory` (if any), takes checksums from the copy, and looks for values that are not finite.
std::vector<Item> take_items(const std::vector<NamedTensor>& tensors, Arena* memory, Context* ctx) {
  std::vector<Item> items;
  items.reserve(tensors.size());
  for (const NamedTensor& t : tensors) {
    Item& item = items.emplace_back();
    item.entry = safetensors_entry(t.name, t.tensor);
    item.source = t.tensor;
    if (memory && item.bytes())
      item.copy =
          static_cast<unsigned char*>(memory->alloc_temporary("snapshot", DType::u8, {item.bytes()}).data);
  }
  for (Item& item : items)
    if (item.copy && item.source.device != Device::cpu) read_tensor(*ctx, item.copy, item.source);
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < items.size(); ++i) {
    Item& item = items[i];
    if (item.copy && item.source.device == Device::cpu) std::memcpy(item.copy, item.source.data, static_cast<size_t>(item.bytes()));
    item.nonfinite = first_nonfinite(item);
    item.xxh3_128 = checksum(item.data(), item.bytes());
  }
  for (const Item& item : items)
    if (item.nonfinite >= 0)
      fail(ExitCode::numeric, "refused: {} holds a value that is not finite (element {} of {})",
           item.entry.name, item.nonfinite, item.source.numel());
  return items;
}

/// Writes one file and what the manifest says about it; checksums are those of memory.
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

void write_text(const std::string& folder, const std::string& name, const std::string& text,
                Manifest& manifest) {
  FileWriter file(folder, name);
  file.write(text.data(), std::ssize(text));
  manifest.files.push_back(file.finish());
}

void write_tensors(const std::string& folder, const std::string& name, std::vector<Item>& items,
                   Manifest& manifest) {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, Item*> by_name;
  for (Item& item : items) {
    entries.push_back(item.entry);
    by_name[item.entry.name] = &item;
  }
  const std::string header = make_safetensors_header(entries);
  FileWriter file(folder, name);
  file.write(header.data(), std::ssize(header));
  for (const SafetensorsEntry& entry : entries) {
    const Item& item = *by_name.at(entry.name);
    file.write(item.data(), item.bytes());
    manifest.tensors.push_back(
        {entry.name, entry.dtype, entry.shape, name, std::ssize(header) + entry.begin, item.xxh3_128});
  }
  manifest.files.push_back(file.finish());
}

}  // namespace

struct CheckpointStore::Impl {
  std::string folder;
  CheckpointConfig config;
  Context* ctx = nullptr;             // of tensors on a GPU
  std::optional<Arena> memory;        // of the snapshot; absent where live host memory is written
  std::map<std::string, bool> valid;  // what rotation knows; used by one save at a time
  std::thread writer;

  mutable std::mutex mutex;  // guards what follows
  int64_t saved_step = -1;
  std::string error;

  void set_error(const std::string& text) {
    const std::lock_guard lock(mutex);
    error = text;
  }

  void finish() {
    if (writer.joinable()) writer.join();
  }

  /// Runs a save; whatever goes wrong becomes a warning.
  template <class Body>
  void guarded(int64_t step, Body&& body) {
    try {
      body();
    } catch (const std::exception& problem) {
      set_error(fmt::format("checkpoint of step {}: {}", step, problem.what()));
      spdlog::warn("{}; earlier checkpoints are untouched; the next save tries again", last_error());
    }
  }

  std::string last_error() const {
    const std::lock_guard lock(mutex);
    return error;
  }

  void write(Job& job) {
    const std::string staging =
        fmt::format("{}/{}{}-{}", folder, kStagingPrefix, step_folder_name(job.step), ::getpid());
    const std::string final_path = folder + "/" + step_folder_name(job.step);
    remove_litter(folder);  // of a save that failed
    check_space(job);
    try {
      stage(job, staging);
      publish(staging, final_path);
    } catch (const std::exception&) {
      try {
        io::remove_tree(staging);
      } catch (const Error& leftover) {
        spdlog::warn("left by a failed save: {}", leftover.what());
      }
      throw;
    }
    {
      const std::lock_guard lock(mutex);
      saved_step = job.step;
    }
    valid[final_path] = true;
    tidy(final_path);
  }

  void check_space(const Job& job) const {
    int64_t need = int64_t{1} << 20;
    for (const Item& item : job.weights) need += item.bytes();
    for (const Item& item : job.optimizer) need += item.bytes();
    const int64_t available = io::free_bytes(folder);
    if (available < need)
      fail(ExitCode::cannot_create, "not enough space in {}: {:.1f} MiB needed, {:.1f} MiB free", folder,
           static_cast<double>(need) / (1 << 20), static_cast<double>(available) / (1 << 20));
  }

  void stage(Job& job, const std::string& staging) const {
    io::make_directories(staging);
    io::fsync_directory(folder);
    Manifest manifest;
    manifest.step = job.step;
    manifest.build = SLUICE_VERSION;
    manifest.config_hash = checksum(job.config_yaml);
    write_tensors(staging, "model.safetensors", job.weights, manifest);
    write_tensors(staging, "optim.safetensors", job.optimizer, manifest);
    write_text(staging, "state.json", job.state, manifest);
    write_text(staging, "config.yaml", job.config_yaml, manifest);
    write_text(staging, "config.json", job.hf_config, manifest);
    const std::string text = manifest.text();
    FileWriter file(staging, kManifestName);
    file.write(text.data(), std::ssize(text));
    file.finish();
    io::fsync_directory(staging);
  }

  /// From here on the checkpoint exists. One of the same step (damaged, or of a branch that was left) is
  /// swapped out in one move, so that there is no moment without either; only where the file system knows no
  /// swap, it goes first.
  void publish(const std::string& staging, const std::string& final_path) const {
    if (!io::exists(final_path) && !io::is_link(final_path)) {
      io::rename(staging, final_path);
    } else if (!io::exchange(staging, final_path)) {
      io::rename(final_path, fmt::format("{}/{}{}-{}", folder, kTrashPrefix, "replaced", ::getpid()));
      io::rename(staging, final_path);
    }
    io::fsync_directory(folder);
  }

  /// After the checkpoint is durable: the hint for people, and the old ones. A failure here costs nothing but
  /// space.
  void tidy(const std::string& newest) {
    try {
      io::write_file_atomic(folder + "/LATEST", newest.substr(newest.rfind('/') + 1) + "\n");
      rotate_checkpoints(folder, config.keep_last, config.keep_every_steps, newest, valid);
      remove_litter(folder);
    } catch (const std::exception& problem) {
      spdlog::warn("after the checkpoint {} was saved: {}", newest, problem.what());
    }
  }
};

CheckpointStore::CheckpointStore(std::string folder, const CheckpointConfig& config,
                                 const CheckpointContent& content, Context* ctx)
    : impl_(std::make_unique<Impl>()) {
  impl_->folder = std::move(folder);
  impl_->config = config;
  impl_->ctx = ctx;
  io::make_directories(impl_->folder);
  remove_litter(impl_->folder);
  bool on_gpu = false;
  for (const NamedTensor& t : content.weights) on_gpu |= t.tensor.device != Device::cpu;
  SLUICE_CHECK(!on_gpu || ctx, "CheckpointStore: tensors on a GPU need a context");
  if (config.async || on_gpu)
    impl_->memory.emplace("checkpoint snapshot", std::max<int64_t>(snapshot_bytes(content), 64));
}

CheckpointStore::~CheckpointStore() { impl_->finish(); }

void CheckpointStore::save(const CheckpointContent& content) {
  impl_->finish();
  impl_->set_error("");
  impl_->guarded(content.step, [&] {
    Job job;
    job.step = content.step;
    Arena* memory = impl_->memory ? &*impl_->memory : nullptr;
    if (memory) memory->rewind(0);
    job.weights = take_items(content.weights, memory, impl_->ctx);
    job.optimizer = take_items(content.optimizer, memory, impl_->ctx);
    job.state = content.state.dump(1) + "\n";
    job.config_yaml = content.config_yaml;
    job.hf_config = content.hf_config.dump(2) + "\n";
    if (!impl_->config.async) return impl_->write(job);
    impl_->writer = std::thread([impl = impl_.get(), moved = std::move(job)]() mutable {
      impl->guarded(moved.step, [&] { impl->write(moved); });
    });
  });
}

bool CheckpointStore::wait() {
  impl_->finish();
  return last_error().empty();
}

int64_t CheckpointStore::saved_step() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->saved_step;
}

std::string CheckpointStore::last_error() const { return impl_->last_error(); }

}  // namespace sluice
