#pragma once
// Byte pair encoding (Sennrich et al. 2016) of pieces of bytes, by a list of merges.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sluice {

/// What a pair of neighbouring tokens becomes; the lowest rank is merged first, the leftmost of equal ones.
struct BpeMerge {
  int32_t left = 0, right = 0, rank = 0, merged = 0;
};

struct BpeUnknown {
  int32_t id = -1;    // of the token for bytes without one; -1: such bytes are dropped
  bool fuse = false;  // one token for several of them in a row
};

class BpeMerges {
 public:
  /// Memory of one thread: results of pieces that were met before, and lists for the merging.
  struct Memory {
    struct Slot {
      uint8_t bytes = 0, count = 0;  // bytes 0: empty
      std::array<char, 30> piece{};
      std::array<int32_t, 8> ids{};
    };
    std::vector<Slot> slots;
    std::vector<int32_t> ids, rank, merged;
    struct Candidate {
      int32_t rank, position, merged;
    };
    std::vector<Candidate> heap;
    std::vector<int32_t> before, behind;
  };

  /// byte_ids: token of each byte; -1: it has none. Of merges of the same pair the last counts.
  BpeMerges(const std::array<int32_t, 256>& byte_ids, const std::vector<BpeMerge>& merges,
            BpeUnknown unknown);

  /// Pieces that are tokens as a whole are not merged (ignore_merges).
  void set_whole(std::unordered_map<std::string, int32_t> whole) { whole_ = std::move(whole); }

  /// Appends the tokens of a piece; n log n in its length.
  void encode(std::string_view piece, Memory& memory, std::vector<int32_t>& out) const;

 private:
  struct Entry {
    uint64_t pair = kNone;
    int32_t rank = 0, merged = 0;
  };
  static constexpr uint64_t kNone = ~uint64_t{0};
  const Entry* find(int32_t left, int32_t right) const;
  void begin(std::string_view piece, std::vector<int32_t>& ids) const;
  void merge_few(Memory& memory) const;
  void merge_many(Memory& memory) const;

  std::array<int32_t, 256> byte_ids_;
  BpeUnknown unknown_;
  std::vector<Entry> table_;
  uint64_t mask_ = 0;
  std::unordered_map<std::string, int32_t> whole_;
};

}  // namespace sluice
