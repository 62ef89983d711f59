#include "doctor_ranks.h"

#include <sched.h>
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "comm/collective_errors.h"
#include "comm/device.h"
#include "comm/mpi.h"
#include "core/build_info.h"
#include "core/cpu_features.h"
#include "core/io.h"
#include "core/parallel_for.h"

namespace sluice {
namespace {

void row(const std::string& name, const std::string& value) { fmt::print("  {:<20}{}\n", name, value); }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
double clock_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Facts of one rank, in the form in which they are sent.
struct Rank {
  std::array<char, 64> host{}, program{}, kernels{};
  int64_t cores = 0, threads = 0;
  int64_t core = -1;      // the only one it may use, or -1
  double ahead = 0;       // seconds its clock is ahead of rank 0's
  double round_trip = 0;  // of a message to rank 0 and back
  int64_t sees_folder = 0;
};

void set(std::array<char, 64>& field, const std::string& text) {
  std::memcpy(field.data(), text.data(), std::min(text.size(), field.size() - 1));
}

Rank mine() {
  Rank r;
  std::array<char, 64> host{};
  gethostname(host.data(), host.size() - 1);
  r.host = host;
  set(r.program, fmt::format("{}, {}", build_info().version, mpi_version()));
  set(r.kernels, isa_name(cpu_isa()));
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) r.cores = CPU_COUNT(&allowed);
  if (r.cores == 1)
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &allowed)) r.core = core;
  r.threads = num_threads();
  return r;
}

/// Groups ranks by their values: one line if all agree, otherwise a line for each value.
std::map<std::string, std::vector<int>> by(const std::vector<Rank>& all, std::array<char, 64> Rank::*field) {
  std::map<std::string, std::vector<int>> groups;
  for (size_t r = 0; r < all.size(); ++r) groups[(all[r].*field).data()].push_back(static_cast<int>(r));
  return groups;
}

void tell_same(const char* name, const std::vector<Rank>& all, std::array<char, 64> Rank::*field,
               const char* warning) {
  const auto groups = by(all, field);
  if (groups.size() == 1) return row(name, groups.begin()->first + " on all");
  row(name, fmt::format("warning: {}", warning));
  for (const auto& [text, ranks] : groups) row("", fmt::format("{}: ranks {}", text, rank_ranges(ranks)));
}

/// The clock offset of each rank from rank 0, from the fastest of several round trips, assuming that rank 0
/// read its clock in the middle of it.
void compare_clocks(Communicator& ranks, Rank& me) {
  for (int r = 1; r < ranks.size(); ++r) {
    me.round_trip = r == ranks.rank() ? 1e9 : me.round_trip;
    for (int trip = 0; trip < 10; ++trip) {
      double there = 0;
      if (ranks.rank() == 0) {
        ranks.receive(&there, sizeof there, r);
        there = clock_time();
        ranks.send(&there, sizeof there, r);
      } else if (ranks.rank() == r) {
        const double begin = clock_time(), steady = now();
        ranks.send(&begin, sizeof begin, 0);
        ranks.receive(&there, sizeof there, 0);
        const double trip_seconds = now() - steady;
        if (trip_seconds >= me.round_trip) continue;
        me.round_trip = trip_seconds;
        me.ahead = begin + trip_seconds / 2 - there;
      }
    }
  }
}

