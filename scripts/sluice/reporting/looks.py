"""Names and colours of runs: one colour per group of seeds, at most ten, the rest grey. Standard library alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .curves import seeds_text
from .groups import by_size, common_name, size

if TYPE_CHECKING:
    from .groups import Group
    from .runs import Run

# Okabe and Ito's palette, distinguishable with every kind of colour vision, without its yellow, which is too pale for lines; then three
# darker ones, which markers tell apart as well.
COLOURS = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C564B",
    "#882255",
    "#8A8A00",
]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*", "<", ">"]
GREY = "#b8b8b8"
MOST = len(COLOURS)

# Which variants are coloured first when there are more groups than colours.
FIRST = [
    "plain",
    "sdpa_output elementwise",
    "sdpa_output headwise",
    "value elementwise",
    "sdpa_output elementwise shared",
    "sandwich",
    "sdpa_output elementwise ns_sigmoid",
    "sdpa_output elementwise constant",
    "sink",
    "plain balanced",
    "sink balanced",
    "sdpa_output headwise balanced",
]


def highlighted(groups: list[Group]) -> list[Group]:
    """At most MOST groups: rows of the papers first, then those of the commonest size, one per variant before a second."""
    if len(groups) <= MOST:
        return list(groups)
    rank = lambda g: FIRST.index(g.variant) if g.variant in FIRST else len(FIRST)
    main = size((by_size([g for g in groups if g.rows]) or [groups])[0][0])
    by_need = sorted(groups, key=lambda g: (not g.rows, size(g) != main, rank(g)))  # stable
    once: list[Group] = []
    again: list[Group] = []
    for group in by_need:
        (again if group.variant in [g.variant for g in once] or size(group) != main else once).append(group)
    chosen = (once + again)[:MOST]
    return [g for g in groups if g in chosen]


def label_groups(groups: list[Group]) -> None:
    """Those that no paper names keep what their runs' names share, unless two of them share it: then the first run's name."""
    for group in [g for g in groups if not g.named]:
        group.label = common_name(group.runs)
    for group in [g for g in groups if not g.named]:
        if group.count() == 1 or sum(g.label == group.label for g in groups) > 1:
            group.label = group.first.name


def label_runs(runs: list[Run], groups: list[Group]) -> None:
    """Names where they differ, folder names where those do, else paths. Labels are for legends; '_' is shown in none."""
    for names in ([r.name for r in runs], [r.base for r in runs], [r.folder for r in runs]):
        if len(set(names)) == len(names):
            break
    for run, name in zip(runs, names):
        run.name = name
    label_groups(groups)
    chosen = highlighted(groups)
    shown = False
    for group in groups:
        for i, run in enumerate(group.runs + group.twins):
            if group in chosen:
                at = chosen.index(group)
                run.colour, run.marker, run.grey = COLOURS[at], MARKERS[at], False
                run.label = group.label + seeds_text(group) if i == 0 else "_seed"
            else:
                run.colour, run.marker, run.grey = GREY, ".", True
                run.label = "_other" if shown else f"others ({len(groups) - len(chosen)})"
                shown = True
