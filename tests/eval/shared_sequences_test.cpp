// An evaluation between two steps by ranks that share sequences (parallel.context) finds what one rank finds,
// and so do other ranks that have to compute it together.
#include <catch2/catch.hpp>
#include <mutex>

#include "comm/mesh.h"
#include "comm/threads.h"
#include "core/parallel_for.h"
#include "eval/analyze.h"
#include "eval/evaluate.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;

namespace {

/// A token is one byte.
class ByteTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return 32; }
  std::vector<int32_t> encode(std::string_view) const override { return {}; }
  std::string decode(const std::vector<int32_t>&) const override { return ""; }
  int32_t end_of_document() const override { return 31; }
  std::string token_name(int32_t) const override { return ""; }
  int64_t token_bytes(int32_t) const override { return 1; }
  std::string fingerprint() const override { return "bytes"; }
  std::string name() const override { return "bytes"; }
  const std::string& model() const override { return model_; }
  bool encodes_in_parts() const override { return true; }
  int64_t lost_bytes(std::string_view, const std::vector<int32_t>&) const override { return 0; }
  std::string normalization() const override { return "no normaliser"; }

 private:
  std::string model_;
};

struct Case : TinyTraining {
  Case() : TinyTraining(Precision::f64) {
    // Of the last sample a part is padding; documents end within chunks.
    write_corpus(folder / "held_out", 700);
    config.data.document_mask = true;
    config.model.attention.kind = AttentionKind::sink;
    config.analysis.query_classes = {{"few", {0, 3, 5, 7}}};
    config.analysis.sink_threshold = 0.1;
    config.analysis.sink_length = 6;
  }
  void select_keys(int64_t block) {
    config.model.attention.kind = AttentionKind::sparse;
    SparseConfig& s = config.model.attention.sparse;
    s.block = block;
    s.indexer.heads = s.indexer.head_dim = 4;
    s.indexer.rope = true;  // equal tokens would tie in the first layer, but for rounding
    s.k = {.policy = BudgetPolicy::eq8, .base = 4, .min = 2, .max = 6};
  }
};

/// After two steps.
EvalResult evaluate(const Case& c, int64_t ranks) {
  EvalResult result;
  std::mutex mutex;
  Config config = c.config;
  config.parallel.context = ranks;
  run_thread_ranks(static_cast<int>(ranks), [&](Communicator& comm) {
    set_num_threads(1);
    const Blend data = c.blend();
    Trainer trainer(config, data, &comm);
    trainer.initialize();
    for (int i = 0; i < 2; ++i) trainer.step();
    trainer.wait_for_weights();
    const ByteTokenizer tokenizer;
    const Evaluator evaluator(config.data.validation, config, tokenizer, 0);
    const EvalResult mine = *evaluator.run(
        trainer.context(), trainer.model(), trainer.store(), trainer.micro_batch(), trainer.analysed(),
        [] { return false; }, nullptr, ranks == 1);
    const std::scoped_lock lock(mutex);
    if (comm.rank() == static_cast<int>(ranks) - 1) result = mine;  // all have it
  });
  return result;
}

Approx near(double x) { return Approx(x).epsilon(1e-9).margin(1e-12); }
/// NaN is what no query has.
bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == near(b); }

void check_near(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i] == near(b[i]));
}

