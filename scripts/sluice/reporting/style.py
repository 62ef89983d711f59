"""How every plot looks, and the axes and legends they share. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .values import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .runs import Run

DASHES = ["-", "--", ":", "-."]

plt.rcParams.update(
    {
        "figure.dpi": 130,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#888888",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "savefig.facecolor": "white",
        "pdf.fonttype": 42,  # TrueType, which publishers ask for
        "svg.hashsalt": "sluice",  # the same figure makes the same file
    }
)


if "text.parse_math" in plt.rcParams:  # names of runs may hold dollar signs
    plt.rcParams["text.parse_math"] = False


def new_figure(panels: int = 1, height: float = 3.6, shared: bool = False) -> tuple[Figure, list[Axes]]:
    """One wide panel, or up to three in a row."""
    columns = 2 if panels == 4 else min(panels, 3)
    rows = (panels + columns - 1) // columns
    width = 7.6 if panels == 1 else (4.6 if panels == 2 else 3.7) * columns
    figure, axes = plt.subplots(rows, columns, figsize=(width, height * rows), squeeze=False, sharey=shared)
    flat = [axis for row in axes for axis in row]
    for axis in flat[panels:]:
        axis.set_visible(False)
    return figure, flat[:panels]


def wrapped(name: str, width: int = 30) -> str:
    """A name above a panel, in as many lines as it takes: names may be long, and those of neighbours may not touch."""
    return "\n".join(textwrap.wrap(name, width)) or name


def first_column(axes: list[Axes]) -> list[Axes]:
    return [axis for axis in axes if axis.get_subplotspec().is_first_col()]


def tokens_axis(axis: Axes) -> None:
    axis.set_xlabel("training tokens")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x) if x else "0"))
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_xlim(left=0)


def layers_axis(axis: Axes, runs: list[Run]) -> None:
    layer_ticks(axis, max([len(r.analysis.get("layers") or []) for r in runs], default=1))


def layer_ticks(axis: Axes, count: int) -> None:
    axis.set_xlabel("layer")
    if count == 1:
        axis.set_xticks([0])
    else:
        axis.xaxis.set_major_locator(MaxNLocator(min(max(count, 2), 10), integer=True))
    axis.set_xlim(-0.3, max(count - 0.7, 0.3))


def log_if_wide(axis: Axes, values: list[float], factor: float = 20) -> bool:
    positive = [v for v in values if v > 0]
    if positive and len(positive) == len(values) and max(positive) > factor * min(positive):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0) if max(positive) < 100 * min(positive) else (1.0,))
        )
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: short(v)))
        axis.yaxis.set_minor_formatter(NullFormatter())
        return True
    return False


def legend(figure: Figure, axes: list[Axes], extra: Sequence[tuple[Any, str]] = (), width: int = 4) -> None:
    """One legend below all panels, so that it never covers a line."""
    handles, labels = [], []
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    for handle, label in extra:
        handles.append(handle)
        labels.append(label)
    figure.tight_layout()
    last = [i for i, label in enumerate(labels) if label.startswith("others (")]
    order = [i for i in range(len(labels)) if i not in last] + last
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    if handles:
        longest = max(len(label) for label in labels)
        width = min(width, 3 if longest <= 40 else 2 if longest <= 60 else 1) if longest > 26 else width
        columns = min(len(handles), width)
        # Below the x label by a fixed distance in inches, whatever the figure's height.
        figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=columns)


def markers_for(count: int) -> dict[str, Any]:
    return {"markevery": max(1, count // 12), "markersize": 4.5}
