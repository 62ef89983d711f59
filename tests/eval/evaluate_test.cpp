#include "eval/evaluate.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>
#include <functional>

#include "comm/threads.h"
#include "config/load.h"
#include "eval/analyze.h"
#include "eval/generate.h"
#include "eval/tiny_checkpoint.h"
#include "eval/trained_model.h"
#include "hf/config.h"
#include "support/model.h"
#include "support/tiny_training.h"

namespace sluice {
namespace {

/// Token t represents t % 3 + 1 bytes, but for 7, which stands for unknown text, and for two special ones, of
/// which 31 ends documents.
class CountingTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return 32; }
  std::vector<int32_t> encode(std::string_view) const override { return {}; }
  std::string decode(const std::vector<int32_t>&) const override { return ""; }
  int32_t end_of_document() const override { return 31; }
  std::string token_name(int32_t) const override { return ""; }
  int64_t token_bytes(int32_t token) const override { return token == 7 || token >= 30 ? 0 : token % 3 + 1; }
  bool is_unknown(int32_t token) const override { return token == 7; }
  std::string fingerprint() const override { return "counting"; }
  std::string name() const override { return "counting"; }
  const std::string& model() const override { return model_; }
  bool encodes_in_parts() const override { return true; }
  int64_t lost_bytes(std::string_view, const std::vector<int32_t>&) const override { return 0; }
  std::string normalization() const override { return "no normaliser"; }

 private:
  std::string model_;
};

const auto kNever = [] { return false; };

EvalResult evaluate(const test::TinyTraining& t, Trainer& trainer, int64_t max_tokens = 0) {
  const Evaluator evaluator(t.config.data.validation, t.config, CountingTokenizer(), max_tokens);
  return *evaluator.run(trainer.context(), trainer.model(), trainer.store(), trainer.micro_batch(),
                        trainer.analysed(), kNever);
}

using test::trained_checkpoint;

}  // namespace

TEST_CASE("a uniform model has a loss of ln V, a perplexity of V and the corresponding bits per byte",
          "[evaluate]") {
  test::TinyTraining t;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  const Tensor values = trainer.store().value(0);  // the embedding, which is also the head
  for (int64_t i = 0; i < values.numel(); ++i) test::Pool::set(values, i, 0);
  trainer.store().pack(trainer.context());

  const EvalResult result = evaluate(t, trainer);
  REQUIRE(result.sets.size() == 1);
  const SetResult& set = result.sets[0];
  CHECK(set.name == "held_out");
  CHECK(set.loss == Approx(std::log(32)).epsilon(1e-6));
  CHECK(set.perplexity == Approx(32).epsilon(1e-5));

  const TokenFile file(t.folder / "held_out");
  CHECK(set.tokens == file.num_tokens() - 1);  // every token but the first is a target once
  double text_tokens = 0, bytes = 0;
  for (int64_t i = 1; i < file.num_tokens(); ++i) {
    const int64_t n = CountingTokenizer().token_bytes(file.token(i));
    text_tokens += n > 0 || file.token(i) == 7;
    bytes += static_cast<double>(n);
  }
  CHECK(set.bits_per_byte == Approx(5 * text_tokens / bytes).epsilon(1e-6));
}

TEST_CASE("losses by octaves of the position add up to the loss", "[evaluate][octaves]") {
  CHECK(octave_of(0) == 0);
  CHECK(octave_of(63) == 0);
  CHECK(octave_of(64) == 1);
  CHECK(octave_of(127) == 1);
  CHECK(octave_of(128) == 2);
  CHECK(octave_of(131071) == 11);
  test::TinyTraining t;
  t.config.data.seq_len = 150;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  const SetResult set = evaluate(t, trainer).sets[0];
  REQUIRE(set.by_position.size() == 3);
  const std::vector<std::pair<int64_t, int64_t>> expected = {{0, 64}, {64, 128}, {128, 150}};
  double nats = 0;
  int64_t tokens = 0;
  for (size_t i = 0; i < 3; ++i) {
    const PositionResult& octave = set.by_position[i];
    CHECK(std::pair(octave.from, octave.to) == expected[i]);
    nats += octave.loss * static_cast<double>(octave.tokens);
    tokens += octave.tokens;
  }
  CHECK(tokens == set.tokens);
  CHECK(nats == Approx(set.loss * static_cast<double>(set.tokens)).epsilon(1e-12));
  const TokenFile file(t.folder / "held_out");
  CHECK(set.by_position[0].tokens ==
        (file.num_tokens() - 1) / 150 * 64 + std::min<int64_t>((file.num_tokens() - 1) % 150, 64));

  // Within documents a token sees only its own: its context counts, wherever it is in the sample.
  t.config.data.document_mask = true;
  const SetResult masked = evaluate(t, trainer).sets[0];
  CHECK(masked.by_position[0].tokens > set.by_position[0].tokens);
  t.config.data.document_positions = true;
  CHECK(evaluate(t, trainer).sets[0].by_position[0].tokens == masked.by_position[0].tokens);
}