void check_layer(const LayerSummary& shared, const LayerSummary& one) {
  check_near({shared.first_token_attention, shared.attention_output_max, shared.attention_residual_max,
              shared.ffn_output_max, shared.ffn_residual_max, shared.value_norm.first, shared.value_norm.rest,
              shared.residual_max.first, shared.residual_max.rest, *shared.imbalance},
             {one.first_token_attention, one.attention_output_max, one.attention_residual_max,
              one.ffn_output_max, one.ffn_residual_max, one.value_norm.first, one.value_norm.rest,
              one.residual_max.first, one.residual_max.rest, *one.imbalance});
  check_near(shared.gate_scores, one.gate_scores);
  check_near(shared.importance, one.importance);
  for (auto member :
       {&HeadAttention::all, &HeadAttention::later, &HeadAttention::sink, &HeadAttention::leading_sink})
    check_near(shared.heads.*member, one.heads.*member);
  REQUIRE(shared.heads.by_class.size() == 2);
  for (size_t i = 0; i < 2; ++i) check_near(shared.heads.by_class[i], one.heads.by_class[i]);
  REQUIRE(shared.gate_health.size() == 1);
  check_near(shared.gate_health[0].below, one.gate_health[0].below);
  check_near(shared.gate_health[0].shut_tokens, one.gate_health[0].shut_tokens);
  REQUIRE(shared.selection.has_value() == one.selection.has_value());
  if (!one.selection) return;
  for (const auto member :
       {&SelectionSummary::mass, &SelectionSummary::top, &SelectionSummary::divergence,
        &SelectionSummary::union_ratio, &SelectionSummary::overlap, &SelectionSummary::keys,
        &SelectionSummary::keys_deviation, &SelectionSummary::keys_least, &SelectionSummary::keys_most})
    CHECK(same((*shared.selection).*member, (*one.selection).*member));
}

}  // namespace

TEST_CASE("ranks that share sequences find the losses and measurements of one rank", "[evaluate][context]") {
  Case c;
  SECTION("all activations kept") {}
  SECTION("recomputed blocks") { c.config.train.recompute = Recompute::block; }
  SECTION("a logit of the extra key by query") {
    c.config.model.attention.kind = AttentionKind::kv_bias;
    c.config.model.attention.gates.clear();
    c.config.model.attention.gates = {{.position = GatePosition::value}};
  }
  SECTION("selected keys") { c.select_keys(1); }
  SECTION("selected blocks of keys") { c.select_keys(3); }
  SECTION("exact") { c.config.parallel.determinism = Determinism::exact; }
  SECTION("exact, selected keys") {
    c.config.parallel.determinism = Determinism::exact;
    c.select_keys(1);
  }
  const EvalResult one = evaluate(c, 1);
  REQUIRE(one.sets[0].tokens > 500);
  REQUIRE(one.sets[0].tokens % 32 != 0);
  for (const int64_t ranks : {2, 4}) {
    INFO(ranks << " ranks");
    const EvalResult shared = evaluate(c, ranks);
    const SetResult &a = shared.sets[0], &b = one.sets[0];
    CHECK(a.tokens == b.tokens);
    if (c.config.parallel.determinism == Determinism::exact) CHECK(a.loss == b.loss);
    check_near({a.loss, a.perplexity, a.bits_per_byte}, {b.loss, b.perplexity, b.bits_per_byte});
    REQUIRE(a.by_position.size() == b.by_position.size());
    for (size_t i = 0; i < a.by_position.size(); ++i) {
      CHECK(a.by_position[i].tokens == b.by_position[i].tokens);
      CHECK(a.by_position[i].loss == near(b.by_position[i].loss));
    }
    REQUIRE(a.classes.size() == 2);
    for (size_t i = 0; i < a.classes.size(); ++i) {
      CHECK(a.classes[i].tokens == b.classes[i].tokens);
      CHECK(a.classes[i].loss == near(b.classes[i].loss));
    }
    for (size_t l = 0; l < one.analysis.layers.size(); ++l)
      check_layer(shared.analysis.layers[l], one.analysis.layers[l]);
    check_near(
        {shared.analysis.first_token_attention, *shared.analysis.mean_gate_score,
         shared.analysis.largest_residual, shared.analysis.sinks.share, shared.analysis.sinks.leading_share,
         shared.analysis.sinks.strongest},
        {one.analysis.first_token_attention, *one.analysis.mean_gate_score, one.analysis.largest_residual,
         one.analysis.sinks.share, one.analysis.sinks.leading_share, one.analysis.sinks.strongest});
  }
}

