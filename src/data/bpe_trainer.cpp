#include "data/bpe_trainer.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <queue>
#include <set>
#include <unordered_map>

#include "core/error.h"
#include "core/parallel_for.h"
#include "core/utf8.h"
#include "data/bpe_write.h"
#include "data/byte_level.h"
#include "data/pretokenizer.h"
#include "data/unicode_form.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

struct PieceHash {
  using is_transparent = void;
  size_t operator()(std::string_view piece) const { return XXH3_64bits(piece.data(), piece.size()); }
};
using Counts = std::unordered_map<std::string, int64_t, PieceHash, std::equal_to<>>;

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

/// A distinct piece.
struct Word {
  std::vector<int32_t> ids;
  int64_t count = 0;
};

/// A pair that may be merged next, with the words in which it was when it was put into the queue.
struct Candidate {
  int64_t count = 0;
  uint64_t pair = 0;
  std::vector<int32_t> words;
  bool operator<(const Candidate& other) const {  // the largest is merged first
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

Json pretokenizer_json(const std::string& name) {
  if (name == "gpt2") return byte_level_json(true, true);
  Json split = {{"type", "Split"},
                {"pattern", {{"Regex", known_pattern(name)}}},
                {"behavior", "Isolated"},
                {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level_json(false, false)})}};
}

}  // namespace

class BpeTrainer::Impl {
 public:
  explicit Impl(const BpeTraining& training) : training_(training) {
    check();
    pretokenizer_.emplace(nlohmann::json(pretokenizer_json(training.pretokenizer)), "--pretokenizer");
  }

  void count(const std::vector<std::string>& documents) {
    parallel_for(std::ssize(documents), 1, [&](int64_t begin, int64_t end) {
      Pattern::Memory memory;
      Counts counts;
      int64_t pieces = 0;
      const Pretokenizer::OnPiece on_piece = [&](std::string_view piece) {
        ++pieces;
        if (const auto found = counts.find(piece); found != counts.end()) {
          ++found->second;
        } else {
          counts.emplace(piece, 1);
        }
      };
      for (int64_t i = begin; i < end; ++i) cut(documents[static_cast<size_t>(i)], memory, on_piece);
      const std::lock_guard lock(mutex_);
      pieces_ += pieces;
      for (const auto& [piece, count] : counts) counts_[piece] += count;
    });
  }

  BpeTrained train(const std::function<void(int64_t)>& progress) {
    if (counts_.empty()) fail(ExitCode::data, "the input contains no text to train a tokenizer on");
    start();
    fill_queue();
    while (std::ssize(tokens_) < training_.vocab_size && merge_next())
      if (progress && merges_.size() % 1000 == 0) progress(std::ssize(merges_));
    return {json().dump(2) + "\n", std::ssize(tokens_), std::ssize(merges_), pieces_, std::ssize(words_)};
  }

 private:
  void check() const {
    const int64_t least = 256 + std::ssize(training_.special_tokens);
    if (training_.vocab_size < least || training_.vocab_size > 1'000'000)
      fail(ExitCode::usage,
           "--vocab-size {}: must be from {} (the 256 bytes and {} special tokens) to 1000000",
           training_.vocab_size, least, training_.special_tokens.size());
    if (known_pattern(training_.pretokenizer).empty())
      fail(ExitCode::usage, "--pretokenizer {}: must be {}", training_.pretokenizer,
           fmt::format("{}", fmt::join(known_pattern_names(), ", ")));
    if (training_.min_frequency < 1)
      fail(ExitCode::usage, "--min-frequency {}: must be at least 1", training_.min_frequency);
    std::set<std::string> seen;
    for (const std::string& token : training_.special_tokens) {
      if (token.empty() || token.size() > 1000 || find_invalid_utf8(token) != std::string::npos)
        fail(ExitCode::usage, "--special-token: must be 1 to 1000 bytes of UTF-8, got \"{}\"", token);
      if (!seen.insert(token).second) fail(ExitCode::usage, "--special-token {}: is given twice", token);
      // The 256 bytes are single characters of the vocabulary.
      if (const auto bytes = bytes_of_characters(token); bytes && bytes->size() == 1)
        fail(ExitCode::usage, "--special-token {}: stands for a byte already", token);
    }
  }

  void cut(std::string_view text, Pattern::Memory& memory, const Pretokenizer::OnPiece& on_piece) const {
    while (!text.empty()) {
      const size_t valid = std::min(find_invalid_utf8(text), text.size());
      const std::string_view part = text.substr(0, valid);
      if (training_.nfc && !plainly_nfc(part)) {
        pretokenizer_->cut(to_unicode_form(part, UnicodeForm::nfc), memory, on_piece);
      } else {
        pretokenizer_->cut(part, memory, on_piece);
      }
      text.remove_prefix(std::min(valid + 1, text.size()));
    }
  }

  int32_t add_token(const std::string& token) {
    const auto [found, added] = id_of_.emplace(token, static_cast<int32_t>(tokens_.size()));
    if (added) tokens_.push_back(token);
    return found->second;
  }

