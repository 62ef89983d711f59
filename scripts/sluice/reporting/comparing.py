"""Differences between variants, over seeds: paired by seed, with a confidence interval. Used by scripts/report and scripts/sweep.
Standard library alone."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

CONFIDENCE = 0.95
FEWEST = 3  # pairs for an interval and a p
RULE = (
    "Differences are to the control, paired by seed: the mean over the seeds that both have, with its 95 % confidence interval in "
    "brackets (Student's t, n - 1 degrees of freedom) and the p of the two-sided paired t-test; only between evaluations after as many "
    "tokens, on the same sets. With fewer than three seeds in common there is neither (n < 3). Bold: the interval excludes zero on the "
    "better side. Of twenty such intervals between equal variants about one excludes zero by chance, and p is not corrected for how "
    "many there are."
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


def p_value(t: float, freedom: int) -> float:
    """P(|T| >= |t|), two-sided, for Student's t."""
    return max(0.0, 1.0 - within(math.atan(abs(t) / math.sqrt(freedom)), freedom))


def p_text(p: float) -> str:
    """p=0.012; below 0.0001 the bound alone, where rounding errors begin to show."""
    return "p<0.0001" if p < 1e-4 else f"p={p:.2g}"


class Difference:
    """Mean of paired differences; low, high and p are None below FEWEST pairs."""

    def __init__(self, values: list[float]) -> None:
        self.n, self.mean = len(values), statistics.fmean(values)
        self.low = self.high = self.p = None
        if self.n >= FEWEST:
            error = statistics.stdev(values) / math.sqrt(self.n)
            half = t_quantile(self.n - 1) * error
            self.low, self.high = self.mean - half, self.mean + half
            # Without spread t is infinite, or, where nothing differs at all, of no size.
            self.p = p_value(self.mean / error, self.n - 1) if error else float(self.mean == 0)

    def better(self, sign: int) -> bool:
        """Whether the interval excludes zero on the side of `sign`: -1 where less is better, +1 where more is."""
        if self.low is None or sign == 0:
            return False
        return self.high < 0 if sign < 0 else self.low > 0

    def text(self, write: Callable[[float], str]) -> str:
        if self.low is None:
            return f"{write(self.mean)} (n < {FEWEST})"
        return f"{write(self.mean)} [{write(self.low)}, {write(self.high)}] {p_text(self.p)} n={self.n}"


def paired(mine: dict, base: dict) -> Difference | None:
    """Of {seed: value}, over the seeds that both have; None without one."""
    common = [
        seed for seed in mine if seed is not None and mine[seed] is not None and base.get(seed) is not None
    ]
    return Difference([mine[seed] - base[seed] for seed in common]) if common else None


class NoBaseline(ValueError):
    """The name given is no group's."""


def choose_baselines(groups: list, name: str | None = None) -> dict:
    """{group: what it is compared with}. The one named; else the control of the sweep file that it is of; else, per model size, the
    first plain transformer, or the first group. A variant of a sweep is compared with the control's trials of the same base and grid
    values, and with nothing (None) where those were not trained."""
    from .groups import by_size

    def twin(group: Any, control: str) -> Any:
        """The group of the control that has all but the variant in common."""
        wanted = (group.place.study, control, group.place.point)
        return next(
            (g for g in groups if wanted in [(p.study, p.variant, p.point) for p in g.places]),
            None,
        )

    if name is not None:
        found = [
            g
            for g in groups
            if name in (g.label, g.short) or any(name in (r.name, r.base) for r in g.runs + g.twins)
        ]
        twins = {g: twin(g, name) for g in groups if g.place}
        if not found and not any(g.place and g.place.variant == name for g in groups):
            raise NoBaseline(
                f"--control {name}: no such group; there are: " + ", ".join(g.label for g in groups)
            )
        return {g: found[0] if found else twins.get(g) for g in groups}
    chosen = {}
    for same in by_size(groups):
        chosen.update(dict.fromkeys(same, next((g for g in same if g.variant == "plain"), same[0])))
    chosen.update({g: twin(g, g.place.control) for g in groups if g.place and g.place.control})
    return chosen