TEST_CASE("evaluation with a begin token predicts the first token of each sample, too",
          "[evaluate][begin_token]") {
  test::TinyTraining t;
  t.config.data.begin_token = 31;
  const Blend data = t.blend(), held_out(t.config.data.validation, t.config);
  Trainer trainer(t.config, data);
  trainer.initialize();
  CHECK(std::isfinite(trainer.step().loss));
  const Blend::SourceInfo info = held_out.sources()[0];
  CHECK(info.unread > 0);
  CHECK(evaluate(t, trainer).sets[0].tokens == info.tokens - info.unread);
}

TEST_CASE("evaluation does not depend on micro-batch size or recomputation", "[evaluate]") {
  // Samples that fill no batch, padding inside of samples, and a limit within a batch.
  const auto [packing, max_tokens] = GENERATE(std::pair(Packing::stream, 0), std::pair(Packing::documents, 0),
                                              std::pair(Packing::stream, 33));
  const auto position = GENERATE(GatePosition::sdpa_output, GatePosition::value);
  const auto kind = GENERATE(AttentionKind::softmax, AttentionKind::sink, AttentionKind::sink_key);
  CAPTURE(packing, max_tokens, position, kind);
  test::TinyTraining t(Precision::f64);
  t.config.data.packing = packing;
  t.config.model.attention.kind = kind;
  t.config.model.attention.gates[0].position = position;
  std::vector<EvalResult> results;
  for (const auto& [micro, recompute] :
       {std::pair(1, Recompute::none), std::pair(4, Recompute::none), std::pair(8, Recompute::none),
        std::pair(2, Recompute::mlp), std::pair(2, Recompute::block)}) {
    CAPTURE(micro, recompute);
    t.config.train.micro_batch_size = micro;
    t.config.train.global_batch_size = 8;
    t.config.train.recompute = recompute;
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    trainer.step();
    results.push_back(evaluate(t, trainer, max_tokens));
    const EvalResult &first = results[0], &last = results.back();
    CHECK(last.sets[0].loss == Approx(first.sets[0].loss).epsilon(1e-9));
    CHECK(last.sets[0].tokens == first.sets[0].tokens);
    const auto same = [](double a, double b) { return std::abs(a - b) <= 1e-9 * std::abs(b); };
    const auto all = [](const ModelSummary& m) {
      std::vector<double> x{m.first_token_attention, *m.mean_gate_score, m.largest_residual,
                            m.imbalance.value(),     m.sinks.share,      m.value_norm.rest};
      for (const LayerSummary& l : m.layers) {
        x.insert(x.end(), l.importance.begin(), l.importance.end());
        x.insert(x.end(), {l.attention_output_max, l.attention_residual_max, l.ffn_output_max});
        for (const double norm : l.gate_health.at(0).row_norms) x.push_back(norm);
        for (const double share : l.gate_health.at(0).above) x.push_back(share);
      }
      return x;
    };
    CHECK(std::ranges::equal(all(last.analysis), all(first.analysis), same));
  }
  CHECK(*results[0].analysis.mean_gate_score == Approx(0.5).margin(0.1));
}

