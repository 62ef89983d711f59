"""Writes tests/golden/hf_*: folders of transformers with the logits of a few tokens, for tests without torch."""

from __future__ import annotations

import torch
import transformers

from ..goldens.tiny_qwen3 import SIZES, some_tokens, write_folder
from .families import MIXTURE, NEXT, randomised
from .repository import repository_model


def write_goldens() -> None:
    sizes = {**SIZES, "tie_word_embeddings": False}
    experts = {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    torch.manual_seed(1)
    models = {
        "hf_qwen3_next": transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(
                **{**sizes, **NEXT, **experts, "shared_expert_intermediate_size": 12}
            )
        ),
        "hf_gated_attention": repository_model(transformers.Qwen3Config(**sizes), headwise=True),
        "hf_llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
    }
    for name, model in models.items():
        model = randomised(model)
        if name == "hf_qwen3_next":
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
