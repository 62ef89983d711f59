#include "checkpoint/state_hash.h"

#include <spdlog/fmt/fmt.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

#include "core/host_view.h"
#include "ops/bit_sum.h"

namespace sluice {
namespace {

/// A slice held by one rank.
struct Piece {
  uint64_t name, hash;
  int64_t begin, count;
};

Piece piece_of(Context& ctx, const NamedTensor& t) {
  const HostView view(ctx, t.tensor);
  const Tensor& host = view.tensor();
  Piece p{XXH3_64bits(t.name.data(), t.name.size()), 0, t.begin, host.numel()};
  Context on_host(64);
  int32_t sum[2];
  bit_sum(on_host, Tensor(sum, DType::i32, {2}), host, p.begin, p.name);
  std::memcpy(&p.hash, sum, sizeof p.hash);
  return p;
}

}  // namespace

uint64_t state_hash(Context& ctx, const CheckpointContent& content, Communicator& ranks) {
  std::vector<Piece> mine;
  std::map<uint64_t, std::string> names;
  for (const auto* tensors : {&content.weights, &content.optimizer})
    for (const NamedTensor& t : *tensors) {
      if (t.tensor.numel() == 0) continue;
      mine.push_back(piece_of(ctx, t));
      names[mine.back().name] = t.name;
    }
  // An all-to-all, of which rank 0 uses its part.
  const auto size = static_cast<size_t>(ranks.size());
  const int64_t bytes = std::ssize(mine) * static_cast<int64_t>(sizeof(Piece));
  std::vector<int64_t> all_bytes(size), sent(size, 0), received(size, 0);
  ranks.all_gather(all_bytes.data(), &bytes, sizeof bytes);
  sent[0] = bytes;
  int64_t total = 0;
  if (ranks.rank() == 0) {
    received = all_bytes;
    for (const int64_t b : all_bytes) total += b;
  }
  std::vector<Piece> all(static_cast<size_t>(total) / sizeof(Piece));
  ranks.all_to_all_v(all.data(), received.data(), mine.data(), sent.data());
  if (ranks.rank() != 0) return 0;

  std::sort(all.begin(), all.end(), [](const Piece& a, const Piece& b) {
    return std::tie(a.name, a.begin, a.count, a.hash) < std::tie(b.name, b.begin, b.count, b.hash);
  });
  uint64_t sum = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const Piece& p = all[i];
    if (i > 0 && all[i - 1].name == p.name && all[i - 1].begin == p.begin && all[i - 1].count == p.count) {
      if (all[i - 1].hash == p.hash) continue;
      fail(ExitCode::corruption, "ranks hold different bits of {} (elements {} to {})",
           names.count(p.name) ? names[p.name] : fmt::format("the tensor of hash {:016x}", p.name), p.begin,
           p.begin + p.count - 1);
    }
    sum += p.hash;
  }
  return mixed_bits(sum);
}

}  // namespace sluice