TEST_CASE("which heads are zeroed in a sample does not depend on the samples beside it", "[evaluate]") {
  test::TinyTraining t(Precision::f64);
  std::vector<std::vector<double>> losses;  // by micro-batch size and threshold
  for (const int64_t micro : {1, 4}) {
    t.config.train.micro_batch_size = micro;
    t.config.train.global_batch_size = 4;
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    for (int step = 0; step < 10; ++step) trainer.step();
    const Evaluator evaluator(t.config.data.validation, t.config, CountingTokenizer(),
                              4 * t.config.data.seq_len);
    std::vector<double>& mine = losses.emplace_back();
    for (double threshold = 0.08; threshold < 0.2; threshold += 0.0005) {
      const ValueZeroing zeroing{threshold};
      mine.push_back(evaluator
                         .run(trainer.context(), trainer.model(), trainer.store(), trainer.micro_batch(),
                              trainer.analysed(), kNever, &zeroing)
                         ->sets[0]
                         .loss);
    }
  }
  int different = 0;
  for (size_t i = 0; i < losses[0].size(); ++i) different += std::abs(losses[1][i] - losses[0][i]) > 1e-9;
  CHECK(different == 0);
  CHECK(losses[0].front() != Approx(losses[0].back()).epsilon(1e-6));  // all heads, and none
}

TEST_CASE("YaRN from overrides stretches the model's own positions", "[evaluate]") {
  test::TinyTraining t;
  const CheckpointInfo checkpoint = find_checkpoint(trained_checkpoint(t, 1));
  const auto scaling = [&](const std::vector<std::string>& overrides) {
    return checkpoint_config(checkpoint, "", overrides).model.rope.scaling;
  };
  const std::string key = "model.rope.scaling.";
  CHECK(scaling({key + "type=yarn", key + "factor=4", "data.seq_len=128"}).original_max_position_embeddings ==
        32);
  CHECK(scaling({"model.rope.scaling={type: yarn, factor: 4}"}).original_max_position_embeddings == 32);
  CHECK(scaling({key + "type=yarn", key + "factor=4", key + "original_max_position_embeddings=9"})
            .original_max_position_embeddings == 9);
  // One that the model was trained with keeps its length.
  test::TinyTraining trained;
  trained.config.model.rope.scaling = {
      .type = RopeScalingType::yarn, .factor = 2, .original_max_position_embeddings = 16};
  const Config own = checkpoint_config(find_checkpoint(trained_checkpoint(trained, 1)), "",
                                       {key + "type=yarn", key + "factor=4", "data.seq_len=64"});
  CHECK(own.model.rope.scaling.original_max_position_embeddings == 16);
}

TEST_CASE("evaluation can be limited and interrupted, and does not change training", "[evaluate]") {
  test::TinyTraining t;
  const Blend data = t.blend();
  Trainer evaluated(t.config, data), untouched(t.config, data);
  evaluated.initialize();
  untouched.initialize();
  evaluated.step();
  untouched.step();
  CHECK(evaluate(t, evaluated, 100).sets[0].tokens == 128);  // whole samples
  const Evaluator evaluator(t.config.data.validation, t.config, CountingTokenizer(), 0);
  int asked = 0;
  CHECK_FALSE(evaluator.run(evaluated.context(), evaluated.model(), evaluated.store(),
                            evaluated.micro_batch(), evaluated.analysed(), [&] { return ++asked > 3; }));
  CHECK(evaluated.step().loss == untouched.step().loss);
  CHECK(test::all_bits(evaluated) == test::all_bits(untouched));
}

