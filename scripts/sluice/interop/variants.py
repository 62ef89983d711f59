"""Configurations of Sluice whose exports are checked, as overrides of a tiny model."""

from __future__ import annotations

BASE = {
    "model": "{vocab_size: 257, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,"
    " head_dim: 8, intermediate_size: 48, tie_word_embeddings: false, initializer_range: 0.15}",
    "data": "{seq_len: 512, train: [{name: t, path: text}], validation: [{name: t, path: text}], allow_overlap: true}",
    "train": "{micro_batch_size: 1, global_batch_size: 1, max_steps: 2, threads: 1}",
    "optimizer": "{lr: 0.05, schedule: constant, weight_decay: 0}",
    "checkpoint": "{every_minutes: 0, async: false}",
    "log": "{tensorboard: false, console: none}",
}

EXPERTS = ["model.moe.num_experts=6", "model.moe.num_experts_per_tok=2", "model.moe.moe_intermediate_size=16"]
GPT_OSS = [
    *EXPERTS,
    "model.moe.bias=true",
    "model.moe.swiglu_limit=0.9",
    "model.attention_bias=true",
    "model.attention.kind=sink",
    "model.qk_norm=false",
]
WINDOW = ["model.attention.window=24", "model.attention.window_pattern=2"]


def gates(*texts: str) -> str:
    return "model.attention.gates=[" + ", ".join("{" + t + "}" for t in texts) + "]"


# Name: the format that --format auto chooses, and the overrides.
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "plain": ("qwen3", []),
    "tied": ("qwen3", ["model.tie_word_embeddings=true"]),
    "bf16": ("qwen3", ["train.precision=bf16"]),
    "yarn": (
        "qwen3",
        [
            "model.rope.scaling={type: yarn, factor: 4, original_max_position_embeddings: 128}",
            "model.rope.theta=1e5",
        ],
    ),
    "yarn_unscaled": (
        "qwen3",
        [
            "model.rope.scaling={type: yarn, factor: 4, original_max_position_embeddings: 128, attention_factor: 1}",
            "model.rope.theta=1e5",
        ],
    ),
    "no_qk_norm": ("llama", ["model.qk_norm=false"]),
    "experts": ("qwen3_moe", EXPERTS),
    "experts_unnormalised": (
        "qwen3_moe",
        [*EXPERTS, "model.moe.norm_topk_prob=false", "model.moe.mlp_only_layers=[0]"],
    ),
    "attention_bias": ("qwen3", ["model.attention_bias=true"]),
    "attention_bias_switch_heads": (
        "sluice",
        [
            "model.attention_bias=true",
            "model.attention.switch_heads={num_experts: 4, num_experts_per_tok: 2, projections: key_value}",
        ],
    ),
    "gpt_oss": (
        "gpt_oss",
        [
            *GPT_OSS,
            "model.attention.window=24",
            "model.attention.window_pattern=2",
            "model.rope.scaling={type: yarn, factor: 4, original_max_position_embeddings: 128, truncate: false}",
        ],
    ),
    "gpt_oss_without_yarn": ("gpt_oss", GPT_OSS),
    "gpt_oss_shared_expert": ("sluice", [*GPT_OSS, "model.moe.shared_expert_intermediate_size=24"]),
    "shared_expert": ("sluice", [*EXPERTS, "model.moe.shared_expert_intermediate_size=24"]),
    "gated_shared_expert": (
        "qwen3_next",
        [
            *EXPERTS,
            "model.moe.shared_expert_intermediate_size=24",
            "model.moe.shared_expert_gate=true",
            gates("position: sdpa_output"),
        ],
    ),
    "elementwise": ("qwen3_next", [gates("position: sdpa_output")]),
    "headwise": ("sluice", [gates("granularity: headwise")]),
    "head_shared": ("sluice", [gates("heads: shared")]),
    "head_shared_before": ("sluice", [gates("granularity: headwise, heads: shared_before_activation")]),
    "additive_silu": ("sluice", [gates("combine: add, activation: silu")]),
    "ns_sigmoid": ("sluice", [gates("activation: ns_sigmoid, granularity: headwise")]),
    "two_sigmoid": ("sluice", [gates("activation: two_sigmoid")]),
    "input_independent": ("sluice", [gates("input: none")]),
    "query_gate": ("sluice", [gates("position: query")]),
    "key_gate": ("sluice", [gates("position: key")]),
    "value_gate": ("sluice", [gates("position: value")]),
    "dense_gate": ("sluice", [gates("position: dense_output")]),
    "dense_gate_constant": ("sluice", [gates("position: dense_output, input: none")]),
    "five_gates": (
        "sluice",
        [gates(*(f"position: {p}" for p in ["query", "key", "value", "sdpa_output", "dense_output"]))],
    ),
    "two_gates_one_place": ("sluice", [gates("position: value", "position: value, activation: identity")]),
    "sink": ("sluice", ["model.attention.kind=sink"]),
    "sink_gated": ("sluice", ["model.attention.kind=sink", gates("position: sdpa_output")]),
    "sink_bf16": ("sluice", ["model.attention.kind=sink", "train.precision=bf16"]),
    "off_by_one": ("sluice", ["model.attention.kind=off_by_one", gates("granularity: headwise")]),
    "sink_key": (
        "sluice",
        ["model.attention.kind=sink_key", gates("position: query, granularity: headwise")],
    ),
    "kv_bias": ("sluice", ["model.attention.kind=kv_bias", gates("position: sdpa_output")]),
    "softpick": ("sluice", ["model.attention.kind=softpick"]),
    "window": ("sluice", ["model.attention.window=24"]),
    "window_alternating_sink": ("sluice", [*WINDOW, "model.attention.kind=sink"]),
    "window_kv_bias_exclusive": (
        "sluice",
        [*WINDOW, "model.attention.kind=kv_bias", "model.attention.exclusive=full"],
    ),
    "window_softpick_norm": (
        "sluice",
        [*WINDOW, "model.attention.kind=softpick", "model.attention.output_norm=rmsnorm"],
    ),
    "exclusive": ("sluice", ["model.attention.exclusive=full"]),
    "exclusive_learned": (
        "sluice",
        ["model.attention.exclusive=learned", gates("position: value, granularity: headwise")],
    ),
    "gated_norm": ("sluice", ["model.gated_norm.rank=6"]),
    "gate_bias": ("sluice", [gates("bias: 1.5", "position: value, granularity: headwise, bias: -0.5")]),
    "gate_input_channels": (
        "sluice",
        [gates("granularity: headwise, input_channels: 5", "input_channels: 9")],
    ),
    "gate_self": (
        "sluice",
        [
            gates(
                *(
                    f"position: {p}, input: self"
                    for p in ["query", "key", "value", "sdpa_output", "dense_output"]
                )
            )
        ],
    ),
    "gate_self_headwise_bias": (
        "sluice",
        [gates("position: value, granularity: headwise, input: self, bias: 0.3", "position: value")],
    ),
    "five_gates_headwise": (
        "sluice",
        [gates(*(f"position: {p}, granularity: headwise" for p in ["query", "key", "value", "sdpa_output"]))],
    ),
    "five_gates_constant": (
        "sluice",
        [
            gates(
                *(
                    f"position: {p}, input: none"
                    for p in ["query", "key", "value", "sdpa_output", "dense_output"]
                )
            )
        ],
    ),
    "output_norm": ("sluice", ["model.attention.output_norm=rmsnorm"]),
    "output_norm_shared": ("sluice", ["model.attention.output_norm=rmsnorm_shared"]),
    "output_silu": ("sluice", ["model.attention.output_activation=silu"]),
    "sandwich_clip": ("sluice", ["model.norm_placement=sandwich", "model.branch_clip=0.5"]),
    "switch_heads": ("sluice", ["model.attention.switch_heads={num_experts: 4, num_experts_per_tok: 2}"]),
    "switch_heads_narrow": (
        "sluice",
        [
            "model.attention.switch_heads={num_experts: 4, num_experts_per_tok: 3, projections: key_value,"
            " expert_width: 4}"
        ],
    ),
    "nanochat": (
        "sluice",
        [
            "model.hidden_act=relu2",
            "model.norm_weights=false",
            "model.embedding_norm=true",
            "model.qk_norm_order=after_rope",
            "model.final_logit_softcapping=15",
        ],
    ),
}