/// Whether this rank sees a file that rank 0 writes, immediately or after the delay of a network file system.
void look_into(Communicator& ranks, const std::string& folder, Rank& me) {
  std::array<char, 64> name{};
  int64_t written = 0;
  if (ranks.rank() == 0) {
    set(name, fmt::format(".sluice-doctor-{}-{:.0f}", getpid(), 1e6 * clock_time()));
    try {
      io::make_directories(folder);
      io::write_file_atomic(folder + "/" + name.data(), name.data());
      written = 1;
    } catch (const Error& error) {
      fmt::print(stderr, "warning: {}\n", error.what());
    }
  }
  ranks.broadcast(name.data(), static_cast<int64_t>(name.size()), 0);
  ranks.broadcast(&written, sizeof written, 0);
  const std::string path = folder + "/" + name.data();
  for (const double end = now() + 3; written && !me.sees_folder && now() < end;) {
    try {
      me.sees_folder = io::exists(path) && io::read_file(path, 64) == name.data();
    } catch (const Error&) {
    }
    if (!me.sees_folder) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  ranks.barrier();
  if (written && ranks.rank() == 0) io::remove_file(path);
}

struct Times {
  double best, median;
};

/// Seconds per collective operation, averaged over about a tenth of a second on this rank's clock. ranks: the
/// host communicator.
template <class F>
Times time_of(Communicator& ranks, F&& operation) {
  operation();
  ranks.barrier();
  const double first = now();
  operation();
  int64_t count = std::clamp<int64_t>(static_cast<int64_t>(0.1 / std::max(now() - first, 1e-6)), 3, 200);
  ranks.broadcast(&count, sizeof count, 0);
  std::vector<double> times;
  for (int64_t i = 0; i < count; ++i) {
    ranks.barrier();
    const double start = now();
    operation();
    times.push_back(now() - start);
  }
  std::sort(times.begin(), times.end());
  return {times[0], times[times.size() / 2]};
}

/// One line of measure_speed: bytes that each rank sends to each other one.
void tell_times(const Communicator& ranks, const char* name, int64_t bytes, const Times& t) {
  if (ranks.rank() != 0) return;
  // Bytes that leave and reach one rank.
  const double rate = static_cast<double>(bytes) * (ranks.size() - 1) / t.best / 1e9;
  const std::string text = bytes >= 1 << 20   ? fmt::format("{} MiB", bytes >> 20)
                           : bytes >= 1 << 10 ? fmt::format("{} KiB", bytes >> 10)
                           : bytes > 0        ? fmt::format("{} B", bytes)
                                              : "";
  row(name, fmt::format("{:>8} {:>12.1f} {:>12.1f}{}", text, 1e6 * t.best, 1e6 * t.median,
                        bytes >= 1 << 10 ? fmt::format(" {:>10.3f}", rate) : ""));
}

/// sent, received: size x most bytes, in the kind of memory that `ranks` works on; host: the same ranks on
/// the host.
void measure_moves(Communicator& host, Communicator& ranks, void* received, const void* sent, int64_t most) {
  const char* name = "all_gather";
  for (const int64_t bytes : {int64_t{8}, int64_t{64} << 10, most}) {
    tell_times(ranks, name, bytes, time_of(host, [&] { ranks.all_gather(received, sent, bytes); }));
    name = "";
  }
  name = "all_to_all";
  for (const int64_t bytes : {int64_t{8}, int64_t{64} << 10, most}) {
    tell_times(ranks, name, bytes, time_of(host, [&] { ranks.all_to_all(received, sent, bytes); }));
    name = "";
  }
}

void measure_speed(Communicator& ranks) {
  if (ranks.rank() == 0)
    row("", fmt::format("{:>8} {:>12} {:>12} {:>10}", "to each", "us, best", "us, median", "GB/s, best"));
  const int64_t most = std::clamp<int64_t>((int64_t{64} << 20) / ranks.size(), 1 << 16, 4 << 20);
  std::vector<char> sent(static_cast<size_t>(most * ranks.size()), 1), received(sent.size());
  tell_times(ranks, "barrier", 0, time_of(ranks, [&] { ranks.barrier(); }));
  measure_moves(ranks, ranks, received.data(), sent.data(), most);
}

/// The same between GPUs, with the transport that training would use.
void measure_gpus(Communicator& ranks) {
  int64_t here = cuda_devices().empty() ? 0 : 1;
  std::vector<int64_t> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(all.data(), &here, sizeof here);
  if (std::count(all.begin(), all.end(), int64_t{1}) == 0) return;
  if (ranks.rank() == 0) fmt::print("\nfrom GPU to GPU\n");
  if (std::count(all.begin(), all.end(), int64_t{1}) != ranks.size()) {
    if (ranks.rank() == 0) row("", "warning: some ranks see no GPU");
    return;
  }
  Context ctx(64, Device::cuda);
  const auto gpus = make_device_communicator(ranks, ctx, {});
  if (ranks.rank() == 0)
    row("transport", gpus->name() == "nccl" ? "NCCL " + nccl_version()
                                            : "host: some ranks share a GPU, or this build has no NCCL");
  const int64_t most = 4 << 20, size = ranks.size();
  Arena memory("doctor", 2 * size * most, Device::cuda);
  const Tensor sent = memory.alloc("sent", DType::u8, {size * most}),
               received = memory.alloc("received", DType::u8, {size * most});
  measure_moves(ranks, *gpus, received.data, sent.data, most);
}

void tell_hosts(const std::vector<Rank>& all) {
  const auto hosts = by(all, &Rank::host);
  row("hosts", fmt::format("{}", hosts.size()));
  for (const auto& [host, ranks] : hosts) {
    int64_t threads = 0, cores = 0;
    std::map<int64_t, int> single;
    for (const int r : ranks) {
      const Rank& rank = all[static_cast<size_t>(r)];
      threads += rank.threads;
      cores = std::max(cores, rank.cores);
      if (rank.core >= 0)
        cores = std::max<int64_t>(cores, ++single[rank.core] ? static_cast<int64_t>(single.size()) : 0);
    }
    const bool shared = std::any_of(single.begin(), single.end(), [](const auto& s) { return s.second > 1; });
    std::string text = fmt::format("ranks {}, {} threads, {} cores", rank_ranges(ranks), threads, cores);
    if (shared)
      text += "; warning: ranks are bound to the same core (mpirun --bind-to none)";
    else if (threads > cores)
      text += "; warning: more threads than cores (train.threads, OMP_NUM_THREADS, or fewer ranks)";
    row("  " + host, text);
  }
}

void tell_clocks(const std::vector<Rank>& all) {
  const auto at = [](const Rank& a, const Rank& b) { return std::abs(a.ahead) < std::abs(b.ahead); };
  const auto most = std::max_element(all.begin(), all.end(), at);
  const auto slowest = std::max_element(
      all.begin(), all.end(), [](const Rank& a, const Rank& b) { return a.round_trip < b.round_trip; });
  row("clocks",
      fmt::format("within {:.3f} ms of rank 0's (rank {}), known to {:.3f} ms{}", 1e3 * std::abs(most->ahead),
                  most - all.begin(), 1e3 * most->round_trip / 2,
                  std::abs(most->ahead) > 1 ? "; warning: heartbeats compare clocks; set them (NTP)" : ""));
  row("message and answer", fmt::format("{:.1f} us with rank 0 at most (rank {})", 1e6 * slowest->round_trip,
                                        slowest - all.begin()));
}

void tell_folder(const std::vector<Rank>& all, const std::string& folder) {
  std::vector<int> blind;
  for (size_t r = 0; r < all.size(); ++r)
    if (!all[r].sees_folder) blind.push_back(static_cast<int>(r));
  const auto why = [&]() -> std::string {
    if (blind.empty()) return "shared: all ranks see files written by rank 0";
    if (blind.size() == all.size()) return "warning: rank 0 cannot write to it";
    return fmt::format(
        "warning: ranks {} do not see files written by rank 0; checkpoints and the watchdog need a run_dir "
        "on a "
        "file system "
        "that all share",
        rank_ranges(blind));
  };
  row("folder", folder + ": " + why());
}

}  // namespace

