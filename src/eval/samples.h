#pragma once
// Samples of text of a model in training: how it continues prompts, the most probable token at each place.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/tokenizer.h"
#include "nn/forward_buffers.h"

namespace sluice {

struct SampleText {
  std::string prompt, text;  // text: without the prompt; ends where the model ended the document
};

/// Continues every prompt by up to `tokens` tokens. In the buffers of a training, without a cache: a whole
/// forward pass for each token, in which as many prompts as the buffers have samples go forward together. Of
/// a text that has become longer than data.seq_len the model sees the end. vocab_size: the model's. Nothing
/// where stop() returned true. alone: one rank does it; otherwise all ranks of a training do, in as many
/// forward passes as prompts of `tokens` tokens need.
std::optional<std::vector<SampleText>> continue_prompts(Context& ctx, const Transformer& model,
                                                        ForwardBuffers& buffers, const Tokenizer& tokenizer,
                                                        const DataConfig& data, int64_t vocab_size,
                                                        const std::vector<std::string>& prompts,
                                                        int64_t tokens, const std::function<bool()>& stop,
                                                        bool alone = true);

/// Text with bytes that are not UTF-8 replaced by U+FFFD.
std::string valid_text(std::string_view text);

/// "  sample "In the" -> " beginning was..."", line breaks as \n.
std::string describe(const SampleText& sample);

}  // namespace sluice
