"""Numbers: how they are read, written, smoothed, counted and compared. Standard library alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def number(value: Any) -> float | None:
    """A finite number, or None: writers put null where a value was not finite."""
    if isinstance(value, bool):
        return None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def short(value: float | None, digits: int = 3, giga: str = "G") -> str:
    """1234567 -> 1.23M"""
    if value is None:
        return "-"
    rounded = float(f"{value:.{digits}g}")  # 999.7 is 1k
    for size, unit in ((1e12, "T"), (1e9, giga), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= size:
            return (
                f"{rounded / size:.{digits}g}{unit}"
                if abs(rounded) < 1000 * size
                else f"{value / size:.0f}{unit}"
            )
    return f"{value:.{digits}g}"


def fixed(digits: int, sign: str = "") -> Callable[[float | None], str]:
    return lambda value: "-" if value is None else f"{value:{sign}.{digits}f}"


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None if none is."""
    values = [v for v in values if v is not None]
    return statistics.fmean(values) if values else None


def mean_of_all(values: Iterable[float | None]) -> float | None:
    """None if one is missing: a mean over the others would be of something else."""
    values = list(values)
    return statistics.fmean(values) if values and None not in values else None


def deviation(values: Iterable[float | None]) -> float | None:
    """Sample standard deviation; None for fewer than two."""
    values = [v for v in values if v is not None]
    return statistics.stdev(values) if len(values) > 1 else None


def smooth(values: list[float], share: float = 0.02) -> list[float]:
    """Median, then mean, over centred windows of that share of the run to either side: no lag, and no bump at a spike.
    Windows shrink towards the start, where curves are steep; at the end, what is there is averaged."""
    reach = max(1, int(share * len(values)))

    def over_windows(average: Callable[[list[float]], float], data: list[float]) -> list[float]:
        return [average(data[i - min(reach, i) : i + min(reach, i) + 1]) for i in range(len(data))]

    return over_windows(statistics.fmean, over_windows(statistics.median, values))


def ema(values: list[float], keep: float = 0.9) -> list[float]:
    """e_0 = v_0, e_i = keep e_(i-1) + (1 - keep) v_i: the smoothing of the papers' curves."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else keep * out[-1] + (1 - keep) * value)
    return out


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


WINDOW = 40  # logged losses that a loss is held against
DEVIATIONS = 5  # of those around their line


def expectation(window: list[float]) -> tuple[float, float]:
    """(the next value, deviation) by a line that single outliers do not move: its slope joins the medians of the first and the last
    third, its height is the median; the deviation is 1.4826 times the median of the distances from it."""
    third = len(window) // 3
    slope = (statistics.median(window[-third:]) - statistics.median(window[:third])) / (len(window) - third)
    flat = [value - slope * i for i, value in enumerate(window)]
    height = statistics.median(flat)
    return height + slope * len(window), 1.4826 * statistics.median(abs(v - height) for v in flat)


def count_spikes(
    values: list[float], thresholds: Sequence[float] = (0.1, 0.2, 0.5), skip: int = 0
) -> tuple[list[Any], int]:
    """(counts, values looked at): how many, after the first `skip`, lie above what the WINDOW values before them lead to by more
    than each threshold and by more than DEVIATIONS deviations. Counts are None where fewer than WINDOW can be looked at."""
    places = range(max(skip, WINDOW), len(values))
    if len(places) < WINDOW:
        return [None] * len(thresholds), len(places)
    above = []
    for i in places:
        expected, deviation = expectation(values[i - WINDOW : i])
        above.append(values[i] - expected if values[i] - expected > DEVIATIONS * deviation else 0.0)
    return [sum(a > t for a in above) for t in thresholds], len(places)


def ranks(values: list[float]) -> list[float]:
    """1 for the least; equals share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    out, i = [0.0] * len(values), 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in range(i, j + 1):
            out[order[k]] = (i + j) / 2 + 1
        i = j + 1
    return out


def spearman(pairs: Iterable[tuple[float | None, float | None]]) -> tuple[float | None, int]:
    """(rho, n): Pearson's correlation of the ranks of both sides; rho is None below three pairs or without spread."""
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(pairs) < 3:
        return None, len(pairs)
    a, b = ranks([p[0] for p in pairs]), ranks([p[1] for p in pairs])
    ma, mb = statistics.fmean(a), statistics.fmean(b)
    va, vb = sum((x - ma) ** 2 for x in a), sum((y - mb) ** 2 for y in b)
    if va == 0 or vb == 0:
        return None, len(pairs)
    return sum((x - ma) * (y - mb) for x, y in zip(a, b)) / math.sqrt(va * vb), len(pairs)
