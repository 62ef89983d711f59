#include "eval/scored_sequences.h"

#include <algorithm>

#include "core/error.h"
#include "eval/sample_rows.h"

namespace sluice {
namespace {

/// One forward pass, filled with sequences one behind the other.
class PackedPass {
 public:
  PackedPass(Context& ctx, const Transformer& model, ForwardBuffers& buffers, const ValueZeroing* zeroing)
      : ctx_(ctx),
        model_(model),
        buffers_(buffers),
        zeroing_(zeroing),
        rows_(model, buffers),
        size_(rows_.tokens()) {}

  bool fits(const ScoredSequence& sequence) const { return used_ + std::ssize(sequence.tokens) - 1 <= size_; }

  void add(const ScoredSequence& sequence, double& sum) {
    const int64_t inputs = std::ssize(sequence.tokens) - 1;
    SLUICE_CHECK(inputs >= 1 && fits(sequence), "log_likelihoods: {} tokens do not fit into {}", inputs,
                 size_);
    for (int64_t i = 0; i < inputs; ++i) {
      const bool scored = i + 1 >= static_cast<int64_t>(sequence.first_target);
      rows_.put(used_ + i, sequence.tokens[static_cast<size_t>(i)],
                scored ? sequence.tokens[static_cast<size_t>(i) + 1] : -1, i, used_);
    }
    parts_.push_back({used_, inputs, &sum});
    used_ += inputs;
  }

  /// Computes, and adds to the sums.
  void run() {
    if (parts_.empty()) return;
    // What is left are sequences of one token 0 without targets, which attend to nothing else.
    for (int64_t i = used_; i < size_; ++i) rows_.put(i, 0, -1, 0, i);
    rows_.upload(ctx_);
    model_.forward(ctx_, buffers_.batch, buffers_.saved, {}, nullptr, zeroing_);
    model_.loss_forward(ctx_, buffers_.losses, buffers_.batch, buffers_.saved);
    const std::vector<double> losses = rows_.losses(ctx_);
    const int32_t* const targets = rows_.whole().targets.as<int32_t>();
    for (const Part& part : parts_)
      for (int64_t i = part.begin; i < part.begin + part.inputs; ++i)
        if (targets[i] >= 0) *part.sum -= losses[static_cast<size_t>(i)];
    parts_.clear();
    used_ = 0;
  }

 private:
  struct Part {
    int64_t begin = 0, inputs = 0;
    double* sum = nullptr;
  };

  Context& ctx_;
  const Transformer& model_;
  ForwardBuffers& buffers_;
  const ValueZeroing* zeroing_;
  SampleRows rows_;
  int64_t size_, used_ = 0;
  std::vector<Part> parts_;
};

}  // namespace

ScoredSequence scored_sequence(const Tokenizer& tokenizer, std::optional<int64_t> begin_token,
                               const std::string& context, const std::string& continuation, int64_t most) {
  const size_t text_end = context.find_last_not_of(" \t\r\n\v\f");
  const std::string before = context.substr(0, text_end == std::string::npos ? 0 : text_end + 1);
  ScoredSequence out;
  out.tokens = tokenizer.encode(context + continuation);
  size_t length = tokenizer.encode(before).size();
  // A tokenizer may join the end of the context with the continuation; something must be left to score.
  length = std::min(length, out.tokens.empty() ? 0 : out.tokens.size() - 1);
  const bool begins = begin_token || length == 0;
  if (begins) {
    const int64_t first = begin_token.value_or(tokenizer.end_of_document());
    out.tokens.insert(out.tokens.begin(), static_cast<int32_t>(first));
    ++length;
  }
  out.first_target = length;
  if (const int64_t over = std::ssize(out.tokens) - (most + 1); over > 0) {
    // What stands in front of every text stays: models trained with it know no sequence without it.
    const auto first = out.tokens.begin() + (begins ? 1 : 0);
    out.tokens.erase(first, first + over);
    out.first_target = static_cast<size_t>(std::max<int64_t>(static_cast<int64_t>(length) - over, 1));
    out.unscored = std::max<int64_t>(over - static_cast<int64_t>(length) + 1, 0);
    out.context_cut = length > (begins ? 1U : 0U);
  }
  return out;
}

std::optional<std::vector<double>> log_likelihoods(Context& ctx, const Transformer& model,
                                                   ForwardBuffers& buffers,
                                                   const std::vector<ScoredSequence>& sequences,
                                                   const std::function<bool()>& stop,
                                                   const ValueZeroing* zeroing) {
  std::vector<double> sums(sequences.size(), 0.0);
  PackedPass pass(ctx, model, buffers, zeroing);
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].tokens.size() < 2) continue;  // nothing to predict
    if (!pass.fits(sequences[i])) {
      if (stop()) return std::nullopt;
      pass.run();
    }
    pass.add(sequences[i], sums[i]);
  }
  if (stop()) return std::nullopt;
  pass.run();
  return sums;
}

}  // namespace sluice
