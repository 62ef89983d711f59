#pragma once
// Forward passes of a trained model over sequences whose earlier keys and values are kept: prompts in chunks
// of bounded memory, then one token at a time for several sequences at once. Where ranks share the model's
// sequences (TrainedModel, in parts of kSharedTokens), they divide the chunks of prompts, and each has all
// keys and values; the next tokens are computed by each of them.
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "core/device.h"
#include "eval/trained_model.h"

namespace sluice {

class CachedModel {
 public:
  static constexpr int64_t kSharedTokens = 64;
  struct Sizes {
    int64_t context = 0;    // tokens of a sequence; at most the model's positions
    int64_t sequences = 1;  // kept at once
    int64_t chunk = 512;    // tokens of a prompt that pass through the model together
  };
  /// Error(usage): the context is longer than the model's rotary table.
  CachedModel(const TrainedModel& trained, const Sizes& sizes);
  ~CachedModel();

  /// Tokens of a sequence so far.
  int64_t length(int64_t sequence) const { return caches_[static_cast<size_t>(sequence)].length; }
  /// Forgets all but the first `length` tokens of a sequence.
  void truncate(int64_t sequence, int64_t length);

  /// Makes a sequence hold the tokens of another one.
  void copy_sequence(int64_t from, int64_t to);

  /// Appends one or more tokens to a sequence. Returns the logits (V) after the last of them, valid until the
  /// next call. Collective where ranks share the sequences, as step() is: all have the logits of the first of
  /// them. At a given length the results do not depend on what the sequence held before truncate().
  std::span<const float> prefill(int64_t sequence, std::span<const int32_t> tokens);
  struct Next {
    int64_t sequence;
    int32_t token;
  };
  /// Appends one token to each of several different sequences. Returns their logits, one row (V) after the
  /// other, valid until the next call.
  std::span<const float> step(std::span<const Next> next);

  int64_t vocab_size() const { return trained_.config().model.vocab_size; }
  int64_t context() const { return sizes_.context; }
  int64_t chunk() const { return sizes_.chunk; }
  int64_t sequences() const { return sizes_.sequences; }
  /// Bytes of the keys and values of all sequences, and of the activations of all passes so far.
  int64_t cache_bytes() const;
  int64_t activation_bytes() const;
  /// Bytes of what a token leaves in the cache.
  int64_t cache_bytes_per_token() const;

 private:
  struct Pass;  // memory of a pass over some rows
  Pass& pass(int64_t rows, bool each);
  std::span<const float> read_logits(Pass& pass);
  const SequenceRanks* ranks() const { return trained_.model().sequence_ranks(); }
  int64_t rows_of_chunk(int64_t length, int64_t left) const;
  void forward_chunk(Pass& pass, KeyValueCache& cache, std::span<const int32_t> tokens);

  const TrainedModel& trained_;
  Sizes sizes_;
  std::unique_ptr<Arena> memory_;
  std::vector<KeyValueCache> caches_;
  std::vector<KeyValueCache*> stepping_;
  std::map<int64_t, std::unique_ptr<Pass>> chunks_, steps_;  // by rows
  /// On a GPU every pass has a stream of its own; where the last one has written keys and values, the next
  /// may read them.
  Mark written_;
  std::vector<float> logits_;
};

}  // namespace sluice
