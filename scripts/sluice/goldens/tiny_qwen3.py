"""What the goldens of Qwen3 and of Qwen3-MoE have in common: a tiny model's sizes, and the folder that holds it."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

from .. import program

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(
        f"{os.path.basename(sys.argv[0])}: {error}; run this with a Python that has it: {sys.executable} does not"
    )

GOLDEN = pathlib.Path(program.ROOT) / "tests" / "golden"
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
VOCABULARY = 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "initializer_range": 0.2,
}


def change_norm(parameter: torch.nn.Parameter) -> None:
    """Norms start at one; here they get an effect. Other parameters are left alone."""
    if parameter.dim() == 1:
        parameter.copy_(1 + 0.3 * torch.randn_like(parameter))


def some_tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, 12))


def write_folder(
    name: str, model: Any, tokens: torch.Tensor, logits: torch.Tensor, **more: float
) -> pathlib.Path:
    """tests/golden/NAME: the model as transformers saves it, and its logits; returns its path."""
    folder = GOLDEN / name
    with torch.no_grad():
        # The same arithmetic in f64 shows how far f32 rounding reaches.
        logits_f64 = model.double()(tokens).logits[0]
    model.float().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    golden = {
        "input_ids": tokens[0].tolist(),
        "logits_f64": logits_f64.tolist(),
        "f32_error": (logits.double() - logits_f64).abs().max().item(),
        **more,
        **VERSIONS,
    }
    (folder / "logits.json").write_text(json.dumps(golden) + "\n")
    return folder
