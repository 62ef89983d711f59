"""Differences between variants, over seeds: paired by seed, with a confidence interval. Used by scripts/report and scripts/sweep.
Standard library alone."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable

CONFIDENCE = 0.95
RULE = (
    "Differences are to the baseline, paired by seed: the mean over the seeds that both have, with its 95 % confidence interval in "
    "brackets (Student's t, n - 1 degrees of freedom); only between evaluations after as many tokens, on the same sets. One seed "
    "has no interval: a hint. Bold: the interval, over at least two seeds, excludes zero on the better side. Of twenty such "
    "intervals between equal variants about one excludes zero by chance."
)


def within(angle: float, freedom: int) -> float:
    """P(|t| < tan(angle) sqrt(freedom)) for Student's t, as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    cosine, term, total = math.cos(angle), 1.0, 0.0
    if freedom % 2 == 0:
        for k in range(0, freedom - 1, 2):
            total += term
            term *= (k + 1) / (k + 2) * cosine * cosine
        return math.sin(angle) * total
    for k in range(1, freedom - 1, 2):
        total += term * cosine
        term *= (k + 1) / (k + 2) * cosine * cosine
    return 2 / math.pi * (angle + math.sin(angle) * total)


@functools.cache
def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Half the width of the two-sided interval in standard errors: 12.706 for one degree of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


class Difference:
    """Mean of paired differences; low and high are None for one pair."""

    def __init__(self, values: list[float]) -> None:
        self.n, self.mean = len(values), statistics.fmean(values)
        self.low = self.high = None
        if self.n > 1:
            half = t_quantile(self.n - 1) * statistics.stdev(values) / math.sqrt(self.n)
            self.low, self.high = self.mean - half, self.mean + half

    def better(self, sign: int) -> bool:
        """Whether the interval excludes zero on the side of `sign`: -1 where less is better, +1 where more is."""
        if self.low is None or sign == 0:
            return False
        return self.high < 0 if sign < 0 else self.low > 0

    def text(self, write: Callable[[float], str]) -> str:
        if self.low is None:
            return f"{write(self.mean)} (one seed: a hint)"
        return f"{write(self.mean)} [{write(self.low)}, {write(self.high)}] n={self.n}"


def paired(mine: dict, base: dict) -> Difference | None:
    """Of {seed: value}, over the seeds that both have; None without one."""
    common = [
        seed for seed in mine if seed is not None and mine[seed] is not None and base.get(seed) is not None
    ]
    return Difference([mine[seed] - base[seed] for seed in common]) if common else None


class NoBaseline(ValueError):
    """The name given is no group's."""


def choose_baselines(groups: list, name: str | None = None) -> dict:
    """{group: what it is compared with}. The one named; else, per model size, the first plain transformer, or the first group."""
    from .groups import by_size

    if name is not None:
        found = [
            g
            for g in groups
            if name in (g.label, g.short) or any(name in (r.name, r.base) for r in g.runs + g.twins)
        ]
        if not found:
            raise NoBaseline(
                f"--baseline {name}: no such group; there are: " + ", ".join(g.label for g in groups)
            )
        return dict.fromkeys(groups, found[0])
    chosen = {}
    for same in by_size(groups):
        chosen.update(dict.fromkeys(same, next((g for g in same if g.variant == "plain"), same[0])))
    return chosen
