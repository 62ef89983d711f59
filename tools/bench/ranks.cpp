// Several ranks compared with one: the cost of data parallelism, of exact sums, of the watchdog and of saves,
// and the fraction of communication hidden behind computation. Ranks are threads of this process, so that
// only the work itself is measured.
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "bench/bench.h"
#include "checkpoint/store.h"
#include "comm/threads.h"
#include "core/parallel_for.h"
#include "core/random.h"
#include "data/token_file.h"
#include "run/watchdog.h"
#include "train/trainer.h"

namespace sluice::bench {
namespace {

struct Layout {
  int ranks = 1, threads = 1;
  int64_t zero_stage = 0;
  bool exact = false;
  double seconds_per_byte = 0;
  GradientDtype wire = GradientDtype::f32;
  int64_t context = 1;
};

/// A temporary folder.
struct Folder {
  std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("sluice_bench_{}", ::getpid())).string();
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

Config with(Config config, const Layout& layout) {
  config.parallel.zero_stage = layout.zero_stage;
  config.parallel.determinism = layout.exact ? Determinism::exact : Determinism::same_layout;
  config.parallel.gradient_dtype = layout.wire;
  config.parallel.context = layout.context;
  return config;
}

/// The training state of one rank.
struct Training {
  Communicator& ranks;  // as passed to the trainer
  Trainer& trainer;
  bool leads() const { return ranks.rank() == 0; }
  void barrier() const { trainer.ranks().barrier(); }
};

/// On every rank: creates a trainer, runs two warm-up steps, then `body`.
void train(const Config& base, const Layout& layout, const std::function<void(const Training&)>& body,
           SlowLink* link = nullptr) {
  const Config config = with(base, layout);
  run_thread_ranks(layout.ranks,
                   [&](Communicator& ranks) {
                     set_num_threads(layout.threads);
                     const Blend data(config.data.train, config.data.seq_len, config.model.vocab_size, false,
                                      1);
                     Trainer trainer(config, data, &ranks);
                     trainer.initialize();
                     for (int i = 0; i < 2; ++i) trainer.step();
                     body({ranks, trainer});
                   },
                   {.link = link});
}

/// Seconds between the common start and the common end of all ranks.
double timed(const Training& t, const std::function<void()>& work) {
  t.barrier();
  const double start = now();
  work();
  t.barrier();
  return now() - start;
}
double timed_step(const Training& t) {
  return timed(t, [&] { t.trainer.step(); });
}
double timed_forward(const Training& t) {
  ForwardBuffers& b = t.trainer.micro_batch();
  return timed(t, [&] { t.trainer.model().forward(t.trainer.context(), b.batch, b.saved); });
}

/// The fastest step.
double measure(const Config& config, const Layout& layout, int steps) {
  SlowLink link{layout.seconds_per_byte};
  double best = 1e30;
  train(
      config, layout,
      [&](const Training& t) {
        for (int i = 0; i < steps; ++i) {
          const double seconds = timed_step(t);
          if (t.leads()) best = std::min(best, seconds);
        }
      },
      &link);
  return best;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

/// Pairs of steps of one run, without and with a feature, so that other load on the machine affects both.
struct Pairs {
  double off = 0,
         more = 0;  // medians: seconds of a step without the feature, and the additional seconds with it
};
Pairs alternate(const Training& t, int pairs, const std::function<void(bool on)>& change,
                double (*time)(const Training&) = timed_step) {
  std::vector<double> off, more;
  for (int i = 0; i < pairs; ++i) {
    double seconds[2];
    for (const bool on : {i % 2 == 1, i % 2 == 0}) {
      change(on);
      seconds[on] = time(t);
    }
    off.push_back(seconds[0]), more.push_back(seconds[1] - seconds[0]);
  }
  return {median(off), median(more)};
}

nlohmann::json spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {{"median", values[values.size() / 2]}, {"least", values.front()}, {"most", values.back()}};
}

/// The rows of the table, each measured several times in turn.
class RankBench {
 public:
  explicit RankBench(bool tiny)
      : tokens_(folder_.path + "/tokens"),
        config_(make_config(tokens_, tiny)),
        rounds_(tiny ? 1 : 5),
        steps_(tiny ? 2 : 8),
        pairs_(2 * steps_) {
    write_data(tokens_, config_);
  }

  void compare_layouts();
  void measure_overlap();
  void measure_gather(const std::string& what, double (*time)(const Training&));
  void compare_gradient_types();
  void measure_watchdog();
  void measure_replicas();
  void measure_saves(bool async);
  const nlohmann::json& rows() const { return rows_; }

