#include "comm/mpi.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/start_limit.h"

#if defined(SLUICE_HAS_MPI)
#define OMPI_SKIP_MPICXX 1  // without the C++ bindings, which cause warnings
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#if defined(__linux__)
#include <sys/prctl.h>

#include <csignal>
#endif
#endif

namespace sluice {

LauncherSize launcher_size() {
  using Names = std::pair<const char*, const char*>;
  for (const auto& [variable, rank] : {Names{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                       Names{"PMI_SIZE", "PMI_RANK"}, Names{"SLURM_NTASKS", "SLURM_PROCID"}})
    if (const char* text = std::getenv(variable)) {
      const char* place = std::getenv(rank);
      // In a batch script outside srun, Slurm's variables (also rank 0) are set, but no step.
      if (std::strcmp(variable, "SLURM_NTASKS") == 0 && (!place || !std::getenv("SLURM_STEP_ID"))) continue;
      int local_rank = 0;
      for (const char* local :
           {"OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"})
        if (const char* value = std::getenv(local)) {
          local_rank = std::atoi(value);
          break;
        }
      if (const int size = std::atoi(text); size > 0)
        return {size, variable, place ? std::atoi(place) : 0, local_rank};
    }
  return {};
}

#if defined(SLUICE_HAS_MPI)
namespace {

/// Largest message in bytes, because MPI counts are int. SLUICE_MPI_MAX_COUNT lowers it, for tests.
int64_t max_count() {
  static const int64_t count = [] {
    const char* text = std::getenv("SLUICE_MPI_MAX_COUNT");
    const int64_t n = text ? std::atoll(text) : 0;
    return n > 0 ? std::min<int64_t>(n, 1 << 30) : int64_t{1} << 30;
  }();
  return count;
}

constexpr const char* kAskForPmix =
    "Under srun, request PMIx (srun --mpi=pmix; `srun --mpi=list` lists the available kinds), or start with "
    "mpirun "
    "inside sbatch\n"
    "(configs/launch/slurm_mpirun.sbatch)";

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  fail(ExitCode::hang, "{}: {}", call, std::string_view(text.data(), static_cast<size_t>(length)));
}

class Mpi : public Communicator {
 public:
  explicit Mpi(MPI_Comm comm, bool world) : comm_(comm), world_(world) {
    check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(comm, &size_), "MPI_Comm_size");
  }
  ~Mpi() override {
    if (!world_)
      MPI_Comm_free(&comm_);
    else if (std::uncaught_exceptions() == 0)
      MPI_Finalize();
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "mpi"; }
  [[noreturn]] void abort(ExitCode code) override {
    MPI_Abort(MPI_COMM_WORLD, static_cast<int>(code));
    std::_Exit(static_cast<int>(code));
  }

 protected:
  void do_barrier() override { check(MPI_Barrier(comm_), "MPI_Barrier"); }
  void do_broadcast(void* data, int64_t bytes, int root) override {
    for (int64_t done = 0; done < bytes; done += max_count())
      check(MPI_Bcast(static_cast<char*>(data) + done, piece(bytes, done), MPI_BYTE, root, comm_),
            "MPI_Bcast");
  }
  void do_all_gather(void* all, const void* mine, int64_t bytes) override {
    char* place = static_cast<char*>(all) + rank_ * bytes;
    if (place != mine && bytes > 0) std::memcpy(place, mine, static_cast<size_t>(bytes));
    if (bytes <= max_count()) {
      check(MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, all, static_cast<int>(bytes), MPI_BYTE, comm_),
            "MPI_Allgather");
      return;
    }
    std::vector<int64_t> offsets(static_cast<size_t>(size_)), sizes(static_cast<size_t>(size_), bytes),
        same(offsets.size(), 0);
    for (int r = 0; r < size_; ++r) offsets[static_cast<size_t>(r)] = r * bytes;
    exchange(all, offsets, sizes, place, same, sizes);
  }
  void do_all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                       const int64_t* sent_bytes) override {
    std::vector<int64_t> to, from, sent_sizes(sent_bytes, sent_bytes + size_),
        sizes(received_bytes, received_bytes + size_);
    int64_t a = 0, b = 0;
    for (int r = 0; r < size_; ++r) {
      to.push_back(a);
      from.push_back(b);
      a += sent_bytes[r];
      b += received_bytes[r];
    }
    SLUICE_CHECK(sent_bytes[rank_] == received_bytes[rank_],
                 "all_to_all_v: rank {} sends {} bytes to itself, expects {}", rank_, sent_bytes[rank_],
                 received_bytes[rank_]);
    if (sent_bytes[rank_] > 0)
      std::memcpy(static_cast<char*>(received) + from[static_cast<size_t>(rank_)],
                  static_cast<const char*>(sent) + to[static_cast<size_t>(rank_)],
                  static_cast<size_t>(sent_bytes[rank_]));
    exchange(received, from, sizes, sent, to, sent_sizes);
  }
  void do_send(const void* data, int64_t bytes, int to) override {
    for (int64_t done = 0; done < bytes || done == 0; done += max_count())
      check(MPI_Send(static_cast<const char*>(data) + done, piece(bytes, done), MPI_BYTE, to, 0, comm_),
            "MPI_Send");
  }
  void do_receive(void* data, int64_t bytes, int from) override {
    for (int64_t done = 0; done < bytes || done == 0; done += max_count())
      check(MPI_Recv(static_cast<char*>(data) + done, piece(bytes, done), MPI_BYTE, from, 0, comm_,
                     MPI_STATUS_IGNORE),
            "MPI_Recv");
  }
  std::unique_ptr<Communicator> do_split(int colour, int key) override {
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, colour, key, &part), "MPI_Comm_split");
    return std::make_unique<Mpi>(part, false);
  }

 private:
  static int piece(int64_t bytes, int64_t done) {
    return static_cast<int>(std::min(max_count(), bytes - done));
  }

  /// Exchanges messages with every other rank, at the given offsets, in pieces.
  void exchange(void* received, const std::vector<int64_t>& from, const std::vector<int64_t>& received_bytes,
                const void* sent, const std::vector<int64_t>& to, const std::vector<int64_t>& sent_bytes) {
    std::vector<MPI_Request> requests;
    for (int step = 1; step < size_; ++step) {
      const int source = (rank_ - step + size_) % size_;
      const auto s = static_cast<size_t>(source);
      for (int64_t done = 0; done < received_bytes[s]; done += max_count()) {
        requests.emplace_back();
        check(MPI_Irecv(static_cast<char*>(received) + from[s] + done, piece(received_bytes[s], done),
                        MPI_BYTE, source, 1, comm_, &requests.back()),
              "MPI_Irecv");
      }
    }
    for (int step = 1; step < size_; ++step) {
      const int target = (rank_ + step) % size_;
      const auto t = static_cast<size_t>(target);
      for (int64_t done = 0; done < sent_bytes[t]; done += max_count()) {
        requests.emplace_back();
        check(MPI_Isend(static_cast<const char*>(sent) + to[t] + done, piece(sent_bytes[t], done), MPI_BYTE,
                        target, 1, comm_, &requests.back()),
              "MPI_Isend");
      }
    }
    check(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE),
          "MPI_Waitall");
  }

  MPI_Comm comm_;
  bool world_;
  int rank_ = 0, size_ = 1;
};

}  // namespace

