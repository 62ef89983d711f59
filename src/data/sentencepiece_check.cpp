#include "data/sentencepiece_check.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <vector>

#include "core/error.h"

namespace sluice {
namespace {

// Field numbers of sentencepiece_model.proto.
constexpr uint32_t kPieces = 1, kNormalizer = 3, kDenormalizer = 5;  // of the model
constexpr uint32_t kPieceText = 1, kPieceType = 3;                   // of a piece
constexpr uint32_t kName = 1, kCharsMap = 2, kAddDummyPrefix = 3,
                   kRemoveExtraWhitespaces = 4;  // of a normaliser
constexpr uint64_t kUserDefined = 4;             // a type of piece

// Sizes of the library's fixed arrays of matches.
constexpr int kMaxRules = 32, kMaxUserDefined = 64;

/// Protocol buffer messages, field by field.
class Fields {
 public:
  enum class Wire : uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

  Fields(std::string_view message, const std::string& path) : rest_(message), path_(path) {}

  bool next() {
    if (rest_.empty()) return false;
    const uint64_t tag = take_varint();
    number = static_cast<uint32_t>(tag >> 3);
    wire = static_cast<Wire>(tag & 7);
    if (tag > std::numeric_limits<uint32_t>::max() || number == 0) refuse("a field number is out of range");
    switch (wire) {
      case Wire::varint:
        value = take_varint();
        return true;
      case Wire::fixed64:
        bytes = take(8);
        return true;
      case Wire::fixed32:
        bytes = take(4);
        return true;
      case Wire::bytes:
        bytes = take(take_varint());
        return true;
    }
    refuse(fmt::format("field {} has wire type {}", number, tag & 7));
  }

  std::string_view text() const { return need(Wire::bytes), bytes; }
  uint64_t integer() const { return need(Wire::varint), value; }

  [[noreturn]] void refuse(const std::string& what) const {
    fail(ExitCode::data, "{}: not a SentencePiece model: {}", path_, what);
  }

  uint32_t number = 0;

 private:
  void need(Wire type) const {
    if (wire != type) refuse(fmt::format("field {} has wire type {}", number, static_cast<uint32_t>(wire)));
  }
  std::string_view take(uint64_t count) {
    if (count > rest_.size()) refuse(fmt::format("it ends {} bytes too early", count - rest_.size()));
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  uint64_t take_varint() {
    uint64_t sum = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      sum |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return sum;
    }
    refuse("a number of more than 64 bits");
  }

  std::string_view rest_;
  const std::string& path_;
  Wire wire = Wire::varint;
  uint64_t value = 0;
  std::string_view bytes;
};

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
    const unsigned first = byte(i);
    const int more = first < 0x80   ? 0
                     : first < 0xc2 ? -1
                     : first < 0xe0 ? 1
                     : first < 0xf0 ? 2
                     : first < 0xf5 ? 3
                                    : -1;
    if (more < 0) return false;
    uint32_t point = more == 0 ? first : first & (0x3fu >> more);
    for (int k = 1; k <= more; ++k) {
      if ((byte(i + static_cast<size_t>(k)) & 0xc0) != 0x80) return false;
      point = point << 6 | (byte(i + static_cast<size_t>(k)) & 0x3f);
    }
    const bool overlong = (more == 2 && point < 0x800) || (more == 3 && point < 0x10000);
    if (overlong || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) return false;
    i += static_cast<size_t>(more) + 1;
  }
  return true;
}

/// precompiled_charsmap: the size of a double-array trie (Aoe 1989; the layout is that of Yata's
/// darts-clone), the trie, and the zero-terminated texts that its leaves refer to. From the base of a state,
/// byte c leads to unit base ^ c, if that bears the label c; the unit says how far its own base is, and
/// whether the unit there holds a leaf's value.
class CharsMap {
 public:
  CharsMap(std::string_view blob, const Fields& fields) : fields_(fields) {
    uint32_t trie_bytes = 0;
    static_assert(std::endian::native == std::endian::little);
    if (blob.size() < sizeof(trie_bytes)) refuse("has no size");
    std::memcpy(&trie_bytes, blob.data(), sizeof(trie_bytes));
    blob.remove_prefix(sizeof(trie_bytes));
    if (trie_bytes > blob.size() || trie_bytes % sizeof(uint32_t) != 0 || trie_bytes == 0)
      refuse(fmt::format("says that its trie has {} bytes, of {}", trie_bytes, blob.size()));
    units_.resize(trie_bytes / sizeof(uint32_t));
    std::memcpy(units_.data(), blob.data(), trie_bytes);
    texts_ = blob.substr(trie_bytes);
    if (!texts_.empty() && texts_.back() != '\0') refuse("does not end its last text");
  }

