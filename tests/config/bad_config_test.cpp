// Invalid configurations and the exact messages about them.
#include <catch2/catch.hpp>
#include <vector>

#include "config/load.h"
#include "config/scratch.h"
#include "core/device.h"
#include "core/error.h"

using namespace sluice;

namespace {

/// The message of a configuration that must be refused with exit code 64; "" if it is accepted.
std::string refusal(const std::string& path, const std::vector<std::string>& overrides = {}) {
  try {
    load_config(path, overrides);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    return error.what();
  }
  return "";
}

struct Case {
  std::string yaml;
  std::string message;  // its first line
};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

TEST_CASE("every mistake in a file is reported with its position, the reason and a remedy", "[config]") {
  const std::vector<Case> cases = {
      {"model:\n\thidden_size: 32\n",
       "a.yaml:2:1: not valid YAML: the line is indented with a tab; use spaces, as many as its neighbours"},
      {"train:\n  seed: 3\n  \tmax_steps: 2\n",
       "a.yaml:3:3: not valid YAML: the line is indented with a tab; use spaces, as many as its neighbours"},
      {"train: {seed: 3\n\t# c\nname: 3\n", "a.yaml:3:1: not valid YAML: end of map flow not found"},
      // keys
      {"model:\n  num_experts: 3\n",
       "a.yaml:2:3: unknown key model.num_experts; did you mean model.moe.num_experts?"},
      {"model:\n  attention:\n    gates:\n      - {postion: query}\n",
       "a.yaml:4:10: unknown key model.attention.gates[0].postion; did you mean position?"},
      {"lr: 1e-3\n", "a.yaml:1:1: unknown key lr; did you mean optimizer.lr?"},
      {"optimizer.lr: 1e-3\n",
       "a.yaml:1:1: unknown key optimizer.lr; write it as nested sections (dots work on the command line "
       "only)"},
      {"model: {moe: {num_experts: 1}}\n",
       "a.yaml:1:15: model.moe.num_experts = 1 is a dense network; use 0 and intermediate_size, or at least "
       "2 experts"},
      {"model: {moe: {num_experts: 8, num_experts_per_tok: 9}}\n",
       "a.yaml:1:31: model.moe.num_experts_per_tok = 9 is more than num_experts = 8"},
      {"model: {moe: {num_experts: 8, shared_expert_gate: true}}\n",
       "a.yaml:1:31: model.moe.shared_expert_gate needs a shared expert; give "
       "shared_expert_intermediate_size"},
      {"model: {moe: {bias: true}}\n", "a.yaml:1:15: model.moe.bias has no effect while num_experts is 0"},
      {"model: {moe: {swiglu_limit: 7}}\n",
       "a.yaml:1:15: model.moe.swiglu_limit has no effect while num_experts is 0"},
      {"model: {moe: {num_experts: 8, swiglu_limit: 0}}\n",
       "a.yaml:1:31: model.moe.swiglu_limit must be greater than 0, got 0"},
      {"model: {moe: {num_experts: 8, mlp_only_layers: [0, 9]}}\n",
       "a.yaml:1:31: model.moe.mlp_only_layers names layer 9, but layers are 0 to 3"},
      {"model: {moe: {num_experts: 8, mlp_only_layers: [0, 1, 2, 3]}}\n",
       "a.yaml:1:15: model.moe.num_experts = 8, but decoder_sparse_step and mlp_only_layers leave no layer "
       "with experts; "
       "set num_experts: 0 for a dense model"},
      {"model: {attention: {switch_heads: {num_experts: 2, num_experts_per_tok: 3}}}\n",
       "a.yaml:1:52: model.attention.switch_heads.num_experts_per_tok = 3 is more than num_experts = 2"},
      {"model: {attention: {switch_heads: {num_experts: 4, expert_width: 24}}}\n",
       "a.yaml:1:52: model.attention.switch_heads.expert_width = 24 does not divide model.head_dim = 64"},
      {"model: {attention: {switch_heads: {num_experts: 3, expert_width: 16}}}\n",
       "a.yaml:1:52: model.attention.switch_heads.expert_width = 16: 3 experts never write the last 16 of a "
       "head's 64 channels"},
      {"model: {attention: {switch_heads: {expert_width: 16}}}\n",
       "a.yaml:1:36: model.attention.switch_heads.expert_width has no effect while num_experts is 0"},
      {"lora: {rank: 8}\n",
       "a.yaml:1:8: lora.rank = 8 trains adapters of an existing model; give train.init_from"},
      {"lora: {rank: 8, targets: [q_proj, q_proj]}\ntrain: {init_from: x}\n",
       "a.yaml:1:17: lora.targets names q_proj twice"},
      {"lora: {rank: 8, alpha: 0}\ntrain: {init_from: x}\n",
       "a.yaml:1:17: lora.alpha must be greater than 0, got 0"},
      {"model: {moe: {mlp_only_layers: 3}}\n",
       "a.yaml:1:32: model.moe.mlp_only_layers must be a list of integers, got 3"},
      {"model: {moe: {mlp_only_layers: [1, x]}}\n",
       "a.yaml:1:36: model.moe.mlp_only_layers[1] must be an integer, got x"},
      {"model: {moe: {load_balance: {scope: batch}}}\n",
       "a.yaml:1:37: model.moe.load_balance.scope must be one of global_batch, micro_batch, previous_step; "
       "got batch"},
      {"parallel: {gradient_dtype: bf16, determinism: exact}\n",
       "a.yaml:1:12: parallel.gradient_dtype: bf16 rounds differently on each number of ranks; with "
       "determinism exact use f32"},
      {"parallel: {gradient_dtype: bf16}\ntrain: {precision: f64}\n",
       "a.yaml:1:12: parallel.gradient_dtype: bf16 is available only for gradients computed in f32; with "
       "precision f64 use f32"},
      {"model: {attention: {head_balance: {coefficient: 1e-4, shared_heads: 3}}}\n",
       "a.yaml:1:55: model.attention.head_balance.shared_heads = 3 leaves fewer than 2 of 4 heads to "
       "balance"},
      {"model: {attention: {gates: [{activation: silu}], head_balance: {coefficient: 1e-4}}}\n",
       "a.yaml:1:30: model.attention.gates[0].activation: scores are not in [0, 1], so they do not measure a "
       "head's importance; set "
       "model.attention.head_balance.coefficient: 0, or use sigmoid or ns_sigmoid"},
      {"model: {attention: {gates: [{combine: add}], head_balance: {coefficient: 1e-4}}}\n",
       "a.yaml:1:30: model.attention.gates[0].combine: scores are added, so they do not measure a head's "
       "importance; set "
       "model.attention.head_balance.coefficient: 0, or use multiply"},
      {"model: {attention: {gates: [{heads: shared}], head_balance: {coefficient: 1e-4}}}\n",
       "a.yaml:1:30: model.attention.gates[0].heads: all heads have the same scores, so they do not measure "
       "a head's importance; set "
       "model.attention.head_balance.coefficient: 0, or use specific"},
      {"model: {attention: {head_balance: {coefficient: 1e-4, scope: global_batch}}}\nparallel: "
       "{determinism: exact}\n",
       "a.yaml:1:55: model.attention.head_balance.scope depends on which rank computes which micro-batch; "
       "with parallel.determinism: exact use micro_batch or previous_step"},
      {"model: {attention: {head_balance: {ddof: 2}}}\n",
       "a.yaml:1:36: model.attention.head_balance.ddof must be 0 or 1, got 2"},
      {"model: {hidden_act: relu2, moe: {num_experts: 8}}\n",
       "a.yaml:1:9: model.hidden_act: relu2 is for dense networks; experts are SwiGLU in this version: use "
       "silu"},
      {"model: {attention: {window: -1}}\n",
       "a.yaml:1:21: model.attention.window must not be negative, got -1"},
      {"model: {attention: {window_pattern: 2}}\n",
       "a.yaml:1:21: model.attention.window_pattern has no effect while window is 0"},
      {"model: {attention: {window: 8, window_pattern: 1}}\n",
       "a.yaml:1:32: model.attention.window_pattern = 1 leaves no layer with a window; use window: 0, or 2 "
       "for "
       "every other layer"},
      {"model: {num_hidden_layers: 3, attention: {window: 8, window_pattern: 4}}\n",
       "a.yaml:1:54: model.attention.window_pattern = 4 is more than the 3 layers, so that all have the "
       "window; "
       "use 0"},
      {"model: {attention: {kind: softpick, kernel: mma}}\n",
       "a.yaml:1:37: model.attention.kernel names a kernel of softmax attention; softpick has one kernel: "
       "use "
       "auto"},
      {"model: {attention: {kind: sparse, kernel: mma}}\n",
       "a.yaml:1:35: model.attention.kernel names a kernel of attention over all keys; sparse attention has "
       "its own: use auto"},
      {"model: {attention: {window: 8, kernel: cudnn}}\n",
       "a.yaml:1:32: model.attention.kernel: cudnn has no sliding window; use auto, or window: 0"},
      {"model: {qk_norm: false, qk_norm_order: after_rope}\n",
       "a.yaml:1:25: model.qk_norm_order: after_rope has no effect while qk_norm is false"},
      {"model: {initializer: fan_in}\n",
       "a.yaml:1:9: model.initializer: fan_in initialises the embedding with deviation 1 and the output head "
       "with 0, so they cannot be one matrix; set "
       "tie_word_embeddings: false"},
      {"model: {tie_word_embeddings: false, initializer: fan_in, scaled_residual_init: true}\n",
       "a.yaml:1:58: model.scaled_residual_init has no effect with initializer: fan_in, which initialises "
       "o_proj and down_proj to 0"},
      {"model: {rope: {theta: 1}}\n", "a.yaml:1:16: model.rope.theta must be greater than 1, got 1"},
      {"train: {init_from: x, init_ignore: [model.rope.tetha]}\n",
       "a.yaml:1:23: train.init_ignore: model.rope.tetha is neither a model key nor data.tokenizer; did you "
       "mean model.rope.theta?"},
      {"train: {init_missing: fresh}\n",
       "a.yaml:1:9: train.init_missing: fresh has no effect without train.init_from"},
      {"train: {init_from: x, init_missing_names: [gate_proj]}\n",
       "a.yaml:1:23: train.init_missing_names has no effect while train.init_missing is refuse"},
      {"train: {init_from: x, init_missing: fresh, init_missing_names: [\"\"]}\n",
       "a.yaml:1:44: train.init_missing_names: the empty text is part of every name; leave the list empty"},
      {"model: {final_logit_softcapping: 0}\n",
       "a.yaml:1:9: model.final_logit_softcapping must be greater than 0, got 0"},
      {"optimizer: {type: muon}\nparallel: {zero_stage: 1}\n",
       "a.yaml:1:13: optimizer.type: muon orthogonalises whole matrices, which parallel.zero_stage = 1 "
       "shards; use 0"},
      {"optimizer: {muon: {momentum: 1}}\n", "a.yaml:1:20: optimizer.muon.momentum must be in [0, 1), got 1"},
      {"optimizer: {muon: {initial_momentum: -0.1}}\n",
       "a.yaml:1:20: optimizer.muon.initial_momentum must be in [0, 1), got -0.1"},
      {"optimizer: {muon: {lr: 0}}\n", "a.yaml:1:20: optimizer.muon.lr must be greater than 0, got 0"},
      {"optimizer: {eps: 1e-50}\n",
       "a.yaml:1:13: optimizer.eps must be at least 1.2e-38, got 1e-50: with 0, which it would be in f32, a "
       "weight without gradient becomes 0 / 0"},
      {"optimizer: {muon: {newton_schulz_steps: 0}}\n",
       "a.yaml:1:20: optimizer.muon.newton_schulz_steps must be at least 1, got 0"},
      {"parallel: {tensor: 2}\n", "a.yaml:1:12: parallel.tensor = 2 is not available in this version; use 1"},
      {"parallel: {context: 0}\n", "a.yaml:1:12: parallel.context must be at least 1, got 0"},
      {"data: {seq_len: 100}\nparallel: {context: 4}\n",
       "a.yaml:2:12: parallel.context = 4 cuts every sequence into 8 equal chunks, but data.seq_len = 100 is "
       "no "
       "multiple of that; use 104"},
      {"data: {seq_len: 48}\nparallel: {context: 3, expert: 2, determinism: exact}\n"
       "model: {moe: {num_experts: 16, load_balance: {scope: micro_batch}}, hidden_size: 32}\n",
       "a.yaml:2:24: parallel.determinism: exact counts every micro-batch once in the experts' gradients, "
       "which needs one of parallel.expert and parallel.context to divide the other, so that groups of ranks "
       "lie within groups; got 2 and 3"},
      {"model: {moe: {num_experts: 9}}\nparallel: {expert: 2}\n",
       "a.yaml:2:12: parallel.expert = 2 does not divide model.moe.num_experts = 9"},
      {"parallel: {expert: 2}\n",
       "a.yaml:1:12: parallel.expert = 2 needs experts, but model.moe.num_experts is 0; use 1"},
      {"parallel: {expert_capacity: 0}\n",
       "a.yaml:1:12: parallel.expert_capacity must be greater than 0 and finite, got 0"},
      {"parallel: {zero_stage: 4}\n", "a.yaml:1:12: parallel.zero_stage must be 0, 1, 2 or 3, got 4"},
      {"optimizer:\n  lr: 1e-3\n  eps: 1e-8\n  lr: 2e-3\n",
       "a.yaml:4:3: duplicate key optimizer.lr; it is also given at a.yaml:2:3. Remove one."},
      {"train: {seed: 1}\nmodel: {qk_norm: true}\ntrain: {seed: 2}\n",
       "a.yaml:3:1: duplicate key train; it is also given at a.yaml:1:1. Remove one."},
      // types
      {"optimizer: {lr: 3e-4x}\n", "a.yaml:1:17: optimizer.lr must be a number, got 3e-4x"},
      {"optimizer: {lr: nan}\n", "a.yaml:1:17: optimizer.lr must be a number, got nan"},
      {"optimizer: {lr: 1e999}\n", "a.yaml:1:17: optimizer.lr is out of range: 1e999"},
      {"optimizer: {beta2: \"0.9\"}\n",
       "a.yaml:1:20: optimizer.beta2 must be a number, got the text \"0.9\"; remove the quotes"},
      {"model: {hidden_size: 2.5}\n", "a.yaml:1:22: model.hidden_size must be an integer, got 2.5"},
      {"model: {hidden_size: 010}\n",
       "a.yaml:1:22: model.hidden_size has a leading zero (octal in YAML 1.1): write 10"},
      {"model: {hidden_size: 0x10}\n", "a.yaml:1:22: model.hidden_size must be a decimal number, got 0x10"},
      {"model: {hidden_size: 1_000}\n",
       "a.yaml:1:22: model.hidden_size must be written without underscores, got 1_000"},
      {"train: {max_tokens: 20e18}\n", "a.yaml:1:21: train.max_tokens is too large: 20e18"},
      {"train: {max_tokens: 20G}\n",
       "a.yaml:1:21: train.max_tokens must be an integer, got 20G (suffixes: k M B T, Ki Mi)"},
      {"train: {seed: -1}\n", "a.yaml:1:15: train.seed must not be negative, got -1"},
      {"model: {qk_norm: yes}\n", "a.yaml:1:18: model.qk_norm must be true or false, got yes; write true"},
      {"model: {qk_norm: off}\n", "a.yaml:1:18: model.qk_norm must be true or false, got off; write false"},
      {"model: {norm_placement: sandwhich}\n",
       "a.yaml:1:25: model.norm_placement must be one of pre, sandwich; got sandwhich; did you mean "
       "sandwich?"},
      {"model: 3\n", "a.yaml:1:1: model must be a section (key: value lines), got 3"},
      {"data:\n  train: {name: a}\n", "a.yaml:2:10: data.train must be a list of sections, got a section"},
      {"data:\n  train: [a.bin]\n",
       "a.yaml:2:11: data.train[0] must be a section (key: value lines), got a.bin"},
      {"- a\n- b\n", "a.yaml:1:1: the file must be a section (key: value lines), got a list"},
      // YAML that is refused
      {"model: &m {qk_norm: true}\n",
       "a.yaml:1:8: anchors (&name) are not allowed; use extends, or write the value again"},
      {"train:\n  <<: {seed: 3}\n", "a.yaml:2:3: merge keys (<<) are not allowed; use extends"},
      {"train: {seed: !!int 3}\n", "a.yaml:1:15: tags (tag:yaml.org,2002:int) are not allowed"},
      {"train: {seed: 1}\n---\ntrain: {seed: 2}\n", "a.yaml:2:1: a second document (---): one per file"},
      {"train: {seed: 1\n", "a.yaml:2:1: not valid YAML: end of map flow not found"},
      {"name: \"a\x01\"\n", "a.yaml:1:1: control character 0x01"},
      {std::string("data: ") + std::string(40, '[') + std::string(40, ']') + "\n",
       "a.yaml:1:38: nested deeper than 32 levels"},
      {"extends: nothing.yaml\n",
       "a.yaml:1:10: extends: there is no file nothing.yaml (names are relative to the file that says so)"},
      {"extends: a.yaml\n", "a.yaml:1:10: extends: a.yaml extends itself"},
      // combinations
      {"model: {num_attention_heads: 6, num_key_value_heads: 4}\n",
       "a.yaml:1:33: model.num_key_value_heads = 4 does not divide num_attention_heads = 6; possible: 1, 2, "
       "3, 6"},
      {"model:\n  head_dim: 33\n", "a.yaml:2:3: model.head_dim must be even (rotary pairs), got 33"},
      {"model: {num_attention_heads: 2147483646, num_key_value_heads: 1, head_dim: 16}\n",
       "a.yaml:1:9: model.num_attention_heads = 2147483646 heads of head_dim = 16 are too large together"},
      {"model: {hidden_size: 0}\n", "a.yaml:1:9: model.hidden_size must be at least 1, got 0"},
      {"model: {vocab_size: 100}\n",
       "a.yaml:1:9: model.vocab_size is 100, but the byte tokenizer has 257 tokens; use 0 or at least 257"},
      {"data: {begin_token: 257}\n",
       "a.yaml:1:8: data.begin_token = 257 is outside the vocabulary of 257 (model.vocab_size)"},
      {"data: {begin_token: -1}\n",
       "a.yaml:1:8: data.begin_token = -1 is outside the vocabulary of 257 (model.vocab_size)"},
      {"data: {document_positions: true}\n",
       "a.yaml:1:8: data.document_positions: tokens of several documents would share positions and see each "
       "other; set document_mask: true"},
      {"data: {packing: documents, begin_token: 3}\n",
       "a.yaml:1:8: data.packing: documents and begin_token are two ways to begin samples with a document; "
       "give one of them"},
      {"eval: {ruler: {samples: -1}}\n", "a.yaml:1:16: eval.ruler.samples must not be negative, got -1"},
      {"eval: {ruler: {tasks: [vt]}}\n",
       "a.yaml:1:16: eval.ruler.tasks: vt is none of niah_single_1, niah_multikey_2 and niah_multikey_3; all "
       "thirteen tasks are run by sluice ruler"},
      {"eval: {ruler: {samples: 4, tasks: []}}\n",
       "a.yaml:1:28: eval.ruler.tasks must name at least one task"},
      {"data: {seq_len: 128}\neval: {ruler: {lengths: [256]}}\n",
       "a.yaml:2:16: eval.ruler.lengths: 256 is not between 1 and data.seq_len = 128"},
      {"analysis: {sink_threshold: 1}\n",
       "a.yaml:1:12: analysis.sink_threshold = 1 must lie between 0 and 1"},
      {"analysis: {query_classes: [{name: other, tokens: [1]}]}\n",
       "a.yaml:1:29: analysis.query_classes[0].name must be a word that no other class has (\"other\" is "
       "taken), "
       "got \"other\""},
      {"analysis: {query_classes: [{name: a}]}\n",
       "a.yaml:1:28: analysis.query_classes[0] needs a list of tokens"},
      {"analysis: {query_classes: [{name: a, tokens: [1, 300]}]}\n",
       "a.yaml:1:38: analysis.query_classes[0].tokens: 300 is outside the vocabulary of 257"},
      {"analysis: {query_classes: [{name: a, tokens: [1]}, {name: b, tokens: [2, 1]}]}\n",
       "a.yaml:1:62: analysis.query_classes[1].tokens: 1 is listed twice"},
      {"model: {rope: {scaling: {factor: 4}}}\n",
       "a.yaml:1:26: model.rope.scaling.factor = 4 has no effect while type is none; set type: yarn"},
      {"model: {rope: {scaling: {type: yarn, factor: 0.5}}}\n",
       "a.yaml:1:38: model.rope.scaling.factor must be at least 1, got 0.5"},
      {"model: {rope: {scaling: {type: yarn}}}\n",
       "a.yaml:1:26: model.rope.scaling.type: yarn changes nothing while factor is 1; set the factor by "
       "which "
       "positions are stretched"},
      {"model: {max_position_embeddings: 128}\n",
       "a.yaml:1:9: data.seq_len = 256 is longer than model.max_position_embeddings = 128"},
      {"model: {attention: {gates: [{position: dense_output, granularity: headwise}]}}\n",
       "a.yaml:1:54: model.attention.gates[0]: dense_output comes after the heads are joined; granularity "
       "must be "
       "elementwise"},
      {"model: {attention: {gates: [{position: dense_output, heads: shared}]}}\n",
       "a.yaml:1:54: model.attention.gates[0]: dense_output comes after the heads are joined; heads must be "
       "specific"},
      {"model: {attention: {gates: [{input_channels: 300}]}}\n",
       "a.yaml:1:30: model.attention.gates[0].input_channels = 300 is more than model.hidden_size = 256"},
      {"model: {attention: {gates: [{input_channels: -1}]}}\n",
       "a.yaml:1:30: model.attention.gates[0].input_channels must not be negative, got -1"},
      {"model: {attention: {gates: [{input: self, input_channels: 4}]}}\n",
       "a.yaml:1:43: model.attention.gates[0].input_channels selects channels of the hidden state; it has no "
       "effect unless input is hidden"},
      {"model: {attention: {gates: [{input: none, init: zero}]}}\n",
       "a.yaml:1:43: model.attention.gates[0].init has no effect while input is none: a learned constant "
       "always starts at 0"},
      {"model: {attention: {gates: [{input: none, bias: 1}]}}\n",
       "a.yaml:1:43: model.attention.gates[0].bias has no effect while input is none: a learned constant is "
       "a "
       "bias itself"},
      {"model: {attention: {gates: [{bias: .inf}]}}\n",
       "a.yaml:1:36: model.attention.gates[0].bias must be a number, got .inf"},
      {"model: {attention: {exclusive: yes}}\n",
       "a.yaml:1:32: model.attention.exclusive must be one of none, full, learned; got yes"},
      {"model: {gated_norm: {rank: 257}}\n",
       "a.yaml:1:22: model.gated_norm.rank = 257 is more than model.hidden_size = 256, so it is not a low "
       "rank"},
      {"model: {gated_norm: {rank: -1}}\n",
       "a.yaml:1:22: model.gated_norm.rank must not be negative, got -1"},
      {"model: {gated_norm: {init: zero}}\n",
       "a.yaml:1:22: model.gated_norm.init has no effect while rank is 0"},
      {"model: {attention: {gates: [{activation: two_sigmoid}], head_balance: {coefficient: 1e-4}}}\n",
       "a.yaml:1:30: model.attention.gates[0].activation: scores are not in [0, 1], so they do not measure a "
       "head's importance; set model.attention.head_balance.coefficient: 0, or use sigmoid or ns_sigmoid"},
      {"train: {global_batch_size: 10, micro_batch_size: 4}\n",
       "a.yaml:1:9: train.global_batch_size = 10 is not a multiple of micro_batch_size = 4; nearest: 8 or "
       "12"},
      built_with_cuda()
          ? Case{"train: {device: cuda, precision: f64}\n",
                 "a.yaml:1:23: train.precision: f64 is available on the CPU only; use f32 or bf16 with "
                 "device "
                 "cuda"}
          : Case{"train: {device: cuda}\n",
                 "a.yaml:1:9: train.device: cuda is not in this build, which is CPU-only; use auto or cpu"},
      {"train: {on_nonfinite: count}\n",
       "a.yaml:1:9: train.on_nonfinite: count would apply an update that is not finite; use skip or stop"},
      {"optimizer: {beta2: 1}\n", "a.yaml:1:13: optimizer.beta2 must be in [0, 1), got 1"},
      {"optimizer: {min_lr: 1}\n", "a.yaml:1:13: optimizer.min_lr = 1 is greater than lr = 0.001"},
      {"optimizer: {warmup_steps: 20}\ntrain: {max_steps: 10}\n",
       "a.yaml:1:13: optimizer.warmup_steps = 20 is longer than the run of 10 steps"},
      {"optimizer: {schedule: wsd, decay_steps: 8, warmup_steps: 5}\ntrain: {max_steps: 10}\n",
       "a.yaml:1:28: optimizer.decay_steps = 8 and warmup_steps = 5 do not fit into the run of 10 steps"},
      {"model: {attention: {kind: sparse, sparse: {phase_steps: 10}}}\ntrain: {max_steps: 10}\n",
       "a.yaml:1:44: model.attention.sparse.phase_steps = 10 leaves no sparse step in the run of 10 steps; "
       "use "
       "fewer, or phase: dense_warm_up for a run that stays dense"},
      {"data: {train: [{name: a, path: x, weight: 0}]}\n",
       "a.yaml:1:35: data.train[0].weight must be greater than 0, got 0"},
      {"data: {train: [{name: a, path: x}, {name: a, path: y}]}\n",
       "a.yaml:1:37: data.train[1].name: a is used twice in data.train"},
      {"data: {train: [{name: a}]}\n", "a.yaml:1:16: data.train[0] needs a path"},
      {"data: {tokenizer: {type: sentencepiece}}\n",
       "a.yaml:1:20: data.tokenizer.path must name the .model file of the sentencepiece tokenizer"},
      {"data: {tokenizer: {type: bpe}}\n",
       "a.yaml:1:20: data.tokenizer.path must name the tokenizer.json of the bpe tokenizer"},
      {"data: {tokenizer: {path: a}}\n",
       "a.yaml:1:20: data.tokenizer.path has no effect while type is byte; set type: sentencepiece or bpe"},
      {"data: {tokenizer: {end_of_document: a}}\n",
       "a.yaml:1:20: data.tokenizer.end_of_document has an effect only where type is bpe"},
      {"eval: {shots: -1}\n", "a.yaml:1:8: eval.shots must not be negative, got -1"},
      {"eval: {max_questions: -1}\n", "a.yaml:1:8: eval.max_questions must not be negative, got -1"},
      {"eval: {prompt_tokens: 0}\n", "a.yaml:1:8: eval.prompt_tokens must be at least 1, got 0"},
      {"eval: {tasks: [a.jsonl]}\n",
       "a.yaml:1:8: eval.tasks and eval.prompts are part of validations, but data.validation names no set"},
      {"data: {validation: [{name: v, path: v}]}\neval: {prompts: [\"\"]}\n",
       "a.yaml:2:8: eval.prompts: a prompt is empty"},
      {"data: {validation: [{name: v, path: v}]}\neval: {tasks: [\"\"]}\n",
       "a.yaml:2:8: eval.tasks: a file has no name"},
      {"checkpoint: {keep_last: 0}\n", "a.yaml:1:14: checkpoint.keep_last must be at least 1, got 0"},
      {"name: a/b\n", "a.yaml:1:1: name must be usable as a folder's name, got \"a/b\""},
  };
  const test::ScratchFolder folder;
  for (const Case& c : cases) {
    folder.write("a.yaml", c.yaml);
    const std::string message = refusal("a.yaml");
    INFO(c.yaml);
    CHECK(first_line(message) == c.message);
    CHECK(message.find("problems") == std::string::npos);  // it is the only one
  }
}

TEST_CASE("every mistake on the command line is reported by key", "[config]") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"optimizer.lrr=3", "command line: unknown key optimizer.lrr; did you mean lr?"},
      {"optimizer.lr", "command line: optimizer.lr is not key=value"},
      {"optimizer.lr=",
       "command line: optimizer.lr= has no value; give one, or optimizer.lr=null for the default"},
      {"train.init_from= ",
       "command line: train.init_from= has no value; give one, or train.init_from=null for the "
       "default"},
      {"optimizer.lr=fast", "command line: optimizer.lr must be a number, got fast"},
      {"optimizer..lr=3", "command line: optimizer..lr is not the name of a key"},
      {"model.attention.gates[2].position=value",
       "command line: model.attention.gates[2] does not exist: model.attention.gates has 1 element"},
      {"model.attention.gates[x].position=value",
       "command line: model.attention.gates[x].position has a bad index; write name[0]"},
      {"model.attention.gates.position=value",
       "command line: model.attention.gates is a list, it has no position; name an element: [0]"},
      {"model.attention.kind.a=value", "command line: model.attention.kind is sink, it has no a"},
      {"model.attention.kind[0]=value", "command line: model.attention.kind is not a list"},
      {"model.attention.gates=[{position: value}",
       "command line: a list or section cannot be a key; is a bracket missing?"},
      {"extends=b.yaml", "command line: extends is allowed only in a file"},
      {"train.precision=f46",
       "command line: train.precision must be one of f32, bf16, f64; got f46; did you mean f64?"},
  };
  const test::ScratchFolder folder;
  folder.write("a.yaml", "model: {attention: {kind: sink, gates: [{position: query}]}}\n");
  for (const auto& [text, message] : cases) {
    INFO(text);
    CHECK(first_line(refusal("a.yaml", {text})) == message);
  }
}