bool built_with_mpi() { return true; }

std::string mpi_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  const std::string all(text.data(), static_cast<size_t>(length));
  return all.substr(0, all.find_first_of(",\n"));
}

std::unique_ptr<Communicator> make_world(double limit_seconds) {
  const LauncherSize launcher = launcher_size();
  if (launcher.size == 0) return make_local_communicator();
#if defined(__linux__)
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // end this rank if the launcher dies
#endif
  // Open MPI would end the process with its own message.
  if (launcher.variable == std::string("SLURM_NTASKS") && !std::getenv("PMIX_RANK") &&
      mpi_version().starts_with("Open MPI")) {
    if (launcher.size == 1) return make_local_communicator();
    fail(ExitCode::usage, "srun started {} processes without PMIx, which {} needs to connect them\n{}",
         launcher.size, mpi_version(), kAskForPmix);
  }
  // Another PMI works only if MPI was built for it; otherwise the process ends in MPI_Init.
  if (launcher.variable == std::string("PMI_SIZE") && launcher.rank == 0 && std::getenv("SLURM_STEP_ID") &&
      !std::getenv("PMIX_RANK") && mpi_version().starts_with("Open MPI"))
    std::fprintf(stderr,
                 "note: srun offers PMI2, which few builds of Open MPI can use. Should this fail:\n%s\n",
                 kAskForPmix);
  int provided = 0;
  const StartLimit limit(
      launcher.rank, limit_seconds,
      fmt::format(
          "MPI_Init has not returned for {} s: some of the {} processes that the launcher started have not "
          "called it (is each of them this program with the same command?)",
          limit_seconds, launcher.size));
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS)
    fail(ExitCode::internal, "MPI_Init_thread failed");
  auto world = std::make_unique<Mpi>(MPI_COMM_WORLD, true);
  if (world->size() == launcher.size) return world;
  fail(ExitCode::usage,
       "{} says that {} processes were started, but MPI sees {}: each would train alone.\n{}; under mpirun, "
       "use the mpirun of {}",
       launcher.variable, launcher.size, world->size(), kAskForPmix, mpi_version());
}

#else

bool built_with_mpi() { return false; }
std::string mpi_version() { return ""; }

std::unique_ptr<Communicator> make_world(double) {
  const LauncherSize launcher = launcher_size();
  if (launcher.size > 1)
    fail(ExitCode::usage,
         "{} says that {} processes were started, but this program was built without MPI: each would train "
         "alone",
         launcher.variable, launcher.size);
  return make_local_communicator();
}

#endif

}  // namespace sluice
