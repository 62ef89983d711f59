"""Writes tests/golden/hf_*: folders of transformers with the logits of a few tokens, for tests without torch."""

from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import torch
import transformers

from .. import program
from ..goldens.tiny_qwen3 import SIZES, some_tokens, write_folder
from .families import GPT_OSS, MIXTURE, NEXT, YARN, randomised
from .repository import repository_model

GATE = {
    "position": "sdpa_output",
    "granularity": "elementwise",
    "heads": "specific",
    "combine": "multiply",
    "activation": "sigmoid",
    "input": "hidden",
}


def write_goldens() -> None:
    write_family_goldens()
    write_own_goldens()


def write_family_goldens() -> None:
    sizes = {**SIZES, "tie_word_embeddings": False}
    experts = {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    yarn = {**GPT_OSS["rope_parameters"], "original_max_position_embeddings": 8}
    gpt_oss = {**sizes, **GPT_OSS, "sliding_window": 5, "rope_parameters": yarn}
    gpt_oss |= {"attention_bias": True, "intermediate_size": 8}
    torch.manual_seed(1)
    models = {
        "hf_qwen3_next": transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(
                **{**sizes, **NEXT, **experts, "shared_expert_intermediate_size": 12}
            )
        ),
        "hf_gated_attention": repository_model(transformers.Qwen3Config(**sizes), headwise=True),
        "hf_llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "hf_gpt_oss": transformers.GptOssForCausalLM(transformers.GptOssConfig(**gpt_oss)),
    }
    for name, model in models.items():
        model = randomised(model)
        if name in ("hf_qwen3_next", "hf_gpt_oss"):
            model.set_experts_implementation("eager")  # the others have no f64
        if name == "hf_gated_attention":
            model.config.update({"headwise_attn_output_gate": True, "elementwise_attn_output_gate": False})
        if name == "hf_llama":  # shards, and weights that bf16 holds exactly
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
        tokens = some_tokens()
        with torch.no_grad():
            logits = model(tokens).logits[0]
        folder = write_folder(name, model, tokens, logits)
        if name == "hf_llama":
            (folder / "model.safetensors").unlink()
            model.bfloat16().save_pretrained(folder, max_shard_size="6KB")
            (folder / "generation_config.json").unlink(missing_ok=True)


OWN: dict[str, dict[str, Any]] = {
    "hf_sluice_kv_bias": {
        "attention": {
            "kind": "kv_bias",
            "window": 5,
            "window_pattern": 2,
            "exclusive": "full",
            "output_norm": "rmsnorm",
            "gates": [
                {**GATE, "position": "value", "granularity": "headwise", "input": "self", "bias": 0.5},
                {**GATE, "position": "query", "input_channels": 5, "activation": "two_sigmoid"},
                {**GATE, "granularity": "headwise", "heads": "shared"},
                {**GATE, "position": "dense_output", "input": "none", "combine": "add"},
            ],
        },
        "gated_norm": {"rank": 3},
    },
    "hf_sluice_softpick": {
        "attention": {"kind": "softpick", "exclusive": "learned", "gates": [{**GATE, "bias": 1.0}]},
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "qk_norm_order": "after_rope",
        "final_logit_softcapping": 10.0,
    },
    "hf_sluice_sink_key": {
        "attention": {
            "kind": "sink_key",
            "output_activation": "silu",
            "gates": [{**GATE, "position": "key", "activation": "ns_sigmoid"}, {**GATE, "input": "none"}],
            "switch_heads": {
                "num_experts": 3,
                "num_experts_per_tok": 2,
                "projections": "key_value",
                "expert_width": 4,
            },
        },
        "hidden_act": "relu2",
        "embedding_norm": True,
        "norm_placement": "sandwich",
        "branch_clip": 0.8,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 8},
    },
}


def write_own_goldens() -> None:
    """Models of modeling_sluice.py, which the tests of Sluice compare with its own layers."""
    # The files import each other as parts of a package, whose name here is not transformers.
    package = types.ModuleType("sluice_files")
    package.__path__ = [str(pathlib.Path(program.ROOT) / "src" / "hf" / "transformers")]
    sys.modules["sluice_files"] = package
    from sluice_files.configuration_sluice import SluiceConfig
    from sluice_files.modeling_sluice import SluiceForCausalLM

    for name, more in OWN.items():
        torch.manual_seed(2)
        config = SluiceConfig(**{**SIZES, "tie_word_embeddings": False, **more})
        config._attn_implementation = "eager"
        model = SluiceForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():  # those of vectors start at 0 or 1
                parameter.add_(0.3 * torch.randn_like(parameter))
        tokens = some_tokens()
        with torch.no_grad():
            logits = model.eval()(tokens).logits[0]
        write_folder(name, model, tokens, logits)
