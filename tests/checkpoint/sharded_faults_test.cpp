// One rank of several dies, cannot write, or never finishes, at every operation of a save: no older
// checkpoint is lost, all ranks get the same result, and training continues.
#include <spdlog/spdlog.h>
#include <sys/syscall.h>

#include <filesystem>

#include "checkpoint/rotation.h"
#include "checkpoint/sharded_toy.h"
#include "checkpoint/write.h"
#include "core/parallel_for.h"
#include "support/process_ranks.h"
#include "support/temp_folder.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Matchers::Contains;

namespace {

/// Every operation with SLUICE_CRASH_ALL=1, otherwise some.
int stride(int some) { return std::getenv("SLUICE_CRASH_ALL") ? 1 : some; }

/// Exit statuses of the ranks of a trial.
constexpr int kSaved = 10, kFailed = 11, kDisagree = 12, kNextFailed = 13;

int exit_status(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

/// Whether all ranks have the same verdict: text and step.
bool agree(Communicator& c, CheckpointStore& store) {
  struct Verdict {
    uint64_t error;
    int64_t step;
  };
  const Verdict mine{std::hash<std::string>()(store.last_error()), store.saved_step()};
  std::vector<Verdict> all(static_cast<size_t>(c.size()));
  c.all_gather(all.data(), &mine, sizeof(mine));
  return std::all_of(all.begin(), all.end(),
                     [&](const Verdict& v) { return v.error == mine.error && v.step == mine.step; });
}

/// A run folder with checkpoints of steps 10 and 20 from `ranks` ranks, copied again for every trial.
class Trials {
 public:
  explicit Trials(int ranks) : ranks_(ranks) {
    spdlog::set_level(spdlog::level::off);  // hundreds of expected warnings
    set_num_threads(1);                     // the thread pool would not survive a fork
    for (const int64_t step : {10, 20})
      for (const int status :
           run_process_ranks(ranks, [&](Communicator& c) { return save(c, root_ / "seed", step, false); }))
        REQUIRE(exit_status(status) == kSaved);
  }
  ~Trials() {
    spdlog::set_level(spdlog::level::info);
    set_num_threads(threads_);
  }
  std::string fresh() {
    io::remove_tree(root_ / "trial");
    std::filesystem::copy(root_ / "seed", root_ / "trial", std::filesystem::copy_options::recursive);
    return root_ / "trial";
  }
  static int save(Communicator& c, const std::string& folder, int64_t step, bool async) {
    ShardedState state(step);
    const CheckpointContent content = content_of(state, even_layout(state, c.size()), c.rank());
    CheckpointStore store(folder, checkpoint_config_of(async), content, nullptr, &c);
    store.save(content);
    const bool ok = store.wait();
    return !agree(c, store) ? kDisagree : ok ? kSaved : kFailed;
  }

 private:
  TempFolder root_;
  int ranks_, threads_ = num_threads();
};

/// The step of the newest checkpoint, after checking that it is valid and all its values belong to that step.
int64_t newest(const std::string& folder) {
  const CheckpointInfo info = newest_valid_checkpoint(folder);
  REQUIRE_FALSE(info.path.empty());
  REQUIRE(list_checkpoints(folder).front() == info.path);  // everything named like a checkpoint is one
  const ShardedState state(info.step);
  ShardedState loaded = state.blank();
  const CheckpointContent targets = content_of(loaded, even_layout(state, 1), 0);
  load_checkpoint(info.path, targets.weights, targets.optimizer);
  REQUIRE(loaded.bits() == state.bits());
  return info.step;
}

bool has_litter(const std::string& folder) {
  const auto names = io::list_directory(folder);
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name != "LATEST" && step_of_folder_name(name) < 0;
  });
}

}  // namespace

