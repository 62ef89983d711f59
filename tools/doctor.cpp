// sluice doctor: features of this build and of this machine, and what is disabled as a result.
#include <cblas.h>
#include <omp.h>
#include <sched.h>
#include <spdlog/fmt/fmt.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <xxhash.h>

#include <chrono>
#include <cstring>
#include <dnnl.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "comm/device.h"
#include "comm/mpi.h"
#include "commands.h"
#include "core/arena.h"
#include "core/build_info.h"
#include "core/cpu_features.h"
#include "core/device.h"
#include "core/io.h"
#include "core/parallel_for.h"
#include "doctor_ranks.h"

namespace sluice {
namespace {

void row(const char* name, const std::string& value) { fmt::print("  {:<20}{}\n", name, value); }

const char* yes(bool b) { return b ? "yes" : "no"; }

std::string bf16_text() {
  if (!bf16_products()) return "computed through f32: saves memory, not time";
  return fmt::format("matrix products in {} ({})",
                     bf16_unit() == Bf16Unit::amx_emulated ? "software, for tests" : "hardware",
                     bf16_unit_name(bf16_unit()));
}

/// The value of a "key : value" line in a /proc file; "" if there is none.
std::string proc_value(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

int64_t memory_kib(const std::string& key) {
  int64_t kib = 0;
  std::istringstream(proc_value("/proc/meminfo", key)) >> kib;
  return kib;
}

/// The best of a few rounds of y = x on arrays far larger than the caches; counts bytes read and written.
double copy_gb_per_second() {
  constexpr int64_t kBytes = int64_t{256} << 20;
  Arena arena("bandwidth", 2 * kBytes);
  char* x = static_cast<char*>(arena.alloc("x", DType::u8, {kBytes}).data);
  char* y = static_cast<char*>(arena.alloc("y", DType::u8, {kBytes}).data);
  const auto copy = [&] {
    parallel_for(kBytes, 1 << 20, [&](int64_t begin, int64_t end) {
      std::memcpy(y + begin, x + begin, static_cast<size_t>(end - begin));
    });
  };
  parallel_for(kBytes, 1 << 20, [&](int64_t begin, int64_t end) {
    std::memset(x + begin, 1, static_cast<size_t>(end - begin));
  });
  copy();
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    copy();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return 2.0 * kBytes / best / 1e9;
}

/// The device that train.device=auto selects, and why it is not a GPU.
void gpus() {
  fmt::print("\nGPU\n");
  if (!built_with_cuda()) {
    row("none used", "the build has no CUDA backend (cmake -DSLUICE_CUDA=on, with the CUDA toolkit)");
    return;
  }
  const std::vector<DeviceInfo> devices = cuda_devices();
  if (devices.empty())
    row("none found",
        io::exists("/dev/nvidiactl")
            ? "the driver does not respond: is it older than the toolkit, or is CUDA_VISIBLE_DEVICES empty?"
            : "no NVIDIA driver is loaded");
  for (size_t i = 0; i < devices.size(); ++i) {
    const DeviceInfo& d = devices[i];
    row(fmt::format("{}", i).c_str(),
        fmt::format("{}, {:.1f} GiB, compute capability {}.{}, {} multiprocessors{}{}", d.name,
                    static_cast<double>(d.memory_bytes) / (1 << 30), d.compute_capability / 10,
                    d.compute_capability % 10, d.multiprocessors,
                    d.compute_capability < 80 ? "; too old: 8.0 is needed" : "",
                    d.emulated ? "; exact but slow, used only with train.device=cuda" : ""));
  }
}

void doctor() {
  fmt::print("sluice {}\n", build_info().version);
  row("commit", build_info().commit);
  row("compiler", fmt::format("{}, {}", build_info().compiler, build_info().build_type));
  row("CUDA", built_with_cuda() ? "in this build" : "not in this build: train.device=cuda is refused");
  if (built_with_cuda())
    row("NCCL", nccl_version().empty() ? "not in this build: ranks on GPUs pass through host memory"
                                       : nccl_version() + ": between ranks with a GPU each");
  row("MPI",
      built_with_mpi() ? mpi_version() + ": ranks under mpirun or srun" : "not in this build: one process");
  if (const std::string launcher = launcher_text(); !launcher.empty()) row("launcher", launcher);
  row("oneDNN", [] {
    const dnnl_version_t* v = dnnl_version();
    return fmt::format("{}.{}.{}", v->major, v->minor, v->patch);
  }());
  row("OpenBLAS", openblas_get_config());
  row("xxHash", fmt::format("{}.{}.{}", XXH_VERSION_MAJOR, XXH_VERSION_MINOR, XXH_VERSION_RELEASE));
  row("nlohmann json", fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                                   NLOHMANN_JSON_VERSION_PATCH));
  row("CLI11", cli11_version());
  row("fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100));

  gpus();
  fmt::print("\nprocessor\n");
  const CpuFeatures& cpu = cpu_features();
  row("model", proc_value("/proc/cpuinfo", "model name"));
  row("AVX2 and FMA", yes(cpu.avx2_fma));
  row("AVX-512", yes(cpu.avx512));
  row("AVX-512 BF16", yes(cpu.avx512_bf16));
  row("AMX BF16", yes(cpu.amx_bf16));
  row("kernels used", fmt::format("{} (SLUICE_ISA=baseline|avx2|avx512|avx512_bf16|amx_emulated lowers it)",
                                  isa_name(cpu_isa())));
  row("bf16", bf16_text());
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int cores =
      sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : omp_get_num_procs();
  row("cores", fmt::format("{} of {} may be used", cores, sysconf(_SC_NPROCESSORS_ONLN)));
  row("threads",
      fmt::format("{}{}", num_threads(),
                  num_threads() > cores ? "  warning: more threads than cores (OMP_NUM_THREADS)" : ""));

  fmt::print("\nmachine\n");
  utsname system{};
  uname(&system);
  row("system", fmt::format("{} {} {}", system.sysname, system.release, system.machine));
  row("memory",
      fmt::format("{:.1f} GiB, {:.1f} free", static_cast<double>(memory_kib("MemTotal")) / (1 << 20),
                  static_cast<double>(memory_kib("MemAvailable")) / (1 << 20)));
  row("disk, here",
      fmt::format("{:.1f} GiB free", static_cast<double>(io::free_bytes(".")) / (int64_t{1} << 30)));
  row("memory bandwidth", fmt::format("{:.1f} GB/s (copy, read + written)", copy_gb_per_second()));
  fmt::print("\nSpeed of operations and of whole steps: sluice bench\n");
}

}  // namespace

void add_doctor_command(Command& app, int& exit_code) {
  Command* command = app.add_subcommand(
      "doctor",
      "features of this build and machine, and what is disabled; under mpirun or srun, a check of all ranks");
  const auto folder = std::make_shared<std::string>(".");
  command->add_option("--run-dir", *folder, "with several ranks: check that all of them see this folder (.)")
      ->type_name("FOLDER");
  command->footer(
      "Examples:\n  sluice doctor\n  SLUICE_ISA=avx2 sluice doctor\n  mpirun -n 4 --bind-to none sluice "
      "doctor --run-dir runs\n");
  command->callback([folder, &exit_code] {
    std::unique_ptr<Communicator> world;
    try {
      world = make_world();
    } catch (const Error& error) {
      // All processes find the same problem and cannot communicate: the first one reports it.
      exit_code = static_cast<int>(error.code());
      if (launcher_size().rank != 0) return;
      doctor();
      row("variables", launcher_variables());
      throw;
    }
    try {
      if (world->rank() == 0) doctor();
      if (world->size() > 1) doctor_ranks(*world, *folder);
    } catch (const Error& error) {
      if (world->size() == 1) throw;
      fmt::print(stderr, "error: rank {}: {}\n", world->rank(), error.what());
      world->abort(error.code());
    }
  });
}

}  // namespace sluice
