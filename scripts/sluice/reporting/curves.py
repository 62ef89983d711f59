"""Curves of groups: the mean over seeds with a band of one standard deviation, or one run's own. Draws on the axes given; needs no
matplotlib of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .values import deviation, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .groups import Group
    from .runs import Run

Points = tuple[list[float], list[float]]


def over_seeds(curves: list[Points]) -> tuple[list[float], list[Any], list[Any] | None]:
    """(x, means, standard deviations or None) of [(x, values)], where every curve has a value."""
    tables = [dict(zip(x, y)) for x, y in curves]
    common = [x for x in curves[0][0] if all(x in table for table in tables)]
    rows = [[table[x] for table in tables] for x in common]
    return common, [mean(row) for row in rows], [deviation(row) for row in rows] if len(curves) > 1 else None


def lines_over_seeds(curves: list[Points]) -> list[tuple[list[float], list[Any], list[Any] | None]]:
    """What is drawn of several seeds: the means with their deviations, or, where the seeds have no place in common, every seed by
    itself. A seed without a point has no line."""
    curves = [xy for xy in curves if xy[0]]
    together = over_seeds(curves) if curves else ([], [], None)
    return [together] if together[0] else [(*xy, None) for xy in curves]


def draw_band(axis: Axes, x: list[float], y: list[float], spread: list[Any] | None, colour: str) -> None:
    if spread:
        axis.fill_between(
            x,
            [v - s for v, s in zip(y, spread)],
            [v + s for v, s in zip(y, spread)],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )


def seeds_text(group: Group) -> str:
    """(5 seeds), or (4 of 5 seeds) where one is in no mean; nothing for a single run."""
    all_of_them, counted = group.count(), len(group.sound()) or group.count()
    if all_of_them < 2:
        return ""
    return f" ({all_of_them} seeds)" if counted == all_of_them else f" ({counted} of {all_of_them} seeds)"


class Curve:
    """What one line of a figure shows: `run` lends its colour. A curve `aside` is a seed that is in no mean."""

    def __init__(self, run: Run, points: Points, spread: list[Any] | None, label: str, aside: bool) -> None:
        self.run, self.x, self.y, self.spread = run, *points, spread
        self.label, self.aside, self.colour = label, aside, run.colour

    def recolour(self, colour: str, label: str) -> None:
        """For a figure whose colours mean something else than the page's."""
        self.colour, self.label = colour, label

    def draw(self, axis: Axes, **options: Any) -> None:
        if self.aside:
            options = {**options, "linewidth": 0.8, "marker": "", "alpha": 0.7}
        axis.plot(self.x, self.y, color=self.colour, label=self.label, **options)
        draw_band(axis, self.x, self.y, self.spread, self.colour)

    def edges(self) -> list[list[float]]:
        """The line, or its band's lower and upper edge."""
        if not self.spread:
            return [self.y]
        return [[v + side * s for v, s in zip(self.y, self.spread)] for side in (-1, 1)]

    def reach(self) -> list[float]:
        """What the axis must hold."""
        return [v for edge in self.edges() for v in edge]


def curves_of(runs: Iterable[Run], points: Callable[[Run], Points]) -> list[Curve]:
    """A curve for each group of the runs given, in their order: the mean over the seeds that count, with their deviation. Runs without a
    colour of their own, and seeds that diverged or are unfinished where others finished, are curves by themselves."""
    made = {id(run): (run, points(run)) for run in runs}
    made = {key: (run, xy) for key, (run, xy) in made.items() if xy[0]}
    out: list[Curve] = []
    told: set[int] = set()
    for run, xy in made.values():
        group = run.group
        if group is None or run.grey:
            out.append(Curve(run, xy, None, run.label, False))
            continue
        if id(group) in told:
            continue
        told.add(id(group))
        members = [r for r in [*group.runs, *group.twins] if id(r) in made]
        counted = [r for r in group.sound() if id(r) in made] or members
        lines = lines_over_seeds([made[id(r)][1] for r in counted])
        if len(counted) > 1 and len(lines) == 1:
            x, y, spread = lines[0]
            out.append(Curve(group.first, (x, y), spread, group.first.label, False))
        else:  # one seed, or seeds that have no place in common
            out += [
                Curve(r, made[id(r)][1], None, group.first.label if i == 0 else "_seed", False)
                for i, r in enumerate(counted)
            ]
        out += [Curve(r, made[id(r)][1], None, "_seed", True) for r in members if r not in counted]
    return out
