"""What the files of a run may hold, and values held to it: damaged ones are reported and left out. Standard library alone.

A shape is NUMBER, WHOLE, TEXT or ANY, a list of one shape, or a map of shapes, in which "*" stands for all other keys.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

NUMBER, WHOLE, TEXT, ANY = "a number", "a whole number", "text", "anything"
LONGEST = 80  # letters of a name that a table or a legend shows
REPORTED = 5  # misfits reported per file
NUMBERS = {"*": NUMBER}

METRICS = {
    "step": WHOLE,
    "tokens": NUMBER,
    "loss": NUMBER,
    "grad_norm": NUMBER,
    "lr": NUMBER,
    "tokens_per_second": NUMBER,
    "seconds": NUMBER,
    "spikes": NUMBER,
    "skipped": NUMBER,
    "heads": {"imbalance": NUMBER},
    "router": {
        "max_over_mean": NUMBER,
        "balance_loss": NUMBER,
        "z_loss": NUMBER,
        "idle": NUMBER,
        "layers": [{"layer": NUMBER, "max_over_mean": NUMBER, "entropy": NUMBER}],
    },
}
BY_HEAD = {
    "first_token_attention_without_first_query": [NUMBER],
    "first_token_attention_by_class": {"*": [NUMBER]},
    "sink_share": [NUMBER],
    "sink_share_leading": [NUMBER],
}
SINKS = {
    "threshold": NUMBER,
    "length": WHOLE,
    "share": NUMBER,
    "share_leading": NUMBER,
    "heads": WHOLE,
    "of": WHOLE,
    "strongest": {"layer": WHOLE, "head": WHOLE, "first_token_attention": NUMBER, "by_class": NUMBERS},
}
GATE_HEALTH = {
    "below_0.05": NUMBER,
    "above_0.95": NUMBER,
    "shut_heads": NUMBER,
    "heads": {"below_0.05": [NUMBER], "above_0.95": [NUMBER], "shut_tokens": [NUMBER], "row_norm": [NUMBER]},
}
EVALUATION = {
    "step": WHOLE,
    "tokens": NUMBER,
    "sets": {
        "*": {
            "loss": NUMBER,
            "perplexity": NUMBER,
            "bits_per_byte": NUMBER,
            "tokens": NUMBER,
            "classes": {"*": {"loss": NUMBER, "share_likely": NUMBER, "tokens": NUMBER}},
            "by_position": [{"from": NUMBER, "to": NUMBER, "loss": NUMBER, "tokens": NUMBER}],
        }
    },
    "analysis": {
        "layers": [
            {
                "gate_scores": [NUMBER],
                "first_token_attention": NUMBER,
                "attention_residual_max": NUMBER,
                "ffn_residual_max": NUMBER,
                "value_norm_first": NUMBER,
                "value_norm_rest": NUMBER,
                "residual_max_first": NUMBER,
                "residual_max_rest": NUMBER,
                "heads": BY_HEAD,
                "gates": [GATE_HEALTH],
                "selection": {"*": NUMBER},
            }
        ],
        "sinks": SINKS,
        "first_token_attention": NUMBER,
        "mean_gate_score": NUMBER,
        "largest_residual": NUMBER,
        "imbalance": NUMBER,
    },
    "ruler": [{"task": TEXT, "length": WHOLE, "samples": WHOLE, "accuracy": NUMBER, "loss": NUMBER}],
}
RULER = {
    "step": WHOLE,
    "yarn": NUMBER,
    "seed": WHOLE,
    "texts": TEXT,
    "prompts": TEXT,
    "cells": [{"task": TEXT, "length": WHOLE, "samples": WHOLE, "score": NUMBER}],
    "average": NUMBERS,
    "depths": [{"task": TEXT, "length": WHOLE, "depth": NUMBER, "samples": WHOLE, "score": NUMBER}],
}
RUN = {
    "name": TEXT,
    "parameters": NUMBER,
    "parameters_active": NUMBER,
    "max_steps": WHOLE,
    "config_hash": TEXT,
    "device": TEXT,
    "data_fingerprint": TEXT,
    "validation_fingerprints": {"*": TEXT},
    "init_from": {"fingerprint": TEXT},
    "changes": [{"step": WHOLE, "key": TEXT, "before": TEXT, "after": TEXT}],
}
STATUS = {"state": TEXT, "step": WHOLE, "max_steps": WHOLE, "exit_code": WHOLE, "error": TEXT}
JOURNAL = {
    "event": TEXT,
    "trial": TEXT,
    "folder": TEXT,
    "reason": TEXT,
    "host": TEXT,
    "code": WHOLE,
    "saved": WHOLE,
    "slot": WHOLE,
    "step": WHOLE,
}
SOURCES = [{"name": TEXT, "path": TEXT, "weight": NUMBER}]
CONFIGURATION = {
    "model": {
        "hidden_size": WHOLE,
        "num_hidden_layers": WHOLE,
        "num_attention_heads": WHOLE,
        "num_key_value_heads": WHOLE,
        "head_dim": WHOLE,
        "vocab_size": WHOLE,
        "norm_placement": TEXT,
        "branch_clip": NUMBER,
        "attention": {
            "kind": TEXT,
            "output_norm": TEXT,
            "output_activation": TEXT,
            "head_balance": {"coefficient": NUMBER},
            "switch_heads": {"num_experts": WHOLE, "num_experts_per_tok": WHOLE, "projections": TEXT},
            "gates": [
                {
                    "position": TEXT,
                    "granularity": TEXT,
                    "heads": TEXT,
                    "combine": TEXT,
                    "activation": TEXT,
                    "input": TEXT,
                }
            ],
        },
        "moe": {"num_experts": WHOLE, "num_experts_per_tok": WHOLE},
    },
    "data": {"seq_len": WHOLE, "train": SOURCES, "validation": SOURCES},
    "train": {"seed": WHOLE, "global_batch_size": WHOLE, "max_steps": WHOLE, "precision": TEXT},
    "optimizer": {"type": TEXT, "lr": NUMBER, "warmup_steps": WHOLE, "rules": [{"match": ANY}]},
    "eval": {},
}
GATE = {
    "position": TEXT,
    "mean": NUMBER,
    "std": NUMBER,
    "min": NUMBER,
    "max": NUMBER,
    "edges_min": NUMBER,
    "edges_max": NUMBER,
    "histogram_50": [NUMBER],
}
ANALYSIS = {
    "step": WHOLE,
    "sequences": WHOLE,
    "total": {
        "first_token_attention": NUMBER,
        "mean_gate_score": NUMBER,
        "m_act_mean": NUMBER,
        "imbalance": NUMBER,
        "sinks": SINKS,
    },
    "arrays": {"*": TEXT},
    "maps": {"tokens": WHOLE},
    "sets": [{"name": TEXT, "tokens": WHOLE, "importance": [[NUMBER]]}],
    "layers": [
        {
            "first_token_attention": NUMBER,
            "imbalance": NUMBER,
            "gates": [GATE],
            "attention_output": NUMBERS,
            "max": NUMBERS,
            "heads": {"importance": [NUMBER], "first_token_attention": [NUMBER], **BY_HEAD},
        }
    ],
}

Note = Callable[[str, str], None]


def clean(text: str, longest: int = LONGEST) -> str:
    """Without control characters and halves of characters, and not longer than `longest`."""
    if not text.isprintable():
        text = "".join(
            " " if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") else letter for letter in text
        )
    return text if len(text) <= longest else text[: longest - 1] + "…"


def empty(shape: Any) -> Any:
    return {} if isinstance(shape, dict) else [] if isinstance(shape, list) else None


def fit(value: Any, shape: Any, note: Note, key: str = "") -> Any:
    """The value, without what does not have its shape: each such part is reported and becomes None, {} or []."""
    if value is None or shape is ANY:
        return empty(shape) if value is None else value
    if isinstance(shape, dict) and isinstance(value, dict):
        other = shape.get("*", ANY)
        return {clean(k): fit(v, shape.get(k, other), note, k) for k, v in value.items()}
    if isinstance(shape, list) and isinstance(value, list):
        return [fit(item, shape[0], note, key) for item in value]
    if shape is TEXT and isinstance(value, (str, int, float)):
        return clean(str(value), 4096)
    if shape in (NUMBER, WHOLE) and isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, float) and (shape is NUMBER or value.is_integer() and abs(value) < 2**63):
            return (int(value) if shape is WHOLE else value) if math.isfinite(value) else None
        if isinstance(value, int) and abs(value) < 2**63:
            return value
    expected = "a map" if isinstance(shape, dict) else "a list" if isinstance(shape, list) else shape
    note(key, f"{expected} is expected")
    return empty(shape)


WARNED: set[str] = set()


def warn(message: str) -> None:
    """On stderr, once."""
    if message not in WARNED:
        WARNED.add(message)
        name = sys.argv[0].rsplit("/", 1)[-1] or "report"
        print(f"{name}: {clean(message, 1000)}", file=sys.stderr)


class Misfits:
    """Collects what does not fit in one file and reports the first few by file and line."""

    def __init__(self, path: str) -> None:
        self.path, self.count = path, 0

    def at(self, line: int) -> Note:
        return lambda key, what: self.add(f"{line}: {clean(key)}: {what}; passed over")

    def of_text(self, text: str) -> Note:
        """The line of a key is the first one that names it."""

        def note(key: str, what: str) -> None:
            found = max(0, text.find(f'"{key}"'), text.find(f"{key}:"))
            self.add(f"{text.count(chr(10), 0, found) + 1}: {clean(key)}: {what}; passed over")

        return note

    def add(self, message: str) -> None:
        self.count += 1
        if self.count <= REPORTED:
            warn(f"{self.path}:{message}")
        elif self.count == REPORTED + 1:
            warn(f"{self.path}: more of the kind, not listed")
