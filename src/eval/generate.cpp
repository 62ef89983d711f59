#include "eval/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "config/derived.h"
#include "core/error.h"
#include "core/random.h"

namespace sluice {

void require_numbers(std::span<const float> logits) {
  for (size_t i = 0; i < logits.size(); ++i)
    if (!(logits[i] < std::numeric_limits<float>::infinity()))
      fail(ExitCode::numeric,
           "the model's logit of token {} is {}: no token is the most probable one; the weights, or what was "
           "computed from them, are not finite",
           i, logits[i]);
}

int32_t most_probable(std::span<const float> logits) {
  require_numbers(logits);
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

int32_t sample(std::span<const float> logits, const Sampling& sampling, double u) {
  SLUICE_CHECK(!logits.empty(), "sample: no logits");
  if (sampling.temperature <= 0) return most_probable(logits);
  require_numbers(logits);

  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  if (sampling.top_k > 0 && sampling.top_k < static_cast<int64_t>(order.size()))
    order.resize(static_cast<size_t>(sampling.top_k));

  std::vector<double> weights;
  weights.reserve(order.size());
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

Generator::Generator(const TrainedModel& trained)
    : context_length_(max_positions(trained.config())), model_(trained, {.context = context_length_}) {
  if (const auto& token = trained.config().data.begin_token) begin_token_ = static_cast<int32_t>(*token);
}

/// The last `count` tokens, or all where there are fewer, that fit behind the begin token; with it.
std::vector<int32_t> Generator::context_of(int64_t count) const {
  std::vector<int32_t> tokens;
  if (begin_token_) tokens.push_back(*begin_token_);
  const int64_t room = context_length_ - std::ssize(tokens);
  tokens.insert(tokens.end(), history_.end() - std::min({count, room, std::ssize(history_)}), history_.end());
  return tokens;
}

void Generator::run(const std::vector<int32_t>& prompt, int64_t max_new_tokens, const Sampling& sampling,
                    const std::function<bool(int32_t)>& on_token) {
  SLUICE_CHECK(!prompt.empty() || begin_token_, "Generator::run: the prompt is empty");
  const RandomStream random(sampling.seed, "generate");
  history_ = prompt;
  model_.truncate(0, 0);
  std::vector<int32_t> next = context_of(context_length_);
  for (int64_t i = 0; i < max_new_tokens; ++i) {
    if (model_.length(0) + std::ssize(next) > context_length_) {
      next = context_of(std::max<int64_t>(context_length_ / 2, 1));
      model_.truncate(0, 0);
    }
    logits_ = model_.prefill(0, next);
    const int32_t token = sample(logits_, sampling, random.uniform(static_cast<uint64_t>(i)));
    history_.push_back(token);
    if (!on_token(token)) return;
    next = {token};
  }
}

}  // namespace sluice
