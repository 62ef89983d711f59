// Settings that are given and have no effect: what the warning says, and what it says nothing about.
#include "config/idle_settings.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <utility>

#include "config/scratch.h"

using namespace sluice;

namespace {

std::vector<std::string> idle(const std::string& path, const std::vector<std::string>& overrides = {}) {
  KeyPlaces places;
  const Config config = load_config(path, overrides, &places);
  return idle_settings(config, places, path);
}

}  // namespace

TEST_CASE("a setting without effect is named with its place and what turns it off", "[config][idle]") {
  const std::string at = "model.attention.", balance = at + "head_balance";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"model: {moe: {shared_expert_intermediate_size: 8}}",
       "a.yaml:1:15: model.moe.shared_expert_intermediate_size has no effect while model.moe.num_experts is "
       "0"},
      {"model: {moe: {shared_expert_intermediate_size: 8, shared_expert_gate: true, norm_topk_prob: false}}",
       "a.yaml:1:77: model.moe.norm_topk_prob, model.moe.shared_expert_intermediate_size and "
       "model.moe.shared_expert_gate have no effect while model.moe.num_experts is 0"},
      {"model: {moe: {num_experts: 4, num_experts_per_tok: 2, load_balance: {coefficient: 0, scope: "
       "micro_batch}}}",
       "a.yaml:1:86: model.moe.load_balance.scope has no effect while model.moe.load_balance.coefficient is "
       "0"},
      {"model: {initializer: fan_in, tie_word_embeddings: false, initializer_range: 0.01}",
       "a.yaml:1:58: model.initializer_range has no effect while model.initializer is fan_in"},
      {"model: {attention: {kind: sparse, sparse: {indexer: {detach_input: false}, loss: {coefficient: 0}}}}",
       "a.yaml:1:54: " + at + "sparse.indexer.detach_input has no effect while " + at +
           "sparse.loss.coefficient is 0"},
      {"optimizer: {type: muon, muon: {initial_momentum: 0.9, momentum_warmup_steps: 0}}",
       "a.yaml:1:32: optimizer.muon.initial_momentum has no effect while "
       "optimizer.muon.momentum_warmup_steps is 0"},
      {"optimizer: {rules: [{match: norm, lr_multiplier: 2}, {match: embed, trainable: false, lr_multiplier: "
       "2, weight_decay: true}, {match: gate, trainable: false, lr_multiplier: 1}]}",
       "a.yaml:1:87: optimizer.rules[1].lr_multiplier and optimizer.rules[1].weight_decay have no effect "
       "while "
       "optimizer.rules[1].trainable is false"},
      {"eval: {every_steps: 5, max_tokens: 100}",
       "a.yaml:1:8: eval.every_steps and eval.max_tokens have no effect while data.validation names no set"},
      {"model: {match_multiple: 8}",
       "a.yaml:1:9: model.match_multiple has no effect while model.match_parameters_of is not given"},
      {"model: {rope: {scaling: {original_max_position_embeddings: 512}}}",
       "a.yaml:1:26: model.rope.scaling.original_max_position_embeddings has no effect while "
       "model.rope.scaling.type is none"},
      {"model: {qk_norm_order: after_rope, rope: {scaling: {type: yarn, factor: 2, attention_factor: 1.2}}}",
       "a.yaml:1:76: model.rope.scaling.attention_factor has no effect while model.qk_norm_order is "
       "after_rope"},
      {"model: {attention: {head_balance: {scope: global_batch, shared_heads: 1}}}",
       "a.yaml:1:36: " + balance + ".scope and " + balance + ".shared_heads have no effect while " + balance +
           ".coefficient is 0"},
      {"model: {attention: {head_balance: {coefficient: 1, calibration_samples: 4}}}",
       "a.yaml:1:52: " + balance + ".calibration_samples has no effect while " + balance +
           ".shared_heads is 0"},
      {"model: {attention: {head_balance: {coefficient: 1, shared_heads: 1, shared_from: online, "
       "calibration_samples: 4}}}",
       "a.yaml:1:90: " + balance + ".calibration_samples has no effect while " + balance +
           ".shared_from is online"},
      {"model: {attention: {kind: sparse, sparse: {k: {policy: inverse, temperature: 0.5}}}}",
       "a.yaml:1:65: " + at + "sparse.k.temperature has no effect while " + at +
           "sparse.k.policy is inverse"},
      {"model: {attention: {kind: sparse, sparse: {k: {policy: entropy, temperature: 0.5, momentum: 0.5}}}}",
       "a.yaml:1:83: " + at + "sparse.k.momentum has no effect while " + at + "sparse.k.policy is entropy"},
      {"model: {attention: {sparse: {block: 4}}}",
       "a.yaml:1:30: " + at + "sparse.block has no effect while " + at + "kind is softmax"},
      {"model: {attention: {kind: sparse, sparse: {k: {max: 64, min: 8}}}}",
       "a.yaml:1:57: " + at + "sparse.k.min and " + at + "sparse.k.max have no effect while " + at +
           "sparse.k.policy is fixed"},
      {"model: {attention: {kind: sparse, sparse: {loss: {coefficient: 0, temperature: 2}}}}",
       "a.yaml:1:67: " + at + "sparse.loss.temperature has no effect while " + at +
           "sparse.loss.coefficient is 0"},
      {"model: {intermediate_size: 99, moe: {num_experts: 4, num_experts_per_tok: 2}}",
       "a.yaml:1:9: model.intermediate_size has no effect while every layer has experts"},
      {"{data: {seq_len: 64}, model: {attention: {window: 64, window_pattern: 2}}}",
       "a.yaml:1:43: " + at + "window and " + at + "window_pattern have no effect while data.seq_len is 64"},
      {"lora: {targets: [q_proj], alpha: 8}",
       "a.yaml:1:27: lora.alpha and lora.targets have no effect while lora.rank is 0"},
      {"train: {init_ignore: [model.rope.theta]}",
       "a.yaml:1:9: train.init_ignore has no effect while train.init_from is not given"},
      {"optimizer: {muon: {lr: 0.1}}",
       "a.yaml:1:20: optimizer.muon.lr has no effect while optimizer.type is adamw"},
      {"optimizer: {decay_steps: 5}",
       "a.yaml:1:13: optimizer.decay_steps has no effect while optimizer.schedule is cosine"},
      {"optimizer: {schedule: constant, min_lr: 1e-4}",
       "a.yaml:1:33: optimizer.min_lr has no effect while optimizer.schedule is constant"},
      {"parallel: {expert_capacity: 3}",
       "a.yaml:1:12: parallel.expert_capacity has no effect while parallel.expert is 1"},
      {"parallel: {exact_sum: fixed64}",
       "a.yaml:1:12: parallel.exact_sum has no effect while parallel.determinism is same_layout"},
      {"{parallel: {determinism: exact}, train: {matmul_algorithm: heuristic}}",
       "a.yaml:1:42: train.matmul_algorithm has no effect while parallel.determinism is exact"},
      {"eval: {shots: 5}", "a.yaml:1:8: eval.shots has no effect while eval.tasks names no file"},
      {"eval: {max_questions: 5}",
       "a.yaml:1:8: eval.max_questions has no effect while eval.tasks names no file"},
      {"eval: {prompt_tokens: 5}",
       "a.yaml:1:8: eval.prompt_tokens has no effect while eval.prompts is empty"},
      {"eval: {ruler: {lengths: [64]}}",
       "a.yaml:1:16: eval.ruler.lengths has no effect while eval.ruler.samples is 0"},
      {"{train: {max_steps: 9}, log: {trace_step: 10}}",
       "a.yaml:1:31: log.trace_step has no effect while the run ends with step 9"},
  };
  const test::ScratchFolder folder;
  for (const auto& [yaml, text] : cases) {
    INFO(yaml);
    folder.write("a.yaml", yaml + "\n");
    CHECK(idle("a.yaml") == std::vector<std::string>{text});
  }
}

