#pragma once
// Log-likelihoods of continuations, for questions that offer a choice of them (eval/tasks.h,
// eval/ruler_choice.h).
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "nn/forward_buffers.h"

namespace sluice {

/// A context and its continuation as tokens: inputs, and where the continuation's targets begin.
struct ScoredSequence {
  std::vector<int32_t> tokens;
  size_t first_target = 1;  // index in tokens of the continuation's first token
  bool context_cut = false;  // the beginning of the context is missing
  int64_t unscored = 0;      // tokens at the continuation's beginning that are no targets
};

/// White space at the end of the context is encoded with the continuation, as lm-eval does. An empty context
/// is the end-of-document token, or data.begin_token, which otherwise stands in front of it. Of a sequence
/// longer than `most` + 1 tokens this first token and the end are kept.
ScoredSequence scored_sequence(const Tokenizer& tokenizer, std::optional<int64_t> begin_token,
                               const std::string& context, const std::string& continuation, int64_t most);

/// Log-likelihoods of the continuations of sequences, packed into forward passes of the buffers' size; a
/// sequence sees itself alone. Nothing where stop() returned true between passes. zeroing: as in evaluations
/// (nn/sequence.h); nullptr: none.
std::optional<std::vector<double>> log_likelihoods(Context& ctx, const Transformer& model,
                                                   ForwardBuffers& buffers,
                                                   const std::vector<ScoredSequence>& sequences,
                                                   const std::function<bool()>& stop,
                                                   const ValueZeroing* zeroing = nullptr);

}  // namespace sluice
