// Several ranks against one: what sharing a step costs, what an exact sum costs, and how much of the exchange is hidden behind
// the computation. Ranks are threads of this process, so that only the work itself is measured.
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include "bench.h"
#include "comm/threads.h"
#include "core/parallel_for.h"
#include "core/random.h"
#include "data/token_file.h"
#include "train/trainer.h"

namespace sluice::bench {
namespace {

struct Layout {
  int ranks = 1, threads = 1;
  int64_t zero_stage = 0;
  bool exact = false;
  double seconds_per_byte = 0;
  GradientDtype wire = GradientDtype::f32;
};

struct Times {
  double step = 0, exchange = 0;  // seconds of the fastest step, and of it in communicators; of rank 0
};

/// A folder that is gone afterwards.
struct Folder {
  std::string path = (std::filesystem::temp_directory_path() / fmt::format("sluice_bench_{}", ::getpid())).string();
  Folder() { std::filesystem::create_directories(path); }
  ~Folder() { std::filesystem::remove_all(path); }
};

Config make_config(const std::string& data, bool tiny) {
  Config c;
  ModelConfig& m = c.model;
  m.vocab_size = tiny ? 64 : 1024;
  m.hidden_size = tiny ? 32 : 256;
  m.num_hidden_layers = tiny ? 2 : 6;
  m.num_attention_heads = m.num_key_value_heads = tiny ? 2 : 4;
  m.head_dim = tiny ? 16 : 64;
  m.intermediate_size = tiny ? 64 : 1024;
  m.attention.gates = {GateConfig{}};
  c.data.seq_len = tiny ? 32 : 256;
  c.data.train = {{"bench", data, 1.0}};
  c.train.micro_batch_size = 1;
  c.train.global_batch_size = 4;
  c.train.max_steps = 1000000;
  return c;
}

void write_data(const std::string& prefix, const Config& c) {
  const RandomStream random(1, "bench");
  std::vector<int32_t> tokens(static_cast<size_t>(64 * c.data.seq_len));
  for (size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<int32_t>(random.bits(i) % static_cast<uint64_t>(c.model.vocab_size));
  TokenFileWriter writer(prefix, c.model.vocab_size);
  writer.add_document(tokens.data(), std::ssize(tokens));
  writer.finish();
}

Times measure(Config config, const Layout& layout, int steps) {
  config.parallel.zero_stage = layout.zero_stage;
  config.parallel.determinism = layout.exact ? Determinism::exact : Determinism::same_layout;
  config.parallel.gradient_dtype = layout.wire;
  Times best{1e30, 0};
  run_thread_ranks(
      layout.ranks,
      [&](Communicator& ranks) {
        set_num_threads(layout.threads);
        const Blend data(config.data.train, config.data.seq_len, config.model.vocab_size, false, 1);
        Trainer trainer(config, data, &ranks);
        trainer.initialize();
        for (int i = 0; i < 2; ++i) trainer.step();
        for (int i = 0; i < steps; ++i) {
          trainer.ranks().barrier();
          const double start = now();
          const int64_t before = ranks.progress().total_ns;
          trainer.step();
          trainer.ranks().barrier();
          if (ranks.rank() != 0) continue;
          const double seconds = now() - start;
          if (seconds < best.step) best = {seconds, 1e-9 * static_cast<double>(ranks.progress().total_ns - before)};
        }
      },
      {.seconds_per_byte = layout.seconds_per_byte});
  return best;
}

nlohmann::json spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {{"median", values[values.size() / 2]}, {"least", values.front()}, {"most", values.back()}};
}

}  // namespace

nlohmann::json measure_ranks(const RaceOptions& options) {
  const Folder folder;
  const bool tiny = options.tiny;
  const Config config = make_config(folder.path + "/tokens", tiny);
  write_data(folder.path + "/tokens", config);
  const int rounds = tiny ? 1 : 5, steps = tiny ? 2 : 8;
  nlohmann::json rows = nlohmann::json::array();
  const auto compare = [&](const std::string& what, const Layout& a, const Layout& b) {
    std::vector<double> ratios, first, second;
    for (int i = 0; i < rounds; ++i) {
      first.push_back(measure(config, a, steps).step);
      second.push_back(measure(config, b, steps).step);
      ratios.push_back(first.back() / second.back());
    }
    nlohmann::json row = spread(ratios);
    row["what"] = what, row["first_ms"] = 1e3 * spread(first)["median"].get<double>(),
    row["second_ms"] = 1e3 * spread(second)["median"].get<double>();
    rows.push_back(row);
  };
  const Layout alone{1, 2}, two{2, 1}, exact{2, 1, 0, true};
  compare("1 rank x 2 threads / 2 ranks x 1 thread", alone, two);
  compare("default / exact, 2 ranks", two, exact);
  for (const int64_t stage : {1, 2, 3}) compare(fmt::format("ZeRO 0 / ZeRO {}, 2 ranks", stage), two, {2, 1, stage});

  // A link that takes about a fifth of a step for its gradients: less than the last backward pass, beside which they travel.
  for (const int64_t stage : {0, 1}) {
    const double fast = measure(config, {2, 1, stage}, steps).step;
    std::vector<double> hidden;
    double slow_ms = 0, exchange_ms = 0;
    ParamStore store;
    const Transformer model(config.model, store);
    const double per_byte = 0.2 * fast / (8.0 * static_cast<double>(store.total()));
    for (int i = 0; i < rounds; ++i) {
      const Times base = measure(config, {2, 1, stage}, steps), slow = measure(config, {2, 1, stage, false, per_byte}, steps);
      hidden.push_back(1 - (slow.step - base.step) / (slow.exchange - base.exchange));
      slow_ms = 1e3 * slow.step, exchange_ms = 1e3 * slow.exchange;
    }
    nlohmann::json row = spread(hidden);
    row["what"] = fmt::format("share of a slow exchange that is hidden, ZeRO {}, 2 ranks", stage);
    row["first_ms"] = exchange_ms, row["second_ms"] = slow_ms;
    rows.push_back(row);
    if (stage != 0) continue;
    // Five times as slow: what is waited for is the link.
    Layout wide{2, 1, stage, false, 5 * per_byte}, narrow = wide;
    narrow.wire = GradientDtype::bf16;
    compare("gradients in f32 / in bf16 over a link as slow as a step", wide, narrow);
  }
  return rows;
}

}  // namespace sluice::bench
