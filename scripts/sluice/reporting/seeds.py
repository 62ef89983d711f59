"""The analyses of several seeds as one: means and standard deviations of everything in them that is a number. Standard library
alone, but for arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .values import deviation, mean, number


def merged(trees: list[Any], how: Callable[..., Any] = mean) -> Any:
    """Trees of one shape as one: numbers by `how` (None where one of them has none), all else as in the first."""
    first = trees[0]
    if isinstance(first, dict):
        return {
            key: merged([t[key] for t in trees], how)
            for key in first
            if all(isinstance(t, dict) and key in t for t in trees)
        }
    if isinstance(first, list):
        return [merged(list(items), how) for items in zip(*[t if isinstance(t, list) else [] for t in trees])]
    if isinstance(first, str):
        return first
    values = [number(t) for t in trees]
    return None if None in values else how(values)


class SeedMean:
    """The analyses of those runs of a group whose step is the latest, as far as they are of the same tokens as the first one's. `layers`
    and `total` hold means; `spreads` holds standard deviations, in the layers' shape; arrays are means where seeds may be averaged, of
    the first run otherwise."""

    def __init__(self, runs: list) -> None:
        latest = max([number(r.deep.data.get("step")) or 0 for r in runs if r.deep], default=0)
        found = [r for r in runs if r.deep and (number(r.deep.data.get("step")) or 0) == latest]
        self.runs = [r for r in found if r.analysed() == found[0].analysed()] or runs[:1]
        self.deep = self.runs[0].deep
        analyses = [r.deep.layers for r in self.runs]
        self.each = analyses
        self.layers = merged(analyses) if len(analyses) > 1 else self.deep.layers
        self.spreads = merged(analyses, deviation) if len(analyses) > 1 else []
        self.total = merged([r.deep.total for r in self.runs]) if len(analyses) > 1 else self.deep.total

    def count(self) -> int:
        return len(self.runs)

    def array(self, name: str) -> Any:
        """Mean over the seeds whose array has the first one's shape."""
        arrays = [r.deep.array(name) for r in self.runs]
        arrays = [a for a in arrays if a is not None]
        same = [a for a in arrays if a.shape == arrays[0].shape]
        return sum(same[1:], same[0]) / len(same) if len(same) > 1 else arrays[0] if arrays else None
