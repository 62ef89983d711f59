"""A tiny gpt-oss whose experts are stored in MXFP4, as the published ones are."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def store_mxfp4(model: Any, folder: pathlib.Path) -> None:
    """Puts random matrices in MXFP4 in the place of the experts' in the folder, and what transformers makes of them
    into the model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=random)
        del tensors[name]
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
        with torch.no_grad():
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