namespace {

void check_json_near(const nlohmann::json& a, const nlohmann::json& b) {
  REQUIRE(a.size() == b.size());
  const nlohmann::json expected = b.flatten();
  for (const auto& [place, value] : expected.items()) {
    INFO(place);
    const nlohmann::json::json_pointer at(place);
    REQUIRE(a.contains(at));
    if (value.is_number())
      CHECK(a.at(at).get<double>() == near(value.get<double>()));
    else
      CHECK(a.at(at) == value);
  }
}

void check_arrays_near(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double farthest = 0;
  for (size_t i = 0; i < a.size(); ++i)
    farthest = std::max(farthest, static_cast<double>(std::abs(a[i] - b[i])));
  CHECK(farthest < 1e-6);
}

}  // namespace

TEST_CASE("ranks that share sequences analyse a model as one rank does", "[analyze][context]") {
  Case c;
  c.config.model.vocab_size = 257;
  c.config.model.initializer_range = 0.3;
  SECTION("a sink") {}
  SECTION("an unbounded gate, for which a second pass is needed") {
    c.config.model.attention.gates.push_back(
        {.position = GatePosition::value, .activation = GateActivation::silu});
  }
  SECTION("a logit of the extra key by query") {
    c.config.model.attention.kind = AttentionKind::kv_bias;
    c.config.model.attention.gates = {{.position = GatePosition::value}};
  }
  SECTION("a window") {
    c.config.data.document_mask = false;
    c.config.model.attention.window = 5;
  }
  SECTION("selected keys") { c.select_keys(1); }
  SECTION("selected blocks of keys") { c.select_keys(3); }
  SECTION("experts") { c.add_experts(); }
  struct Found {
    nlohmann::json analysis;
    std::vector<int32_t> map_tokens;
    std::vector<float> mean, heads, queries, keys;
  };
  // 7 samples of held_out, which groups of ranks cannot divide evenly.
  const AnalyzeOptions options{
      .tokens = 7 * 32, .map_sequences = 3, .map_tokens = 10, .measures = c.config.analysis};
  const auto found_by = [&](int ranks, int context) {
    std::vector<Found> all(static_cast<size_t>(ranks));
    run_thread_ranks(ranks, [&](Communicator& comm) {
      set_num_threads(1);
      const Mesh mesh(comm, {.context = context});
      const TrainedModel trained(c.config, 32 / context, context > 1 ? &mesh.context() : nullptr);
      const Analysis a = analyze(trained, c.config.data.validation, c.config.data, options, mesh.data());
      all[static_cast<size_t>(comm.rank())] = {
          to_json(a),          a.map_tokens, a.maps.mean(), a.maps.heads(), a.maps.queries().points,
          a.maps.keys().points};
    });
    return all;
  };
  const Found one = found_by(1, 1)[0];
  REQUIRE(one.analysis["sequences"] == 7);
  for (const auto& [ranks, context] : {std::pair(2, 2), std::pair(4, 4), std::pair(4, 2)}) {
    INFO(ranks << " ranks, context " << context);
    const std::vector<Found> all = found_by(ranks, context);
    for (int rank = 0; rank < ranks; ++rank) {
      const Found& shared = all[static_cast<size_t>(rank)];
      INFO("rank " << rank);
      if (rank >= context) {  // these have no maps
        nlohmann::json measured = shared.analysis, expected = one.analysis;
        measured.erase("maps"), expected.erase("maps");
        check_json_near(measured, expected);
        continue;
      }
      check_json_near(shared.analysis, one.analysis);
      CHECK(shared.map_tokens == one.map_tokens);
      for (const auto member : {&Found::mean, &Found::heads, &Found::queries, &Found::keys})
        check_arrays_near(shared.*member, one.*member);
    }
  }
}

namespace {

/// Needles, questions and prompts, of bytes. Several questions go into a sample, and some go on in the next.
struct Prompts : TinyTraining {
  Task task{"letters", {}};

