"""Figures 3 to 7 of the Gated Attention paper, of our runs: gate scores, attention's output, activations, layer by layer. They
read RUN/analysis. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from .looks import MOST
from .plots_paper import BANDS, ELEMENTWISE, SHARED, gates_at, gates_of, picks
from .style import first_column, layer_ticks, legend, log_if_wide, new_figure, wrapped
from .values import deviation, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .groups import Group


# ---- figures 3 and 7


Bins = tuple[list[float], float, float]  # counts, and the outer edges of the bins


def rebinned(bins: Bins, low: float, high: float) -> list[float]:
    """The counts in as many bins between other edges that hold the first: each bin's are spread evenly over its width."""
    counts, first, last = bins
    if (first, last) == (low, high) or not high > low:
        return counts
    width, step = (last - first) / len(counts), (high - low) / len(counts)
    out = [0.0] * len(counts)
    for i, count in enumerate(counts):
        begin = (first + i * width - low) / step  # in bins of the new ones
        end = max(begin + width / step, begin + 1e-9)
        for j in range(max(0, int(begin)), min(len(counts), int(end) + 1)):
            out[j] += count * max(0.0, min(end, j + 1) - max(begin, j)) / (end - begin)
    return out


def histogram(seeds: list[list[Any]]) -> tuple[list[float], list[float]] | None:
    """Shares of the scores of all layers, mean over seeds, and the bins' edges, of [[gate of layer 0, ...] of a seed, ...]. Gates whose
    scores have no bounds have edges of their own in every layer and seed: their counts are put into bins between the outermost ones.
    None where a layer has no counts."""
    made: list[list[Bins]] = []
    for gates in seeds:
        made.append([])
        for gate in gates:
            low, high, counts = (
                number(gate.get("edges_min")),
                number(gate.get("edges_max")),
                gate.get("histogram_50"),
            )
            if low is None or high is None or not counts or None in counts:
                return None
            made[-1].append((counts, low, high))
    every = [bins for of_seed in made for bins in of_seed]
    if not every or not all(made) or len({len(counts) for counts, _, _ in every}) != 1:
        return None
    low, high = min(low for _, low, _ in every), max(high for _, _, high in every)
    shares = []
    for of_seed in made:
        counts = [sum(column) for column in zip(*[rebinned(bins, low, high) for bins in of_seed])]
        shares.append([count / (sum(counts) or 1) for count in counts])
    step = (high - low) / len(shares[0])
    return [low + i * step for i in range(len(shares[0]) + 1)], [sum(c) / len(shares) for c in zip(*shares)]


def plot_gate_histograms(groups: list[Group]) -> Figure | None:
    made = []
    for p in picks(groups, [ELEMENTWISE, "value elementwise", SHARED], MOST):
        for i, (name, gates) in enumerate(gates_of(p)):
            bins = histogram([gates_at(layers, i) for layers in p.seeds.each])
            if bins:
                means = [number(g.get("mean")) for g in gates]
                means = [m for m in means if m is not None]
                made.append((p, name, sum(means) / len(means) if means else None, *bins))
    if not made:
        return None
    figure, axes = new_figure(min(len(made), 9), 3.0, shared=True)
    for axis, (p, name, mean, edges, shares) in zip(axes, made):
        axis.stairs(shares, edges, color=p.colour, fill=True, alpha=0.35)
        axis.stairs(shares, edges, color=p.colour)
        if mean is not None:
            axis.axvline(mean, color="#333333", linestyle="--", linewidth=1.2)
            right = mean < 0.5 * (edges[0] + edges[-1])
            axis.text(
                mean,
                0.97,
                f" mean {mean:.3f} ",
                transform=axis.get_xaxis_transform(),
                va="top",
                ha="left" if right else "right",
                fontsize=9,
            )
        axis.set_title(wrapped(name))
        axis.set_xlabel("gate score")
    for axis in first_column(axes):
        axis.set_ylabel("share of the scores")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    legend(figure, [])
    return figure


