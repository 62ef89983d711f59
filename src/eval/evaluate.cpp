#include "eval/evaluate.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/targets.h"
#include "eval/sample_rows.h"

namespace sluice {
namespace {

constexpr int64_t kFirstOctave = 64;  // positions
constexpr int64_t kAnalysedTokens =
    8192;  // per set: enough for stable means and for maxima over all positions

/// Samples [sample, end) in file order, as many as there is room for; what room they leave is padding.
void fill(Context& ctx, SampleRows& rows, const Blend& set, int64_t sample, int64_t end, int64_t seq_len) {
  const Batch& whole = rows.whole();
  const int64_t room = rows.tokens() / seq_len;
  int32_t* const targets = whole.targets.as<int32_t>();
  set.fill_sequential(sample, room, whole.tokens.as<int32_t>(), targets, whole.positions.as<int32_t>(),
                      whole.first_key.as<int32_t>());
  std::fill(targets + std::min(room, end - sample) * seq_len, targets + rows.tokens(), kPadding);
  rows.upload(ctx);
}

/// Sums of losses by octave, for sequences of up to seq_len tokens.
std::vector<PositionResult> empty_octaves(int64_t seq_len) {
  std::vector<PositionResult> octaves;
  for (int64_t i = 0; i <= octave_of(seq_len - 1); ++i)
    octaves.push_back(
        {.from = i == 0 ? 0 : kFirstOctave << (i - 1), .to = std::min(kFirstOctave << i, seq_len)});
  return octaves;
}

}  // namespace

int64_t octave_of(int64_t position) { return std::bit_width(static_cast<uint64_t>(position / kFirstOctave)); }

Evaluator::Evaluator(const std::vector<DataSource>& sets, const Config& config, const Tokenizer& tokenizer,
                     int64_t max_tokens)
    : analysis_(config.analysis),
      classes_(config.analysis.query_classes),
      ruler_(config, tokenizer),
      seq_len_(config.data.seq_len),
      max_tokens_(max_tokens) {
  for (const DataSource& set : sets) {
    names_.push_back(set.name);
    sets_.push_back(std::make_unique<Blend>(std::vector<DataSource>{set}, config));
    text_loss_.push_back(sets_.back()->sources().front().loss);
  }
  // A model may have more ids than its tokenizer; the additional ids represent no text.
  token_bytes_.assign(static_cast<size_t>(std::max(config.model.vocab_size, tokenizer.vocab_size())), 0);
  of_text_.assign(token_bytes_.size(), false);
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const int64_t bytes = token_bytes_[static_cast<size_t>(id)] = tokenizer.token_bytes(id);
    of_text_[static_cast<size_t>(id)] = bytes > 0 || tokenizer.is_unknown(id);
  }
}

void Evaluator::also(std::vector<Task> tasks, const Config& config, const Tokenizer& tokenizer) {
  tasks_ = std::move(tasks);
  more_ = config.eval;
  data_ = config.data;
  vocab_size_ = config.model.vocab_size;
  tokenizer_ = &tokenizer;
}