TEST_CASE("analysis is bitwise independent of the number of ranks and threads", "[analyze]") {
  const test::OneThread one_thread;
  test::TinyTraining t;
  t.add_experts();
  t.config.model.attention.gates.push_back(
      {.position = GatePosition::value, .activation = GateActivation::silu});
  const CheckpointInfo checkpoint = find_checkpoint(trained_checkpoint(t, 3));
  // Sets of different lengths: in some rounds not all ranks have a sample.
  const std::vector<DataSource> sets = {{"held_out", t.folder / "held_out", 1.0},
                                        {"train", t.folder / "train", 1.0}};
  t.config.analysis.query_classes = {{"few", {0, 3, 4}}, {"end", {31}}};
  t.config.analysis.sink_threshold = 0.1;
  t.config.analysis.sink_length = 8;
  const AnalyzeOptions options{.tokens = 7 * t.config.data.seq_len,
                               .map_sequences = 3,
                               .map_tokens = 10,
                               .measures = t.config.analysis};
  std::vector<std::string> results;
  for (const int ranks : {1, 2, 3})
    run_thread_ranks(ranks, [&](Communicator& comm) {
      set_num_threads(ranks == 1 ? 3 : 1);
      const TrainedModel trained(checkpoint, t.config.data.seq_len);
      const Analysis a = analyze(trained, sets, t.config.data, options, comm);
      if (comm.rank() != 0) return;
      CHECK(a.maps.sequences() == 3);
      CHECK(a.map_sets == std::vector<std::string>{"held_out", "train", "held_out"});
      CHECK(a.map_tokens.size() == 30);
      results.push_back(to_json(a).dump());
      for (const float x : a.maps.mean()) results.back() += fmt::format(" {}", x);
    });
  REQUIRE(results.size() == 3);
  CHECK(results[1] == results[0]);
  CHECK(results[2] == results[0]);

  // Evaluation gives the same results for the same samples.
  const auto json = nlohmann::json::parse(results[0].substr(0, results[0].find("} ") + 1));
  CHECK(json["sequences"] == 14);
  CHECK(json["tokens"] == 14 * t.config.data.seq_len);
  const TrainedModel trained(checkpoint, t.config.data.seq_len);
  Arena memory("activations", 1 << 22), host("host");
  Context ctx(1 << 22);
  ForwardBuffers buffers =
      make_forward_buffers(trained, memory, host, t.config.data.seq_len, Recompute::none);
  const ModelSummary summary = Evaluator(sets, t.config, trained.tokenizer(), options.tokens)
                                   .run(ctx, trained.model(), trained.store(), buffers, buffers, kNever)
                                   ->analysis;
  CHECK(json["total"]["first_token_attention"] == Approx(summary.first_token_attention).epsilon(1e-9));
  CHECK(json["total"]["mean_gate_score"] == Approx(*summary.mean_gate_score).epsilon(1e-9));
  for (size_t layer = 0; layer < 2; ++layer) {
    const auto& measured = json["layers"][layer];
    const LayerSummary& short_form = summary.layers[layer];
    CHECK(measured["value_norm_first"] == Approx(short_form.value_norm.first).epsilon(1e-9));
    CHECK(measured["value_norm_rest"] == Approx(short_form.value_norm.rest).epsilon(1e-9));
    CHECK(measured["max"]["residual_first"] == short_form.residual_max.first);
    CHECK(measured["max"]["residual_rest"] == short_form.residual_max.rest);
    CHECK(measured["gates"][0]["health"]["heads"]["below_0.05"] == short_form.gate_health[0].below);
    CHECK(measured["gates"][0]["health"]["heads"]["row_norm"] == short_form.gate_health[0].row_norms);
  }
  const SinkSummary& sinks = summary.sinks;
  CHECK(json["total"]["sinks"]["share"] == Approx(sinks.share).margin(1e-12));
  CHECK(json["total"]["sinks"]["share_leading"] == Approx(sinks.leading_share).margin(1e-12));
  CHECK((sinks.leading_share > 0 && sinks.leading_share > sinks.share));
  CHECK(json["total"]["sinks"]["strongest"]["first_token_attention"] ==
        Approx(sinks.strongest).epsilon(1e-9));
  for (size_t layer = 0; layer < 2; ++layer)
    for (size_t h = 0; h < 2; ++h)
      for (const auto& [c, name] : {std::pair(0, "few"), std::pair(1, "end"), std::pair(2, "other")})
        CHECK(json["layers"][layer]["heads"]["first_token_attention_by_class"][name][h] ==
              Approx(summary.layers[layer].heads.by_class[static_cast<size_t>(c)][h]).epsilon(1e-9));
  CHECK(json["total"]["imbalance"] == Approx(*summary.imbalance).epsilon(1e-9));
  CHECK(json["total"]["max"]["ffn_output"] ==
        std::max(summary.layers[0].ffn_output_max, summary.layers[1].ffn_output_max));
}

