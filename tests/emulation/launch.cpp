// Launches: rules of the launch configuration, OS threads that run groups, seeds and counters.
#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <thread>

#include "capture.h"
#include "fault.h"
#include "machine.h"

namespace emu {
namespace {

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct Settings {
  uint64_t seed = from_environment("SLUICE_EMULATION_SEED", 0);
  int threads = static_cast<int>(
      from_environment("SLUICE_EMULATION_THREADS", std::max(1u, std::thread::hardware_concurrency())));
  std::mutex mutex;
  Stats stats{};
};
Settings& settings() {
  static Settings* s = new Settings;
  return *s;
}

void add_stats(Stats& from) {
  Settings& s = settings();
  const std::lock_guard lock(s.mutex);
  uint64_t* to = reinterpret_cast<uint64_t*>(&s.stats);
  const uint64_t* counts = reinterpret_cast<const uint64_t*>(&from);
  for (size_t i = 0; i < sizeof(Stats) / sizeof(uint64_t); ++i) to[i] += counts[i];
  from = Stats{};
}

/// The group of an OS thread, with the stacks of its CUDA threads, which the next OS thread reuses.
class GroupOfThread {
 public:
  ~GroupOfThread() {
    if (!group_) return;
    const std::lock_guard lock(mutex());
    free_groups().push_back(group_);
  }
  Group* get() {
    if (group_) return group_;
    {
      const std::lock_guard lock(mutex());
      if (!free_groups().empty()) {
        group_ = free_groups().back();
        free_groups().pop_back();
      }
    }
    if (!group_) group_ = new Group;
    adopt_os_thread(group_->main);
    return group_;
  }

 private:
  static std::mutex& mutex() {
    static auto* m = new std::mutex;
    return *m;
  }
  static std::vector<Group*>& free_groups() {
    static auto* groups = new std::vector<Group*>;
    return *groups;
  }
  Group* group_ = nullptr;
};

/// Runs the groups, in ascending order or, with the last woken first, in descending order.
void run_groups(Launch& launch) {
  static thread_local GroupOfThread mine;
  Group* const group = mine.get();
  group->launch = &launch;
  for (;;) {
    if (launch.stopped) break;
    const uint64_t index = launch.next_group++;
    if (index >= launch.group_count) break;
    run_group(*group, launch.seed % 3 == 2 ? launch.group_count - 1 - index : index);
  }
  add_stats(group->stats);
}

/// OS threads that wait for launches, as long as the program runs.
class Workers {
 public:
  /// Runs the launch on `helpers` threads of the pool and on the caller's.
  void run(Launch& launch, int helpers) {
    {
      std::unique_lock lock(mutex_);
      while (static_cast<int>(started_) < helpers) {
        std::thread([this, id = started_] { wait_for_work(id); }).detach();
        ++started_;
      }
      launch_ = &launch, wanted_ = busy_ = helpers, ++generation_;
    }
    wake_.notify_all();
    run_groups(launch);
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return busy_ == 0; });
    wanted_ = 0;
  }

 private:
  void wait_for_work(int id) {
    uint64_t seen = 0;
    for (;;) {
      Launch* launch;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen && id < wanted_; });
        seen = generation_;
        launch = launch_;
      }
      run_groups(*launch);
      const std::lock_guard lock(mutex_);
      if (--busy_ == 0) finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  Launch* launch_ = nullptr;
  uint64_t generation_ = 0;
  int started_ = 0, wanted_ = 0, busy_ = 0;
};

void check_configuration(const LaunchParams& p) {
  const auto refuse = [&](const char* why) {
    throw LaunchError(std::string("kernel ") + p.name + ": invalid launch configuration: " + why);
  };
  const auto positive = [](dim3 d) { return d.x > 0 && d.y > 0 && d.z > 0; };
  if (!positive(p.grid) || !positive(p.block) || !positive(p.cluster)) refuse("a dimension is zero");
  const uint64_t threads = uint64_t{p.block.x} * p.block.y * p.block.z;
  if (threads > 1024 || p.block.z > 64) refuse("more than 1024 threads in a block, or 64 along z");
  if (p.grid.x > 0x7fffffffu || p.grid.y > 65535 || p.grid.z > 65535)
    refuse("the grid is larger than 2^31-1, 65535, 65535");
  if (p.dyn_smem > kSharedLimit) refuse("more than 227 KiB of shared memory");
  if (p.grid.x % p.cluster.x || p.grid.y % p.cluster.y || p.grid.z % p.cluster.z)
    refuse("the grid is not a multiple of the cluster");
  if (uint64_t{p.cluster.x} * p.cluster.y * p.cluster.z > 8) refuse("more than 8 blocks in a cluster");
}

}  // namespace

void set_seed(uint64_t seed) { settings().seed = seed; }
uint64_t seed() { return settings().seed; }
void set_threads(int threads) { settings().threads = std::max(1, threads); }
int threads() { return settings().threads; }
Stats stats() {
  const std::lock_guard lock(settings().mutex);
  return settings().stats;
}
void reset_stats() {
  const std::lock_guard lock(settings().mutex);
  settings().stats = Stats{};
}

void run_launch(const LaunchParams& params, const KernelCall& call) {
  static Workers* workers = new Workers;
  static std::mutex* one_at_a_time = new std::mutex;
  const std::lock_guard device(*one_at_a_time);
  Launch launch;
  launch.params = params;
  launch.call = &call;
  launch.seed = settings().seed;
  launch.group_shape = params.cooperative ? params.grid : params.cluster;
  const dim3 shape = launch.group_shape;
  launch.group_count =
      uint64_t{params.grid.x} * params.grid.y * params.grid.z / (uint64_t{shape.x} * shape.y * shape.z);
  const FaultReports faults;
  san::release(&launch.begin_sync);
  const int threads = static_cast<int>(std::min<uint64_t>(settings().threads, launch.group_count));
  if (threads <= 1)
    run_groups(launch);
  else
    workers->run(launch, threads - 1);
  san::acquire(&launch.end_sync);
  if (!launch.error.empty()) throw LaunchError(launch.error);
}

void launch_call(const LaunchParams& params, const KernelCall& call) {
  check_configuration(params);
  if (!record_launch(params, call)) run_launch(params, call);
}

}  // namespace emu
