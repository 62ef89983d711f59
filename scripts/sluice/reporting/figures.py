"""Which pictures are made: (heading, [(file name, what draws it or returns None, one sentence of explanation)]). Needs
matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import plots_grid, plots_heads, plots_layers, plots_paper, plots_training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .groups import Group
    from .paper_tables import PaperTable
    from .runs import Run


def all_figures(
    runs: list[Run], groups: list[Group], tables: Sequence[PaperTable] = ()
) -> list[tuple[str, list[tuple[str, Callable[[], Figure | None], str]]]]:
    """tables: the papers', as paper_tables makes them."""
    # Grey lines lie below coloured ones.
    shown = [r for r in runs if r.grey] + [r for r in runs if not r.grey]
    return [
        ("Ours beside the papers'", plots_grid.deltas(tables)),
        (
            "The Gated Attention paper's figures",
            plots_paper.figures(groups, shown) + plots_layers.figures(groups),
        ),
        ("Heads, values, queries and keys", plots_heads.figures(groups)),
        ("Across runs", plots_grid.figures(groups)),
        ("Training", plots_training.figures(shown)),
    ]
