"""How much of dense attention the keys hold that sparse attention selects: over training, and by layer. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from matplotlib.ticker import PercentFormatter

from .curves import draw_band, lines_over_seeds
from .plots_sinks import shown_groups
from .selection import by_layer, selections, series
from .style import layer_ticks, legend, new_figure, tokens_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .groups import Group


def plot_recall(groups: list[Group]) -> Figure | None:
    made = shown_groups(groups, lambda run: bool(selections(run.last)))
    if not made:
        return None
    figure, axes = new_figure(3, 3.3)
    for group, runs in made:
        colour = runs[0].colour if not runs[0].grey else "#333333"
        for axis, draw in zip(
            axes,
            (
                lambda run: series(run, "mass_recall"),
                lambda run: by_layer(run, "mass_recall"),
                lambda run: by_layer(run, "top_recall"),
            ),
        ):
            for i, (x, y, spread) in enumerate(lines_over_seeds([draw(run) for run in runs])):
                label = group.label if i == 0 else "_seed"
                axis.plot(x, y, color=colour, label=label, marker="o", markersize=4)
                draw_band(axis, x, y, spread, colour)
    for axis, title in zip(axes, ("attention held, all layers", "attention held", "largest keys held")):
        axis.set_title(title)
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    tokens_axis(axes[0])
    for axis in axes[1:]:
        layer_ticks(axis, max(len(run.analysis.get("layers") or []) for _, runs in made for run in runs))
    legend(figure, axes)
    return figure


def figures(groups: list[Group]) -> list[tuple[str, Callable[[], Figure | None], str]]:
    return [
        (
            "selected_keys",
            lambda: plot_recall(groups),
            "What sparse attention's selected keys hold: of dense attention, over training and by layer, and of the keys with "
            "most dense attention. Means over seeds, with a band of one standard deviation.",
        )
    ]