TEST_CASE("nothing is said of a setting that has its effect, its default, or is not given",
          "[config][idle]") {
  const test::ScratchFolder folder;
  folder.write("base.yaml", "optimizer: {type: muon, muon: {lr: 0.1}, schedule: wsd, decay_steps: 2}\n");
  folder.write("a.yaml",
               "extends: base.yaml\ntrain: {max_steps: 9}\nlog: {trace_step: 9}\nlora: {alpha: 32}\n"
               "optimizer: {min_lr: 1e-4}\n");
  CHECK(idle("a.yaml").empty());
  // A setting of the file itself is named once the command line turns it off, one of its base is not.
  CHECK(idle("a.yaml", {"optimizer.type=adamw", "optimizer.schedule=constant"}) ==
        std::vector<std::string>{
            "a.yaml:5:13: optimizer.min_lr has no effect while optimizer.schedule is constant"});
  CHECK(idle("a.yaml", {"lora.alpha=8"}) ==
        std::vector<std::string>{"command line: lora.alpha has no effect while lora.rank is 0"});
  folder.write(
      "a.yaml",
      "model: {intermediate_size: 99, moe: {num_experts: 4, num_experts_per_tok: 2, mlp_only_layers: [0]}, "
      "attention: {window: 63}}\ndata: {seq_len: 64}\n");
  CHECK(idle("a.yaml").empty());
  // Analysis averages importance by it, whether it is balanced or not.
  folder.write("a.yaml", "model: {attention: {head_balance: {skip_first: false}}}\n");
  CHECK(idle("a.yaml").empty());
  CHECK(idle(SLUICE_SOURCE_DIR "/configs/reference.yaml").empty());
}
