"""Figures 1 and 2 of the Gated Attention paper, of our runs: losses and attention on the first token; and which runs its figures
show. Figure 2 reads RUN/analysis. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator, PercentFormatter

from . import paper as papers
from .curves import draw_band, lines_over_seeds
from .groups import size
from .looks import COLOURS, MARKERS
from .seeds import SeedMean
from .style import layer_ticks, legend, new_figure, tokens_axis, wrapped
from .values import ema, number, quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .groups import Group
    from .runs import Run

BANDS = "Means over seeds; bands: their standard deviation."
ELEMENTWISE = "sdpa_output elementwise"
SHARED = ELEMENTWISE + " shared"


class Pick:
    """A group's analyses, means over its seeds, with its name and colour in this figure."""

    def __init__(self, group: Group, at: int) -> None:
        self.group, self.seeds = group, SeedMean([r for r in group.sound() if r.deep] or group.runs)
        self.name = group.label + (f" ({self.seeds.count()} seeds)" if self.seeds.count() > 1 else "")
        self.colour, self.marker = COLOURS[at], MARKERS[at]
        self.layers, self.total = self.seeds.layers, self.seeds.total
        self.first = self.seeds.deep  # of the first seed, for what cannot be averaged

    def values(self, *path: str) -> tuple[list[float], list[float]]:
        """(layer, mean over seeds) where there is one."""
        return along(self.layers, path)

    def band(self, axis: Axes, *path: str) -> list[float]:
        """A pale band of one standard deviation to either side of the means, none for one seed; its upper edge."""
        spread = dict(zip(*along(self.seeds.spreads, path)))
        points = [(i, v, spread[i]) for i, v in zip(*self.values(*path)) if i in spread]
        if points:
            axis.fill_between(
                [i for i, _, _ in points],
                [v - s for _, v, s in points],
                [v + s for _, v, s in points],
                color=self.colour,
                alpha=0.18,
                linewidth=0,
            )
        return [v + s for _, v, s in points]

    def line(self, axis: Axes, path: tuple[str, ...], **options: Any) -> list[float]:
        """Draws means and their band; what the axis must hold."""
        x, y = self.values(*path)
        if not y:
            return []
        axis.plot(x, y, color=self.colour, **{"marker": self.marker, "markersize": 4.5, **options})
        return y + self.band(axis, *path)

    def gates_output(self) -> bool:
        """Whether a gate lies on attention's output: only then does the output have a before and an after."""
        return any(
            isinstance(gate, dict) and gate.get("position") == "sdpa_output"
            for layer in self.layers
            for gate in layer.get("gates") or []
        )

    def output_names(self) -> dict[str, str]:
        """Of the lines of attention's output: {"before": name, ...}; one line where no gate lies on it."""
        if self.gates_output():
            return {
                "before": "before the gate",
                "after": "after the gate",
                "before_times_mean_gate": "before, times the mean gate score",
            }
        others = sorted(
            {
                str(gate.get("position"))
                for layer in self.layers
                for gate in layer.get("gates") or []
                if isinstance(gate, dict)
            }
        )
        return {"before": f"gate on {', '.join(others)} only" if others else "no gate"}


