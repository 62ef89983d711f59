#include "eval/analyze.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "config/derived.h"
#include "data/loader.h"
#include "data/token_check.h"

namespace sluice {
namespace {

/// Forward passes over the first tokens of samples, and what is measured after each. Where ranks share the
/// sequences, passes over whole samples, collective among them.
class SamplePass {
 public:
  using Read = std::function<void(Context&, const Batch&, const Transformer::Saved&)>;

  /// read: called once in a dry run to measure its scratch memory.
  SamplePass(const TrainedModel& trained, int64_t seq_len, int64_t tokens, const Read& read)
      : model_(trained.model()), ranks_(model_.sequence_ranks()) {
    if (ranks_) tokens = ranks_->split().length();
    sample_.fill(std::vector<int32_t>(static_cast<size_t>(seq_len)));
    Context dry(0, trained.device());
    Arena measure("activations", 0, trained.device()), measure_host("host");
    const auto make = [&](Arena& memory, Arena& host) {
      return make_forward_buffers(trained, memory, host, tokens, Recompute::none);
    };
    ForwardBuffers shapes = make(measure, measure_host);
    model_.forward(dry, shapes.batch, shapes.saved);
    read(dry, shapes.batch, shapes.saved);
    memory_ = std::make_unique<Arena>("activations", measure.high_water(), trained.device());
    host_memory_ = std::make_unique<Arena>("host", measure_host.high_water());
    ctx_ = std::make_unique<Context>(std::max<int64_t>(dry.scratch.high_water(), 64), trained.device());
    buffers_ = make(*memory_, *host_memory_);
  }

  /// Returns false without a pass if the sample is not whole.
  bool run(const Blend& set, int64_t sample, const Read& read) {
    if (!set.whole(sample)) return false;
    set.fill_sequential(sample, 1, sample_[0].data(), sample_[1].data(), sample_[2].data(),
                        sample_[3].data());
    const Batch& host = buffers_.host;
    const auto whole = [&](size_t i) {
      return Tensor(sample_[i].data(), DType::i32, {std::ssize(sample_[i])});
    };
    if (ranks_) {
      take_part(ranks_->split(), host, 0, {whole(0), whole(1), whole(2), whole(3)});
    } else {
      size_t i = 0;
      for (const Tensor& t : {host.tokens, host.targets, host.positions, host.first_key})
        std::copy_n(sample_[i++].data(), t.numel(), t.as<int32_t>());
    }
    buffers_.upload(*ctx_);
    model_.forward(*ctx_, buffers_.batch, buffers_.saved);
    read(*ctx_, buffers_.batch, buffers_.saved);
    return true;
  }
  /// Of the whole sample.
  const std::vector<int32_t>& tokens() const { return sample_[0]; }

