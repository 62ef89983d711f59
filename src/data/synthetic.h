#pragma once
// Synthetic tasks that a few attention heads solve, with the loss that is best possible (README.md). Tokens
// are those of the byte tokenizer. A document is a pure function of the task, its seed and the document's
// number.
#include <array>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace sluice {

/// Positions of a document that are predicted alike, as expected values over the task's documents. A position
/// is that of the token that is predicted; its query is the token before.
struct PositionClass {
  std::string name;
  std::string query_class;  // of the query, as in analysis.query_classes; "other" for all others
  double positions = 0;     // per document
  double nats = 0;          // per document: sum of the conditional entropies given everything before
  double hits = 0;          // per document: right guesses of who always guesses the most probable token
  double entropy() const { return positions > 0 ? nats / positions : 0; }  // nats per token
  double accuracy() const { return positions > 0 ? hits / positions : 0; }
};

struct SyntheticTask {
  std::string name;                    // "bigram-backcopy"
  int64_t length = 0;                  // tokens of every document
  nlohmann::ordered_json parameters;   // that the documents depend on
  std::vector<PositionClass> classes;  // every position is in one of them
  std::string query_class;             // name and tokens of the class that tells positions apart; empty: none
  std::vector<uint8_t> query_tokens;
  std::vector<std::string> notes;  // what a user should know about these documents
  /// Writes a document's `length` tokens. Safe to call from several threads.
  std::function<void(uint64_t document, uint8_t* out)> document;

  /// Sum over the classes of a query class; over all if the name is empty.
  PositionClass sum(const std::string& of_query_class = "") const;
};

/// Number of a validation document: they continue the same stream far behind the training documents.
constexpr uint64_t kFirstValidationDocument = uint64_t{1} << 40;
constexpr int64_t kLongestDocument = 65536;

/// How often each byte follows each other one in a text. The first byte counts as the last one's successor,
/// so that every byte of the text has one.
struct BigramTable {
  std::array<std::array<int64_t, 256>, 256> pairs{};  // [byte][next byte]
  std::array<int64_t, 256> bytes{};                   // their sums over the next byte: the byte's own count
};
BigramTable count_bigrams(const unsigned char* text, int64_t size);

/// "auto:K": the K most frequent bytes of the text (the lower one of two that are equally frequent);
/// "chars:te ": these ASCII characters; "bytes:116,101,32". In ascending order. Error(usage): anything else,
/// a byte that is given twice or not in the text, or no other byte in the text.
std::vector<uint8_t> parse_triggers(const std::string& text, const BigramTable& table);

/// Bigram-Backcopy (Guo et al. 2024, arXiv 2410.13835): behind a trigger comes the byte before the trigger
/// again, behind any other byte one drawn from its row of the table. The first byte is drawn from the text's
/// bytes that are no triggers. length: 2 to kLongestDocument.
SyntheticTask bigram_backcopy(const BigramTable& table, const std::vector<uint8_t>& triggers, int64_t length,
                              uint64_t seed);

/// Pairs of distinct keys and independent values, then some of the keys again in random order, each followed
/// by its value (multi-query associative recall, Arora et al. 2023, arXiv 2312.04927). Keys are tokens 0 to
/// keys - 1, values the tokens behind them.
struct RecallOptions {
  int64_t keys = 64, values = 64;  // sizes of the two vocabularies: at most 256 in sum
  int64_t pairs = 32;              // at most `keys`
  int64_t queries = 32;            // at most `pairs`
};
/// Error(usage): options out of bounds.
SyntheticTask associative_recall(const RecallOptions& options, uint64_t seed);

/// A block of distinct random tokens, repeated to the end of the document. Its length is uniform within
/// bounds.
struct InductionOptions {
  int64_t vocabulary = 128;                         // at most 256
  int64_t shortest_block = 16, longest_block = 64;  // 2 to `vocabulary`
  int64_t repeats = 4;                              // documents have repeats * longest_block tokens
};
/// Error(usage): options out of bounds.
SyntheticTask induction(const InductionOptions& options, uint64_t seed);

/// What PREFIX.json says of a task under the key "synthetic": parameters, and for every class of positions
/// and queries its share, entropy and accuracy.
nlohmann::ordered_json describe(const SyntheticTask& task);

/// Writes documents first ... first + count - 1 to PREFIX.bin/.idx/.json, on all threads; the files do not
/// depend on their number.
void write_documents(const SyntheticTask& task, uint64_t first, int64_t count, const std::string& prefix);

}  // namespace sluice
