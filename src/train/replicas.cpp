#include "train/replicas.h"

#include <spdlog/fmt/fmt.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>

#include "comm/collective_errors.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "ops/bit_sum.h"

namespace sluice {
namespace {

uint64_t hash_of(const std::string& text) { return XXH3_64bits(text.data(), text.size()); }

/// The same of a tensor in host memory, by all threads, at the rate at which memory is read.
uint64_t hash_of(const Tensor& t) {
  constexpr int64_t kChunk = 1 << 20;
  const int64_t bytes = t.numel() * dtype_size(t.dtype);
  const auto* const data = static_cast<const char*>(t.data);
  std::atomic<uint64_t> sum{0};
  parallel_for((bytes + kChunk - 1) / kChunk, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      sum +=
          XXH3_64bits_withSeed(data + i * kChunk, static_cast<size_t>(std::min(kChunk, bytes - i * kChunk)),
                               static_cast<uint64_t>(i));
  });
  return sum;
}

/// One hash of all that a rank holds.
struct Summary {
  uint64_t dense = 0, experts = 0;
  int64_t expert_rank = 0;  // which experts it holds
  int64_t changed = 0;      // 1: it found its own memory changed
};

}  // namespace

std::vector<int> ranks_in_doubt(const std::vector<int>& ranks, const std::vector<uint64_t>& hashes) {
  std::map<uint64_t, size_t> count;
  for (const uint64_t hash : hashes) ++count[hash];
  if (count.size() < 2) return {};
  std::vector<int> doubtful;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (2 * count[hashes[i]] <= hashes.size()) doubtful.push_back(ranks[i]);
  return doubtful;
}

ReplicaCheck::ReplicaCheck(int64_t every_steps, const Mesh& mesh, bool alone)
    : every_steps_(alone || mesh.tokens().size() > 1 ? every_steps : 0), mesh_(mesh) {}

void ReplicaCheck::allocate(std::vector<Replica> replicas, Arena& device, Arena& host, bool on_gpu) {
  if (!active()) return;
  replicas_ = std::move(replicas);
  hashes_.assign(replicas_.size() + 1, 0);
  if (!on_gpu) return;
  const int64_t count = std::max<int64_t>(std::ssize(replicas_), 1);
  sums_ = device.alloc("hashes of replicas", DType::i32, {count, 2});
  host_sums_ = host.alloc("hashes of replicas", DType::i32, {count, 2});
}

void ReplicaCheck::compare(Context& ctx, Communicator& ranks, int64_t step, const std::string& state,
                           const std::string& changed) {
  if (sums_) {
    for (size_t i = 0; i < replicas_.size(); ++i)
      bit_sum(ctx, sums_.rows(static_cast<int64_t>(i), 1), replicas_[i].tensor, 0, i);
    if (ctx.dry_run) return;
    copy(ctx, host_sums_, sums_);
    synchronize(ctx);
    std::memcpy(hashes_.data(), host_sums_.data, replicas_.size() * sizeof(uint64_t));
  } else {
    if (ctx.dry_run) return;
    for (size_t i = 0; i < replicas_.size(); ++i) hashes_[i] = hash_of(replicas_[i].tensor);
  }
  hashes_.back() = hash_of(state);

  Summary mine{.expert_rank = mesh_.expert().rank(), .changed = !changed.empty()};
  for (size_t i = 0; i < hashes_.size(); ++i) {
    uint64_t& sum = of_expert(i) ? mine.experts : mine.dense;
    sum += mixed_bits(hashes_[i] + i);
  }
  std::vector<Summary> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(all.data(), &mine, sizeof mine);
  std::map<int64_t, uint64_t> experts;
  bool equal = true;
  std::vector<int> expert_ranks, finders;
  for (const Summary& s : all) {
    if (s.changed) finders.push_back(static_cast<int>(&s - all.data()));
    equal = equal && s.dense == all[0].dense &&
            experts.emplace(s.expert_rank, s.experts).first->second == s.experts;
    expert_ranks.push_back(static_cast<int>(s.expert_rank));
  }
  if (!finders.empty()) tell_change(ranks, step, changed, finders);
  if (!equal) tell_difference(ranks, step, expert_ranks);
  equal_step_ = step;
}

std::string ReplicaCheck::when(int64_t step) const {
  return fmt::format(
      "after {} steps (ranks were {})", step,
      equal_step_ < 0 ? "not compared before" : fmt::format("last found equal after {}", equal_step_));
}

/// A rank that found its own memory changed knows which one it is, also without a majority, and where no
/// other rank holds the same.
void ReplicaCheck::tell_change(Communicator& ranks, int64_t step, const std::string& changed,
                               const std::vector<int>& finders) {
  const std::vector<std::string> hosts = host_names(ranks);
  std::string what;
  for (const int rank : finders) {
    std::string words = changed;
    broadcast_text(ranks, words, rank);
    what +=
        fmt::format("{}{} holds other bits of {}", what.empty() ? "" : "; ", rank_text({rank}, hosts), words);
  }
  fail(ExitCode::corruption, "{}, and reported {}: memory changed them", what, when(step));
}

void ReplicaCheck::tell_difference(Communicator& ranks, int64_t step, const std::vector<int>& expert_ranks) {
  const auto size = static_cast<size_t>(ranks.size()), count = hashes_.size();
  std::vector<uint64_t> all(size * count);
  ranks.all_gather(all.data(), hashes_.data(), static_cast<int64_t>(count * sizeof(uint64_t)));
  constexpr size_t kNames = 3;
  std::vector<std::string> names;
  size_t differing = 0;
  std::set<int> doubtful;
  bool outvoted = true;
  for (size_t i = 0; i < count; ++i) {
    std::map<int, std::pair<std::vector<int>, std::vector<uint64_t>>>
        groups;  // ranks that hold the same, and their hashes
    for (size_t r = 0; r < size; ++r) {
      auto& [holders, hashes] = groups[of_expert(i) ? expert_ranks[r] : 0];
      holders.push_back(static_cast<int>(r));
      hashes.push_back(all[r * count + i]);
    }
    for (const auto& [share, group] : groups) {
      const std::vector<int> wrong = ranks_in_doubt(group.first, group.second);
      if (wrong.empty()) continue;
      outvoted = outvoted && wrong.size() < group.first.size();
      doubtful.insert(wrong.begin(), wrong.end());
      if (++differing > kNames) continue;
      std::string name = i < replicas_.size() ? replicas_[i].name : "the state of policy, routers and heads";
      broadcast_text(ranks, name, wrong.front());  // ranks that hold other experts have other names for them
      names.push_back(name);
    }
  }
  std::string what = fmt::format("{}", fmt::join(names, ", "));
  if (differing > kNames) what += fmt::format(" and {} more", differing - kNames);
  const std::string who = rank_text({doubtful.begin(), doubtful.end()}, host_names(ranks)),
                    hold = doubtful.size() == 1 ? "holds" : "hold";
  if (outvoted)
    fail(ExitCode::corruption,
         "{} {} other bits of {} than the other ranks that have a replica, {}: memory or processor changed "
         "them",
         who, hold, what, when(step));
  fail(ExitCode::corruption,
       "{} {} different bits of {}, {}: memory or processor of one of them changed them; without a majority "
       "it cannot be known whose are right",
       who, hold, what, when(step));
}

}  // namespace sluice
