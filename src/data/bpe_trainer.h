#pragma once
// Training of byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): the most frequent pair of
// neighbouring tokens within pieces becomes a token, until the vocabulary is full.
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct BpeTraining {
  int64_t vocab_size = 0;                                       // special tokens and the 256 bytes included
  std::string pretokenizer = "llama3";                          // a name of known_pattern_names()
  bool nfc = false;                                             // text is brought to NFC first
  std::vector<std::string> special_tokens = {"<|endoftext|>"};  // ids from 0 on
  int64_t min_frequency = 2;                                    // of a pair that is merged
};

struct BpeTrained {
  std::string json;  // tokenizer.json
  int64_t vocab_size = 0, merges = 0, pieces = 0, distinct_pieces = 0;
};

/// Counts pieces of documents, then merges. The result is a function of the counts alone: equal for any
/// number of threads and any order of the documents. Of equally frequent pairs the one with the lower ids is
/// merged first, as Hugging Face's trainer does, and with the same ids: special tokens, the 256 bytes in the
/// order of their characters, merges.
class BpeTrainer {
 public:
  /// Error(usage) for values that are not possible.
  explicit BpeTrainer(const BpeTraining& training);
  ~BpeTrainer();
  BpeTrainer(const BpeTrainer&) = delete;
  BpeTrainer& operator=(const BpeTrainer&) = delete;

  /// Counts the pieces of documents, on all threads. Bytes that are not UTF-8 separate pieces and are not
  /// counted.
  void count(const std::vector<std::string>& documents);

  /// Error(data) where there was no text. progress: called with the number of merges now and then; may be
  /// empty.
  BpeTrained train(const std::function<void(int64_t)>& progress = {});

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