TEST_CASE("analysis skips partial samples and refuses positions beyond the model's", "[analyze]") {
  const test::OneThread one_thread;
  test::TinyTraining t;
  const CheckpointInfo checkpoint = find_checkpoint(trained_checkpoint(t, 1));
  const TrainedModel trained(checkpoint, t.config.data.seq_len);
  const auto alone = make_local_communicator();
  DataConfig data = t.config.data;
  const auto sequences = [&](int64_t tokens) {
    return analyze(trained, data.validation, data, {.tokens = tokens, .map_sequences = 1}, *alone)
        .total.sequences;
  };
  const auto whole = static_cast<double>((TokenFile(t.folder / "held_out").num_tokens() - 1) / data.seq_len);
  CHECK(sequences(0) == whole);
  CHECK(sequences(100) == 4);
  data.seq_len = 16;
  CHECK(sequences(100) == 7);
  // With a begin token, whole samples alone; a document's end on a sample's end does not cut it short.
  data.begin_token = 256;
  data.document_mask = true;
  Config config = trained.config();
  config.data = data;
  const Blend begins(data.validation, config);
  CHECK(sequences(0) == static_cast<double>(begins.sources()[0].samples));
  CHECK(begins.sources()[0].samples <
        static_cast<int64_t>(TokenFile(t.folder / "held_out").num_tokens() / 16));
  data.begin_token.reset();
  data.seq_len = 33;
  CHECK_THROWS_WITH(sequences(0), Catch::Contains("33") && Catch::Contains("32 positions"));
}

TEST_CASE("sampling follows temperature, top_k and top_p", "[generate]") {
  const std::vector<float> logits = {0, std::log(4.0f), std::log(2.0f), std::log(1.0f), -50};
  Sampling s;
  s.temperature = 0;
  CHECK(sample(logits, s, 0.99) == 1);
  const auto share = [&](const Sampling& sampling, int32_t token) {
    int64_t hits = 0;
    for (int i = 0; i < 8000; ++i) hits += sample(logits, sampling, (i + 0.5) / 8000) == token;
    return static_cast<double>(hits) / 8000;
  };
  s.temperature = 1;
  CHECK(share(s, 1) == Approx(0.5).margin(1e-3));
  CHECK(share(s, 0) == Approx(0.125).margin(1e-3));
  s.temperature = 0.5;  // squares: 16 4 1 1
  CHECK(share(s, 1) == Approx(16.0 / 22).margin(1e-3));
  s.temperature = 1;
  s.top_k = 2;
  CHECK(share(s, 1) == Approx(2.0 / 3).margin(1e-3));
  CHECK(share(s, 0) == 0);
  s.top_k = 0;
  s.top_p = 0.6;  // 0.5 is not enough, 0.75 is
  CHECK(share(s, 2) == Approx(1.0 / 3).margin(1e-3));
  CHECK(share(s, 0) == 0);
  s.top_p = 1e-9;
  CHECK(share(s, 1) == 1);
}

TEST_CASE("generation with a KV cache equals full recomputation", "[generate]") {
  test::TinyTraining t(GENERATE(Precision::f32, Precision::f64));
  // Large random weights, so that every position affects the next token.
  t.config.model.initializer_range = 0.5;
  const TrainedModel trained(find_checkpoint(trained_checkpoint(t, 0)), 1);
  Sampling greedy;
  greedy.temperature = 0;
  const auto generate = [&](const std::vector<int32_t>& prompt, int64_t n) {
    std::vector<int32_t> tokens;
    Generator(trained).run(prompt, n, greedy, [&](int32_t token) {
      tokens.push_back(token);
      return true;
    });
    return tokens;
  };
  const std::vector<int32_t> prompt = {3, 18, 0, 3};
  const auto cached = generate(prompt, 20);
  REQUIRE(cached.size() == 20);
  std::vector<int32_t> so_far = prompt;
  for (const int32_t token : cached) {
    CHECK(generate(so_far, 1) == std::vector<int32_t>{token});
    so_far.push_back(token);
  }
  // Far beyond the context of 32 tokens, and from a prompt that is longer than it.
  CHECK(generate(prompt, 100).size() == 100);
  CHECK(generate(std::vector<int32_t>(50, 3), 3).size() == 3);
}