def sparse(keys: str, indexer: str = "rope: true", *more: str) -> tuple[str, list[str]]:
    """With rope in the indexer; without it the same byte at two places has the same score in the first layer but for
    rounding, and either may be selected."""
    keys = f"{{{keys}, indexer: {{{indexer}}}}}"
    return "sluice", ["model.attention.kind=sparse", f"model.attention.sparse={keys}", *more]


ADAPTIVE = "base: 48, min: 8, max: 96"
VARIANTS |= {
    "sparse": sparse("k: {base: 64}"),
    "sparse_without_rope": sparse("k: {base: 512}", "rope: false"),
    "sparse_self_sink": sparse("k: {base: 3}, force_self: true, sink: true"),
    "sparse_dsa": sparse(
        "k: {base: 64}, loss: {learn_temperature: true}",
        "rope: true, heads: 2, head_dim: 24, activation: relu, head_weights: linear, bias: false, key_norm: true, "
        "scale: 0.3",
    ),
    "sparse_blocks": sparse("k: {base: 5}, block: 4, scope: kv_head", "rope: true, head_weights: none"),
    "sparse_blocks_gated": sparse(
        "k: {base: 2}, block: 16", "rope: true", gates("position: value", "position: sdpa_output")
    ),
    "sparse_warm_up": sparse("phase: dense_warm_up"),
    **{
        "sparse_" + policy: sparse(f"k: {{policy: {policy}, {ADAPTIVE}}}")
        for policy in ("eq8", "inverse", "code", "entropy")
    },
}
# Formats that auto does not choose: the variant, and the format.
FORCED = {
    "elementwise_as_sluice": ("elementwise", "sluice"),
    "elementwise_as_repository": ("elementwise", "gated_attention"),
    "headwise_as_repository": ("headwise", "gated_attention"),
    "plain_as_sluice": ("plain", "sluice"),
    "experts_as_sluice": ("experts", "sluice"),
    "yarn_as_sluice": ("yarn", "sluice"),
    "yarn_unscaled_as_sluice": ("yarn_unscaled", "sluice"),
    "gpt_oss_as_sluice": ("gpt_oss", "sluice"),
}
# What a format does not hold: the variant, the format, and the key that the refusal names.
REFUSED = {
    "elementwise_as_qwen3": ("elementwise", "qwen3", "model.attention.gates"),
    "experts_as_llama": ("experts", "llama", "model.moe.num_experts = 6"),
    "gpt_oss_as_qwen3_moe": ("gpt_oss", "qwen3_moe", "model.moe.swiglu_limit = 0.9"),
    "plain_as_gpt_oss": ("plain", "gpt_oss", "model.qk_norm = true"),
    "sparse_as_qwen3_next": ("sparse", "qwen3_next", "model.attention.kind = sparse"),
}
