#include "eval/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "config/derived.h"
#include "core/host_view.h"
#include "core/random.h"

namespace sluice {

int32_t sample(const std::vector<float>& logits, const Sampling& sampling, double u) {
  SLUICE_CHECK(!logits.empty(), "sample: no logits");
  if (sampling.temperature <= 0)
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());

  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  if (sampling.top_k > 0 && sampling.top_k < static_cast<int64_t>(order.size()))
    order.resize(static_cast<size_t>(sampling.top_k));

  std::vector<double> weights;
  const double largest = logits[static_cast<size_t>(order[0])];
  for (const int32_t id : order)
    weights.push_back(std::exp((logits[static_cast<size_t>(id)] - largest) / sampling.temperature));
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  size_t kept = 0;
  double mass = 0;
  while (kept < weights.size() && (kept == 0 || mass < sampling.top_p * total)) mass += weights[kept++];

  double rest = u * mass;
  for (size_t i = 0; i + 1 < kept; ++i) {
    rest -= weights[i];
    if (rest < 0) return order[i];
  }
  return order[kept - 1];
}

struct Generator::Pass {
  Arena activations, host;
  Context ctx;
  ForwardBuffers buffers;
  Tensor logits;  // (1, V)

  struct Sizes {
    int64_t activations = 0, host = 0, scratch = 0;
  };

  /// Measures, then allocates.
  static std::unique_ptr<Pass> make(const TrainedModel& trained, int64_t num_tokens, int64_t context_length) {
    Pass dry(trained, num_tokens, {});
    Arena nothing("cache", 0, trained.device());
    // The scratch memory of attention may depend on the number of keys, so it is measured with a pass that
    // fills the cache.
    KeyValueCache cache = trained.model().make_cache(nothing, context_length, trained.dtype());
    cache.length = context_length - num_tokens;
    dry.forward(trained.model(), cache);
    return std::unique_ptr<Pass>(new Pass(trained, num_tokens,
                                          {dry.activations.high_water(), dry.host.high_water(),
                                           std::max<int64_t>(dry.ctx.scratch.high_water(), 64)}));
  }

  void forward(const Transformer& model, KeyValueCache& cache) {
    model.forward(ctx, buffers.batch, buffers.saved, {}, &cache);
    model.logits(ctx, logits, buffers.saved.hidden.rows(buffers.saved.hidden.dim(0) - 1, 1));
  }

 private:
  Pass(const TrainedModel& trained, int64_t num_tokens, const Sizes& sizes)
      : activations("activations", sizes.activations, trained.device()),
        host("host", sizes.host),
        ctx(sizes.scratch, trained.device()) {
    buffers = make_forward_buffers(trained, activations, host, num_tokens, Recompute::block);
    logits = activations.alloc("logits", accumulate_dtype(trained.dtype()),
                               {1, trained.config().model.vocab_size});
  }
};

Generator::Generator(const TrainedModel& trained)
    : trained_(trained), context_length_(max_positions(trained.config())) {
  Arena measure("cache", 0, trained.device());
  trained.model().make_cache(measure, context_length_, trained.dtype());
  cache_memory_ = std::make_unique<Arena>("cache", measure.high_water(), trained.device());
  cache_ = trained.model().make_cache(*cache_memory_, context_length_, trained.dtype());
  one_ = Pass::make(trained, 1, context_length_);
}
Generator::~Generator() = default;

/// Appends tokens to the cache and returns the logits after the last of them.
const std::vector<float>& Generator::feed(const std::vector<int32_t>& tokens) {
  const auto count = static_cast<int64_t>(tokens.size());
  std::unique_ptr<Pass> many = count == 1 ? nullptr : Pass::make(trained_, count, context_length_);
  Pass& pass = many ? *many : *one_;
  const Batch& batch = pass.buffers.host;
  for (int64_t i = 0; i < count; ++i) {
    batch.tokens.as<int32_t>()[i] = tokens[static_cast<size_t>(i)];
    batch.targets.as<int32_t>()[i] = -1;
    batch.positions.as<int32_t>()[i] = static_cast<int32_t>(cache_.length + i);
    batch.first_key.as<int32_t>()[i] = 0;
  }
  pass.buffers.upload(pass.ctx);
  pass.forward(trained_.model(), cache_);
  const HostView view(pass.ctx, pass.logits);
  synchronize(pass.ctx);
  const Tensor& logits = view.tensor();
  logits_.resize(static_cast<size_t>(logits.numel()));
  for (size_t i = 0; i < logits_.size(); ++i)
    logits_[i] =
        logits.dtype == DType::f64 ? static_cast<float>(logits.as<double>()[i]) : logits.as<float>()[i];
  return logits_;
}

void Generator::run(const std::vector<int32_t>& prompt, int64_t max_new_tokens, const Sampling& sampling,
                    const std::function<bool(int32_t)>& on_token) {
  SLUICE_CHECK(!prompt.empty(), "Generator::run: the prompt is empty");
  const RandomStream random(sampling.seed, "generate");
  history_ = prompt;
  cache_.length = 0;
  std::vector<int32_t> next = prompt;
  if (static_cast<int64_t>(next.size()) > context_length_)
    next.assign(prompt.end() - context_length_, prompt.end());
  for (int64_t i = 0; i < max_new_tokens; ++i) {
    if (cache_.length + static_cast<int64_t>(next.size()) > context_length_) {
      next.assign(history_.end() - std::max<int64_t>(context_length_ / 2, 1), history_.end());
      cache_.length = 0;
    }
    const int32_t token = sample(feed(next), sampling, random.uniform(static_cast<uint64_t>(i)));
    history_.push_back(token);
    if (!on_token(token)) return;
    next = {token};
  }
}

}  // namespace sluice
