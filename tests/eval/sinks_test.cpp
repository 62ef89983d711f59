// A model of one head, written by hand, that solves Bigram-Backcopy (Guo et al. 2024, arXiv 2410.13835):
// after a trigger comes the token before the trigger, after any other token one that is drawn from a table of
// bigrams. Queries of triggers attend to the token before them. All others have nothing to copy, and attend
// to the first token, whose value is zero.
#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "eval/evaluate.h"
#include "support/model.h"
#include "support/tiny_training.h"

namespace sluice {
namespace {

constexpr int64_t kVocab = 8, kLength = 32,
                  kDocuments = 24;  // token 0 begins documents; triggers are 1 and 2
constexpr double kCopyLogit = 60;   // of the copied token, after a trigger
constexpr double kFirstScore = 12, kBeforeScore = 4000;

bool trigger(int32_t token) { return token == 1 || token == 2; }

/// Probability of `next` after `token`, which is no trigger. The first character of a document is none,
/// either: there is nothing but the begin token before it.
double bigram(int32_t token, int32_t next) {
  if (next == 0) return 0;
  if (token == 0) return trigger(next) ? 0 : 1.0 / (kVocab - 3);
  return (next == 1 + token % 7 ? 0.5 : 0) + 0.5 / (kVocab - 1);
}

std::vector<std::vector<int32_t>> backcopy_documents() {
  std::mt19937 random(11);
  std::vector<std::vector<int32_t>> documents;
  for (int64_t d = 0; d < kDocuments; ++d) {
    std::vector<int32_t> document = {0};
    while (std::ssize(document) < kLength) {
      const int32_t last = document.back();
      if (trigger(last)) {
        document.push_back(document[document.size() - 2]);
        continue;
      }
      double u = static_cast<double>(random()) / 4294967296.0;
      int32_t next = 1;
      while (next + 1 < kVocab && u >= bigram(last, next)) u -= bigram(last, next++);
      document.push_back(next);
    }
    documents.push_back(document);
  }
  documents.push_back({0});  // the last token of a file is a target alone
  return documents;
}

struct Backcopy : test::TinyTraining {
  std::vector<std::vector<int32_t>> documents = backcopy_documents();

  Backcopy() : TinyTraining(Precision::f64) {
    ModelConfig& m = config.model;
    m.vocab_size = kVocab;
    m.hidden_size = 2 * kVocab;  // the token, and what is copied
    m.num_hidden_layers = m.num_attention_heads = m.num_key_value_heads = 1;
    m.head_dim = 16;
    m.attention.gates.clear();
    m.qk_norm = m.tie_word_embeddings = false;
    m.rope.theta = 1e12;  // channel 0 turns by one radian per position, channel 7 practically not
    test::write_tokens(folder / "backcopy", documents, kVocab);
    config.data.seq_len = kLength;
    config.data.document_mask = true;
    config.data.train = {{"backcopy", folder / "backcopy", 1.0}};
    config.data.validation = config.data.train;
    config.train.micro_batch_size = 4;
    config.analysis.query_classes = {{"trigger", {1, 2}}};
  }

  void write_weights(Trainer& trainer) const {
    ParamStore& store = trainer.store();
    const int64_t C = config.model.hidden_size, D = config.model.head_dim;
    const auto matrix = [&](const std::string& name) {
      for (size_t i = 0; i < store.specs().size(); ++i) {
        if (store.specs()[i].name != name) continue;
        const Tensor t = store.value(static_cast<ParamStore::Id>(i));
        for (int64_t k = 0; k < t.numel(); ++k) test::Pool::set(t, k, 0);
        return t;
      }
      throw std::runtime_error("no parameter " + name);
    };
    const auto set = [](const Tensor& t, int64_t row, int64_t column, double value) {
      test::Pool::set(t, row * t.dim(1) + column, value);
    };
    const Tensor embedding = matrix("model.embed_tokens.weight"), head = matrix("lm_head.weight");
    const std::string layer = "model.layers.0.";
    const Tensor q = matrix(layer + "self_attn.q_proj.weight"), k = matrix(layer + "self_attn.k_proj.weight"),
                 v = matrix(layer + "self_attn.v_proj.weight"), o = matrix(layer + "self_attn.o_proj.weight");
    matrix(layer + "mlp.down_proj.weight");  // the FFN adds nothing

    // What a norm multiplies a vector of `ones` channels equal to 1 by.
    const auto norm = [&](double ones) {
      return 1 / std::sqrt(ones / static_cast<double>(C) + config.model.rms_norm_eps);
    };
    const double root = std::sqrt(static_cast<double>(D));
    for (int32_t token = 0; token < kVocab; ++token) {
      set(embedding, token, token, 1);
      set(k, 0, token, 1 / norm(1));
      if (token == 0) set(k, D / 2 - 1, token, 1 / norm(1));
      if (token != 0) set(v, token, token, 1 / norm(1));
      set(o, kVocab + token, token, 1);
      if (trigger(token)) {
        // Turned back by one position, so that it agrees with the key of the position before.
        set(q, 0, token, kBeforeScore * root * std::cos(1.0) / norm(1));
        set(q, D / 2, token, -kBeforeScore * root * std::sin(1.0) / norm(1));
      } else {
        set(q, D / 2 - 1, token, kFirstScore * root / norm(1));
        for (int32_t next = 0; next < kVocab; ++next)
          set(head, next, token, std::log(std::max(bigram(token, next), 1e-12)) / norm(1));
      }
      set(head, token, kVocab + token, kCopyLogit / norm(2));
    }
    store.pack(trainer.context());
  }
};

class NoTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return kVocab; }
  std::vector<int32_t> encode(std::string_view) const override { return {}; }
  std::string decode(const std::vector<int32_t>&) const override { return ""; }
  int32_t end_of_document() const override { return 0; }
  std::string token_name(int32_t) const override { return ""; }
  int64_t token_bytes(int32_t token) const override { return token == 0 ? 0 : 1; }
  std::string fingerprint() const override { return "backcopy"; }
  std::string name() const override { return "backcopy"; }
  const std::string& model() const override { return model_; }
  bool encodes_in_parts() const override { return true; }
  int64_t lost_bytes(std::string_view, const std::vector<int32_t>&) const override { return 0; }
  std::string normalization() const override { return "no normaliser"; }

