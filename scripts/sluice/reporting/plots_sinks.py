"""Attention on the first token by head over training, and the attention map of the strongest head. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .curves import draw_band, lines_over_seeds
from .looks import GREY
from .sinks import by_head, head_series, query_classes, sinks, strongest
from .style import DASHES, first_column, legend, new_figure, tokens_axis, wrapped
from .values import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .groups import Group
    from .runs import Run

MOST_PANELS = 6


def shown_groups(groups: list[Group], able: Callable[[Run], bool]) -> list[tuple[Group, list[Run]]]:
    """The able runs of each group, one per seed; coloured groups first."""
    ordered = [g for g in groups if not g.first.grey] + [g for g in groups if g.first.grey]
    found = [(g, [run for run in g.sound() or g.runs if able(run)]) for g in ordered]
    return [(g, runs) for g, runs in found if runs][:MOST_PANELS]


def best_head(run: Run) -> tuple[int, int]:
    place = strongest(run.analysis.get("layers") or [])
    assert place is not None  # of shown_groups
    return place


def plot_heads(groups: list[Group]) -> Figure | None:
    """One panel per variant: the strongest head of each seed, their mean and deviation, and every other head."""
    made = shown_groups(groups, lambda run: strongest(run.analysis.get("layers") or []) is not None)
    if not made:
        return None
    figure, axes = new_figure(len(made), 3.3, shared=True)
    classes = query_classes([run for _, runs in made for run in runs])
    for axis, (group, runs) in zip(axes, made):
        for run in runs:
            for place in by_head(run.analysis["layers"]):
                if place != best_head(run):
                    x, y = head_series(run, place)
                    axis.plot(x, y, color=GREY, linewidth=0.8, marker="." if len(x) == 1 else None)
        colour = runs[0].colour if not runs[0].grey else "#333333"
        for i, name in enumerate([None, *classes]):
            series = [head_series(run, best_head(run), name) for run in runs]
            for x, y, spread in lines_over_seeds(series):
                axis.plot(
                    x,
                    y,
                    color=colour,
                    linestyle=DASHES[1 + (i - 1) % (len(DASHES) - 1)] if name else "-",
                    linewidth=1.5 if name else 2.4,
                    zorder=3 if name else 4,
                    marker="o" if len(x) == 1 else None,
                )
                if name is None:
                    draw_band(axis, x, y, spread, colour)
        threshold = number(sinks(runs[0]).get("threshold"))
        if threshold is not None:
            axis.axhline(threshold, color="#999999", linewidth=0.9, linestyle=(0, (1, 2)))
        which = (
            f"strongest of each of {len(runs)} seeds"
            if len(runs) > 1
            else "strongest: layer {}, head {}".format(*best_head(runs[0]))
        )
        axis.set_title(f"{wrapped(group.label)}\n{which}", fontsize=10)
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        tokens_axis(axis)
    for axis in first_column(axes):
        axis.set_ylabel("attention on the first token")
    line = lambda **options: plt.Line2D([], [], **{"color": "#333333", **options})
    several = any(len(by_head(run.analysis["layers"])) > 1 for _, runs in made for run in runs)
    legend(
        figure,
        [],
        [
            (line(linewidth=2.4), "strongest head, all queries"),
            *(
                (line(linestyle=DASHES[1 + i % (len(DASHES) - 1)], linewidth=1.5), f'its queries of "{name}"')
                for i, name in enumerate(classes)
            ),
            *([(line(color=GREY, linewidth=0.8), "every other head")] if several else []),
            (line(color="#999999", linewidth=0.9, linestyle=(0, (1, 2))), "threshold of a sink"),
        ],
    )
    return figure


def plot_strongest_map(groups: list[Group]) -> Figure | None:
    """Attention of the head that looks most at the first token, over the first tokens of one sequence."""
    made = []
    for group, (run, *_) in shown_groups(groups, lambda run: strongest(run.deep.layers) is not None):
        maps, place = run.deep.array("attention_heads"), strongest(run.deep.layers)
        if maps is None or maps.ndim != 4 or place is None:
            continue
        if place[0] < maps.shape[0] and place[1] < maps.shape[1]:
            made.append((group, place, by_head(run.deep.layers)[place], maps[place]))
    if not made:
        return None
    columns = min(len(made), 3)
    rows = (len(made) + columns - 1) // columns
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, layout="constrained", figsize=(3.3 * columns + 0.9, 3.4 * rows)
    )
    flat = [axis for row in axes for axis in row]
    for axis in flat[len(made) :]:
        axis.set_visible(False)
    for axis, (group, (layer, head), share, attention) in zip(flat, made):
        image = axis.imshow(attention, cmap="viridis", norm=PowerNorm(0.4, 0, 1), interpolation="nearest")
        axis.set_title(
            f"{wrapped(group.label)}\nlayer {layer}, head {head}: {100 * share:.0f} % on the first token", fontsize=9.5
        )
        axis.grid(False)
        axis.set_xlabel("key")
        axis.set_ylabel("query")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.colorbar(image, ax=flat[: len(made)], shrink=0.8, label="attention (colour: value^0.4)")
    return figure


def figures(groups: list[Group]) -> list[tuple[str, Callable[[], Figure | None], str]]:
    return [
        (
            "sink_heads",
            lambda: plot_heads(groups),
            "Attention of each head on the first token, mean over the queries that are not the first token themselves. The "
            "strongest head is the one with the largest mean at the last evaluation; of several seeds each has its own, and "
            "the lines are their means, with a band of one standard deviation around that of all queries.",
        ),
        (
            "sink_map",
            lambda: plot_strongest_map(groups),
            "Attention of that head in the analysis, over the first tokens of one sequence: a bright first column is a sink. "
            "The share is the mean over the later queries of all sequences. Of several seeds the first.",
        ),
    ]
