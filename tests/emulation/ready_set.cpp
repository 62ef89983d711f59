// Scheduling policies. Uniform random choice is a weak adversary, because all warps advance evenly; "last
// woken first" and strict priorities let one warp run far ahead of the others, which exposes a missing
// barrier.
#include <bit>

#include "machine.h"

namespace emu {

void ReadySet::reset(unsigned warps, Policy policy, Random* random) {
  policy_ = policy, random_ = random;
  head_ = count_ = 0;
  lanes_.assign(warps, 0);
  last_lane_.assign(warps, kWarpSize - 1);
  order_.resize(std::bit_ceil(warps));
  ring_mask_ = static_cast<unsigned>(order_.size()) - 1;
  if (policy == Policy::priorities) {
    priority_.resize(warps);
    for (uint32_t& p : priority_) p = static_cast<uint32_t>(random->next()) | 1u;
  }
}

unsigned ReadySet::take_seeded() {
  unsigned place = 0;  // in the ring
  if (policy_ == Policy::random) {
    place = random_->below(count_);
  } else if (policy_ == Policy::newest_first) {
    place = count_ - 1;
  } else if (policy_ == Policy::priorities) {
    if (random_->one_in(128))
      priority_[random_->below(static_cast<unsigned>(priority_.size()))] = random_->next() | 1u;
    for (unsigned i = 1; i < count_; ++i)
      if (priority_[at(i)] > priority_[at(place)]) place = i;
  }
  const unsigned warp = at(place);
  const uint32_t ready = lanes_[warp];

  unsigned lane;
  if (policy_ == Policy::random) {
    const unsigned turn = random_->below(kWarpSize);
    lane = (static_cast<unsigned>(std::countr_zero(std::rotr(ready, static_cast<int>(turn)))) + turn) %
           kWarpSize;
  } else if (policy_ == Policy::newest_first) {  // round-robin in descending order
    const uint32_t below = ready & ((1u << last_lane_[warp]) - 1u);
    lane = 31u - static_cast<unsigned>(std::countl_zero(below ? below : ready));
  } else {  // round-robin in ascending order
    const uint32_t above = ready & ~((2u << last_lane_[warp]) - 1u);
    lane = static_cast<unsigned>(std::countr_zero(above ? above : ready));
  }
  last_lane_[warp] = static_cast<uint8_t>(lane);
  lanes_[warp] = ready & ~(1u << lane);
  if (!lanes_[warp]) {
    if (place == count_ - 1) {
      --count_;
    } else {
      bring_to_front(place);
      head_ = (head_ + 1) & ring_mask_, --count_;
    }
  }
  return warp * kWarpSize + lane;
}

void ReadySet::defer(unsigned warp) {
  if (policy_ == Policy::priorities) priority_[warp] = 0;
  if (count_ < 2) return;
  if (policy_ == Policy::in_order && at(0) == warp) {
    head_ = (head_ + 1) & ring_mask_;
    at(count_ - 1) = warp;
  } else if (policy_ == Policy::newest_first && at(count_ - 1) == warp) {
    head_ = (head_ - 1) & ring_mask_;
    at(0) = warp;
  }
}

}  // namespace emu