TEST_CASE("generation puts the begin token first in every context", "[generate][begin_token]") {
  test::TinyTraining plain, with_begin;
  for (test::TinyTraining* t : {&plain, &with_begin}) t->config.model.initializer_range = 0.5;
  with_begin.config.data.begin_token = 256;
  const TrainedModel without(find_checkpoint(trained_checkpoint(plain, 0)), 1);
  const TrainedModel with(find_checkpoint(trained_checkpoint(with_begin, 0)), 1);
  const auto generate = [](const TrainedModel& trained, const std::vector<int32_t>& prompt, int64_t n) {
    std::vector<int32_t> tokens;
    Generator(trained).run(prompt, n, Sampling{.temperature = 0}, [&](int32_t token) {
      tokens.push_back(token);
      return true;
    });
    return tokens;
  };
  CHECK(generate(with, {3, 18, 0, 3}, 20) == generate(without, {256, 3, 18, 0, 3}, 20));
  CHECK(generate(with, {3, 18, 0, 3}, 20) != generate(without, {3, 18, 0, 3}, 20));
  CHECK(generate(with, {}, 5) == generate(without, {256}, 5));  // a new document
  // A prompt beyond the context of 32 tokens: the begin token and the prompt's last 31.
  std::vector<int32_t> prompt(50), window = {256};
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 7 % 31);
  window.insert(window.end(), prompt.end() - 31, prompt.end());
  CHECK(generate(with, prompt, 1) == generate(without, window, 1));
  // Then the begin token and the last 16.
  const std::vector<int32_t> two = generate(with, prompt, 2);
  window = {256};
  window.insert(window.end(), prompt.end() - 15, prompt.end());
  window.push_back(two[0]);
  CHECK(generate(without, window, 1) == std::vector<int32_t>{two[1]});
}

TEST_CASE("generation is reproducible and stops on request", "[generate]") {
  test::TinyTraining t;
  const TrainedModel trained(find_checkpoint(trained_checkpoint(t, 2)), 1);
  const auto generate = [&](uint64_t seed) {
    Sampling s;
    s.seed = seed;
    std::vector<int32_t> tokens;
    Generator(trained).run({1, 2}, 30, s, [&](int32_t token) {
      tokens.push_back(token);
      return tokens.size() < 12;
    });
    return tokens;
  };
  CHECK(generate(1).size() == 12);
  CHECK(generate(1) == generate(1));
  CHECK(generate(1) != generate(2));
}

TEST_CASE("a run path selects its newest checkpoint", "[generate]") {
  test::TinyTraining t;
  const std::string run = trained_checkpoint(t, 1);
  CHECK(find_checkpoint(run).step == 1);
  CHECK(find_checkpoint(run + "/ckpt").step == 1);
  CHECK(find_checkpoint(find_checkpoint(run).path).step == 1);
  test::expect_error(ExitCode::no_input, {"no such run"}, [&] { find_checkpoint(t.folder / "nowhere"); });
  io::make_directories(t.folder / "empty");
  test::expect_error(ExitCode::no_input, {"contains no checkpoint"},
                     [&] { find_checkpoint(t.folder / "empty"); });
}

