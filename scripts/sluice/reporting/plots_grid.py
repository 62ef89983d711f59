"""Many runs at once: perplexity per domain, learning-rate tolerance, spikes. Needs matplotlib."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from .groups import by_size, size, unequal
from .looks import COLOURS, MARKERS
from .runs import THRESHOLDS
from .style import legend, new_figure
from .tables import HEADINGS, lr_points
from .values import deviation, mean, mean_of_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .groups import Group
    from .paper_tables import PaperTable
    from .runs import Run

MOST = 24


def colours_of(groups: list[Group]) -> Callable[[Group], str]:
    """Of the page; where this figure would be grey altogether, or has more groups than there are colours, one colour."""
    grey = len(groups) > len(COLOURS) or all(g.first.grey for g in groups)
    return lambda group: COLOURS[0] if grey else group.first.colour


def plot_dots(
    groups: list[Group],
    panels: Sequence[tuple[str, Callable[[Run], float | None]]],
    label: str = "",
    most: int = MOST,
    dashed: Group | None = None,
) -> Figure:
    """A panel per value, a line per group, a dot per seed; the dashed line is the mean of the group `dashed`, else of the first."""
    colour = colours_of(groups)
    dashed = dashed or groups[0]
    left_out = max(0, len(groups) - most)
    groups = groups[:most]
    columns = min(len(panels), 4)
    rows = (len(panels) + columns - 1) // columns
    figure, axes = plt.subplots(
        rows,
        columns,
        squeeze=False,
        sharey=True,
        layout="constrained",
        figsize=(2.5 * columns + 1.6, max(0.21 * len(groups) + 1.0, 1.9) * rows),
    )
    flat = [axis for row in axes for axis in row]
    for axis in flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, value_of) in zip(flat, panels):
        for y, group in enumerate(groups):
            values = [v for v in map(value_of, group.evaluated()) if v is not None]
            if not values:
                continue
            axis.plot(
                values,
                [y] * len(values),
                linestyle="none",
                marker="o",
                markersize=3.5,
                color=colour(group),
                alpha=0.55,
            )
            axis.plot(
                [mean(values)], [y], marker="|", markersize=10, markeredgewidth=2.2, color=colour(group)
            )
        level = mean(map(value_of, dashed.evaluated()))
        if level is not None:
            axis.axvline(level, color="#777777", linestyle="--", linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.08)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.tick_params(axis="x", labelsize=8.5)
        axis.set_yticks(range(len(groups)), [g.label for g in groups], fontsize=8.5)
        axis.set_ylim(len(groups) - 0.4, -0.6)
    more = f"{left_out} more are in the table" if left_out else ""
    figure.supxlabel(f"{label} ({more})" if label and more else label or more, fontsize=10)
    return figure


def plot_domains(groups: list[Group]) -> Figure | None:
    """Perplexity by domain, and the mean of all."""
    measured = lambda group: [run for run in group.evaluated() if any(run.perplexities().values())]
    groups = [g for g in groups if measured(g)]
    names: list[str] = []
    for group in groups:
        for run in measured(group):
            names += [n for n in run.perplexities() if n not in names]
    if len(names) < 2 or not groups:
        return None
    of_domain = lambda name: lambda run: run.perplexities().get(name)
    panels = [(name, of_domain(name)) for name in names]
    panels.append(("mean over domains", lambda run: mean_of_all(run.perplexities().values())))
    return plot_dots(groups, panels, "perplexity")


# Of Run.measures, and what a panel says of it.
SINK_MEASURES = {
    "first_token_attention": HEADINGS["first_token_attention"],
    "strongest_sink": "of the strongest head",
    "largest_residual": HEADINGS["largest_residual"],
}


def loss_differences(groups: list[Group], controls: Mapping[Group, Group | None]) -> dict[Run, float]:
    """{run: its loss less that of the same seed of its group's control}, where the tables have a difference; 0 of a control."""
    out = {}
    for group in groups:
        base = controls.get(group)
        if base is None or unequal(group.sound() + base.sound()):
            continue
        losses = base.by_seed("loss")
        for run in group.sound():
            loss, of_base = run.measures["loss"], losses.get(run.seed())
            if loss is not None and of_base is not None:
                out[run] = loss - of_base
    return out


def plot_sink_measures(groups: list[Group], controls: Mapping[Group, Group | None]) -> Figure | None:
    """Loss less the control's of the same seed, attention on the first token and the largest residual of several variants."""
    groups = [g for g in groups if any(g.values(key) for key in SINK_MEASURES)]
    if len(groups) < 2:
        return None
    dashed = next((base for base in map(controls.get, groups) if base), groups[0])
    differences = loss_differences([*groups, dashed], controls)
    measure = lambda key: lambda run: run.measures[key]
    shown = [key for key in SINK_MEASURES if any(g.values(key) for g in groups)]
    panels: list[tuple[str, Callable[[Run], float | None]]] = [("loss, less the control's", differences.get)]
    panels += [(SINK_MEASURES[key], measure(key)) for key in shown]
    return plot_dots(groups, panels, most=2 * MOST, dashed=dashed)


def plot_deltas(table: PaperTable) -> Figure | None:
    """The paper's differences to the baseline and ours, in panels of their own: their scales have nothing in common."""
    lines = [
        (name, ours, theirs) for name, ours, theirs in table.deltas if ours is not None and theirs is not None
    ]
    if len(lines) < 3:
        return None
    figure, axes = plt.subplots(
        1, 2, sharey=True, layout="constrained", figsize=(9.0, 0.27 * len(lines) + 1.5)
    )
    for axis, whose, at, colour in zip(axes, ("the paper's", "ours"), (2, 1), ("#8C564B", COLOURS[0])):
        data = [line[at] for line in lines]
        axis.hlines(range(len(lines)), 0, data, color=colour, linewidth=1.4, alpha=0.5)
        axis.plot(data, range(len(lines)), linestyle="none", marker="o", markersize=5.5, color=colour)
        axis.axvline(0, color="#555555", linewidth=1)
        if whose == "ours" and table.chance:
            axis.axvspan(-table.chance, table.chance, color="#999999", alpha=0.25, linewidth=0)
        axis.set_title(f"{whose}: Δ {table.metric}")
        axis.margins(x=0.1)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_yticks(range(len(lines)), [name for name, _, _ in lines], fontsize=9)
        axis.set_ylim(len(lines) - 0.4, -0.6)
    return figure


def plot_lr(groups: list[Group]) -> Figure | None:
    ladders = lr_points(groups)[:8]
    if not ladders:
        return None
    figure, (axis,) = new_figure(1, 4.0)
    rates = sorted({lr for _, points in ladders for lr, _ in points})
    losses = [run.measures["loss"] for _, points in ladders for _, g in points for run in g.evaluated()]
    losses = [v for v in losses if v is not None]
    if not losses:
        plt.close(figure)
        return None
    low, high = min(losses), max(losses)
    margin = 0.08 * (high - low) or 0.05
    top = high + 3 * margin
    failed = False
    for i, (name, points) in enumerate(ladders):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        means = []
        # Variants stand side by side at a rate, so that equal ones are seen.
        shift = 1 + 0.02 * (i - (len(ladders) - 1) / 2)
        for lr, group in points:
            values = [v for v in (run.measures["loss"] for run in group.evaluated()) if v is not None]
            axis.plot(
                [lr * shift] * len(values),
                values,
                linestyle="none",
                marker=marker,
                markersize=4,
                color=colour,
                alpha=0.45,
            )
            if values:
                means.append((lr * shift, mean(values)))
            bad = sum(state == "diverged" for state, _ in group.endings)
            if bad:
                failed = True
                axis.plot(
                    [lr * shift],
                    [top - 0.9 * margin * (i % 3)],
                    marker="X",
                    markersize=9,
                    color=colour,
                    markeredgecolor="black",
                    markeredgewidth=0.6,
                    linestyle="none",
                )
                axis.text(
                    lr * shift * 1.04,
                    top - 0.9 * margin * (i % 3),
                    f"{bad}/{group.count()}",
                    fontsize=8.5,
                    va="center",
                )
        axis.plot(
            [x for x, _ in means],
            [y for _, y in means],
            color=colour,
            marker=marker,
            markersize=6,
            label=name,
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(rates))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_xlim(rates[0] / 1.15, rates[-1] * 1.2)
    axis.set_ylim(low - margin, top + margin)
    if failed:
        axis.axhline(high + 0.7 * margin, color="#999999", linewidth=0.8)
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel("validation loss (nats per token)")
    cross = plt.Line2D(
        [], [], marker="X", markersize=9, linestyle="none", color="#bbbbbb", markeredgecolor="black"
    )
    legend(figure, [axis], [(cross, "diverged, of how many seeds")] if failed else [])
    return figure


def plot_spikes(groups: list[Group]) -> Figure | None:
    """Mean counts over the seeds that have losses enough; the stroke is their standard deviation."""
    counts = [(g, [run.spikes[0] for run in g.runs if run.spikes[0][0] is not None]) for g in groups]
    counts = [(g, of_runs) for g, of_runs in counts if of_runs][:MOST]
    if not any(g.rows or g.count() > 1 for g, _ in counts):
        return None
    colour = colours_of([g for g, _ in counts])
    figure, axes = plt.subplots(
        1,
        len(THRESHOLDS),
        squeeze=False,
        sharey=True,
        layout="constrained",
        figsize=(10.5, 0.21 * len(counts) + 1.4),
    )
    for t, axis in enumerate(axes[0]):
        ends = []
        for y, (group, of_runs) in enumerate(counts):
            values = [c[t] for c in of_runs]
            average, spread = mean(values), deviation(values) or 0.0
            axis.barh(y, average, color=colour(group), height=0.65, alpha=0.75)
            if spread:
                axis.plot(
                    [max(0.0, average - spread), average + spread], [y, y], color="#444444", linewidth=1.1
                )
            axis.text(
                average + spread,
                y,
                f" {average:.3g}" + (" (diverged)" if group.diverged() else ""),
                va="center",
                fontsize=8,
            )
            ends.append(average + spread)
        axis.set_title(f"> trailing line + {THRESHOLDS[t]:g}", fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.set_xlim(0, 1.25 * max(ends) or 1.0)
        axis.grid(False, axis="y")
        names = [g.label + (f" ({len(of_runs)} seeds)" if len(of_runs) > 1 else "") for g, of_runs in counts]
        axis.set_yticks(range(len(counts)), names, fontsize=8.5)
        axis.set_ylim(len(counts) - 0.4, -0.6)
    figure.supxlabel("spikes in the logged losses per run, mean over seeds", fontsize=10)
    return figure


def deltas(tables: Sequence[PaperTable]) -> list[tuple[str, Callable[[], Figure | None], str]]:
    again = lambda i, table: f"_{i}" if any(t.id == table.id for t in tables[:i]) else ""
    return [
        (
            f"deltas_{table.id}{again(i, table)}",
            functools.partial(plot_deltas, table),
            f"{table.short}: differences to the row's baseline, of finished rows. Below 0 is better. Grey: plus and minus the "
            "standard deviation of the baseline's seeds, where there are several.",
        )
        for i, table in enumerate(tables)
    ]


def figures(
    groups: list[Group], controls: Mapping[Group, Group | None]
) -> list[tuple[str, Callable[[], Figure | None], str]]:
    """controls: what each group is compared with, as the tables have it."""
    sizes = [same for same in by_size(groups) if len(same) > 1 or len(groups) == 1][:4]
    made: list[tuple[str, Callable[[], Figure | None], str]] = []
    for i, same in enumerate(sizes):
        made.append(
            (
                "perplexity_domains" + (f"_{i + 1}" if i else ""),
                functools.partial(plot_domains, same),
                f"Runs of one size ({size_text(same[0])}). At the last evaluation. Dots: seeds; strokes: their means; "
                "dashed: the first line's mean. Runs that diverged are left out.",
            )
        )
    for i, same in enumerate(sizes):
        made.append(
            (
                "sink_measures" + (f"_{i + 1}" if i else ""),
                functools.partial(plot_sink_measures, same, controls),
                f"Runs of one size ({size_text(same[0])}). Validation loss less the control's of the same seed, each line's control being "
                "that of the tables (the one of the same grid point); attention on the first token (mean over heads, and of the head that "
                "gives it most) and the largest residual. Dots: seeds, of which lines can have different ones; strokes: their means; "
                "dashed: the mean of the first control. Runs that diverged are left out.",
            )
        )
    made.append(
        (
            "lr_tolerance",
            lambda: plot_lr(groups),
            "Learning-rate tolerance. Small marks: seeds; lines: means of the runs that did not diverge.",
        )
    )
    for i, same in enumerate(sizes):
        made.append(
            (
                "spikes" + (f"_{i + 1}" if i else ""),
                functools.partial(plot_spikes, same),
                f"Runs of one size ({size_text(same[0])}). How often the logged training loss stood above what the losses before it "
                "lead to, after twice the warm-up; strokes: standard deviation over seeds. Runs with too few losses are left out.",
            )
        )
    return made


def size_text(group: Group) -> str:
    hidden, layers, head_dim, experts = size(group)
    return (
        f"hidden {hidden}, {layers} layers, heads of {head_dim}" + (", experts" if experts else "")
        if hidden
        else "unknown"
    )