 private:
  /// A value per round, with the seconds of what was compared.
  struct Rounds {
    std::vector<double> values, first, second;
    void add(double value, double first_seconds, double second_seconds) {
      values.push_back(value), first.push_back(first_seconds), second.push_back(second_seconds);
    }
  };
  void add(const std::string& what, const Rounds& rounds);
  void compare(const std::string& what, const Layout& a, const Layout& b);
  void measure_hidden(Rounds& rounds, const Training& t, SlowLink& link, double share,
                      double& seconds_per_byte, double (*time)(const Training&)) const;

  const Layout alone_{1, 2}, two_{2, 1};
  Folder folder_;
  std::string tokens_;
  Config config_;
  int rounds_, steps_, pairs_;
  double link_seconds_per_byte_ = 0;  // of measure_overlap
  nlohmann::json rows_ = nlohmann::json::array();
};

void RankBench::add(const std::string& what, const Rounds& rounds) {
  nlohmann::json row = spread(rounds.values);
  row["what"] = what;
  row["first_ms"] = 1e3 * median(rounds.first);
  row["second_ms"] = 1e3 * median(rounds.second);
  rows_.push_back(row);
}

void RankBench::compare(const std::string& what, const Layout& a, const Layout& b) {
  Rounds rounds;
  for (int i = 0; i < rounds_; ++i) {
    const double first = measure(config_, a, steps_), second = measure(config_, b, steps_);
    rounds.add(first / second, first, second);
  }
  add(what, rounds);
}

void RankBench::compare_layouts() {
  compare("1 rank x 2 threads / 2 ranks x 1 thread", alone_, two_);
  compare("default / exact, 2 ranks", two_, {2, 1, 0, true});
  Layout shared = two_;
  shared.context = 2, shared.exact = true;
  compare("1 rank x 1 thread / 2 ranks that share sequences, exact", {1, 1, 0, true}, shared);
  for (const int64_t stage : {1, 2, 3})
    compare(fmt::format("ZeRO 0 / ZeRO {}, 2 ranks", stage), two_, {2, 1, stage});
}

/// On every rank. Of each round, the fraction of the link's time that does not lengthen what `time` measures.
/// seconds_per_byte, of all ranks: 0 is replaced by what makes the link take `share` of that time.
void RankBench::measure_hidden(Rounds& rounds, const Training& t, SlowLink& link, double share,
                               double& seconds_per_byte, double (*time)(const Training&)) const {
  const auto on_link = [&](double rate) {
    t.barrier();
    link.taken_ns = 0;
    return alternate(
        t, pairs_,
        [&](bool on) {
          t.barrier();
          link.seconds_per_byte = on ? rate : 0;
        },
        time);
  };
  const auto travel = [&] {
    return 1e-9 * static_cast<double>(link.taken_ns) / (2.0 * pairs_);
  };  // of a rank
  if (seconds_per_byte == 0) {
    // Twice, since a move takes somewhat longer than it should, a short one by more of its time.
    double rate = 1e-9;
    for (int probe = 0; probe < 2; ++probe) {
      const Pairs p = on_link(rate);
      t.barrier();
      if (t.leads()) seconds_per_byte = rate * share * p.off / travel();
      t.barrier();
      rate = seconds_per_byte;
    }
  }
  for (int i = 0; i < rounds_; ++i) {
    const Pairs p = on_link(seconds_per_byte);
    if (t.leads()) rounds.add(1 - p.more / travel(), travel(), p.off + p.more);
  }
}

/// One micro-batch per rank, and a link on which gradient reduction takes 30 % of the step. It can overlap
/// the backward pass, which is two thirds of the step.
void RankBench::measure_overlap() {
  Config short_steps = config_;
  short_steps.train.global_batch_size = 2;
  for (const int64_t stage : {0, 1, 2, 3}) {
    Rounds rounds;
    SlowLink link;
    train(
        short_steps, {2, 1, stage},
        [&](const Training& t) { measure_hidden(rounds, t, link, 0.3, link_seconds_per_byte_, timed_step); },
        &link);
    add(fmt::format("hidden fraction of a slow gradient reduction, ZeRO {}, 2 ranks", stage), rounds);
  }
}

/// Sequences on two ranks, and a link that is slow for keys, values and their gradients alone, so that these
/// take a tenth of the time of what is measured.
void RankBench::measure_gather(const std::string& what, double (*time)(const Training&)) {
  Config long_sequences = config_;
  long_sequences.data.seq_len *= 4;
  long_sequences.train.global_batch_size = 1;
  const Layout shared = {.ranks = 2, .context = 2};
  const ModelConfig& m = config_.model;
  SlowLink link;
  link.only_moves_of = long_sequences.data.seq_len / (2 * shared.ranks) * m.num_key_value_heads * m.head_dim *
                       static_cast<int64_t>(sizeof(float));
  Rounds rounds;
  double seconds_per_byte = 0;
  train(
      long_sequences, shared,
      [&](const Training& t) { measure_hidden(rounds, t, link, 0.1, seconds_per_byte, time); }, &link);
  add(fmt::format("hidden fraction of a slow {}, sequences on 2 ranks", what), rounds);
}

/// Over a link that bounds the step.
void RankBench::compare_gradient_types() {
  Layout wide{2, 1, 0, false, 4 * link_seconds_per_byte_}, narrow = wide;
  narrow.wire = GradientDtype::bf16;
  compare("gradients in f32 / in bf16 over a link as slow as a step", wide, narrow);
}

void RankBench::measure_watchdog() {
  Rounds rounds;
  train(config_, two_, [&](const Training& t) {
    std::unique_ptr<Watchdog> watchdog;
    for (int i = 0; i < rounds_; ++i) {
      const Pairs p = alternate(t, pairs_, [&](bool now_on) {
        if (now_on == (watchdog != nullptr)) return;
        const auto start = [&] {
          watchdog = now_on ? std::make_unique<Watchdog>(t.ranks, folder_.path + "/heartbeat", 600) : nullptr;
        };
        if (t.leads()) start();
        t.barrier();  // rank 0 has truncated the file
        if (!t.leads()) start();
        t.trainer.step();  // the cores rest while a watchdog's thread ends, and a step after a rest is faster
      });
      if (t.leads()) rounds.add(p.off / (p.off + p.more), p.off, p.off + p.more);
    }
  });
  add("without / with a watchdog, 2 ranks", rounds);
}

void RankBench::measure_replicas() {
  Rounds rounds;
  train(config_, two_, [&](const Training& t) {
    for (int i = 0; i < rounds_; ++i) {
      std::vector<double> quiet, comparing;
      for (int k = 0; k < steps_; ++k) {
        quiet.push_back(timed_step(t));
        const double start = now();
        t.trainer.verify_replicas();
        t.barrier();
        comparing.push_back(now() - start);
      }
      const double usual = median(quiet), comparison = median(comparing);
      if (t.leads()) rounds.add(comparison / (50 * usual), comparison, usual);
    }
  });
  add("comparison of replicas every 50 steps, fraction of time", rounds);
}

/// The time of a save and its slowdown of the following steps, over the fifty steps between two saves.
void RankBench::measure_saves(bool async) {
  Rounds rounds;
  train(config_, two_, [&](const Training& t) {
    CheckpointConfig saving;
    saving.async = async;
    CheckpointStore checkpoints(fmt::format("{}/ckpt_{}", folder_.path, async), saving, t.trainer.content(),
                                &t.trainer.context(), &t.trainer.ranks());
    for (int i = 0; i < rounds_; ++i) {
      std::vector<double> quiet;
      for (int k = 0; k < steps_; ++k) quiet.push_back(timed_step(t));
      const double usual = median(quiet);
      t.barrier();
      const double start = now();
      checkpoints.save(t.trainer.content());
      t.barrier();
      double stall = now() - start;
      for (int k = 0; k < steps_; ++k) stall += timed_step(t) - usual;
      checkpoints.wait();
      if (t.leads()) rounds.add(stall / (50 * usual), stall, usual);
    }
  });
  add(fmt::format("{} save every 50 steps, fraction of time", async ? "asynchronous" : "synchronous"),
      rounds);
}

}  // namespace

nlohmann::json measure_ranks(const RaceOptions& options) {
  RankBench bench(options.tiny);
  bench.compare_layouts();
  bench.measure_overlap();
  bench.measure_gather("gather of keys and values, forward", timed_forward);
  bench.measure_gather("exchange of keys, values and their gradients, whole step", timed_step);
  bench.compare_gradient_types();
  bench.measure_watchdog();
  bench.measure_replicas();
  bench.measure_saves(/*async=*/true);
  bench.measure_saves(/*async=*/false);
  return bench.rows();
}

}  // namespace sluice::bench
