#include "run/limits_check.h"

#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "checkpoint/rotation.h"
#include "checkpoint/store.h"
#include "core/cgroup.h"
#include "core/device.h"
#include "core/host.h"
#include "core/io.h"
#include "core/parallel_for.h"
#include "run/run_folder.h"

namespace sluice {
namespace {

// What a training takes beside its arenas and beside what the process has taken by now: buffers, kernels that
// oneDNN generates, pages of libraries that are first used later. 3 MiB were measured on a small model; the
// rest is room to spare.
constexpr int64_t kBeside = int64_t{16} << 20;
constexpr int64_t kBesideThread = int64_t{1} << 20;

/// Address space of one more thread's stack.
int64_t stack_bytes() {
  rlimit limit{};
  constexpr int64_t kUsual = int64_t{8} << 20;
  if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUsual;
  return std::min<int64_t>(static_cast<int64_t>(limit.rlim_cur), int64_t{1} << 30);
}

std::vector<NamedBytes> parts_of(const MemoryPlan& m) {
  std::vector<NamedBytes> parts = {{"parameters", m.parameters}, {"gradients", m.gradients},
                                   {"optimizer", m.optimizer},   {"activations", m.activations},
                                   {"batch", m.batch},           {"scratch", m.scratch}};
  if (!m.on_gpu) parts.push_back({"checkpoint copy", m.snapshot});
  return parts;
}

std::string list(const std::vector<NamedBytes>& items, const char* format) {
  std::string text;
  for (const NamedBytes& item : items)
    text += fmt::format(fmt::runtime(format), item.name, bytes_text(item.bytes));
  return text;
}

std::string failure(const LimitFit& c, const std::vector<NamedBytes>& savings, const std::string& note) {
  std::string text =
      fmt::format("this training needs {} of {}, and {} may be used: {}\n its parts:{}", bytes_text(c.needed),
                  c.what, bytes_text(c.there), c.limit, list(c.parts, "\n  {:<28} {:>11}"));
  if (!savings.empty()) text += "\n what helps most:" + list(savings, "\n  {:<28} saves {:>11}");
  return text + note + "\n train.check_limits=false starts nevertheless";
}

/// Bytes of the checkpoints in a folder that a newer one may replace.
int64_t replaceable_bytes(const Config& config) {
  const std::string folder = config.run_dir + "/ckpt";
  int64_t bytes = 0;
  for (const std::string& path : list_checkpoints(folder)) {
    const int64_t step = step_of_folder_name(path.substr(path.rfind('/') + 1)),
                  every = config.checkpoint.keep_every_steps;
    if (every > 0 && step % every == 0) continue;
    for (const std::string& name : io::list_directory(path)) bytes += io::file_size(path + "/" + name);
  }
  return bytes;
}

/// Checkpoints that are never removed, over the whole run.
int64_t kept_for_ever(const Plan& plan) {
  const int64_t every = plan.config.checkpoint.keep_every_steps;
  return every > 0 ? plan.steps / every : 0;
}

/// x times n, or the largest number.
int64_t times(int64_t x, int64_t n) {
  int64_t product = 0;
  return __builtin_mul_overflow(x, n, &product) ? std::numeric_limits<int64_t>::max() : product;
}

Sharing sharing_of(Communicator& ranks) {
  if (ranks.size() == 1) return {};
  struct Place {
    uint64_t host, group;
  };
  const auto hash = [](const std::string& text) { return XXH3_64bits(text.data(), text.size()); };
  const std::vector<MemoryGroup> groups = memory_groups();
  const Place mine{hash(host_name()), hash(groups.empty() ? "" : groups.front().file)};
  std::vector<Place> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(all.data(), &mine, sizeof mine);
  Sharing sharing{0, 0};
  for (const Place& p : all) {
    sharing.machine += p.host == mine.host;
    sharing.group += p.host == mine.host && p.group == mine.group;
  }
  return sharing;
}

std::vector<NamedBytes> disk_savings(const Plan& plan) {
  std::vector<NamedBytes> savings;
  const CheckpointConfig& c = plan.config.checkpoint;
  if (c.keep_last > 1)
    savings.push_back({"checkpoint.keep_last=1", times(plan.memory.checkpoint, c.keep_last - 1)});
  return savings;
}

}  // namespace

LimitFit compare_memory(const Plan& plan, const std::vector<MemoryLimit>& limits, const Sharing& sharing) {
  LimitFit c{.what = "memory",
             .needed = 0,
             .there = std::numeric_limits<int64_t>::max(),
             .limit = "no limit is known",
             .parts = {}};
  double worst = -1;
  for (const MemoryLimit& limit : limits) {
    const int64_t threads = num_threads();
    const int64_t beside = kBeside + threads * (limit.address_space ? stack_bytes() : kBesideThread);
    std::vector<NamedBytes> parts = plan.memory.on_gpu
                                        ? std::vector<NamedBytes>{{"checkpoint copy", plan.memory.snapshot},
                                                                  {"pinned", plan.memory.pinned}}
                                        : parts_of(plan.memory);
    parts.push_back({limit.address_space ? "stacks of threads, libraries" : "libraries, buffers", beside});
    int64_t needed = 0;
    for (const NamedBytes& part : parts) needed += part.bytes;
    const int share = !limit.shared ? 1 : limit.own_group ? sharing.group : sharing.machine;
    const int64_t there = limit.free / std::max(share, 1);
    const double use = static_cast<double>(needed) / static_cast<double>(std::max<int64_t>(there, 1));
    if (use <= worst) continue;
    worst = use;
    c.needed = needed;
    c.there = there;
    c.parts = parts;
    c.limit =
        limit.name + (share > 1 ? fmt::format(", divided between {} ranks of this machine", share) : "");
  }
  return c;
}

LimitFit compare_gpu_memory(const Plan& plan) {
  LimitFit c{.what = "GPU memory", .needed = 0, .there = 0, .limit = "", .parts = {}};
  if (!plan.memory.on_gpu) return c;
  const DeviceInfo info = cuda_devices().at(static_cast<size_t>(chosen_cuda_device()));
  c.needed = plan.memory.total();
  c.there = info.memory_bytes;
  c.limit = "all of " + info.name;
  c.parts = parts_of(plan.memory);
  return c;
}

LimitFit compare_disk(const Plan& plan, int64_t free_bytes) {
  const int64_t one = plan.memory.checkpoint, kept = std::max<int64_t>(plan.config.checkpoint.keep_last, 1);
  const int64_t all = times(one, kept + 1), replaced = std::min(replaceable_bytes(plan.config), all);
  LimitFit c{.what = "disk space",
             .needed = all - replaced + kSpareBytes,
             .there = free_bytes,
             .limit = fmt::format("free on the file system of {}", plan.config.run_dir),
             .parts = {{fmt::format("{} checkpoint{} kept", kept, kept == 1 ? "" : "s"), times(one, kept)},
                       {"and one being written", one},
                       {"to spare", kSpareBytes}}};
  if (replaced > 0) c.parts.push_back({"less those that are there", replaced});
  return c;
}

std::vector<NamedBytes> memory_savings(const Plan& plan) {
  struct Change {
    std::string key;
    Config config;
  };
  std::vector<Change> changes;
  const Config& c = plan.config;
  const auto change = [&](const std::string& key, auto&& apply) {
    changes.push_back({key, c});
    apply(changes.back().config);
  };
  if (const int64_t half = c.train.micro_batch_size / 2; half > 0 && c.train.global_batch_size % half == 0)
    change(fmt::format("train.micro_batch_size={}", half),
           [&](Config& x) { x.train.micro_batch_size = half; });
  if (c.train.recompute != Recompute::block)
    change("train.recompute=block", [](Config& x) { x.train.recompute = Recompute::block; });
  if (c.data.seq_len > 1)
    change(fmt::format("data.seq_len={}", c.data.seq_len / 2), [](Config& x) { x.data.seq_len /= 2; });
  if (plan.ranks > 1 && c.parallel.zero_stage < 3 && c.optimizer.type == OptimizerType::adamw)
    change("parallel.zero_stage=3", [](Config& x) { x.parallel.zero_stage = 3; });
  if (c.checkpoint.async && !plan.memory.on_gpu)
    change("checkpoint.async=false", [](Config& x) { x.checkpoint.async = false; });
  if (c.train.precision == Precision::f32)
    change("train.precision=bf16", [](Config& x) { x.train.precision = Precision::bf16; });
  std::vector<NamedBytes> savings;
  const auto world = plan.ranks > 1 ? make_dry_communicator(0, static_cast<int>(plan.ranks)) : nullptr;
  for (const Change& changed : changes) {
    try {
      const int64_t saved = plan.memory.total() - Trainer::measure(changed.config, world.get()).total();
      if (saved > 0) savings.push_back({changed.key, saved});
    } catch (const Error&) {  // not possible with the other keys
    }
  }
  std::stable_sort(savings.begin(), savings.end(),
                   [](const NamedBytes& a, const NamedBytes& b) { return a.bytes > b.bytes; });
  savings.resize(std::min<size_t>(savings.size(), 3));
  return savings;
}

void check_limits(const Plan& plan, Communicator& ranks) {
  const bool strict = plan.config.train.check_limits, leads = ranks.rank() == 0;
  const auto report = [&](ExitCode code, const std::string& message) {
    if (strict) fail(code, "{}", message);
    if (leads) spdlog::warn("{}", message);
  };
  const LimitFit memory = compare_memory(plan, memory_limits(), sharing_of(ranks));
  double short_of[2] = {
      memory.fits() ? 0.0 : static_cast<double>(memory.needed) - static_cast<double>(memory.there),
      static_cast<double>(ranks.rank())};
  std::vector<double> all(2 * static_cast<size_t>(ranks.size()));
  ranks.all_gather(all.data(), short_of, sizeof short_of);
  for (int r = 0; r < ranks.size(); ++r) {
    if (all[2 * static_cast<size_t>(r)] == 0) continue;
    if (memory.fits())
      report(ExitCode::out_of_memory,
             fmt::format("rank {} has too little memory for this training; its own message says more", r));
    else
      report(ExitCode::out_of_memory, failure(memory, memory_savings(plan), ""));
    break;
  }
  if (const LimitFit gpu = compare_gpu_memory(plan); !gpu.fits())
    report(ExitCode::out_of_memory, failure(gpu, memory_savings(plan), ""));
  if (!leads) return;
  const int64_t free = free_disk_bytes(plan.config.run_dir);
  const LimitFit disk = compare_disk(plan, free);
  if (!disk.fits())
    report(ExitCode::cannot_create, failure(disk, disk_savings(plan),
                                            "\n  run_dir=FOLDER on a file system with more room\n (a quota "
                                            "cannot be seen here and may be less)"));
  if (const int64_t for_ever = kept_for_ever(plan); for_ever > 0 && disk.fits()) {
    const int64_t bytes = times(plan.memory.checkpoint, for_ever);
    if (bytes > free - disk.needed)
      spdlog::warn(
          "checkpoint.keep_every_steps: {} will keep {} checkpoints, {} in all, and {} are free for them; "
          "saving will fail "
          "on the way unless older ones are moved",
          plan.config.checkpoint.keep_every_steps, for_ever, bytes_text(bytes),
          bytes_text(std::max<int64_t>(free - disk.needed, 0)));
  }
}

std::string limits_text(const Plan& plan) {
  const LimitFit memory =
      compare_memory(plan, memory_limits(), {static_cast<int>(plan.ranks), static_cast<int>(plan.ranks)});
  const LimitFit disk = compare_disk(plan, free_disk_bytes(plan.config.run_dir));
  std::string text =
      fmt::format("\nlimits of this machine{}\n", plan.ranks > 1 ? ", were all ranks on it" : "");
  for (const LimitFit& c : {memory, disk}) {
    text += fmt::format("  {:<24} {:>22}  {} {} may be used, {}\n", c.what, bytes_text(c.needed),
                        c.fits() ? "fits:" : "DOES NOT FIT:", bytes_text(c.there), c.limit);
  }
  return text;
}

nlohmann::json limits_json(const Plan& plan) {
  const auto json = [](const LimitFit& c) {
    return nlohmann::json{{"needed", c.needed}, {"there", c.there}, {"limit", c.limit}, {"fits", c.fits()}};
  };
  return {{"memory", json(compare_memory(plan, memory_limits(),
                                         {static_cast<int>(plan.ranks), static_cast<int>(plan.ranks)}))},
          {"disk", json(compare_disk(plan, free_disk_bytes(plan.config.run_dir)))}};
}

}  // namespace sluice
