#include "optim/bf16_wire.h"

#include "core/random.h"
#include "ops/elementwise.h"

namespace sluice {
namespace {

enum class Leg : uint64_t { scatter, gather };

uint32_t key_of(const Bf16Wire::Place& p, Leg leg) {
  const RandomStream stream(static_cast<uint64_t>(p.step), "gradients on the wire");
  const uint64_t message = stream.bits(static_cast<uint64_t>(p.micro_batch) * 2 + static_cast<uint64_t>(leg));
  return static_cast<uint32_t>(
      RandomStream(message, static_cast<uint64_t>(p.rank)).bits(static_cast<uint64_t>(p.bucket_begin)));
}

}  // namespace

void Bf16Wire::allocate(Arena& arena, int64_t most) {
  sent_ = arena.alloc("rounded gradients to send", DType::bf16, {most});
  arrived_ = arena.alloc("rounded gradients that came", DType::bf16, {most});
}

void Bf16Wire::all_to_all(Context& ctx, Communicator& ranks, const Tensor& received, const Tensor& all,
                          const Place& place) {
  const int64_t total = all.numel();
  SLUICE_CHECK(total <= sent_.numel(), "Bf16Wire: {} elements, room for {}", total, sent_.numel());
  round_stochastically(ctx, sent_.rows(0, total), all.view({total}), key_of(place, Leg::scatter));
  ranks.all_to_all(arrived_.data, sent_.data, total / ranks.size() * static_cast<int64_t>(sizeof(bf16)));
  cast(ctx, received.view({total}), arrived_.rows(0, total));
}

void Bf16Wire::all_gather(Context& ctx, Communicator& ranks, const Tensor& all, const Tensor& mine,
                          const Place& place) {
  const int64_t total = all.numel();
  SLUICE_CHECK(total <= sent_.numel(), "Bf16Wire: {} elements, room for {}", total, sent_.numel());
  round_stochastically(ctx, sent_.rows(0, mine.numel()), mine, key_of(place, Leg::gather));
  ranks.all_gather(arrived_.data, sent_.data, mine.numel() * static_cast<int64_t>(sizeof(bf16)));
  cast(ctx, all.view({total}), arrived_.rows(0, total));
}

}  // namespace sluice
