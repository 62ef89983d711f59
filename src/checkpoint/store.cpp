#include "checkpoint/store.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "checkpoint/rotation.h"
#include "checkpoint/write.h"
#include "comm/collective_errors.h"
#include "core/caught.h"
#include "core/io.h"
#include "core/repeated_warning.h"
#include "core/start_thread.h"

namespace sluice {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// A number unique to this call over all processes.
int64_t nonce() {
  return static_cast<int64_t>(::getpid()) * 1'000'000'007 +
         std::chrono::system_clock::now().time_since_epoch().count() % 1'000'000'007;
}

/// What a rank sends to the others before a save starts.
struct Offer {
  int64_t step, bytes;
  int64_t has_weights, has_optimizer;
  int64_t nonce;  // of rank 0: makes the name of the staging folder unique
};

/// Approximate size of the files in a folder into which others are writing.
int64_t bytes_in(const std::string& folder) {
  int64_t bytes = 0;
  if (!io::is_directory(folder)) return 0;
  for (const std::string& name : io::list_directory(folder)) {
    try {
      bytes += io::file_size(folder + "/" + name);
    } catch (const io::IoError&) {  // renamed after it was listed
    }
  }
  return bytes;
}

}  // namespace

struct CheckpointStore::Impl {
  /// State of this rank's writer.
  enum class State : int64_t { idle, writing, done, failed };

  std::string folder;
  CheckpointConfig config;
  Context* ctx = nullptr;  // for tensors on a GPU
  std::unique_ptr<Communicator> alone;
  Communicator* ranks = nullptr;
  std::optional<Arena> memory;        // of the snapshot; absent if live host memory is written directly
  std::map<std::string, bool> valid;  // validity known to rotation; used by one save at a time
  std::function<void()> guard = [] {};
  std::thread writer;
  std::optional<SaveJob> current;  // the writer's
  RepeatedWarning failures;
  bool warned_of_threads = false;  // that no thread can be started
  Patience patience;
  bool
      begun = false,
      hangs =
          false;  // begun: a save has to be concluded; hangs: it timed out once with its writer still running

  mutable std::mutex mutex;  // guards the members below
  State state = State::idle;
  int64_t saved_step = -1;
  std::string error;  // of the last save: this rank's until all ranks have concluded, then the common one

  bool leads() const { return ranks->rank() == 0; }
  bool several() const { return ranks->size() > 1; }
  void set_error(const std::string& text) {
    const std::lock_guard lock(mutex);
    error = text;
  }
  std::string last_error() const {
    const std::lock_guard lock(mutex);
    return error;
  }
  void set_state(State s) {
    const std::lock_guard lock(mutex);
    state = s;
  }
  State get_state() const {
    const std::lock_guard lock(mutex);
    return state;
  }

