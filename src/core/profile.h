#pragma once
// Where the time of a step goes: seconds and calls per op, collected at the ops' doors when a Context carries a Profile.
#include <array>
#include <chrono>
#include <cstdint>

namespace sluice {

class Profile {
 public:
  struct Entry {
    const char* op = nullptr;
    double seconds = 0;
    int64_t calls = 0;
  };

  /// op is a string literal. Ops beyond the capacity share the last entry's place: "other".
  void add(const char* op, double seconds) {
    size_t i = 0;
    while (i < count_ && entries_[i].op != op) ++i;
    if (i == count_) {
      if (count_ == entries_.size()) entries_[i = count_ - 1].op = "other";
      else entries_[count_++].op = op;
    }
    entries_[i].seconds += seconds;
    ++entries_[i].calls;
  }
  void clear() { count_ = 0, entries_ = {}; }
  const Entry* begin() const { return entries_.data(); }
  const Entry* end() const { return entries_.data() + count_; }

 private:
  std::array<Entry, 64> entries_{};
  size_t count_ = 0;
};

/// Adds the time of its life to an op, if there is a profile.
class ProfileScope {
 public:
  using Clock = std::chrono::steady_clock;
  ProfileScope(Profile* profile, const char* op) : profile_(profile), op_(op) {
    if (profile_) start_ = Clock::now();
  }
  ~ProfileScope() {
    if (profile_) profile_->add(op_, std::chrono::duration<double>(Clock::now() - start_).count());
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

 private:
  Profile* profile_;
  const char* op_;
  Clock::time_point start_;
};

}  // namespace sluice