  /// Visits every reachable unit once, in depth-first post-order. A trie may share suffixes but must have no
  /// cycle: with a cycle the number of matches along a path is unbounded, so it is refused.
  void check() {
    rules_.assign(units_.size(), kUnseen);
    struct Visit {
      size_t unit, base;
      int byte, rules;  // the next byte to follow; the largest number of matches below this unit
    };
    std::vector<Visit> path = {{0, base_of(0, 0), 0, 0}};
    rules_[0] = kOpen;
    while (!path.empty()) {
      Visit& at = path.back();
      if (at.byte == 256) {
        const size_t done = at.unit;
        const int rules = at.rules + (done != 0 && has_leaf(units_[done]) ? 1 : 0);
        if (rules > kMaxRules) refuse(fmt::format("has more than {} rules with a common prefix", kMaxRules));
        rules_[done] = static_cast<int8_t>(rules);
        path.pop_back();
        if (!path.empty()) path.back().rules = std::max(path.back().rules, rules);
        continue;
      }
      const auto byte = static_cast<uint32_t>(at.byte++);
      const size_t next = at.base ^ byte;
      if (label(units_[next]) != byte) continue;
      if (rules_[next] == kOpen) refuse("contains a cycle");
      if (rules_[next] != kUnseen) {
        at.rules = std::max<int>(at.rules, rules_[next]);
        continue;
      }
      rules_[next] = kOpen;
      const size_t base = base_of(next, next);
      if (has_leaf(units_[next])) check_text(units_[base] & 0x7fffffffu);
      path.push_back({next, base, 0, 0});
    }
  }

 private:
  static constexpr int8_t kUnseen = -1, kOpen = -2;

  static bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
  static uint32_t label(uint32_t unit) { return unit & (0x80000000u | 0xffu); }

  /// Base of the 256 units that the next byte after a unit selects.
  size_t base_of(size_t unit, size_t from) const {
    const uint32_t bits = units_[unit];
    const size_t base = from ^ (size_t{bits >> 10} << ((bits & 0x200u) >> 6));
    if ((base | 0xff) >= units_.size())
      refuse(fmt::format("leads from unit {} to unit {}, of {}", unit, base | 0xff, units_.size()));
    return base;
  }

  void check_text(uint32_t begin) const {
    if (begin >= texts_.size())
      refuse(fmt::format("puts in the text at {}, of {} bytes", begin, texts_.size()));
    if (!is_utf8(texts_.data() + begin))
      refuse(fmt::format("puts in a text, at {}, that is not UTF-8", begin));
  }

  [[noreturn]] void refuse(const std::string& what) const { fields_.refuse("its normalisation map " + what); }

  const Fields& fields_;
  std::vector<uint32_t> units_;
  std::string_view texts_;
  std::vector<int8_t> rules_;  // for each unit: the largest number of matches from it on
};

void read_normalizer(std::string_view message, const std::string& path, SentencePieceSpec& spec) {
  for (Fields field(message, path); field.next();) {
    switch (field.number) {
      case kName:
        spec.normalizer = field.text();
        break;
      case kCharsMap:
        if (!field.text().empty()) CharsMap(field.text(), field).check();
        break;
      case kAddDummyPrefix:
        spec.adds_space = field.integer() != 0;
        break;
      case kRemoveExtraWhitespaces:
        spec.removes_extra_whitespace = field.integer() != 0;
        break;
      default:
        break;
    }
  }
}

/// User-defined pieces are matched by a trie. Its builder accepts no empty piece, and it stores matches with
/// a common prefix in an array of fixed size.
class Pieces {
 public:
  void read(std::string_view message, const std::string& path) {
    std::string_view text;
    bool user_defined = false;
    Fields field(message, path);
    while (field.next()) {
      if (field.number == kPieceText) text = field.text();
      if (field.number == kPieceType) user_defined = field.integer() == kUserDefined;
    }
    if (text.empty()) field.refuse(fmt::format("piece {} is empty", count_));
    if (text.find('\0') != std::string_view::npos)
      field.refuse(fmt::format("piece {} holds a zero byte", count_));
    if (user_defined) user_defined_.insert(text);
    ++count_;
  }

  void check(const std::string& path) const {
    std::vector<std::string_view> open;  // each has the one before it as a prefix
    for (const std::string_view text : user_defined_) {
      while (!open.empty() && !text.starts_with(open.back())) open.pop_back();
      open.push_back(text);
      if (open.size() > kMaxUserDefined)
        fail(ExitCode::data,
             "{}: not a SentencePiece model: more than {} user-defined pieces have a common prefix", path,
             kMaxUserDefined);
    }
  }

 private:
  int64_t count_ = 0;
  std::set<std::string_view> user_defined_;  // sorted, so that a piece follows its prefixes
};

}  // namespace

SentencePieceSpec check_sentencepiece_model(std::string_view model, const std::string& path) {
  SentencePieceSpec spec, back;
  Pieces pieces;
  for (Fields field(model, path); field.next();) {
    if (field.number == kPieces) pieces.read(field.text(), path);
    if (field.number == kNormalizer) read_normalizer(field.text(), path, spec);
    if (field.number == kDenormalizer) read_normalizer(field.text(), path, back);
  }
  pieces.check(path);
  return spec;
}

}  // namespace sluice
