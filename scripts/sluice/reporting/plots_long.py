"""Plots of long contexts: loss by position, RULER's needles by depth and length, and their likelihood over training. Needs
matplotlib."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, PercentFormatter

from .curves import curves_of
from .long_context import by_position, depth_map, factor, newest, several_texts, short_length, words
from .style import first_column, legend, new_figure, tokens_axis, wrapped
from .values import number, short

if TYPE_CHECKING:
    from typing import Any

    from matplotlib.figure import Figure

    from .groups import Group
    from .runs import Run

MOST_PANELS = 6
BINS = 10  # of the depth: few samples stand at each of the 40


def plot_positions(runs: list[Run]) -> Figure | None:
    """One panel per validation set."""
    names = list(dict.fromkeys(name for run in runs for name in run.sets()))
    names = [n for n in names if any(len(by_position(run, n)[0]) > 1 for run in runs)][:MOST_PANELS]
    if not names:
        return None
    figure, axes = new_figure(len(names))
    for axis, name in zip(axes, names):
        for curve in curves_of(runs, functools.partial(by_position, name=name)):
            curve.draw(axis, marker=curve.run.marker, markersize=4, linestyle=curve.run.dash)
        axis.set_title(wrapped(name))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short(v)))
        axis.set_xlabel("position")
    for axis in first_column(axes):
        axis.set_ylabel("loss (nats per token)")
    legend(figure, axes)
    return figure


def plot_depths(groups: list[Group]) -> Figure | None:
    """One panel per variant, factor of YaRN and kind of prompts."""
    made = []
    for group in groups:
        run = next((run for run in group.sound() if run.ruler), None)
        summaries = newest(run) if run else []
        for summary in summaries:
            yarn, (lengths, _, cells) = factor(summary), depth_map(summary)
            if cells:
                title = group.label if yarn == 1 else f"{group.label}, YaRN {yarn:g}"
                if sum(factor(other) == yarn for other in summaries) > 1:
                    title += ", " + words(summary, several_texts(groups))
                made.append((title, lengths, cells))
    made = made[:MOST_PANELS]
    if not made:
        return None
    columns = min(len(made), 3)
    rows = (len(made) + columns - 1) // columns
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, layout="constrained", figsize=(3.3 * columns + 0.9, 3.0 * rows)
    )
    flat = [axis for row in axes for axis in row]
    for axis in flat[len(made) :]:
        axis.set_visible(False)
    for axis, (title, lengths, cells) in zip(flat, made):
        table = [[float("nan")] * len(lengths) for _ in range(BINS)]
        for bin_ in range(BINS):
            for i, length in enumerate(lengths):
                values = [
                    v
                    for (depth, n), v in cells.items()
                    if n == length and min(int(depth * BINS / 100), BINS - 1) == bin_
                ]
                if values:
                    table[bin_][i] = sum(values) / len(values)
        image = axis.imshow(table, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto", interpolation="nearest")
        axis.set_title(wrapped(title), fontsize=10)
        axis.grid(False)
        axis.set_xticks(range(len(lengths)), [short_length(n) for n in lengths])
        axis.set_yticks([-0.5, BINS / 2 - 0.5, BINS - 0.5], ["0", "50", "100"])
        axis.set_xlabel("tokens")
        axis.set_ylabel("depth (percent)")
    figure.colorbar(image, ax=flat[: len(made)], shrink=0.8, label="found (percent)")
    return figure


def choices(runs: list[Run]) -> list[tuple[str, int]]:
    """(task, length) of what eval.ruler measured."""
    found = {
        (c["task"], c["length"])
        for run in runs
        for record in run.evals
        for c in record.get("ruler") or []
        if c.get("task") and c.get("length")
    }
    return sorted(found)


def plot_choices(runs: list[Run]) -> Figure | None:
    """One panel per task and length."""
    cells = choices(runs)[:MOST_PANELS]
    if not cells:
        return None
    figure, axes = new_figure(len(cells), shared=True)

    def pick(record: dict[str, Any], cell: tuple[str, int]) -> float | None:
        for c in record.get("ruler") or []:
            if (c.get("task"), c.get("length")) == cell:
                return number(c.get("accuracy"))
        return None

    for axis, cell in zip(axes, cells):
        series = lambda run, cell=cell: run.eval_series(lambda record: pick(record, cell))
        for curve in curves_of(runs, series):
            curve.draw(axis, marker=curve.run.marker, markersize=4, linestyle=curve.run.dash)
        axis.axhline(0.1, color="#999999", linewidth=0.9, linestyle=(0, (1, 2)))
        axis.set_title(f"{cell[0]} at {short_length(cell[1])}")
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        tokens_axis(axis)
    for axis in first_column(axes):
        axis.set_ylabel("true value most likely")
    legend(figure, axes, [(plt.Line2D([], [], color="#999999", linewidth=0.9, linestyle=(0, (1, 2))), "chance")])
    return figure


def figures(
    groups: list[Group], runs: list[Run]
) -> list[tuple[str, Callable[[], Figure | None], str]]:
    return [
        (
            "loss_by_position",
            lambda: plot_positions(runs),
            "Loss by position in octaves (0 to 64, 64 to 128, 128 to 256, ...), of the last evaluation. Where a model has not been "
            "trained, the line rises. Several seeds: the mean, and a band of one standard deviation to either side.",
        ),
        (
            "ruler_depths",
            lambda: plot_depths(groups),
            "RULER's needles: share found by depth in the prompt and length, mean over the tasks that ask for one thing at one "
            "place. White: no sample. Of several seeds the first.",
        ),
        (
            "ruler_choice",
            lambda: plot_choices(runs),
            "RULER's needles over training, without decoding: share of the samples whose true value is more likely than nine others "
            "(eval.ruler).",
        ),
    ]