 private:
  std::string model_;
};

/// Attention on the first token, from the scores that the weights above give.
double first_token_attention(const std::vector<int32_t>& document, int64_t t) {
  if (!trigger(document[static_cast<size_t>(t)]))
    return 1 / (1 + static_cast<double>(t) * std::exp(-kFirstScore));
  const auto score = [&](int64_t j) { return kBeforeScore * std::cos(static_cast<double>(t - 1 - j)); };
  double sum = 0;
  for (int64_t j = 0; j <= t; ++j) sum += std::exp(score(j) - score(0));
  return 1 / sum;
}

}  // namespace

TEST_CASE("a hand-made model that solves Bigram-Backcopy has the attention and the losses of its arithmetic",
          "[evaluate]") {
  const test::OneThread one_thread;
  Backcopy t;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  t.write_weights(trainer);
  const Evaluator evaluator(t.config.data.validation, t.config, NoTokenizer(), 0);
  const EvalResult result = *evaluator.run(trainer.context(), trainer.model(), trainer.store(),
                                           trainer.micro_batch(), trainer.analysed(), [] { return false; });

  double on[2] = {}, queries[2] = {}, nats = 0, targets[2] = {}, sinks = 0;
  t.documents.pop_back();
  for (const std::vector<int32_t>& document : t.documents) {
    double in_document = 1;
    for (int64_t i = 1; i < kLength; ++i) {
      const bool other = !trigger(document[static_cast<size_t>(i)]);
      const double attention = first_token_attention(document, i);
      in_document += attention;
      on[other] += attention;
      ++queries[other];
    }
    sinks += in_document / static_cast<double>(kLength) > 0.3;
    for (size_t i = 0; i + 1 < document.size(); ++i) {
      ++targets[!trigger(document[i])];
      if (!trigger(document[i])) nats -= std::log(bigram(document[i], document[i + 1]));
    }
  }
  const double on_trigger = on[0] / queries[0], on_other = on[1] / queries[1];
  CHECK(on_trigger < 0.1);
  CHECK(on_other > 0.999);

  const ModelSummary& a = result.analysis;
  const HeadAttention& heads = a.layers[0].heads;
  CHECK(a.query_classes == std::vector<std::string>{"trigger", "other"});
  CHECK(heads.by_class[0][0] == Approx(on_trigger).margin(1e-9));
  CHECK(heads.by_class[1][0] == Approx(on_other).margin(1e-9));
  CHECK(heads.later[0] == Approx((on[0] + on[1]) / (queries[0] + queries[1])).margin(1e-9));
  CHECK(a.sinks.share == Approx(sinks / static_cast<double>(kDocuments)).margin(1e-12));
  CHECK(a.sinks.heads == 1);
  CHECK(a.sinks.strongest_by_class == std::vector<double>{heads.by_class[0][0], heads.by_class[1][0]});

  const std::vector<ClassResult>& classes = result.sets[0].classes;
  REQUIRE(classes.size() == 2);
  CHECK(classes[0].name == "trigger");
  CHECK(classes[0].tokens == static_cast<int64_t>(targets[0]));
  CHECK(classes[0].loss < 1e-6);
  CHECK(classes[0].share_likely == 1);
  CHECK(classes[1].tokens == static_cast<int64_t>(targets[1]));
  CHECK(classes[1].loss == Approx(nats / targets[1]).margin(0.01));
  const auto tokens = static_cast<double>(result.sets[0].tokens);
  CHECK(result.sets[0].loss ==
        Approx((classes[0].loss * targets[0] + classes[1].loss * targets[1]) / tokens).epsilon(1e-12));

  std::string text;
  for (const std::string& line : describe(result)) text += line + "\n";
  CHECK_THAT(text, Catch::Contains("loss  after \"trigger\" 0.0000") &&
                       Catch::Contains("sinks: 1 of 1 heads give the first token more than 30% of their "
                                       "attention; strongest: layer 0 head 0, 100.0% on \"other\""));
}

}  // namespace sluice
