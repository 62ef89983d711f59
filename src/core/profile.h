#pragma once
// Time per op: seconds and calls, collected at the entry points of the ops when a Context has a Profile. On a
// GPU they are device times, available after synchronize().
#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

namespace sluice {

class Profile {
 public:
  struct Entry {
    const char* op = nullptr;
    double seconds = 0;
    int64_t calls = 0;
  };

  /// One call of an op; calls are in order of their start.
  struct Slice {
    const char* op;
    double start, seconds;  // start: relative to the first call
  };

  /// Also keeps every single call, which allocates host memory during the step.
  void keep_timeline() { keeps_timeline_ = true; }
  const std::vector<Slice>& timeline() const { return timeline_; }

  /// op is a string literal; start is in seconds of any clock. Ops beyond the capacity share the last entry,
  /// "other".
  void add(const char* op, double start, double seconds) {
    if (keeps_timeline_) {
      if (timeline_.empty()) first_ = start;
      timeline_.push_back({op, start - first_, seconds});
    }
    size_t i = 0;
    while (i < count_ && entries_[i].op != op) ++i;
    if (i == count_) {
      if (count_ == entries_.size())
        entries_[i = count_ - 1].op = "other";
      else
        entries_[count_++].op = op;
    }
    entries_[i].seconds += seconds;
    ++entries_[i].calls;
  }
  void clear() { count_ = 0, entries_ = {}, timeline_.clear(); }
  const Entry* begin() const { return entries_.data(); }
  const Entry* end() const { return entries_.data() + count_; }

 private:
  std::array<Entry, 64> entries_{};
  size_t count_ = 0;
  bool keeps_timeline_ = false;
  double first_ = 0;
  std::vector<Slice> timeline_;
};

/// Adds its own lifetime to the time of an op if there is a profile.
class ProfileScope {
 public:
  using Clock = std::chrono::steady_clock;
  ProfileScope(Profile* profile, const char* op) : profile_(profile), op_(op) {
    if (profile_) start_ = Clock::now();
  }
  ~ProfileScope() {
    if (profile_)
      profile_->add(op_, std::chrono::duration<double>(start_.time_since_epoch()).count(),
                    std::chrono::duration<double>(Clock::now() - start_).count());
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

 private:
  Profile* profile_;
  const char* op_;
  Clock::time_point start_;
};

}  // namespace sluice