def extremes(gates: list[Any], key: str, choose: Callable[..., float]) -> list[float]:
    """Per layer the least or greatest score of any seed; not a number where there is none."""
    rows = [[number(gate.get(key)) for gate in of_layer] for of_layer in zip(*gates)]
    return [choose([v for v in row if v is not None], default=float("nan")) for row in rows]


def plot_gate_layers(groups: list[Group]) -> Figure | None:
    made = []
    for p in picks(groups, [ELEMENTWISE, "sdpa_output headwise", SHARED, ELEMENTWISE + " ns_sigmoid"], MOST):
        for i, (name, gates) in enumerate(gates_of(p)):
            made.append((p, name, gates, [gates_at(layers, i) for layers in p.seeds.each]))
    if not made:
        return None
    figure, axes = new_figure(min(len(made), 9), 3.0, shared=True)
    for axis, (p, name, gates, of_seeds) in zip(axes, made):
        x = list(range(len(gates)))
        get = lambda key: [
            number(g.get(key)) if number(g.get(key)) is not None else float("nan") for g in gates
        ]
        mean, std = get("mean"), get("std")
        least, most = extremes(of_seeds, "min", min), extremes(of_seeds, "max", max)
        x, mean, std = x[: len(least)], mean[: len(least)], std[: len(least)]
        axis.fill_between(
            x,
            [max(m - s, low) for m, s, low in zip(mean, std, least)],
            [min(m + s, high) for m, s, high in zip(mean, std, most)],
            color=p.colour,
            alpha=0.2,
            linewidth=0,
        )
        axis.plot(x, mean, color=p.colour, marker="o", markersize=4.5)
        if p.seeds.count() > 1:
            spread = [
                deviation([number(g.get("mean")) for g in of_layer]) or 0.0 for of_layer in zip(*of_seeds)
            ]
            axis.errorbar(x, mean, spread, linestyle="none", ecolor=p.colour, capsize=3, elinewidth=1.2)
        axis.plot(x, least, color="#444444", linestyle=":", linewidth=1.3)
        axis.plot(x, most, color="#444444", linestyle=":", linewidth=1.3)
        axis.set_title(wrapped(name))
        layer_ticks(axis, len(gates))
    for axis in first_column(axes):
        axis.set_ylabel("gate score")
    grey = plt.Line2D([], [], color="#777777", marker="o", markersize=4.5)
    band = plt.Rectangle((0, 0), 1, 1, color="#777777", alpha=0.25, linewidth=0)
    dots = plt.Line2D([], [], color="#444444", linestyle=":", linewidth=1.3)
    legend(
        figure,
        [],
        [
            (grey, "mean"),
            (band, "mean ± deviation of the scores, within the extremes"),
            (dots, "least and greatest"),
        ],
    )
    return figure


# ---- figures 4, 5 and 6

DASH = {"before": "-", "after": "--", "before_times_mean_gate": ":"}


def plot_mean_abs(groups: list[Group]) -> Figure | None:
    chosen = [
        p
        for p in picks(groups, ["plain", ELEMENTWISE, "value elementwise"])
        if p.values("attention_output", "mean_abs_before")[1]
    ]
    if not chosen:
        return None
    figure, (axis,) = new_figure()
    seen = []
    for p in chosen:
        for key, name in p.output_names().items():
            path = ("attention_output", "mean_abs_" + key)
            y = p.values(*path)[1]
            if y:
                seen += p.line(
                    axis,
                    path,
                    linestyle=DASH[key],
                    markersize=5,
                    label=f"{p.name}, {name} (mean {sum(y) / len(y):.2g})",
                )
    if not log_if_wide(axis, seen):
        axis.set_ylim(0, 1.1 * max(seen) or 1.0)
    axis.set_ylabel("mean absolute value")
    layer_ticks(axis, max(len(p.layers) for p in chosen))
    legend(figure, [axis], width=2)
    return figure


