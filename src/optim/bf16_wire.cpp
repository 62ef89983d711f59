#include "optim/bf16_wire.h"

#include <bit>

#include "core/parallel_for.h"
#include "core/random.h"

namespace sluice {
namespace {

/// Wellons' "lowbias32": every bit of the result depends on every bit of x.
inline uint32_t scramble(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

void widen(float* to, const bf16* x, int64_t n) {
  parallel_for(n, 16384, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = static_cast<float>(x[i]);
  });
}

enum class Leg : uint64_t { scatter, gather };

uint32_t key_of(const Bf16Wire::Place& p, Leg leg) {
  const RandomStream stream(static_cast<uint64_t>(p.step), "gradients on the wire");
  const uint64_t message = stream.bits(static_cast<uint64_t>(p.micro_batch) * 2 + static_cast<uint64_t>(leg));
  return static_cast<uint32_t>(RandomStream(message, static_cast<uint64_t>(p.rank)).bits(static_cast<uint64_t>(p.bucket_begin)));
}

}  // namespace

void round_stochastically(bf16* to, const float* x, int64_t n, uint32_t key) {
  parallel_for(n, 16384, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
      // Adding 16 random bits below the cut carries into it as often as it should.
      const uint32_t up = (bits + (scramble(static_cast<uint32_t>(i) ^ key) & 0xffffu)) >> 16;
      // Past the largest bf16 there is only infinity, which a finite number does not become.
      const bool keeps = (up & 0x7f80u) == 0x7f80u;
      const uint32_t quiet = (bits & 0x7fffffffu) > 0x7f800000u ? 0x40u : 0u;
      to[i].bits = static_cast<uint16_t>(keeps ? (bits >> 16) | quiet : up);
    }
  });
}

void Bf16Wire::allocate(Arena& arena, int64_t most) {
  sent_ = arena.alloc("rounded gradients to send", DType::bf16, {most});
  arrived_ = arena.alloc("rounded gradients that came", DType::bf16, {most});
}

void Bf16Wire::all_to_all(Communicator& ranks, float* received, const float* all, int64_t n, const Place& place) {
  const int64_t total = n * ranks.size();
  SLUICE_CHECK(total <= sent_.numel(), "Bf16Wire: {} elements, room for {}", total, sent_.numel());
  round_stochastically(sent_.as<bf16>(), all, total, key_of(place, Leg::scatter));
  ranks.all_to_all(arrived_.data, sent_.data, n * static_cast<int64_t>(sizeof(bf16)));
  widen(received, arrived_.as<bf16>(), total);
}

void Bf16Wire::all_gather(Communicator& ranks, float* all, const float* mine, int64_t n, const Place& place) {
  SLUICE_CHECK(n * ranks.size() <= sent_.numel(), "Bf16Wire: {} elements, room for {}", n * ranks.size(), sent_.numel());
  round_stochastically(sent_.as<bf16>(), mine, n, key_of(place, Leg::gather));
  ranks.all_gather(arrived_.data, sent_.data, n * static_cast<int64_t>(sizeof(bf16)));
  widen(all, arrived_.as<bf16>(), n * ranks.size());
}

}  // namespace sluice
