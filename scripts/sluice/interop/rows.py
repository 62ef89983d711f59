"""The configurations of configs/ whose exports are checked, at the size of their proxies."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[3] / "configs"

FOLDERS = [
    "gated_attention/proxy",
    "sink_aware/proxy/adamw",
    "sink_aware/proxy/nanochat",
    "sparse/proxy",
    "variants/proxy",
]


def rows() -> dict[str, pathlib.Path]:
    """By name, such as table1_05_sdpa_elementwise or nanochat/1b_sink."""
    found = {}
    for folder in FOLDERS:
        short = folder.split("/")[-1]
        short = folder.split("/")[0] if short == "proxy" else short
        prefix = "" if short == "gated_attention" else f"{short}/"
        for path in sorted((ROOT / folder).glob("*.yaml")):
            found[prefix + path.stem] = path
    return found


def overrides(text: pathlib.Path) -> list[str]:
    """Two steps on a short text; weights large enough that a difference shows in the logits."""
    data = f"[{{name: t, path: {text}}}]"
    return [
        f"data.train={data}", f"data.validation={data}", "data.allow_overlap=true", "data.seq_len=512",
        "train.micro_batch_size=1", "train.global_batch_size=1", "train.max_steps=2", "train.precision=f32",
        "model.initializer_range=0.1", "model.attention.sparse.indexer.rope=true", "model.attention.sparse.phase_steps=0",
        "optimizer.warmup_steps=0", "eval.every_steps=0", "eval.max_tokens=512",
    ]  # fmt: skip
