"""Tiny models of random weights of the families that Sluice reads, as transformers makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 257
LENGTH = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
NEXT: dict[str, Any] = {
    "layer_types": ["full_attention"] * 2,
    "partial_rotary_factor": 1.0,
    "shared_expert_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def randomised(model: Any) -> Any:
    """Norms, biases and other vectors get an effect."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def _make(kind: str, **more: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(transformers, kind + "Config")(**{**SIZES, **more})
        torch.manual_seed(0)
        return randomised(getattr(transformers, kind + "ForCausalLM")(config))

    return build


# A limit and an original length that the tiny model reaches.
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "swiglu_limit": 0.7,
    "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
}
# What Sluice cannot compute: what makes the model, and words of the message.
REFUSED_FAMILIES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "qwen2": (_make("Qwen2"), ["biases"]),
    "gpt_oss_other_slope": (_make("GptOss", **GPT_OSS, swiglu_alpha=1.5), ["swiglu_alpha = 1.5"]),
}
# By name: what makes the model, and how it is saved.
FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "qwen3": (_make("Qwen3"), {}),
    "qwen3_tied": (_make("Qwen3", tie_word_embeddings=True), {}),
    "qwen3_yarn": (_make("Qwen3", rope_parameters=YARN), {}),
    "qwen3_yarn_mscale": (_make("Qwen3", rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}), {}),
    "qwen3_sharded": (_make("Qwen3"), {"max_shard_size": "20KB"}),
    "qwen3_bf16": (_make("Qwen3"), {"dtype": torch.bfloat16}),
    "qwen3_f16": (_make("Qwen3"), {"dtype": torch.float16}),
    "qwen3_moe": (_make("Qwen3Moe", **MIXTURE), {}),
    "qwen3_next": (_make("Qwen3Next", **NEXT, **MIXTURE), {}),
    "qwen3_next_dense": (_make("Qwen3Next", **NEXT, **{**MIXTURE, "num_experts": 0}), {}),
    "llama": (_make("Llama"), {}),
    "llama_tied_heads_alike": (_make("Llama", num_key_value_heads=4, tie_word_embeddings=True), {}),
    "mistral": (_make("Mistral", sliding_window=None), {}),
    "mistral_window": (_make("Mistral", sliding_window=100), {}),
    "qwen3_window": (_make("Qwen3", use_sliding_window=True, sliding_window=60, max_window_layers=0), {}),
    "qwen3_window_alternating": (
        _make(
            "Qwen3",
            use_sliding_window=True,
            sliding_window=60,
            layer_types=["sliding_attention", "full_attention"],
        ),
        {},
    ),
    "qwen3_moe_window": (_make("Qwen3Moe", use_sliding_window=True, sliding_window=60, **MIXTURE), {}),
    "qwen3_moe_tied": (_make("Qwen3Moe", tie_word_embeddings=True, **MIXTURE), {}),
    "llama_bias": (_make("Llama", attention_bias=True), {}),
    "qwen3_bias": (_make("Qwen3", attention_bias=True), {}),
    "qwen3_moe_bias": (_make("Qwen3Moe", attention_bias=True, **MIXTURE), {}),
    "gpt_oss": (_make("GptOss", **GPT_OSS), {}),
    "gpt_oss_bf16_sharded": (
        _make("GptOss", **GPT_OSS),
        {"dtype": torch.bfloat16, "max_shard_size": "20KB"},
    ),
    "gpt_oss_mxfp4": (_make("GptOss", **{**GPT_OSS, "intermediate_size": 64}), {"mxfp4": True}),
    "gpt_oss_plain": (
        _make(
            "GptOss",
            num_local_experts=3,
            num_experts_per_tok=3,
            attention_bias=False,
            layer_types=["full_attention"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        {},
    ),
    "llama_bf16_sharded": (_make("Llama"), {"dtype": torch.bfloat16, "max_shard_size": "10KB"}),
}
