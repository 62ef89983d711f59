// Prompts and continuations with a cache of keys and values, at several lengths.
#include "bench/bench.h"
#include "core/random.h"
#include "eval/cached_model.h"

namespace sluice::bench {
namespace {

constexpr int64_t kTogether = 8;  // sequences

struct Case {
  const char* name;
  bool gated, sparse, large;
  Precision precision;
};
constexpr Case kCases[] = {{"plain", false, false, false, Precision::f32},
                           {"gated", true, false, false, Precision::f32},
                           {"sparse", false, true, false, Precision::f32},
                           {"124M", false, false, true, Precision::bf16}};

/// About 20M parameters, of which 13M are not embeddings, or the widths of GPT-2's smallest; or a few, for
/// tests.
Config model(const Case& c, bool tiny, int64_t context) {
  Config config;
  ModelConfig& m = config.model;
  m.vocab_size = 16384, m.hidden_size = 384, m.num_hidden_layers = 8;
  m.num_attention_heads = 6, m.num_key_value_heads = 2, m.head_dim = 64, m.intermediate_size = 1024;
  if (c.large) {
    m.vocab_size = 50304, m.hidden_size = 768, m.num_hidden_layers = 12;
    m.num_attention_heads = m.num_key_value_heads = 12, m.intermediate_size = 2048;
  }
  if (tiny) {
    m.vocab_size = 61, m.hidden_size = 32, m.num_hidden_layers = 2;
    m.num_attention_heads = 2, m.num_key_value_heads = 1, m.head_dim = 16, m.intermediate_size = 48;
  }
  if (c.gated) m.attention.gates.emplace_back();
  if (c.sparse) {
    m.attention.kind = AttentionKind::sparse;
    m.attention.sparse.k.base = tiny ? 16 : 512;
  }
  m.max_position_embeddings = context;
  config.data.seq_len = context;
  config.train.precision = c.precision;
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

/// Rows of one model.
void measure(nlohmann::json& rows, const Case& c, bool tiny, int64_t longest) {
  const int64_t steps = tiny ? 3 : 33, context = longest + 2 * steps + 1;
  const TrainedModel trained(model(c, tiny, context), 512);
  CachedModel cached(trained, {.context = context, .sequences = kTogether});
  const RandomStream random(1, "bench decode");
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < longest; ++i)
    tokens.push_back(static_cast<int32_t>(random.bits(static_cast<uint64_t>(i)) %
                                          static_cast<uint64_t>(cached.vocab_size())));
  cached.prefill(0, std::span(tokens).first(static_cast<size_t>(std::min<int64_t>(longest, 513))));
  cached.truncate(0, 0);
  const auto weights = static_cast<double>(trained.num_parameters() * dtype_size(trained.dtype())),
             token = static_cast<double>(cached.cache_bytes_per_token());
  double seconds = 0;
  for (int64_t length = tiny ? 64 : 1024; length <= longest; length *= 2) {
    const int64_t held = cached.length(0);
    const double start = now();
    cached.prefill(0,
                   std::span(tokens).subspan(static_cast<size_t>(held), static_cast<size_t>(length - held)));
    seconds += now() - start;
    for (int64_t i = 1; i < kTogether; ++i) cached.copy_sequence(0, i);
    const double copy = copy_rate(tiny ? 0 : 0.1), one = median_step(cached, 1, steps);
    cached.truncate(0, length);
    const double many = median_step(cached, kTogether, steps);
    for (int64_t i = 0; i < kTogether; ++i) cached.truncate(i, length);
    const double cache = token * static_cast<double>(length);
    rows.push_back({{"model", c.name},
                    {"precision", dtype_name(trained.dtype())},
                    {"parameters", trained.num_parameters()},
                    {"length", length},
                    {"prefill_tokens_per_second", static_cast<double>(length) / seconds},
                    {"decode_tokens_per_second", 1 / one},
                    {"together", kTogether},
                    {"decode_tokens_per_second_together", static_cast<double>(kTogether) / many},
                    {"copy_gb_per_second", copy},
                    {"cache_bytes_per_sequence", cache},
                    {"activation_bytes", cached.activation_bytes()}});
    if (c.sparse) continue;  // reads selected keys alone
    rows.back()["decode_gb_per_second"] = (weights + cache) / one * 1e-9;
    rows.back()["decode_gb_per_second_together"] = (weights + kTogether * cache) / many * 1e-9;
  }
}

}  // namespace

nlohmann::json measure_decode(bool tiny, int64_t longest) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Case& c : kCases) measure(rows, c, tiny, longest);
  return rows;
}

}  // namespace sluice::bench