TEST_CASE("all problems are reported together, by file and line, with source and caret", "[config]") {
  const test::ScratchFolder folder;
  folder.write("base.yaml", "optimizer:\n  lr: big\n");
  folder.write("a.yaml",
               "extends: base.yaml\nmodel:\n  head_dim: 7\n  hiden_size: 3\noptimizer: {lr: 1e-3}\n");
  CHECK(
      refusal("a.yaml", {"train.threads=-2"}) ==
      "a.yaml:3:3: model.head_dim must be even (rotary pairs), got 7\n"
      "     3 |   head_dim: 7\n"
      "       |   ^\n"
      "a.yaml:4:3: unknown key model.hiden_size; did you mean hidden_size?\n"
      "     4 |   hiden_size: 3\n"
      "       |   ^\n"
      "         known in model: vocab_size, hidden_size, num_hidden_layers, num_attention_heads, "
      "num_key_value_heads,\n"
      "           head_dim, intermediate_size, tie_word_embeddings, rms_norm_eps, hidden_act, norm_weights,\n"
      "           initializer, initializer_range, scaled_residual_init, attention_bias, qk_norm,\n"
      "           qk_norm_order, embedding_norm, final_logit_softcapping, logit_z_loss_coefficient,\n"
      "           norm_placement, gated_norm, branch_clip, max_position_embeddings, rope, attention, moe,\n"
      "           match_parameters_of, match_multiple\n"
      "base.yaml:2:7: optimizer.lr must be a number, got big\n"
      "     2 |   lr: big\n"
      "       |       ^\n"
      "command line: train.threads must not be negative, got -2\n"
      "       | train.threads=-2\n"
      "       | ^\n"
      "4 problems");
}

