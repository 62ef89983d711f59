"""What a plain and a gated run on Bigram-Backcopy say about attention sinks, as a small table and in plain sentences:
scripts/quickstart prints them. Standard library alone."""

from __future__ import annotations

import os
import sys
from typing import Any

from .reporting import shapes
from .reporting.files import read_lines

COPY, REST = "trigger", "other"  # the classes of queries of configs/sinks


def last_evaluation(run: str) -> dict[str, Any]:
    """The last one that measured sinks; {} where there is none."""
    records = read_lines(os.path.join(run, "eval.jsonl"), shapes.EVALUATION)
    return next((r for r in reversed(records) if (r.get("analysis") or {}).get("sinks")), {})


class Sink:
    """What a run's last evaluation measured; every number is None where it did not."""

    def __init__(self, run: str) -> None:
        record = last_evaluation(run)
        self.record = record
        strongest = self.at("analysis", "sinks", "strongest")
        layer = strongest.get("layer") if isinstance(strongest, dict) else None
        of_layer = ("analysis", "layers", layer)
        self.share = self.number("analysis", "sinks", "strongest", "by_class", REST)
        self.share_copying = self.number("analysis", "sinks", "strongest", "by_class", COPY)
        overall = self.number("analysis", "sinks", "strongest", "first_token_attention")
        threshold = self.number("analysis", "sinks", "threshold")
        self.formed = None if overall is None or threshold is None else overall > threshold
        first, rest = (self.number(*of_layer, f"value_norm_{which}") for which in ("first", "rest"))
        self.value_ratio = first / rest if first is not None and rest else None
        sets = self.at("sets")
        name = next(iter(sets), None) if isinstance(sets, dict) else None
        self.losses = [self.number("sets", name, "classes", which, "loss") for which in (COPY, REST)]

    def at(self, *path: Any) -> Any:
        value: Any = self.record
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def number(self, *path: Any) -> float | None:
        value = self.at(*path)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def table(plain: Sink, gated: Sink) -> list[str]:
    percent = lambda v: "-" if v is None else f"{100 * v:.1f}%"
    fixed = lambda v: "-" if v is None else f"{v:.3f}"
    rows = [
        ("", "plain", "gated"),
        ("strongest head's attention on the first token,", "", ""),
        ("  where there is nothing to copy", percent(plain.share), percent(gated.share)),
        ("  where it copies", percent(plain.share_copying), percent(gated.share_copying)),
        ("norm of the first token's value, the others' = 1", fixed(plain.value_ratio), fixed(gated.value_ratio)),
        *(
            (f"held-out loss, {what}", fixed(a), fixed(b))
            for what, a, b in zip(("where it copies", "elsewhere"), plain.losses, gated.losses)
        ),
    ]
    return [f"{name:<50}{a:>8}{b:>8}".rstrip() for name, a, b in rows]


def verdict(plain: Sink, gated: Sink) -> str:
    if plain.formed is None or gated.formed is None:
        return "Their evaluations did not measure sinks."
    if not plain.formed:
        return "No sink has formed in the plain model: its training was too short, or the text is of another kind."
    emptied = ", whose value it has emptied" if (plain.value_ratio or 1) < 0.5 else ""
    sink = (
        "A softmax must give its attention to something. Where there is nothing to copy, the plain model has learned to "
        f"give it to the first token{emptied}: an attention sink."
    )
    if gated.formed:
        return sink + " The gated model has one too: here the gate did not remove it."
    return sink + " The gate can close the head instead, and its model has no sink."


def words(baseline: str, gated: str) -> list[str]:
    runs = Sink(baseline), Sink(gated)
    return [
        "The task: behind a trigger the byte before the trigger comes again; everywhere else the next byte depends on the "
        "last one alone, and attention has nothing to do.",
        *table(*runs),
        verdict(*runs),
        "One seed of each: what several seeds show stands in configs/sinks/README.md.",
    ]


if __name__ == "__main__":
    print("\n".join(words(*sys.argv[1:3])))
