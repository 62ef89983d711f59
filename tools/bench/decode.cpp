// Prompts and continuations with a cache of keys and values, at several lengths.
#include "bench/bench.h"
#include "core/random.h"
#include "eval/cached_model.h"

namespace sluice::bench {
namespace {

constexpr int64_t kTogether = 8;  // sequences

/// About 20M parameters, of which 13M are not embeddings; or a few, for tests.
Config model(const std::string& kind, bool tiny, int64_t context) {
  Config config;
  ModelConfig& m = config.model;
  m.vocab_size = tiny ? 61 : 16384, m.hidden_size = tiny ? 32 : 384, m.num_hidden_layers = tiny ? 2 : 8;
  m.num_attention_heads = tiny ? 2 : 6, m.num_key_value_heads = tiny ? 1 : 2, m.head_dim = tiny ? 16 : 64;
  m.intermediate_size = tiny ? 48 : 1024;
  if (kind == "gated") m.attention.gates.emplace_back();
  if (kind == "sparse") {
    m.attention.kind = AttentionKind::sparse;
    m.attention.sparse.k.base = tiny ? 16 : 512;
  }
  m.max_position_embeddings = context;
  config.data.seq_len = context;
  return config;
}

double median_step(CachedModel& cached, int64_t sequences, int64_t steps) {
  std::vector<CachedModel::Next> next;
  for (int64_t i = 0; i < sequences; ++i) next.push_back({i, 7});
  std::vector<double> times;
  for (int64_t i = 0; i < steps; ++i) {
    const double start = now();
    cached.step(next);
    times.push_back(now() - start);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

nlohmann::json measure_decode(bool tiny, int64_t longest) {
  nlohmann::json rows = nlohmann::json::array();
  const int64_t steps = tiny ? 3 : 9;
  for (const std::string kind : {"plain", "gated", "sparse"}) {
    const int64_t context = longest + 2 * steps + 1;
    const TrainedModel trained(model(kind, tiny, context), 512);
    CachedModel cached(trained, {.context = context, .sequences = kTogether});
    const RandomStream random(1, "bench decode");
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < longest; ++i)
      tokens.push_back(static_cast<int32_t>(random.bits(static_cast<uint64_t>(i)) %
                                            static_cast<uint64_t>(cached.vocab_size())));
    cached.prefill(0, std::span(tokens).first(static_cast<size_t>(std::min<int64_t>(longest, 513))));
    cached.truncate(0, 0);
    double seconds = 0;
    for (int64_t length = tiny ? 64 : 1024; length <= longest; length *= 2) {
      const int64_t held = cached.length(0);
      const double start = now();
      cached.prefill(
          0, std::span(tokens).subspan(static_cast<size_t>(held), static_cast<size_t>(length - held)));
      seconds += now() - start;
      for (int64_t i = 1; i < kTogether; ++i) cached.copy_sequence(0, i);
      const double one = median_step(cached, 1, steps);
      cached.truncate(0, length);
      const double many = median_step(cached, kTogether, steps);
      for (int64_t i = 0; i < kTogether; ++i) cached.truncate(i, length);
      rows.push_back({{"model", kind},
                      {"parameters", trained.num_parameters()},
                      {"length", length},
                      {"prefill_tokens_per_second", static_cast<double>(length) / seconds},
                      {"decode_tokens_per_second", 1 / one},
                      {"together", kTogether},
                      {"decode_tokens_per_second_together", static_cast<double>(kTogether) / many},
                      {"cache_bytes_per_sequence", cached.cache_bytes() / kTogether * length / context},
                      {"activation_bytes", cached.activation_bytes()}});
    }
  }
  return rows;
}

}  // namespace sluice::bench
