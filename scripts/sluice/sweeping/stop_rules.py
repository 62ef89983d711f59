"""The rules by which a sweep ends a trial early (stop_if), and the metrics that they may name."""

from __future__ import annotations

import difflib
import math
from typing import Any

OPERATORS = {
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}
# Of a line of metrics.jsonl, and of val.SET in one of eval.jsonl: src/run/README.md. Those of heads, router and indexer stand there
# where the model has such.
STEP_METRICS = (
    "step",
    "samples",
    "tokens",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "seconds",
    "spikes",
    "skipped",
    "diverged_since",
    "logit_z_loss",
    "heads.imbalance",
    "heads.importance",
    "heads.balance_loss",
    "router.balance_loss",
    "router.z_loss",
    "router.max_over_mean",
    "router.idle",
    "indexer.kl",
    "indexer.mean_k",
)
SET_METRICS = ("loss", "perplexity", "bits_per_byte", "tokens", "text_dropped")
CLASS_METRICS = ("loss", "share_likely", "tokens")  # val.SET.classes.CLASS


def wrong_metric(metric: str) -> str:
    """What is wrong with the name of a metric, as far as it can be known before there are runs; else empty."""
    parts = metric.split(".")
    if metric in STEP_METRICS or (parts[0] == "epochs" and len(parts) == 2):
        return ""
    if parts[0] != "val":
        near = difflib.get_close_matches(metric, STEP_METRICS, 1)
        known = ", ".join(STEP_METRICS)
        return f"unknown metric {metric}; " + (
            f"did you mean {near[0]}?" if near else f"there are {known}, and of evaluations val.SET.loss"
        )
    of_class = len(parts) == 5 and parts[2] == "classes"
    known_of_set = CLASS_METRICS if of_class else SET_METRICS
    if len(parts) != (5 if of_class else 3) or parts[-1] not in known_of_set:
        return (
            f"unknown metric {metric}; of a validation set there are val.SET.{{{', '.join(SET_METRICS)}}} "
            f"and val.SET.classes.CLASS.{{{', '.join(CLASS_METRICS)}}}"
        )
    return ""


class StopRule:
    """Ends a trial when a record of metrics.jsonl (or val.SET.loss of eval.jsonl) says so."""

    def __init__(self, metric: str, op: str, value: float | None, after_steps: int) -> None:
        self.metric, self.op, self.value, self.after_steps = metric, op, value, after_steps

    def __str__(self) -> str:
        text = (
            f"{self.metric} not finite"
            if self.op == "nonfinite"
            else f"{self.metric} {self.op} {self.value:g}"
        )
        return text + (f" after step {self.after_steps}" if self.after_steps else "")

    def holds(self, record: dict[str, Any]) -> bool | None:
        """Whether it holds for {"step": ..., ...}; None where the record has no such metric."""
        if record["step"] <= self.after_steps:
            return False
        value = record
        for part in self.metric.split("."):
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if self.op == "nonfinite":
            return not number  # writers put null where a value was not finite
        return number and OPERATORS[self.op](value, self.value)