TEST_CASE("a kill of any rank at any operation of a save leaves a complete checkpoint", "[sharded][crash]") {
  const int ranks = GENERATE(2, 3);
  Trials trials(ranks);
  int kills = 0, newer = 0;
  for (int victim = 0; victim < ranks; ++victim)
    for (int n = 1 + victim;; n += stride(5)) {
      REQUIRE(n < 300);
      const std::string folder = trials.fresh();
      const bool torn = n % 2 == 0, async = n % 3 == 0;
      INFO("rank " << victim << " of " << ranks << " killed at operation " << n << (torn ? ", torn" : ""));
      const auto statuses = run_process_ranks(
          ranks,
          [&](Communicator& c) {
            if (c.rank() == victim)
              ::setenv("SLUICE_CRASH", fmt::format("{}{}", n, torn ? ":torn" : "").c_str(), 1);
            return Trials::save(c, folder, 30, async);
          },
          n % 4);  // the others continue for this many milliseconds
      const int64_t step = newest(folder);
      REQUIRE((step == 20 || step == 30));
      newer += step == 30;
      const bool killed = WIFSIGNALED(statuses[static_cast<size_t>(victim)]);
      // The next start, with another number of ranks, cleans up and saves.
      if (n % 2 == 0)
        for (const int status :
             run_process_ranks(2, [&](Communicator& c) { return Trials::save(c, folder, 40, true); }))
          REQUIRE(exit_status(status) == kSaved);
      else
        REQUIRE(run_process_ranks(1, [&](Communicator& c) {
                  return Trials::save(c, folder, 40, false);
                })[0] == kSaved << 8);
      REQUIRE(newest(folder) == 40);
      REQUIRE_FALSE(has_litter(folder));
      if (!killed) {
        for (const int status : statuses) REQUIRE(exit_status(status) == kSaved);
        break;
      }
      ++kills;
    }
  CHECK(kills >= 60 / stride(5));
  CHECK(newer >= 2);
}

TEST_CASE("an error at any operation of any rank fails at most that save, and all ranks report it",
          "[sharded][crash]") {
  const int ranks = GENERATE(2, 3);
  Trials trials(ranks);
  int failures = 0, trial = 0;
  for (const char* error : {"ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE", "EDQUOT"})
    for (int victim = 0; victim < ranks; ++victim)
      for (int n = 1 + (trial++ * 3) % stride(11);; n += stride(11)) {
        REQUIRE(n < 300);
        const std::string folder = trials.fresh();
        const bool sticky = n % 3 == 0, async = n % 2 == 0;
        INFO(error << " of rank " << victim << " of " << ranks << " at operation " << n
                   << (sticky ? " and all after it" : ""));
        const auto statuses = run_process_ranks(ranks, [&](Communicator& c) {
          ShardedState state(30), next(40);
          const Layout layout = even_layout(state, c.size());
          const CheckpointContent content = content_of(state, layout, c.rank());
          CheckpointStore store(folder, checkpoint_config_of(async), content, nullptr, &c);
          if (c.rank() == victim)
            ::setenv("SLUICE_IOFAIL", fmt::format("{}:{}{}", n, error, sticky ? ":sticky" : "").c_str(), 1);
          store.save(content);
          const bool ok = store.wait();
          const bool same =
              agree(c, store) && ok == (store.saved_step() == 30) && ok == store.last_error().empty();
          const bool named = ok || store.last_error().find(error) != std::string::npos;
          // Was it reached? With fewer operations than n the fault is still pending.
          int64_t reached = 1;
          if (c.rank() == victim) {
            try {
              io::make_directories(folder + "/.trash-probe");
            } catch (const io::IoError&) {
              reached = sticky ? 1 : 0;
            }
            ::unsetenv("SLUICE_IOFAIL");
          }
          c.broadcast(&reached, sizeof(reached), victim);
          store.save(content_of(next, layout, c.rank()));
          if (!store.wait() || store.saved_step() != 40 || !agree(c, store)) return kNextFailed;
          return !same || !named ? kDisagree : !ok ? kFailed : reached ? kSaved : 0;
        });
        for (const int status : statuses) REQUIRE(exit_status(status) == exit_status(statuses[0]));
        const int outcome = exit_status(statuses[0]);
        REQUIRE((outcome == kSaved || outcome == kFailed || outcome == 0));
        failures += outcome == kFailed;
        REQUIRE(newest(folder) == 40);
        REQUIRE_FALSE(has_litter(folder));
        if (outcome == 0 || (sticky && outcome == kSaved)) break;
      }
  CHECK(failures >= 100 / stride(11));
}

namespace {

std::atomic<bool> released{false};
void hang_here(int) {
  while (!released) ::usleep(1000);
}

/// Stops all threads of the process but this one.
void stop_writer() {
  struct sigaction action {};
  action.sa_handler = hang_here;
  ::sigaction(SIGUSR1, &action, nullptr);
  for (const std::string& name : io::list_directory("/proc/self/task"))
    if (const int tid = std::stoi(name); tid != ::getpid()) ::syscall(SYS_tgkill, ::getpid(), tid, SIGUSR1);
}

}  // namespace

