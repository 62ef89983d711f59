#pragma once
// How a sample of a task of RULER is drawn, and written at any size.
#include "core/random.h"
#include "eval/ruler_tasks.h"

namespace sluice {

/// Random numbers of one sample, in order.
class Draw {
 public:
  Draw(uint64_t seed, const std::string& what) : stream_(seed, what) {}
  /// In [0, n).
  int64_t below(int64_t n) { return static_cast<int64_t>(stream_.bits(next_++) % static_cast<uint64_t>(n)); }
  double uniform() { return stream_.uniform(next_++); }
  uint64_t bits() { return stream_.bits(next_++); }
  /// `count` different numbers in [0, n), in random order.
  std::vector<int64_t> distinct(int64_t count, int64_t n);
  template <class T>
  void shuffle(std::vector<T>& list) {
    for (size_t i = list.size(); i > 1; --i)
      std::swap(list[i - 1], list[static_cast<size_t>(below(static_cast<int64_t>(i)))]);
  }

 private:
  RandomStream stream_;
  uint64_t next_ = 0;
};

struct RulerPlan {
  int64_t smallest = 1, largest = 1;            // sizes
  std::function<RulerPrompt(int64_t)> written;  // at a size; without size and tokens
  int64_t leap = 0;                             // the texts have nothing between this size and the next
};

/// label: what tells the sample's random numbers apart from all others.
RulerPlan plan_needles(RulerTask task, const RulerTexts& texts, uint64_t seed, const std::string& label);
RulerPlan plan_variables(const RulerTexts& texts, uint64_t seed, const std::string& label);
RulerPlan plan_common_words(const RulerTexts& texts, int64_t length, uint64_t seed, const std::string& label);
RulerPlan plan_frequent_words(uint64_t seed, const std::string& label);
RulerPlan plan_questions(const std::vector<RulerQuestion>& questions, int64_t sample, uint64_t seed,
                         const std::string& label);

/// The sentences that nothing is asked about.
constexpr std::string_view kNoise =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
std::string joined(const std::vector<std::string>& parts, std::string_view between);

}  // namespace sluice