  /// Special tokens, the bytes by their characters, and the words in a fixed order.
  void start() {
    for (const std::string& token : training_.special_tokens) add_token(token);
    std::vector<std::pair<std::string, int>> bytes;
    for (int byte = 0; byte < 256; ++byte)
      bytes.emplace_back(byte_character(static_cast<unsigned char>(byte)), byte);
    std::sort(bytes.begin(), bytes.end());
    std::vector<int32_t> byte_ids(256);
    for (const auto& [character, byte] : bytes) byte_ids[static_cast<size_t>(byte)] = add_token(character);
    std::vector<std::pair<std::string_view, int64_t>> order(counts_.begin(), counts_.end());
    std::sort(order.begin(), order.end());
    words_.reserve(order.size());
    for (const auto& [piece, count] : order) {
      Word word{{}, count};
      for (const char c : piece) word.ids.push_back(byte_ids[static_cast<unsigned char>(c)]);
      words_.push_back(std::move(word));
    }
  }

  void fill_queue() {
    std::unordered_map<uint64_t, std::vector<int32_t>> where;
    for (size_t w = 0; w < words_.size(); ++w) {
      const Word& word = words_[w];
      for (size_t i = 0; i + 1 < word.ids.size(); ++i) {
        const uint64_t pair = pair_of(word.ids[i], word.ids[i + 1]);
        pair_counts_[pair] += word.count;
        std::vector<int32_t>& list = where[pair];
        if (list.empty() || list.back() != static_cast<int32_t>(w)) list.push_back(static_cast<int32_t>(w));
      }
    }
    for (auto& [pair, list] : where) queue_.push({pair_counts_[pair], pair, std::move(list)});
  }

  /// Merges the most frequent pair; false where none is frequent enough.
  bool merge_next() {
    while (!queue_.empty()) {
      Candidate next = std::move(const_cast<Candidate&>(queue_.top()));  // it is popped at once
      queue_.pop();
      if (const int64_t now = pair_counts_[next.pair]; now != next.count) {
        next.count = now;
        if (now > 0) queue_.push(std::move(next));
        continue;
      }
      if (next.count < training_.min_frequency) return false;
      merge(next);
      return true;
    }
    return false;
  }

  void merge(const Candidate& chosen) {
    const auto left = static_cast<int32_t>(chosen.pair >> 32), right = static_cast<int32_t>(chosen.pair);
    const std::string token = tokens_[static_cast<size_t>(left)] + tokens_[static_cast<size_t>(right)];
    const int32_t merged = add_token(token);
    if (merged < std::ssize(training_.special_tokens)) {  // text must not become a special token
      pair_counts_[chosen.pair] = 0;
      return;
    }
    merges_.emplace_back(left, right);
    std::unordered_map<uint64_t, std::vector<int32_t>> grown;
    for (const int32_t w : chosen.words) merge_in(w, left, right, merged, grown);
    pair_counts_[chosen.pair] = 0;
    for (auto& [pair, list] : grown)
      if (const int64_t count = pair_counts_[pair]; count > 0) queue_.push({count, pair, std::move(list)});
  }

  /// Replaces the pair in one word from left to right, and counts the pairs that went and came.
  void merge_in(int32_t w, int32_t left, int32_t right, int32_t merged,
                std::unordered_map<uint64_t, std::vector<int32_t>>& grown) {
    Word& word = words_[static_cast<size_t>(w)];
    std::vector<int32_t>& ids = word.ids;
    const auto change = [&](int32_t a, int32_t b, int64_t sign) {
      const uint64_t pair = pair_of(a, b);
      pair_counts_[pair] += sign * word.count;
      if (sign < 0) return;
      std::vector<int32_t>& list = grown[pair];
      if (list.empty() || list.back() != w) list.push_back(w);
    };
    size_t out = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] != left || i + 1 == ids.size() || ids[i + 1] != right) {
        ids[out++] = ids[i];
        continue;
      }
      if (out > 0) change(ids[out - 1], left, -1), change(ids[out - 1], merged, 1);
      if (i + 2 < ids.size()) change(right, ids[i + 2], -1), change(merged, ids[i + 2], 1);
      ids[out++] = merged;
      ++i;
    }
    ids.resize(out);
  }

  Json json() const {
    BpeText text;
    for (const std::string& token : training_.special_tokens)
      text.special_tokens.emplace_back(token, std::ssize(text.special_tokens));
    text.vocabulary = Json::object();
    text.merges = Json::array();
    // Unordered objects compare each new key with all others.
    auto& members = text.vocabulary.get_ref<Json::object_t&>();
    for (size_t i = 0; i < tokens_.size(); ++i)
      static_cast<std::vector<std::pair<const std::string, Json>>&>(members).emplace_back(tokens_[i], i);
    for (const auto& [left, right] : merges_)
      text.merges.push_back(
          Json::array({tokens_[static_cast<size_t>(left)], tokens_[static_cast<size_t>(right)]}));
    if (training_.nfc) text.normalizer = {{"type", "NFC"}};
    text.pre_tokenizer = pretokenizer_json(training_.pretokenizer);
    text.decoder = byte_level_json(false, true);
    return bpe_json(std::move(text));
  }

  BpeTraining training_;
  std::optional<Pretokenizer> pretokenizer_;
  std::mutex mutex_;
  Counts counts_;
  int64_t pieces_ = 0;
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int32_t> id_of_;
  std::vector<std::pair<int32_t, int32_t>> merges_;
  std::vector<Word> words_;
  std::unordered_map<uint64_t, int64_t> pair_counts_;
  std::priority_queue<Candidate> queue_;
};

BpeTrainer::BpeTrainer(const BpeTraining& training) : impl_(std::make_unique<Impl>(training)) {}
BpeTrainer::~BpeTrainer() = default;
void BpeTrainer::count(const std::vector<std::string>& documents) { impl_->count(documents); }
BpeTrained BpeTrainer::train(const std::function<void(int64_t)>& progress) { return impl_->train(progress); }

}  // namespace sluice