  /// Collective. Rank 0 creates and cleans the folder. If other ranks did not see it, every save would run
  /// into its timeout, so they look for a probe folder that rank 0 creates there.
  void open_folder() const {
    std::string probe, problem;
    if (leads()) {
      try {
        if (io::is_link(folder))
          fail(ExitCode::cannot_create,
               "{} is a symbolic link, and checkpoints are written and removed only in a folder of the run; "
               "to "
               "keep them on another disk, put run_dir there",
               folder);
        io::make_directories(folder);
        remove_litter(folder);
        probe = fmt::format("{}/{}probe-{:x}", folder, kStagingPrefix, nonce());
        if (several()) io::make_directories(probe);
      } catch (const Error& error_here) {
        if (!several()) throw;
        problem = error_here.what();
      }
    }
    if (!several()) return;
    broadcast_text(*ranks, probe, 0);
    broadcast_text(*ranks, problem, 0);
    if (!problem.empty()) fail(ExitCode::cannot_create, "{}", problem);
    constexpr double kSeen = 5;  // seconds within which a network file system shows new entries
    for (const double start = now(); !io::exists(probe);) {
      if (now() - start > std::min(kSeen, config.timeout_seconds)) {
        problem = fmt::format(
            "{} is not the folder that rank 0 sees: checkpoints need a file system shared by all ranks",
            folder);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    problem = first_problem(*ranks, problem);
    if (leads()) io::remove_tree(probe);
    if (!problem.empty()) fail(ExitCode::usage, "{}", problem);
  }

  /// Reports a failed save; rank 0 logs it.
  void failed(int64_t step, const std::string& problem) {
    set_error(fmt::format("checkpoint of step {}: {}", step, problem));
    if (leads())
      failures.warn(fmt::format("{}; earlier checkpoints are untouched{}; the next save tries again",
                                last_error(), newest()));
  }

  /// ", the newest is PATH", or nothing.
  std::string newest() const {
    try {
      const std::vector<std::string> all = list_checkpoints(folder);
      return all.empty() ? "" : ", the newest is " + all.front();
    } catch (const Error&) {
      return "";
    }
  }

  /// This rank's part of a save; any failure becomes a warning.
  void run() {
    try {
      if (leads()) {
        lead();
      } else {
        try {
          write_part(*current, write_files(*current));
        } catch (const std::exception&) {
          write_failure(*current, caught_error().what());
          throw;
        }
      }
      set_state(State::done);
    } catch (const std::exception&) {
      const std::string problem = caught_error().what();
      // Rank 0 reports the outcome; another rank's problem is reported only if rank 0 does not know it.
      if (leads())
        failed(current->step, problem);
      else
        set_error(problem);
      set_state(State::failed);
    }
  }

  void lead() {
    guard();
    const std::string final_path = folder + "/" + step_folder_name(current->step);
    io::make_directories(folder);  // it may have been removed in the meantime
    remove_litter(folder, current->staging.substr(folder.size() +
                                                  1));  // of a failed save; other ranks may have started
    check_space();
    try {
      Manifest manifest = collect_parts(*current, write_files(*current), patience);
      // What was written may be of two steps: without a snapshot it was the memory that training goes on in.
      if (!memory && patience.ended)
        fail(ExitCode::save_failed, "not written within {} s, and training has gone on",
             config.timeout_seconds);
      finish_staging(*current, manifest);
      guard();
      publish(*current, final_path);
    } catch (const std::exception& problem) {
      const auto* file = dynamic_cast<const io::IoError*>(&problem);
      const bool full = file && (file->error_number() == ENOSPC || file->error_number() == EDQUOT);
      const int64_t available =
          full && io::exists(folder) ? io::free_bytes(folder) : 0;  // before leftovers are removed
      remove_staging();
      if (full) fail(file->code(), "{}; {}", file->what(), space_text(current->all_bytes, available));
      throw;
    }
    {
      const std::lock_guard lock(mutex);
      saved_step = current->step;
    }
    failures.over();
    valid[final_path] = true;
    tidy(final_path);
  }

  void remove_staging() const {
    try {
      io::remove_tree(current->staging);
    } catch (const Error& leftover) {
      // If other ranks are still writing into it, the next save removes it.
      if (!several()) spdlog::warn("left by a failed save: {}", leftover.what());
    }
  }

  static std::string space_text(int64_t need, int64_t available) {
    return fmt::format("{:.1f} MiB needed, {:.1f} MiB free", static_cast<double>(need) / (1 << 20),
                       static_cast<double>(available) / (1 << 20));
  }

  void check_space() const {
    int64_t need = kSpareBytes + current->all_bytes;
    if (several())
      need -= bytes_in(
          current->staging);  // files of other ranks are no longer needed, but their space is not free yet
    const int64_t available = io::free_bytes(folder);
    if (available < need)
      fail(ExitCode::cannot_create, "not enough space in {}: {}", folder, space_text(need, available));
  }

  /// After the checkpoint is durable: updates LATEST, a hint for people, and removes old checkpoints. A
  /// failure here only wastes space.
  void tidy(const std::string& newest) {
    try {
      guard();
      io::write_file_atomic(folder + "/LATEST", newest.substr(newest.rfind('/') + 1) + "\n");
      if (!current->keep_all)
        rotate_checkpoints(folder, config.keep_last, config.keep_every_steps, newest, valid);
      remove_litter(folder);
    } catch (const std::exception& problem) {
      spdlog::warn("after the checkpoint {} was saved: {}", newest, problem.what());
    }
  }

  /// Collective. All ranks agree on one job, or on the reason why there is none.
  std::optional<SaveJob> agree_on_job(const CheckpointContent& content, bool keep_all) {
    SaveJob job;
    std::string problem;
    try {
      job.step = content.step;
      job.keep_all = keep_all;
      Arena* to = memory ? &*memory : nullptr;
      if (to) to->rewind(0);
      job.weights = take_items(content.weights, false, to, ctx);
      job.optimizer = take_items(content.optimizer, true, to, ctx);
      if (leads()) {
        job.state = content.state.dump(1) + "\n";
        job.config_yaml = content.config_yaml;
        job.hf_config = content.hf_config.dump(2) + "\n";
        job.tokenizer_model = content.tokenizer_model;
      }
    } catch (const std::exception&) {
      problem = caught_error().what();
    }
    problem = first_problem(*ranks, problem);
    if (!problem.empty()) {
      failed(content.step, problem);
      return {};
    }
    Offer mine{content.step, std::ssize(job.tokenizer_model), !job.weights.empty(), !job.optimizer.empty(),
               nonce()};
    for (const auto* items : {&job.weights, &job.optimizer})
      for (const SaveItem& item : *items) mine.bytes += item.bytes();
    std::vector<Offer> offers(static_cast<size_t>(ranks->size()));
    ranks->all_gather(offers.data(), &mine, sizeof(mine));
    for (const Offer& offer : offers) {
      SLUICE_CHECK(offer.step == offers[0].step, "save: rank 0 saves step {}, another rank step {}",
                   offers[0].step, offer.step);
      job.all_bytes += offer.bytes;
    }
    job.rank = ranks->rank();
    job.ranks = ranks->size();
    job.folder = folder;
    job.staging =
        fmt::format("{}/{}{}-{:x}", folder, kStagingPrefix, step_folder_name(job.step), offers[0].nonce);
    job.weights_file = my_file(kWeightsKind, offers, &Offer::has_weights);
    job.optimizer_file = my_file(kOptimizerKind, offers, &Offer::has_optimizer);
    return job;
  }

  /// File numbers count only ranks with data; if there are none, rank 0 writes an empty file.
  std::string my_file(const char* kind, std::vector<Offer>& offers, int64_t Offer::*has) const {
    int count = 0, before = 0;
    for (size_t r = 0; r < offers.size(); ++r) {
      count += offers[r].*has != 0;
      before += static_cast<int>(r) < ranks->rank() && offers[r].*has != 0;
    }
    if (count == 0) return leads() ? shard_name(kind, 0, 1) : "";
    return offers[static_cast<size_t>(ranks->rank())].*has ? shard_name(kind, before, count) : "";
  }

  /// Collective. Waits until no rank is writing, then broadcasts rank 0's outcome. Returns false if a writer
  /// hangs.
  bool conclude() {
    if (!begun) return true;
    const double start = now();
    int failed_first = -1;  // of the other ranks; later failures may be caused by rank 0's cleanup
    for (auto pause = std::chrono::milliseconds(1);;
         pause = std::min(pause * 2, std::chrono::milliseconds(20))) {
      struct Look {
        State state;
        int64_t late;
      };
      const Look mine{get_state(), leads() && (hangs || now() - start > config.timeout_seconds + 1)};
      std::vector<Look> all(static_cast<size_t>(ranks->size()));
      ranks->all_gather(all.data(), &mine, sizeof(mine));
      const auto any = [&](State s) {
        return std::any_of(all.begin(), all.end(), [&](const Look& l) { return l.state == s; });
      };
      if (any(State::failed)) patience.ended = true;
      for (int r = 1; r < ranks->size() && failed_first < 0; ++r)
        if (all[static_cast<size_t>(r)].state == State::failed) failed_first = r;
      if (!any(State::writing)) break;
      if (all[0].late) {
        hangs = patience.ended = true;
        return false;
      }
      std::this_thread::sleep_for(pause);
    }
    if (writer.joinable()) writer.join();
    begun = hangs = false;
    if (!several()) return true;
    const std::string problem = first_problem(*ranks, ranks->rank() == failed_first ? last_error() : "");
    std::string verdict = last_error();
    // A rank that could not write its reason to the folder sends it here.
    if (leads() && get_state() == State::failed && !problem.empty() &&
        verdict.find(problem) == std::string::npos) {
      spdlog::warn("{}", problem);
      verdict += "; " + problem;
    }
    broadcast_text(*ranks, verdict, 0);
    int64_t durable = saved();
    ranks->broadcast(&durable, sizeof(durable), 0);
    const std::lock_guard lock(mutex);
    error = verdict;
    saved_step = durable;
    return true;
  }

  int64_t saved() const {
    const std::lock_guard lock(mutex);
    return saved_step;
  }

  void begin(SaveJob agreed) {
    current = std::move(agreed);
    begun = true;
    patience.ended = false;
    patience.seconds = config.timeout_seconds;
    set_state(State::writing);
    if (!config.async && !several()) return run();
    // With several ranks the writer always has a thread, because the ranks must communicate while it runs.
    std::string problem;
    if (start_thread(
            writer, [this] { run(); }, problem))
      return;
    if (!warned_of_threads)
      spdlog::warn("checkpoints: {}; training waits while they are written (reported once)", problem);
    warned_of_threads = true;
    // No rank waits for a message here: rank 0 waits for files, the others for nothing.
    run();
  }
};

CheckpointStore::CheckpointStore(std::string folder, const CheckpointConfig& config,
                                 const CheckpointContent& content, Context* ctx, Communicator* ranks)
    : impl_(std::make_unique<Impl>()) {
  impl_->folder = std::move(folder);
  impl_->config = config;
  impl_->ctx = ctx;
  if (!ranks) impl_->alone = make_local_communicator();
  impl_->ranks = ranks ? ranks : impl_->alone.get();
  impl_->open_folder();
  bool on_gpu = false;
  for (const auto* tensors : {&content.weights, &content.optimizer})
    for (const NamedTensor& t : *tensors) on_gpu |= t.tensor.device != Device::cpu;
  SLUICE_CHECK(!on_gpu || ctx, "CheckpointStore: tensors on a GPU need a context");
  if (config.async || on_gpu)
    impl_->memory.emplace("checkpoint snapshot", std::max<int64_t>(snapshot_bytes(content), 64));
}

CheckpointStore::~CheckpointStore() {
  // No collective here: other ranks may be gone, so their parts may never arrive, and the wait is short.
  constexpr double kLeaving = 10;
  if (impl_->patience.seconds > kLeaving) impl_->patience.seconds = kLeaving;
  if (impl_->writer.joinable()) impl_->writer.join();
}

void CheckpointStore::set_guard(std::function<void()> check) { impl_->guard = std::move(check); }

void CheckpointStore::move(const std::string& folder) {
  impl_->folder = folder;
  impl_->valid.clear();
}

void CheckpointStore::save(const CheckpointContent& content, bool keep_all) {
  if (!impl_->conclude()) {
    impl_->failed(content.step, "the previous save has not ended: a rank's files are still being written");
    return;
  }
  impl_->set_error("");
  std::optional<SaveJob> job = impl_->agree_on_job(content, keep_all);
  if (!job) return;
  impl_->begin(std::move(*job));
  if (!impl_->config.async && !impl_->conclude())
    impl_->failed(content.step,
                  fmt::format("a rank's files are still being written after {} s; training goes on",
                              impl_->config.timeout_seconds));
}

bool CheckpointStore::wait() {
  if (!impl_->conclude())
    impl_->set_error("the last save has not ended: a rank's files are still being written");
  return last_error().empty();
}

int64_t CheckpointStore::saved_step() const { return impl_->saved(); }

std::string CheckpointStore::path_of(int64_t step) const {
  return impl_->folder + "/" + step_folder_name(step);
}

std::string CheckpointStore::last_error() const { return impl_->last_error(); }

}  // namespace sluice