TEST_CASE("a rank that never finishes its part fails the save after the time limit", "[sharded][crash]") {
  const int victim = GENERATE(0, 1);
  Trials trials(2);
  constexpr int kTooFast = 9;  // the writer was done before it could be stopped, as may be on a busy machine
  const auto attempt = [&](Communicator& c, const std::string& folder) {
    std::vector<float> big(size_t{8} << 20, 1.0f);  // long enough to be caught while it is written
    ShardedState state(30);
    CheckpointContent content = content_of(state, even_layout(state, 2), c.rank());
    content.optimizer.push_back(
        {fmt::format("big{}", c.rank()), Tensor(big.data(), DType::f32, {std::ssize(big)})});
    CheckpointStore store(folder, checkpoint_config_of(true, 0.4), content, nullptr, &c);
    const auto begin = std::chrono::steady_clock::now();
    store.save(content);
    if (c.rank() == victim) stop_writer();
    if (store.wait()) return kTooFast;
    if (store.saved_step() != -1) return 1;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (seconds < 0.4 || seconds > 60) return 2;
    if (!agree(c, store)) return 3;
    store.save(content);  // is refused immediately, and training continues
    if (store.last_error().find("has not ended") == std::string::npos || !agree(c, store)) return 4;
    c.barrier();
    released = true;
    content.step = 31;
    for (int i = 0; i < 200 && store.saved_step() != 31; ++i) {
      ::usleep(10000);
      c.barrier();
      store.save(content);
      store.wait();
    }
    return store.saved_step() == 31 && agree(c, store) ? kSaved : 5;
  };
  std::string folder;
  std::vector<int> statuses;
  for (int tries = 0; tries < 10; ++tries) {
    folder = trials.fresh();
    statuses = run_process_ranks(2, [&](Communicator& c) { return attempt(c, folder); });
    if (exit_status(statuses[0]) != kTooFast) break;
  }
  for (const int status : statuses) CHECK(exit_status(status) == kSaved);
  CHECK(list_checkpoints(folder).front() == folder + "/step_00000031");
  CHECK_FALSE(has_litter(folder));
}

TEST_CASE("parts that are damaged, failed or of another step are not accepted", "[sharded]") {
  const TempFolder folder;
  ShardedState state(30);
  const Layout layout = even_layout(state, 2);
  const auto job_of = [&](int rank) {
    const CheckpointContent content = content_of(state, layout, rank);
    SaveJob job;
    job.step = 30;
    job.rank = rank;
    job.ranks = 2;
    job.folder = folder.path;
    job.staging = folder / ".staging-x";
    job.weights_file = shard_name(kWeightsKind, rank, 2);
    job.optimizer_file = shard_name(kOptimizerKind, rank, 2);
    job.weights = take_items(content.weights, false, nullptr, nullptr);
    job.optimizer = take_items(content.optimizer, true, nullptr, nullptr);
    return job;
  };
  SaveJob lead = job_of(0), follower = job_of(1);
  const Manifest mine = write_files(lead);
  const std::string part = lead.staging + "/part-00001.json";
  Patience patience;
  patience.seconds = 0.02;
  CHECK_THROWS_WITH(collect_parts(lead, mine, patience),
                    Contains("rank 1 did not write its part within 0.02 s"));
  patience.ended = true;
  CHECK_THROWS_WITH(collect_parts(lead, mine, patience), Contains("no part from rank 1"));
  Manifest theirs = write_files(follower);
  write_part(follower, theirs);
  CHECK(collect_parts(lead, mine, patience).files.size() ==
        7);  // parts present when the waiting ended are counted
  const std::string good = io::read_file(part);
  std::string bad = good;
  bad[bad.size() / 2] ^= 1;
  io::write_file_atomic(part, bad);
  CHECK_THROWS_WITH(collect_parts(lead, mine, patience), Contains("part-00001.json: damaged"));
  theirs.step = 20;
  io::write_file_atomic(part, theirs.text());
  CHECK_THROWS_WITH(collect_parts(lead, mine, patience), Contains("rank 1 has written step 20"));
  io::remove_file(part);
  write_failure(follower, "cannot write x");
  CHECK_THROWS_WITH(collect_parts(lead, mine, patience), Contains("rank 1: cannot write x"));
}
