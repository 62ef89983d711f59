#include "data/bpe_merges.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace sluice {
namespace {

constexpr size_t kSlots = size_t{1} << 16;
constexpr size_t kFew = 48;  // symbols up to which a search through all of them beats a heap
constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

uint64_t spread(uint64_t pair) {
  pair *= 0x9e3779b97f4a7c15u;
  return pair ^ pair >> 29;
}

}  // namespace

BpeMerges::BpeMerges(const std::array<int32_t, 256>& byte_ids, const std::vector<BpeMerge>& merges,
                     BpeUnknown unknown)
    : byte_ids_(byte_ids), unknown_(unknown), table_(std::bit_ceil(merges.size() * 2 + 16)) {
  mask_ = table_.size() - 1;
  for (const BpeMerge& merge : merges) {
    const uint64_t pair = pair_of(merge.left, merge.right);
    uint64_t at = spread(pair) & mask_;
    while (table_[at].pair != kNone && table_[at].pair != pair) at = (at + 1) & mask_;
    table_[at] = {pair, merge.rank, merge.merged};
  }
}

const BpeMerges::Entry* BpeMerges::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  for (uint64_t at = spread(pair) & mask_; table_[at].pair != kNone; at = (at + 1) & mask_)
    if (table_[at].pair == pair) return &table_[at];
  return nullptr;
}

void BpeMerges::begin(std::string_view piece, std::vector<int32_t>& ids) const {
  ids.clear();
  bool after_unknown = false;
  for (const char c : piece) {
    const int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    if (id >= 0) {
      ids.push_back(id);
    } else if (unknown_.id >= 0 && !(unknown_.fuse && after_unknown)) {
      ids.push_back(unknown_.id);
    }
    after_unknown = id < 0;
  }
}

void BpeMerges::merge_few(Memory& m) const {
  std::vector<int32_t>&ids = m.ids, &rank = m.rank, &merged = m.merged;
  size_t n = ids.size();
  rank.assign(n, kNever);
  merged.assign(n, 0);
  const auto look = [&](size_t i) {
    const Entry* const entry = find(ids[i], ids[i + 1]);
    rank[i] = entry ? entry->rank : kNever;
    if (entry) merged[i] = entry->merged;
  };
  for (size_t i = 0; i + 1 < n; ++i) look(i);
  while (n > 1) {
    const auto pairs_end = rank.begin() + static_cast<int64_t>(n) - 1;
    const auto lowest = std::min_element(rank.begin(), pairs_end);
    if (*lowest == kNever) break;
    const auto i = static_cast<size_t>(lowest - rank.begin());
    ids[i] = merged[i];
    for (std::vector<int32_t>* list : {&ids, &rank, &merged})
      std::move(list->begin() + static_cast<int64_t>(i) + 2, list->begin() + static_cast<int64_t>(n),
                list->begin() + static_cast<int64_t>(i) + 1);
    --n;
    if (i + 1 < n) look(i);
    if (i > 0) look(i - 1);
  }
  ids.resize(n);
}

void BpeMerges::merge_many(Memory& m) const {
  std::vector<int32_t>&ids = m.ids, &before = m.before, &behind = m.behind;
  const auto n = static_cast<int32_t>(ids.size());
  before.resize(ids.size());
  behind.resize(ids.size());
  m.heap.clear();
  const auto later = [](const Memory::Candidate& a, const Memory::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  const auto at = [](std::vector<int32_t>& list, int32_t i) -> int32_t& {
    return list[static_cast<size_t>(i)];
  };
  const auto entry_at = [&](int32_t i) -> const Entry* {
    return i < 0 || at(behind, i) >= n ? nullptr : find(at(ids, i), at(ids, at(behind, i)));
  };
  const auto push = [&](int32_t i) {
    if (const Entry* const entry = entry_at(i)) {
      m.heap.push_back({entry->rank, i, entry->merged});
      std::push_heap(m.heap.begin(), m.heap.end(), later);
    }
  };
  for (int32_t i = 0; i < n; ++i) at(before, i) = i - 1, at(behind, i) = i + 1;
  for (int32_t i = 0; i + 1 < n; ++i)
    if (const Entry* const entry = entry_at(i)) m.heap.push_back({entry->rank, i, entry->merged});
  std::make_heap(m.heap.begin(), m.heap.end(), later);
  while (!m.heap.empty()) {
    std::pop_heap(m.heap.begin(), m.heap.end(), later);
    const Memory::Candidate next = m.heap.back();
    m.heap.pop_back();
    const int32_t i = next.position;
    if (at(ids, i) < 0) continue;  // merged into the one before it
    const Entry* const entry = entry_at(i);
    if (!entry || entry->merged != next.merged) continue;  // its neighbour has changed
    const int32_t gone = at(behind, i);
    at(ids, i) = next.merged;
    at(ids, gone) = -1;
    at(behind, i) = at(behind, gone);
    if (at(behind, i) < n) at(before, at(behind, i)) = i;
    push(at(before, i));
    push(i);
  }
  ids.erase(std::remove(ids.begin(), ids.end(), -1), ids.end());
}

void BpeMerges::encode(std::string_view piece, Memory& m, std::vector<int32_t>& out) const {
  if (piece.empty()) return;
  if (m.slots.empty()) m.slots.resize(kSlots);
  const bool is_short = piece.size() <= m.slots[0].piece.size();
  Memory::Slot& slot = m.slots[is_short ? XXH3_64bits(piece.data(), piece.size()) & (kSlots - 1) : 0];
  if (is_short && slot.bytes == piece.size() &&
      std::memcmp(slot.piece.data(), piece.data(), piece.size()) == 0) {
    out.insert(out.end(), slot.ids.begin(), slot.ids.begin() + slot.count);
    return;
  }
  if (const auto found = whole_.empty() ? whole_.end() : whole_.find(std::string(piece));
      found != whole_.end()) {
    m.ids.assign(1, found->second);
  } else {
    begin(piece, m.ids);
    if (m.ids.size() <= kFew) {
      merge_few(m);
    } else {
      merge_many(m);
    }
  }
  out.insert(out.end(), m.ids.begin(), m.ids.end());
  if (!is_short || m.ids.size() > slot.ids.size()) return;
  slot.bytes = static_cast<uint8_t>(piece.size());
  slot.count = static_cast<uint8_t>(m.ids.size());
  std::memcpy(slot.piece.data(), piece.data(), piece.size());
  std::copy(m.ids.begin(), m.ids.end(), slot.ids.begin());
}

}  // namespace sluice
