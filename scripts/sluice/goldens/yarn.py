"""Writes tests/golden/yarn.json: inverse frequencies and the factor of cosines and sines, as transformers computes them for YaRN.

Needs torch and transformers. Run again only when the golden is to change; the result is committed.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
# The gated-attention paper's extension, the 1.7B model of Gated Sparse Attention, gpt-oss, and a head of 64.
MODELS = (
    {"head_dim": 128, "theta": 1e6, "original": 32768, "factor": 4.0},
    {"head_dim": 128, "theta": 1e4, "original": 4096, "factor": 32.0},
    {"head_dim": 64, "theta": 150000.0, "original": 4096, "factor": 32.0, "truncate": False},
    {"head_dim": 64, "theta": 1e4, "original": 2048, "factor": 1.5},
    {"head_dim": 64, "theta": 1e4, "original": 512, "factor": 8.0},
)
# By the factor of length, and without.
SCALES = ({}, {"attention_factor": 1.0})


def case(model: dict[str, float], scale: dict[str, float]) -> dict[str, object]:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": model["theta"],
        "factor": model["factor"],
        "original_max_position_embeddings": model["original"],
        "truncate": model.get("truncate", True),
        **scale,
    }
    config = transformers.LlamaConfig(
        head_dim=model["head_dim"],
        max_position_embeddings=int(model["original"] * model["factor"]),
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    return {**model, **scale, "cos_and_sin": factor, "frequencies": [float(f) for f in frequencies]}


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    cases = [case(model, scale) for model in MODELS for scale in SCALES]
    with open(os.path.join(ROOT, "tests/golden/yarn.json"), "w") as file:
        file.write(json.dumps({"transformers": transformers.__version__, "cases": cases}) + "\n")
