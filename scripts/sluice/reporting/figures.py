"""Which pictures are made: (heading, [(file name, what draws it or returns None, one sentence of explanation)]). Needs
matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from . import (
    plots_grid,
    plots_heads,
    plots_layers,
    plots_long,
    plots_paper,
    plots_selection,
    plots_sinks,
    plots_training,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .groups import Group
    from .paper_tables import PaperTable
    from .runs import Run


def all_figures(
    runs: list[Run],
    groups: list[Group],
    controls: Mapping[Group, Group | None],
    tables: Sequence[PaperTable] = (),
) -> list[tuple[str, list[tuple[str, Callable[[], Figure | None], str]]]]:
    """controls: as choose_baselines has them; tables: the papers', as paper_tables makes them."""
    # In the order of the groups, as tables have them; grey lines lie below coloured ones.
    place = {group: i for i, group in enumerate(groups)}
    shown = sorted(runs, key=lambda run: (not run.grey, place.get(run.group, 0)))
    return [
        ("Ours beside the papers'", plots_grid.deltas(tables)),
        (
            "The Gated Attention paper's figures",
            plots_paper.figures(groups, shown) + plots_layers.figures(groups),
        ),
        ("Attention sinks", plots_sinks.figures(groups)),
        ("Sparse attention", plots_selection.figures(groups)),
        ("Heads, values, queries and keys", plots_heads.figures(groups)),
        ("Long contexts", plots_long.figures(groups, shown)),
        ("Across runs", plots_grid.figures(groups, controls)),
        ("Training", plots_training.figures(shown)),
    ]