TEST_CASE("config.json has a standard model_type for plain models and sluice for all others", "[hf_config]") {
  Config config;
  config.model.vocab_size = 257;
  CHECK(hf_config(config, 256)["model_type"] == "qwen3");
  CHECK(hf_config(config, 256)["architectures"][0] == "Qwen3ForCausalLM");
  CHECK(hf_config(config, 256)["eos_token_id"] == 256);
  CHECK(hf_config(config, 256)["bos_token_id"].is_null());
  config.data.begin_token = 7;
  CHECK(hf_config(config, 256)["bos_token_id"] == 7);
  config.model.qk_norm = false;
  CHECK(hf_config(config, 256)["model_type"] == "llama");
  config.model.attention.gates = {GateConfig{}};
  const auto gated = hf_config(config, 256);
  CHECK(gated["model_type"] == "sluice");
  CHECK(gated["attention"]["gates"][0]["position"] == "sdpa_output");
  CHECK_FALSE(gated.contains("num_experts"));
  CHECK_FALSE(gated["attention"].contains("switch_heads"));
  config.model.attention.gates.clear();
  config.model.attention.switch_heads.num_experts = 8;
  const auto switched = hf_config(config, 256);
  CHECK(switched["model_type"] == "sluice");
  CHECK(switched["attention"]["switch_heads"]["num_experts"] == 8);
  CHECK(switched["attention"]["switch_heads"]["projections"] == "value");

  // No standard model type exists for any of these.
  const std::vector<std::function<void(ModelConfig&)>> changes = {
      [](ModelConfig& m) { m.hidden_act = HiddenAct::relu2; }, [](ModelConfig& m) { m.norm_weights = false; },
      [](ModelConfig& m) { m.qk_norm_order = QkNormOrder::after_rope; },
      [](ModelConfig& m) { m.embedding_norm = true; },
      [](ModelConfig& m) { m.final_logit_softcapping = 15; }};
  for (size_t i = 0; i < changes.size(); ++i) {
    INFO("change " << i);
    Config changed;
    changed.model.vocab_size = 257;
    changes[i](changed.model);
    const auto j = hf_config(changed, 256);
    CHECK(j["model_type"] == "sluice");
    CHECK(j["hidden_act"] == (i == 0 ? "relu2" : "silu"));
    CHECK(j["norm_weights"] == (i != 1));
    CHECK(j["qk_norm_order"] == (i == 2 ? "after_rope" : "before_rope"));
    CHECK(j["embedding_norm"] == (i == 3));
    CHECK(j["final_logit_softcapping"] == (i == 4 ? nlohmann::json(15.0) : nlohmann::json(nullptr)));
  }
}

TEST_CASE("config.json has a standard model_type for mixtures of experts where one exists", "[hf_config]") {
  Config config;
  MoeConfig& moe = config.model.moe;
  moe.num_experts = 6;
  moe.num_experts_per_tok = 3;
  moe.moe_intermediate_size = 40;
  moe.norm_topk_prob = false;
  moe.decoder_sparse_step = 2;
  moe.mlp_only_layers = {1};
  moe.load_balance.coefficient = 0.25;
  const nlohmann::json plain = hf_config(config, 256);
  CHECK(plain["architectures"][0] == "Qwen3MoeForCausalLM");
  CHECK(plain["model_type"] == "qwen3_moe");
  const nlohmann::json keys = {{"num_experts", 6},
                               {"num_experts_per_tok", 3},
                               {"moe_intermediate_size", 40},
                               {"norm_topk_prob", false},
                               {"decoder_sparse_step", 2},
                               {"mlp_only_layers", {1}},
                               {"router_aux_loss_coef", .25},
                               {"output_router_logits", false}};
  const auto check_keys = [&](const nlohmann::json& j) {
    for (const auto& [key, value] : keys.items()) {
      INFO(key);
      CHECK(j.at(key) == value);
    }
  };
  check_keys(plain);

  // Names of other architectures are not used.
  config.model.qk_norm = false;
  CHECK(hf_config(config, 256)["model_type"] == "sluice");
  config.model.qk_norm = true;
  moe.shared_expert_intermediate_size = 24;
  moe.shared_expert_gate = true;
  const nlohmann::json shared = hf_config(config, 256);
  CHECK(shared["model_type"] == "sluice");
  CHECK(shared["shared_expert_intermediate_size"] == 24);
  CHECK(shared["shared_expert_gate"] == true);
  check_keys(shared);
}

TEST_CASE("a checkpoint from a GPU opens on a machine without one if another device is given", "[evaluate]") {
  const test::TemporaryFolder folder;
  std::ofstream(folder / "config.yaml") << "train: {device: cuda}\n";
  CheckpointInfo checkpoint;
  checkpoint.path = folder.path;
  CHECK(checkpoint_config(checkpoint, "cpu").train.device == DeviceChoice::cpu);
  CHECK(checkpoint_config(checkpoint, "auto").train.device == DeviceChoice::automatic);
  if (!built_with_cuda()) CHECK_THROWS_AS(checkpoint_config(checkpoint), Error);
  CHECK_THROWS_AS(checkpoint_config(checkpoint, "tpu"), Error);
}

}  // namespace sluice