def plot_shares(groups: list[Group]) -> Figure | None:
    chosen = [
        p
        for p in picks(groups, ["plain", ELEMENTWISE, "value elementwise"])
        if p.values("attention_output", "below_1e-2_before")[1]
    ]
    if not chosen:
        return None
    figure, axes = new_figure(2, 3.6)
    for axis, threshold in zip(axes, ("1e-2", "1e-3")):
        top = 0.01
        for p in chosen:
            for key, name in p.output_names().items():
                y = p.line(
                    axis,
                    ("attention_output", f"below_{threshold}_{key}"),
                    linestyle=DASH[key],
                    label=f"{p.name}, {name}",
                )
                top = max([top] + y)
        axis.set_ylim(0, 1.1 * top)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if top > 0.05 else 1))
        axis.set_title(f"|attention output| < {threshold}")
        axis.set_ylabel("share of the values")
        layer_ticks(axis, max(len(p.layers) for p in chosen))
    legend(figure, axes, width=2)
    return figure


def plot_maxima(groups: list[Group]) -> Figure | None:
    chosen = picks(
        groups, ["plain", ELEMENTWISE, "value elementwise", SHARED, ELEMENTWISE + " ns_sigmoid"], 5
    )
    panels = [
        ("attention output", ("max", "attention_output")),
        ("residual after attention", ("max", "attention_residual")),
        ("first-token attention", ("first_token_attention",)),
        ("feed-forward output", ("max", "ffn_output")),
        ("residual after feed-forward", ("max", "ffn_residual")),
    ]
    if not any(p.values("max", "ffn_residual")[1] for p in chosen):
        return None
    figure, axes = new_figure(5, 3.1)
    # One kind of scale for all four.
    ranges = [
        [v for p in chosen for v in p.values(*path)[1] if v > 0] for _, path in panels if path[0] == "max"
    ]
    wide = any(values and max(values) > 8 * min(values) for values in ranges)
    for axis, (title, path) in zip(axes, panels):
        seen = []
        for p in chosen:
            seen += p.line(axis, path, linewidth=1.5, label=p.name)
        axis.set_title(title)
        if path[0] == "max":
            axis.set_ylabel("largest |value|")
            if seen and not (wide and log_if_wide(axis, seen, 1)):
                axis.set_ylim(0, 1.1 * max(seen))
        else:
            axis.set_ylim(0, min(1.02, 1.15 * max(seen + [0.01])))
            axis.set_ylabel("share of attention")
            axis.yaxis.set_major_formatter(
                PercentFormatter(1.0, decimals=0 if max(seen + [0.01]) > 0.05 else 1)
            )
        layer_ticks(axis, max(len(p.layers) for p in chosen))
    legend(figure, axes, width=3)
    return figure


def figures(groups: list[Group]) -> list[tuple[str, Callable[[], Figure | None], str]]:
    return [
        (
            "figure3_gate_scores",
            lambda: plot_gate_histograms(groups),
            "Figure 3: scores over all layers, 50 bins; of gates without bounds between the outermost scores of all layers and seeds. Sparse "
            "gates stand far left. Of several seeds the mean.",
        ),
        (
            "figure4_mean_abs",
            lambda: plot_mean_abs(groups),
            "Figure 4: mean absolute value of attention's output, before and after the gate where one lies on it. "
            + BANDS,
        ),
        (
            "figure5_shares",
            lambda: plot_shares(groups),
            "Figure 5: how many values of attention's output are next to nothing. Dotted: what scaling by the mean score "
            "alone would do. " + BANDS,
        ),
        (
            "figure6_maxima",
            lambda: plot_maxima(groups),
            "Figure 6: the largest absolute values in a layer, and attention on the first token. " + BANDS,
        ),
        (
            "figure7_gate_layers",
            lambda: plot_gate_layers(groups),
            "Figure 7: gate scores layer by layer. Means "
            "over seeds, with bars of their standard deviation; the extremes are those of all seeds.",
        ),
    ]