  Prompts() : TinyTraining(Precision::f64) {
    config.model.vocab_size = 257;
    config.model.initializer_range = 0.3;
    config.data.seq_len = 672;
    config.data.document_mask = true;
    config.eval.ruler = {.samples = 2, .tasks = {"niah_single_1", "niah_multikey_2"}, .lengths = {640}};
    config.eval.prompts = {"ab", "the question", std::string(700, 'x'), "x"};
    config.eval.prompt_tokens = 5;
    for (int q = 0; q < 9; ++q) {
      TaskQuestion& question = task.questions.emplace_back();
      for (int c = 0; c < 3; ++c)
        question.choices.push_back({std::string(static_cast<size_t>(100 + 67 * q), 'a'),
                                    " " + std::string(1, static_cast<char>('b' + c))});
      question.answer = static_cast<size_t>(q % 3);
    }
  }
  /// What every rank finds, at the start of a training.
  std::vector<EvalResult> evaluate(int ranks) const {
    std::vector<EvalResult> results(static_cast<size_t>(ranks));
    const auto tokenizer = make_tokenizer({});
    run_thread_ranks(ranks, [&](Communicator& comm) {
      set_num_threads(1);
      const Blend data = blend();
      Trainer trainer(config, data, &comm);
      trainer.initialize();
      trainer.wait_for_weights();
      Evaluator evaluator({}, config, *tokenizer, 0);
      evaluator.also({task}, config, *tokenizer);
      results[static_cast<size_t>(comm.rank())] = *evaluator.run(
          trainer.context(), trainer.model(), trainer.store(), trainer.micro_batch(), trainer.analysed(),
          [] { return false; }, nullptr, ranks == 1);
    });
    return results;
  }
};

}  // namespace

TEST_CASE("ranks that compute together answer questions and continue prompts as one rank does",
          "[evaluate][context][tasks]") {
  Prompts t;
  SECTION("softmax") {}
  SECTION("a window") {
    t.config.data.document_mask = false;
    t.config.model.attention.window = 50;
  }
  SECTION("selected keys") {
    t.config.model.attention.kind = AttentionKind::sparse;
    t.config.model.attention.sparse.indexer.rope = true;
    t.config.model.attention.sparse.k = {.policy = BudgetPolicy::fixed, .base = 40};
  }
  SECTION("experts") { t.add_experts(); }
  const EvalResult one = t.evaluate(1)[0];
  REQUIRE(one.ruler.size() == 2);
  REQUIRE(one.tasks.size() == 1);
  REQUIRE(one.samples.size() == 4);
  struct Layout {
    int ranks;
    int64_t context, zero_stage;
  };
  for (const Layout& layout : {Layout{2, 2, 0}, Layout{4, 4, 3}, Layout{4, 2, 1}, Layout{2, 1, 3}}) {
    INFO(layout.ranks << " ranks, context " << layout.context << ", stage " << layout.zero_stage);
    t.config.parallel.context = layout.context;
    t.config.parallel.zero_stage = layout.zero_stage;
    t.config.parallel.expert = t.config.model.moe.num_experts > 0 ? 2 : 1;
    for (const EvalResult& shared : t.evaluate(layout.ranks)) {
      for (size_t i = 0; i < 2; ++i)
        check_near({shared.ruler[i].loss, shared.ruler[i].margin, shared.ruler[i].accuracy},
                   {one.ruler[i].loss, one.ruler[i].margin, one.ruler[i].accuracy});
      const TaskResult &a = shared.tasks[0], &b = one.tasks[0];
      check_near({a.accuracy, a.answer_loss}, {b.accuracy, b.answer_loss});
      for (size_t q = 0; q < b.log_likelihoods.size(); ++q)
        check_near(a.log_likelihoods[q], b.log_likelihoods[q]);
      for (size_t i = 0; i < 4; ++i) CHECK(shared.samples[i].text == one.samples[i].text);
    }
  }
}