std::string launcher_text() {
  const LauncherSize size = launcher_size();
  if (size.size == 0) return "";
  const std::string variable = size.variable;
  const char* job = std::getenv("SLURM_JOB_ID");
  std::string by = variable == "OMPI_COMM_WORLD_SIZE" ? "mpirun of Open MPI"
                   : variable == "SLURM_NTASKS"       ? "srun"
                                                      : "a PMI launcher";
  if (job && variable != "SLURM_NTASKS") by += fmt::format(" in Slurm job {}", job);
  return fmt::format("{} ({}={})", by, variable, size.size);
}

std::string launcher_variables() {
  std::string text;
  for (const char* name :
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE",
        "PMIX_RANK", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID",
        "SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT", "OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle"})
    if (const char* value = std::getenv(name))
      text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
  return text;
}

void doctor_ranks(Communicator& ranks, const std::string& folder) {
  Rank me = mine();
  compare_clocks(ranks, me);
  look_into(ranks, folder, me);
  std::vector<Rank> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(all.data(), &me, sizeof me);
  if (ranks.rank() == 0) {
    fmt::print("\nranks\n");
    row("started by", fmt::format("{}; {} sees {} ranks", launcher_text(), ranks.name(), ranks.size()));
    row("rank 0's variables", launcher_variables());
    tell_hosts(all);
    tell_same("program", all, &Rank::program, "ranks run different programs, or MPI libraries");
    tell_same("kernels", all, &Rank::kernels,
              "ranks use different instruction sets: results are not bitwise reproducible (SLUICE_ISA)");
    tell_clocks(all);
    tell_folder(all, folder);
  }
  measure_speed(ranks);
  measure_gpus(ranks);
}

}  // namespace sluice
