#include "eval/prompt_scores.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "config/derived.h"
#include "core/error.h"
#include "core/host_view.h"

namespace sluice {
namespace {

constexpr int64_t kRows = 32;  // whose logits are held at once

}  // namespace

TokenScore token_score(const float* logits, int64_t vocab_size, int32_t token, int64_t count) {
  const double largest = *std::max_element(logits, logits + vocab_size);
  double total = 0;
  for (int64_t v = 0; v < vocab_size; ++v) total += std::exp(logits[v] - largest);
  const double normaliser = largest + std::log(total);
  TokenScore score;
  score.log_probability = logits[token] - normaliser;
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

struct PromptScores::Memory {
  Arena activations, host;
  Context ctx;
  ForwardBuffers buffers;
  Tensor logits;  // (kRows, V)

  static std::unique_ptr<Memory> make(const TrainedModel& trained) {
    Memory dry(trained, 0, 0, 0);
    trained.model().forward(dry.ctx, dry.buffers.batch, dry.buffers.saved);
    trained.model().logits(dry.ctx, dry.logits, dry.buffers.saved.hidden.rows(0, dry.logits.dim(0)));
    return std::unique_ptr<Memory>(new Memory(trained, dry.activations.high_water(), dry.host.high_water(),
                                              std::max<int64_t>(dry.ctx.scratch.high_water(), 64)));
  }

 private:
  Memory(const TrainedModel& trained, int64_t activation_bytes, int64_t host_bytes, int64_t scratch_bytes)
      : activations("activations", activation_bytes, trained.device()),
        host("host", host_bytes),
        ctx(scratch_bytes, trained.device()) {
    const int64_t length = max_positions(trained.config());
    buffers = make_forward_buffers(trained, activations, host, length, Recompute::block);
    logits = activations.alloc("logits", accumulate_dtype(trained.dtype()),
                               {std::min(kRows, length), trained.config().model.vocab_size});
  }
};

PromptScores::PromptScores(const TrainedModel& trained) : trained_(trained), memory_(Memory::make(trained)) {}
PromptScores::~PromptScores() = default;

std::vector<TokenScore> PromptScores::score(const std::vector<int32_t>& tokens, int64_t alternatives) {
  Memory& m = *memory_;
  const int64_t size = m.buffers.batch.tokens.numel(), count = std::ssize(tokens), rows = m.logits.dim(0);
  SLUICE_CHECK(count <= size, "PromptScores: {} tokens, but the context holds {}", count, size);
  const Batch& host = m.buffers.host;
  for (int64_t i = 0; i < size; ++i) {  // the rest comes later, and is not looked at
    host.tokens.as<int32_t>()[i] = i < count ? tokens[static_cast<size_t>(i)] : 0;
    host.targets.as<int32_t>()[i] = -1;
    host.positions.as<int32_t>()[i] = static_cast<int32_t>(i);
    host.first_key.as<int32_t>()[i] = 0;
  }
  m.buffers.upload(m.ctx);
  trained_.model().forward(m.ctx, m.buffers.batch, m.buffers.saved);
  std::vector<TokenScore> scores;
  const int64_t vocab_size = m.logits.dim(1);
  std::vector<float> row(static_cast<size_t>(vocab_size));
  for (int64_t done = 0; done + 1 < count; done += rows) {
    const int64_t begin = std::min(done, size - rows);  // the last rows are computed with some before them
    trained_.model().logits(m.ctx, m.logits, m.buffers.saved.hidden.rows(begin, rows));
    const HostView view(m.ctx, m.logits);
    synchronize(m.ctx);
    const Tensor& logits = view.tensor();
    for (int64_t i = done; i < std::min(done + rows, count - 1); ++i) {
      const int64_t at = (i - begin) * vocab_size;
      for (int64_t v = 0; v < vocab_size; ++v)
        row[static_cast<size_t>(v)] = logits.dtype == DType::f64
                                          ? static_cast<float>(logits.as<double>()[at + v])
                                          : logits.as<float>()[at + v];
      scores.push_back(token_score(row.data(), vocab_size, tokens[static_cast<size_t>(i) + 1], alternatives));
    }
  }
  return scores;
}

}  // namespace sluice