def along(layers: list[Any], path: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """(layer, number) where there is one."""
    out = []
    for i, layer in enumerate(layers):
        for key in path:
            layer = layer.get(key) if isinstance(layer, dict) else None
        if number(layer) is not None:
            out.append((i, number(layer)))
    return [i for i, _ in out], [v for _, v in out]


def has_analysis(group: Group) -> bool:
    return any(run.deep for run in group.runs)


def choose(
    groups: list[Group],
    variants: list[str],
    limit: int = 6,
    able: Callable[[Group], bool] = has_analysis,
) -> list[Group]:
    """Groups that a figure of the paper shows, of one model size; without any of its rows, the first few groups."""
    fit = [g for g in groups if able(g)]
    out: list[Group] = []
    for variant in variants:
        hit = next(
            (g for g in fit if g.rows and g.variant == variant and (not out or size(g) == size(out[0]))), None
        )
        out += [hit] if hit else []
    return out or fit[:limit]


def picks(groups: list[Group], variants: list[str], limit: int = 6) -> list[Pick]:
    """With the page's colours; what is grey there gets one that is free here."""
    chosen = choose(groups, variants, limit)[: len(COLOURS)]
    free = [c for c in COLOURS if c not in [g.first.colour for g in chosen]]
    return [Pick(g, COLOURS.index(free.pop(0) if g.first.grey else g.first.colour)) for g in chosen]


def gates_at(layers: list[Any], i: int) -> list[Any]:
    """The i-th gate of each layer that has so many."""
    return [gates[i] for gates in (layer.get("gates") or [] for layer in layers) if i < len(gates)]


def gates_of(pick: Pick) -> list[tuple[str, list[Any]]]:
    """[(name, [gate of layer 0, ...])], one per gate position; means over seeds."""
    count = max([len(layer.get("gates") or []) for layer in pick.layers], default=0)
    out = []
    for i in range(count):
        gates = gates_at(pick.layers, i)
        out.append((pick.name + (f", {gates[0].get('position')}" if count > 1 else ""), gates))
    return out


# ---- figure 1


def smoothed(run: Run, less: Run | None = None, keep: float = 0.9) -> tuple[list[float], list[float]]:
    """(tokens, EMA of the losses), or of their differences to those of another run at the same step."""
    x, y = run.series("loss")
    reference = dict(zip(*less.series("loss"))) if less else dict.fromkeys(x, 0.0)
    pairs = [(a, b - reference[a]) for a, b in zip(x, y) if a in reference]
    return [a for a, _ in pairs], ema([d for _, d in pairs], keep)


def loss_differences(group: Group, base: Group) -> list[tuple[list[float], list[float]]]:
    """Smoothed curves of the seeds that both have."""
    theirs = {run.seed(): run for run in base.sound()}
    made = [smoothed(run, theirs[run.seed()], 0.98) for run in group.sound() if run.seed() in theirs]
    return [curve for curve in made if curve[0]]


def baselines_of(groups: list[Group]) -> dict[Group, Group]:
    """{group: the paper's baseline that was trained alike and is the same model, with the same start, but for what the group's row
    sets}, of those that have one and are none."""
    rows = {row["id"]: row for table in papers.load()["tables"] for row in table["rows"]}
    plain = [g for g in groups if g.variant == "plain" and any(not rows[i].get("baseline") for i in g.rows)]
    found = {}
    for group in [g for g in groups if g not in plain]:
        sets = {"geometry": any(rows[i].get("geometry") for i in group.rows)}
        for base in plain:
            alike = papers.protocol(group.first, "moe") == papers.protocol(base.first, "moe")
            if alike and papers.same_but_for_the_row(group.first, base.first, sets):
                found[group] = base
                break
    return found


def plot_losses(groups: list[Group], runs: list[Run]) -> Figure | None:
    """Left: EMA .9 of the training loss; right: less the baseline's, at the same step and seed. Means over seeds."""
    bases = baselines_of(groups)
    groups = [g for g in groups if not g.first.grey and any(len(r.series("loss")[0]) > 20 for r in g.runs)]
    if not any(g.rows for g in groups):
        return None
    used = list(dict.fromkeys(bases[g] for g in groups if g in bases))
    figure, axes = new_figure(2 if used else 1, 4.0)
    curves = []
    for run in [r for r in runs if r.grey]:
        x, y = run.series("loss")
        axes[0].plot(x, ema(y), color=run.colour, linewidth=0.7, label=run.label, zorder=1)
    for group in groups:
        lines = lines_over_seeds([smoothed(run) for run in group.sound() or group.runs])
        for i, (x, line, spread) in enumerate(lines):
            curves.append(line)
            label = group.first.label if i == 0 else "_seed"
            axes[0].plot(x, line, color=group.first.colour, linewidth=1.2, label=label)
            draw_band(axes[0], x, line, spread, group.first.colour)
    tails = [v for line in curves for v in line[len(line) // 10 :]]
    if tails:
        low = min(min(line) for line in curves)
        high = min(quantile(tails, 0.98), low + 2.0)
        axes[0].set_ylim(low - 0.06 * (high - low), high + 0.1 * (high - low))
    axes[0].set_title("EMA (0.9) of the logged losses")
    axes[0].set_ylabel("training loss (nats per token)")
    if len(axes) > 1:
        ends = []
        for group in [g for g in groups if g in bases]:
            for i, (x, line, spread) in enumerate(lines_over_seeds(loss_differences(group, bases[group]))):
                label = group.first.label if i == 0 else "_seed"
                axes[1].plot(x, line, color=group.first.colour, linewidth=1.4, label=label)
                draw_band(axes[1], x, line, spread, group.first.colour)
                ends += line[len(line) // 3 :]
        axes[1].axhline(0, color=used[0].first.colour if len(used) == 1 else "#777777", linewidth=1.2)
        if ends:
            reach = max(0.02, 1.15 * max(abs(v) for v in ends))
            axes[1].set_ylim(-reach, reach)
        axes[1].set_title(f"less the loss of: {used[0].label}" if len(used) == 1 else "less the loss of the baseline")
        axes[1].set_ylabel("difference, EMA (0.98)")
    for axis in axes:
        tokens_axis(axis)
    legend(figure, axes, width=3)
    return figure


# ---- figure 2


def plot_first_token(groups: list[Group]) -> Figure | None:
    shown = ["plain", ELEMENTWISE, "sdpa_output headwise", "value elementwise", SHARED]
    chosen = picks(groups, shown, len(COLOURS))
    if not any(p.values("first_token_attention")[1] for p in chosen):
        return None
    figure, (axis,) = new_figure()
    ends = []
    for p in chosen:
        share = number(p.total.get("first_token_attention"))
        name = p.name + (f": mean {100 * share:.1f} %" if share is not None else "")
        ends += p.line(axis, ("first_token_attention",), markersize=5, label=name)
    axis.set_ylim(0, min(1.02, 1.15 * max(ends + [0.01])))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if max(ends + [0.01]) > 0.05 else 1))
    axis.set_ylabel("share, mean over queries and heads")
    layer_ticks(axis, max(len(p.layers) for p in chosen))
    legend(figure, [axis], width=2)
    return figure


def spread_layers(first_token: Any, count: int) -> list[int]:
    """First, the one that looks most at the first token, one between, last."""
    if count <= 4:
        return list(range(count))
    most = max(range(count), key=lambda i: first_token[i] if i < len(first_token) else 0)
    chosen = {0, count - 1, most}
    for i in (count // 2, count // 3, 2 * count // 3):
        if len(chosen) < 4:
            chosen.add(i)
    return sorted(chosen)


def plot_maps(groups: list[Group]) -> Figure | None:
    """Attention averaged over heads and sequences: a row of panels per run."""
    chosen = [(p, p.seeds.array("attention_mean")) for p in picks(groups, ["plain", ELEMENTWISE], 2)]
    chosen = [(p, maps) for p, maps in chosen if maps is not None and maps.ndim == 3][:3]
    if not chosen:
        return None
    first = chosen[0][0]
    layers = spread_layers(first.values("first_token_attention")[1], min(len(m) for _, m in chosen))
    figure, axes = plt.subplots(
        len(chosen),
        len(layers),
        squeeze=False,
        layout="constrained",
        figsize=(2.7 * len(layers) + 0.9, 2.75 * len(chosen) + 0.5),
    )
    for row, (p, maps) in zip(axes, chosen):
        for axis, layer in zip(row, layers):
            image = axis.imshow(
                maps[layer], cmap="viridis", norm=PowerNorm(0.4, 0, 1), interpolation="nearest"
            )
            share = number(p.layers[layer].get("first_token_attention")) if layer < len(p.layers) else None
            axis.set_title(
                f"layer {layer}" + (f": {100 * share:.0f} % on token 0" if share is not None else ""),
                fontsize=9.5,
            )
            axis.grid(False)
            axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axis.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        row[0].set_ylabel(f"{wrapped(p.name)}\nquery")
    for axis in axes[-1]:
        axis.set_xlabel("key")
    figure.colorbar(image, ax=axes, shrink=0.8, label="attention (colour: value to the power 0.4)")
    return figure


def figures(groups: list[Group], runs: list[Run]) -> list[tuple[str, Callable[[], Figure | None], str]]:
    return [
        (
            "figure1_loss",
            lambda: plot_losses(groups, runs),
            "Figure 1, right, of the paper: training loss, smoothed as there; beside it the difference, at the same step and seed, to "
            "the baseline of the same model, with the same start, in all that the row does not set. Lines: means over seeds; bands: "
            "their standard deviation. Grey: the other runs.",
        ),
        (
            "figure2_first_token",
            lambda: plot_first_token(groups),
            "Figure 2, left: how much of the attention goes to the first token, before any gate. " + BANDS,
        ),
        (
            "figure2_maps",
            lambda: plot_maps(groups),
            "Figure 2, right: attention of the first positions, averaged over heads, sequences and seeds.",
        ),
    ]
