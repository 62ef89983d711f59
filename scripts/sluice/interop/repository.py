"""The attention of qiuzh20/gated_attention as its files describe it, for models that transformers has no code for: q_proj gives,
for each key/value head, the queries of its group and then the group's gates."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


class RepositoryAttention(nn.Module):
    def __init__(self, plain: Any, config: Any, headwise: bool) -> None:
        super().__init__()
        self.sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        heads, _, width = self.sizes
        self.gate_width = 1 if headwise else width
        self.q_proj = nn.Linear(config.hidden_size, heads * (width + self.gate_width), bias=False)
        self.k_proj, self.v_proj, self.o_proj = plain.k_proj, plain.v_proj, plain.o_proj
        self.q_norm, self.k_norm = plain.q_norm, plain.k_norm
        nn.init.normal_(self.q_proj.weight, std=config.initializer_range)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        heads, groups, width = self.sizes
        batch, length, _ = hidden_states.shape
        share = heads // groups
        packed = self.q_proj(hidden_states).view(batch, length, groups, -1)
        queries, gates = packed.split([share * width, share * self.gate_width], -1)
        query = self.q_norm(queries.reshape(batch, length, heads, width)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(batch, length, groups, width)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(batch, length, groups, width).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        output = nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(share, 1), value.repeat_interleave(share, 1), is_causal=True
        ).transpose(1, 2)
        output = output * torch.sigmoid(gates.reshape(batch, length, heads, self.gate_width))
        return self.o_proj(output.reshape(batch, length, -1)), None


def repository_model(config: Any, headwise: bool) -> Any:
    """A Qwen3 with that attention, of random weights."""
    model = transformers.Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn = RepositoryAttention(layer.self_attn, config, headwise)
    return model


def load_repository(folder: pathlib.Path) -> Any:
    """A folder of this format."""
    from safetensors.torch import load_file

    keys = json.loads((folder / "config.json").read_text())
    model = repository_model(
        transformers.Qwen3Config.from_pretrained(folder), keys["headwise_attn_output_gate"]
    )
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.float().eval()
