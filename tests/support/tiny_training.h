#pragma once
// A training run small enough to be repeated many times in a test.
#include <map>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "config/config.h"
#include "config/load.h"
#include "core/host_view.h"
#include "data/loader.h"
#include "data/temporary.h"
#include "hf/config.h"
#include "support/gradcheck.h"
#include "support/whole_state.h"
#include "train/trainer.h"

namespace sluice::test {

/// Documents of a simple grammar (each token is mostly determined by the one before), so that there is
/// something to learn.
inline void write_corpus(const std::string& prefix, int64_t tokens = 20000, int64_t vocab_size = 32) {
  std::mt19937 random(7);
  std::vector<std::vector<int32_t>> documents;
  for (int64_t written = 0; written < tokens;) {
    std::vector<int32_t> document;
    const int64_t length = 50 + static_cast<int64_t>(random() % 200);
    uint32_t x = random() % 31;
    for (int64_t i = 0; i < length; ++i) {
      document.push_back(static_cast<int32_t>(x));
      x = random() % 8 == 0 ? random() % 31 : (x * 5 + 3) % 31;
    }
    document.push_back(static_cast<int32_t>(vocab_size - 1));
    written += length + 1;
    documents.push_back(std::move(document));
  }
  write_tokens(prefix, documents, vocab_size);
}

struct TinyTraining {
  TemporaryFolder folder;
  Config config;

  explicit TinyTraining(Precision precision = Precision::f32) {
    write_corpus(folder / "train");
    write_corpus(folder / "held_out", 1500);
    config.name = "tiny";
    config.run_dir = folder / "run";
    config.model.vocab_size = 32;
    config.model.hidden_size = 32;
    config.model.num_hidden_layers = 2;
    config.model.num_attention_heads = 2;
    config.model.num_key_value_heads = 1;
    config.model.head_dim = 16;
    config.model.intermediate_size = 48;
    config.model.attention.gates = {GateConfig{}};
    config.data.seq_len = 32;
    config.data.train = {{"tiny", folder / "train", 1.0}};
    config.data.validation = {{"held_out", folder / "held_out", 1.0}};
    config.train.micro_batch_size = 2;
    config.train.global_batch_size = 4;
    config.train.max_steps = 20;
    config.train.precision = precision;
    config.optimizer.lr = 5e-3;
    config.optimizer.warmup_steps = 3;
    config.checkpoint.async = false;
  }
  /// A dense layer and an MoE layer with six experts, two per token, and a gated shared expert.
  void add_experts() {
    MoeConfig& moe = config.model.moe;
    moe.num_experts = 6;
    moe.num_experts_per_tok = 2;
    moe.moe_intermediate_size = 20;
    moe.shared_expert_intermediate_size = 12;
    moe.shared_expert_gate = true;
    moe.mlp_only_layers = {0};
  }
  /// A tiny version of nanochat's model and optimizer, with learning rates for this size.
  void make_nanochat() {
    ModelConfig& m = config.model;
    m.num_key_value_heads = m.num_attention_heads;
    m.intermediate_size = 4 * m.hidden_size;
    m.attention.gates.clear();
    m.tie_word_embeddings = false;
    m.hidden_act = HiddenAct::relu2;
    m.norm_weights = false;
    m.initializer = Initializer::fan_in;
    m.qk_norm_order = QkNormOrder::after_rope;
    m.embedding_norm = true;
    m.final_logit_softcapping = 15;
    OptimizerConfig& o = config.optimizer;
    o.type = OptimizerType::muon;
    o.lr = 0.05;
    o.beta1 = 0.8;
    o.eps = 1e-10;
    o.weight_decay = 0;
    o.schedule = Schedule::wsd;
    o.warmup_steps = 0;
    o.rules = {{"lm_head", 0.2, std::nullopt}};
    o.muon.momentum_warmup_steps = 8;
  }
  Blend blend() const { return Blend(config.data.train, config); }
};

/// Every bit of weights, moments and master weights.
inline std::string all_bits(Trainer& trainer) {
  const CheckpointContent content = trainer.content();
  std::string bits;
  for (const auto* tensors : {&content.weights, &content.optimizer})
    for (const NamedTensor& t : *tensors) {
      const HostView view(trainer.context(), t.tensor);
      bits.append(static_cast<const char*>(view.tensor().data), static_cast<size_t>(t.tensor.bytes()));
    }
  return bits;
}

/// Every tensor's bytes by its name.
inline std::map<std::string, std::string> bits_of(Trainer& trainer) {
  WholeState state;
  state.add(trainer.content());
  return state.tensors();
}

/// Saves the state of a trainer, or of the trainers of several ranks; returns the path of the checkpoint.
inline std::string save_checkpoint(const std::string& folder, Trainer& trainer, const Config& config,
                                   Communicator* ranks = nullptr) {
  CheckpointContent content = trainer.content();
  content.config_yaml = to_yaml(config);
  content.hf_config = hf_config(config, config.model.vocab_size - 1);
  CheckpointStore store(folder, config.checkpoint, content, &trainer.context(), ranks);
  store.save(content);
  if (!store.wait()) throw std::runtime_error(store.last_error());
  return list_checkpoints(folder).front();
}

}  // namespace sluice::test