TEST_CASE("a value that could not be read causes no second problem", "[config]") {
  const test::ScratchFolder folder;
  folder.write("a.yaml", "model: {num_attention_heads: many, num_key_value_heads: 3}\n");
  CHECK(first_line(refusal("a.yaml")) ==
        "a.yaml:1:30: model.num_attention_heads must be an integer, got many");
  CHECK(refusal("a.yaml").find("problems") == std::string::npos);
}

TEST_CASE("a missing file exits with no_input", "[config]") {
  try {
    load_config("no/such.yaml");
    FAIL("was read");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::no_input);
  }
}

TEST_CASE("training without data or length is refused with a reason", "[config]") {
  Config config;
  config.name = "x";
  const auto message = [&] {
    try {
      validate_for_training(config);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::usage);
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message() ==
        "the length of training is not given: set train.max_steps or train.max_tokens\n"
        "there is no training data: data.train is empty; give it a list of {name: ..., path: ...}");
  config.data.train = {{"a", "x", 1}};
  config.train.max_steps = 3;
  CHECK(message().empty());
  config.train.max_tokens = 10;
  CHECK(message() == "train.max_steps = 3 and train.max_tokens = 10 are both given; set one of them to 0");
  config.train.max_steps = 0;
  config.train.max_tokens = 16 * 256 + 1;
  CHECK(training_steps(config) == 2);
}