std::optional<EvalResult> Evaluator::run(Context& ctx, const Transformer& model, const ParamStore& store,
                                         ForwardBuffers& buffers, ForwardBuffers& analysed,
                                         const std::function<bool()>& stop, const ValueZeroing* zeroing,
                                         bool alone) const {
  EvalResult result;
  SummaryAccumulator summary(model, store, analysis_);
  SampleRows rows_of(model, buffers), analysed_rows(model, analysed);
  const int64_t samples_per_batch = rows_of.tokens() / seq_len_,
                analysed_samples = analysed_rows.tokens() / seq_len_;
  for (size_t i = 0; i < sets_.size(); ++i) {
    const Blend& set = *sets_[i];
    int64_t samples = set.num_sequential_samples();
    if (max_tokens_ > 0) samples = std::min(samples, (max_tokens_ + seq_len_ - 1) / seq_len_);

    const int64_t analysed_end = std::min(samples, (kAnalysedTokens + seq_len_ - 1) / seq_len_);
    for (int64_t s = 0; s < analysed_end; s += analysed_samples) {
      if (stop()) return std::nullopt;
      fill(ctx, analysed_rows, set, s, analysed_end, seq_len_);
      model.forward(ctx, analysed.batch, analysed.saved, {}, nullptr, zeroing);
      summary.add(ctx, analysed.batch, analysed.saved);
    }

    SetResult r;
    r.name = names_[i];
    if (classes_.count() > 1)
      for (const std::string& name : classes_.names()) r.classes.push_back({.name = name});
    r.by_position = empty_octaves(seq_len_);
    double nats = 0, nats_of_text = 0, bytes = 0;
    for (int64_t s = 0; s < samples; s += samples_per_batch) {
      if (stop()) return std::nullopt;
      fill(ctx, rows_of, set, s, samples, seq_len_);
      model.forward(ctx, buffers.batch, buffers.saved, {}, nullptr, zeroing);
      model.loss_forward(ctx, buffers.losses, buffers.batch, buffers.saved);
      const std::vector<double> losses = rows_of.losses(ctx);
      const Batch& whole = rows_of.whole();
      const int32_t *targets = whole.targets.as<int32_t>(), *tokens = whole.tokens.as<int32_t>(),
                    *first_key = whole.first_key.as<int32_t>();
      for (int64_t t = 0; t < rows_of.tokens(); ++t) {
        if (targets[t] < 0) continue;
        const double loss = losses[static_cast<size_t>(t)];
        nats += loss;
        ++r.tokens;
        PositionResult& octave = r.by_position[static_cast<size_t>(octave_of(t - first_key[t]))];
        octave.loss += loss;
        ++octave.tokens;
        if (!r.classes.empty()) {
          ClassResult& c = r.classes[classes_.of(tokens[t])];
          c.loss += loss;
          c.share_likely += loss < std::log(2.0);
          ++c.tokens;
        }
        const auto target = static_cast<size_t>(targets[t]);
        if (!of_text_[target]) continue;
        nats_of_text += loss;
        bytes += static_cast<double>(token_bytes_[target]);
      }
    }
    // 0 / 0 = NaN is intended: nothing was measured.
    r.loss = nats / static_cast<double>(r.tokens);
    r.perplexity = std::exp(r.loss);
    for (ClassResult& c : r.classes) {
      c.loss /= static_cast<double>(c.tokens);
      c.share_likely /= static_cast<double>(c.tokens);
    }
    std::erase_if(r.by_position, [](const PositionResult& octave) { return octave.tokens == 0; });
    for (PositionResult& octave : r.by_position) octave.loss /= static_cast<double>(octave.tokens);
    r.loss_of_text = text_loss_[i];
    bytes *= text_loss_[i].bytes_per_token_byte();  // the text's own bytes
    r.bits_per_byte = nats_of_text / (std::log(2.0) * bytes);
    result.sets.push_back(r);
  }
  summary.merge_ranks();
  result.analysis = summary.result();
  std::optional<std::vector<RulerChoice>> ruler = ruler_.run(ctx, model, buffers, stop, zeroing);
  if (!ruler) return std::nullopt;
  result.ruler = std::move(*ruler);
  for (const Task& task : tasks_) {
    auto answered =
        answer_task(ctx, model, buffers, *tokenizer_, data_, task, {more_.shots, more_.max_questions}, stop);
    if (!answered) return std::nullopt;
    result.tasks.push_back(std::move(*answered));
  }
  if (more_.prompts.empty()) return result;
  auto samples = continue_prompts(ctx, model, buffers, *tokenizer_, data_, vocab_size_, more_.prompts,
                                  more_.prompt_tokens, stop, alone);
  if (!samples) return std::nullopt;
  result.samples = std::move(*samples);
  return result;
}

std::string figure(double value, int digits) {
  return std::isnan(value) ? "-" : fmt::format("{:.{}f}", value, digits);
}

std::string describe_strongest(const ModelSummary& summary) {
  const SinkSummary& s = summary.sinks;
  if (s.strongest_by_class.empty()) return fmt::format("{}%", figure(100 * s.strongest, 1));
  std::string text;
  for (size_t c = s.strongest_by_class.size(); c-- > 0;)
    text += fmt::format("{}% on \"{}\"{}", figure(100 * s.strongest_by_class[c], 1), summary.query_classes[c],
                        c > 0 ? ", " : "");
  return text;
}

std::vector<std::string> describe(const EvalResult& result) {
  std::vector<std::string> lines;
  size_t width = 0;
  for (const SetResult& set : result.sets) width = std::max(width, set.name.size());
  for (const SetResult& set : result.sets) {
    lines.push_back(set.tokens == 0
                        ? fmt::format("  val {:<{}}  no token was predicted: no loss", set.name, width)
                        : fmt::format("  val {:<{}}  loss {:.4f}  ppl {:.3f}  {} bits/byte  ({} tokens{})",
                                      set.name, width, set.loss, set.perplexity, figure(set.bits_per_byte, 4),
                                      set.tokens, set.loss_of_text.describe("; ")));
    std::string classes;
    for (const ClassResult& c : set.classes)
      classes += fmt::format("  after \"{}\" {} ({} tokens)", c.name, figure(c.loss, 4), c.tokens);
    if (set.tokens > 0 && !classes.empty())
      lines.push_back(fmt::format("      {:<{}}  loss{}", "", width, classes));
  }
  for (const RulerChoice& choice : result.ruler) lines.push_back(describe(choice));
  const ModelSummary& a = result.analysis;
  lines.push_back(fmt::format(
      "  attention on the first token {:.1f}%{}  largest residual {:.1f}", 100 * a.first_token_attention,
      a.mean_gate_score ? fmt::format("  mean gate score {:.3f}", *a.mean_gate_score) : "",
      a.largest_residual));
  if (a.sinks.heads > 0 || !a.query_classes.empty())
    lines.push_back(
        fmt::format("  sinks: {} of {} heads give the first token more than {:g}% of their attention; "
                    "strongest: layer {} head {}, {}",
                    a.sinks.heads, a.sinks.of, 100 * a.sink_threshold, a.sinks.layer, a.sinks.head,
                    describe_strongest(a)));
  for (const TaskResult& task : result.tasks) lines.push_back(describe(task));
  for (const SampleText& sample : result.samples) lines.push_back(describe(sample));
  return lines;
}

}  // namespace sluice
