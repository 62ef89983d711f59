#include "eval/prompt_scores.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "config/derived.h"
#include "core/error.h"
#include "core/host_view.h"
#include "eval/sampling.h"

namespace sluice {
namespace {

constexpr int64_t kRows = 32;      // whose logits are held at once
constexpr int64_t kSmallest = 64;  // rows of a pass

/// The logits of a row as f32.
void copy_row(const Tensor& logits, int64_t row, std::vector<float>& out) {
  const int64_t size = logits.dim(1);
  out.resize(static_cast<size_t>(size));
  for (int64_t v = 0; v < size; ++v)
    out[static_cast<size_t>(v)] = logits.dtype == DType::f64
                                      ? static_cast<float>(logits.as<double>()[row * size + v])
                                      : logits.as<float>()[row * size + v];
}

}  // namespace

TokenScore token_score(const float* logits, int64_t vocab_size, int32_t token, int64_t count) {
  require_numbers({logits, static_cast<size_t>(vocab_size)});
  const double largest = *std::max_element(logits, logits + vocab_size);
  double total = 0;
  for (int64_t v = 0; v < vocab_size; ++v) total += std::exp(logits[v] - largest);
  const double normaliser = largest + std::log(total);
  TokenScore score;
  score.log_probability = logits[token] - normaliser;
  if (count == 0) return score;
  std::vector<int32_t> order(static_cast<size_t>(vocab_size));
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + std::min(count, vocab_size);
  std::partial_sort(order.begin(), end, order.end(), [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  for (auto id = order.begin(); id != end; ++id)
    score.alternatives.emplace_back(*id, logits[*id] - normaliser);
  return score;
}

struct PromptScores::Pass {
  Arena activations, host;
  Context ctx;
  ForwardBuffers buffers;
  Tensor logits;  // (kRows, V)

  static std::unique_ptr<Pass> make(const TrainedModel& trained, int64_t rows) {
    Pass dry(trained, rows, 0, 0, 0);
    trained.model().forward(dry.ctx, dry.buffers.batch, dry.buffers.saved);
    trained.model().logits(dry.ctx, dry.logits, dry.buffers.saved.hidden.rows(0, dry.logits.dim(0)));
    return std::unique_ptr<Pass>(new Pass(trained, rows, dry.activations.high_water(), dry.host.high_water(),
                                          std::max<int64_t>(dry.ctx.scratch.high_water(), 64)));
  }
  void put(int64_t row, int32_t token, int64_t position, int64_t first_key) const {
    const Batch& batch = buffers.host;
    batch.tokens.as<int32_t>()[row] = token;
    batch.targets.as<int32_t>()[row] = -1;
    batch.positions.as<int32_t>()[row] = static_cast<int32_t>(position);
    batch.first_key.as<int32_t>()[row] = static_cast<int32_t>(first_key);
  }

 private:
  Pass(const TrainedModel& trained, int64_t rows, int64_t activation_bytes, int64_t host_bytes,
       int64_t scratch_bytes)
      : activations("activations", activation_bytes, trained.device()),
        host("host", host_bytes),
        ctx(scratch_bytes, trained.device()) {
    buffers = make_forward_buffers(trained, activations, host, rows, Recompute::block);
    logits = activations.alloc("logits", accumulate_dtype(trained.dtype()),
                               {std::min(kRows, rows), trained.config().model.vocab_size});
  }
};

PromptScores::PromptScores(const TrainedModel& trained, int64_t context)
    : trained_(trained), context_(context) {}
PromptScores::~PromptScores() = default;

/// The smallest pass with room for so many rows: a power of two, or the context.
PromptScores::Pass& PromptScores::pass(int64_t rows) {
  int64_t size = kSmallest;
  while (size < rows) size *= 2;
  size = std::min(size, context_);
  std::unique_ptr<Pass>& made = passes_[size];
  if (!made) made = Pass::make(trained_, size);
  return *made;
}

std::vector<PromptScore> PromptScores::score(std::span<const ScoredPrompt> prompts) {
  std::vector<PromptScore> out(prompts.size());
  std::vector<Packed> packed;
  int64_t used = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto count = std::ssize(prompts[i].tokens);
    SLUICE_CHECK(count >= 1 && count <= context_, "PromptScores: {} tokens, but the context holds {}", count,
                 context_);
    if (used + count > context_) {
      run(prompts, packed, out);
      packed.clear();
      used = 0;
    }
    packed.push_back({i, used, used + count});
    used += count;
  }
  if (!packed.empty()) run(prompts, packed, out);
  return out;
}

void PromptScores::run(std::span<const ScoredPrompt> prompts, const std::vector<Packed>& packed,
                       std::vector<PromptScore>& out) {
  const int64_t used = packed.back().end;
  Pass& p = pass(used);
  const int64_t size = p.buffers.batch.tokens.numel(), rows = p.logits.dim(0);
  for (const Packed& part : packed)
    for (int64_t i = part.begin; i < part.end; ++i)
      p.put(i, prompts[part.prompt].tokens[static_cast<size_t>(i - part.begin)], i - part.begin, part.begin);
  for (int64_t i = used; i < size; ++i) p.put(i, 0, i - used, used);  // is not looked at
  p.buffers.upload(p.ctx);
  trained_.model().forward(p.ctx, p.buffers.batch, p.buffers.saved);
  std::vector<float> row;
  size_t at = 0;
  for (int64_t done = 0; done < used; done += rows) {
    const int64_t begin = std::min(done, size - rows);  // the last rows are computed with some before them
    trained_.model().logits(p.ctx, p.logits, p.buffers.saved.hidden.rows(begin, rows));
    const HostView view(p.ctx, p.logits);
    synchronize(p.ctx);
    for (int64_t i = done; i < std::min(done + rows, used); ++i) {
      if (i == packed[at].end) ++at;
      const ScoredPrompt& prompt = prompts[packed[at].prompt];
      PromptScore& score = out[packed[at].prompt];
      const bool last = i + 1 == packed[at].end;
      if (last && !prompt.next) continue;
      copy_row(view.tensor(), i - begin, row);
      if (last)
        score.next = row;
      else
        score.tokens.push_back(token_score(row.data(), std::ssize(row),
                                           prompt.tokens[static_cast<size_t>(i - packed[at].begin) + 1],
                                           prompt.alternatives));
    }
  }
}

}  // namespace sluice