 private:
  const Transformer& model_;
  const SequenceRanks* ranks_;
  std::array<std::vector<int32_t>, 4> sample_;  // tokens, targets, positions, first_key
  std::unique_ptr<Arena> memory_, host_memory_;
  std::unique_ptr<Context> ctx_;
  ForwardBuffers buffers_;
};

/// Adds samples [0, count) to `sums` in order: in every round each rank computes one sample, starting from
/// `blank`, and merges those of all ranks.
template <class Sums, class Add>
void share_samples(Sums& sums, const Sums& blank, int64_t count, Communicator& ranks, const Add& add) {
  const Parts into = sums.parts();
  const int64_t size = packed_size(into);
  std::vector<double> mine(static_cast<size_t>(size)), all(static_cast<size_t>(size * ranks.size()));
  for (int64_t first = 0; first < count; first += ranks.size()) {
    Sums one = blank;
    if (first + ranks.rank() < count) add(one, first + ranks.rank());
    pack(mine.data(), one.parts());
    ranks.all_gather(all.data(), mine.data(), size * static_cast<int64_t>(sizeof(double)));
    for (int64_t r = 0; r < std::min<int64_t>(ranks.size(), count - first); ++r)
      merge_packed(into, all.data() + r * size);
  }
}

/// Takes samples from the sets in turn until there are enough.
void draw_maps(Analysis& a, const TrainedModel& trained, const std::vector<std::unique_ptr<Blend>>& sets,
               int64_t seq_len, int64_t sequences) {
  const auto read = [&](Context& ctx, const Batch& batch, const Transformer::Saved& saved) {
    a.maps.add(ctx, batch.first_key, saved);
  };
  SamplePass pass(trained, seq_len, a.maps.tokens(), read);
  bool more = true;
  for (int64_t sample = 0; more && a.maps.sequences() < sequences; ++sample) {
    more = false;
    for (size_t i = 0; i < sets.size() && a.maps.sequences() < sequences; ++i) {
      if (sample >= sets[i]->num_sequential_samples()) continue;
      more = true;
      if (!pass.run(*sets[i], sample, read)) continue;
      a.map_tokens.insert(a.map_tokens.end(), pass.tokens().begin(), pass.tokens().begin() + a.maps.tokens());
      a.map_sets.push_back(a.sets[i].name);
    }
  }
}

}  // namespace

Analysis analyze(const TrainedModel& trained, const std::vector<DataSource>& sources, const DataConfig& data,
                 const AnalyzeOptions& options, Communicator& ranks) {
  const int64_t seq_len = data.seq_len;
  if (seq_len > max_positions(trained.config()))
    fail(ExitCode::usage, "data.seq_len is {}, but the model has {} positions", seq_len,
         max_positions(trained.config()));
  if (const SequenceRanks* shared = trained.model().sequence_ranks())
    SLUICE_CHECK(shared->split().seq_len == seq_len, "analyze: ranks share sequences of {} tokens, not {}",
                 shared->split().seq_len, seq_len);
  Config config = trained.config();
  config.data = data;
  std::vector<std::unique_ptr<Blend>> blends;
  blends.reserve(sources.size());
  for (const DataSource& source : sources)
    blends.push_back(std::make_unique<Blend>(std::vector<DataSource>{source}, config));
  if (ranks.rank() == 0)
    for (const auto& blend : blends) check_tokens(*blend, trained.tokenizer(), trained.config());
  const auto samples_of = [&](const Blend& blend) {
    const int64_t all = blend.num_sequential_samples();
    return options.tokens > 0 ? std::min(all, (options.tokens + seq_len - 1) / seq_len) : all;
  };

  const Statistics blank(trained.model(), seq_len, options.measures);
  std::vector<Analysis::Set> sets;
  Statistics total = blank;
  {
    Statistics unused = blank;
    SamplePass pass(trained, seq_len, seq_len,
                    [&](Context& ctx, const Batch& batch, const Transformer::Saved& saved) {
                      unused.add(ctx, batch, saved);
                    });
    for (size_t i = 0; i < blends.size(); ++i) {
      sets.push_back({sources[i].name, blank});
      share_samples(sets[i].sums, blank, samples_of(*blends[i]), ranks, [&](Statistics& one, int64_t sample) {
        const auto add = [&](Context& ctx, const Batch& batch, const Transformer::Saved& saved) {
          one.add(ctx, batch, saved);
        };
        if (pass.run(*blends[i], sample, add)) one.merge_tokens();
      });
      if (sets[i].sums.sequences == 0)
        fail(ExitCode::data, "{}: no whole sample of {} tokens", sources[i].name, seq_len);
      sets[i].padded = samples_of(*blends[i]) - static_cast<int64_t>(sets[i].sums.sequences);
      total.merge(sets[i].sums);
    }
  }

  SecondPass second(total);
  if (second.needed()) {
    const SecondPass blank_second = second;
    SecondPass unused = second;
    SamplePass pass(
        trained, seq_len, seq_len,
        [&](Context& ctx, const Batch&, const Transformer::Saved& saved) { unused.add(ctx, saved); });
    for (const auto& blend : blends)
      share_samples(second, blank_second, samples_of(*blend), ranks, [&](SecondPass& one, int64_t sample) {
        const auto add = [&](Context& ctx, const Batch&, const Transformer::Saved& saved) {
          one.add(ctx, saved);
        };
        if (pass.run(*blend, sample, add)) one.merge_tokens();
      });
  }

  Analysis analysis{.sets = std::move(sets),
                    .total = std::move(total),
                    .second = std::move(second),
                    .maps = AttentionMaps(trained.model(), std::min(options.map_tokens, seq_len))};
  Context ctx(64, trained.device());
  for (int64_t l = 0; l < trained.config().model.num_hidden_layers; ++l)
    analysis.gate_row_norms.push_back(
        gate_row_norms(ctx, trained.store(), static_cast<size_t>(l), trained.config().model));
  if (ranks.rank() == 0) draw_maps(analysis, trained, blends, seq_len, options.map_sequences);
  return analysis;
}

}  // namespace sluice
