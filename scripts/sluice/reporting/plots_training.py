"""Plots of the runs' own records: losses, speed, residuals, sinks, gates and routers over training. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .looks import GREY
from .style import DASHES, layers_axis, legend, log_if_wide, markers_for, new_figure, tokens_axis
from .tables import with_spread
from .values import deviation, fixed, mean, number, quantile, short, smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .runs import Run


def plot_metric(
    runs: list[Run], key: str, title: str, label: str, raw: bool = True, log: bool = False
) -> Figure | None:
    """One key of metrics.jsonl over training: the values pale, their running average on top."""
    figure, (axis,) = new_figure()
    lines: list[tuple[Run, list[float], list[float]]] = []
    extra: list[tuple[Any, str]] = []
    for i, run in enumerate(runs):
        x, y = run.series(key)
        if not x:
            continue
        # Equal curves stay visible: the first one is the widest.
        width = 1.8 if raw else 1.6 + 2.2 * (len(runs) - 1 - i) / max(1, len(runs) - 1)
        if run.grey:
            width = 1.0
        elif raw:
            axis.plot(x, y, color=run.colour, alpha=0.22, linewidth=0.8)
        lines.append((run, x, smooth(y) if raw else y))
        axis.plot(*lines[-1][1:], color=run.colour, linestyle=run.dash, linewidth=width, label=run.label)
    if not lines:
        plt.close(figure)
        return None
    # Grey runs may leave the picture: one that diverged would flatten the rest.
    shown = [line for line in lines if not line[0].grey or key == "lr"] or lines
    values = [v for run, _, _ in shown for v in run.series(key)[1]]
    smoothed = [v for _, _, y in shown for v in y]
    if log:
        log_if_wide(axis, values)
    if axis.get_yscale() == "linear" and raw:
        # Single outliers of the raw values may leave the picture; the averages never do.
        low, high = min(min(smoothed), quantile(values, 0.005)), max(max(smoothed), quantile(values, 0.99))
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        axis.set_ylim(low - margin if low > margin else 0.0, high + margin)
    elif raw:
        axis.set_ylim(bottom=0.8 * min(min(smoothed), quantile(values, 0.005)))
    if key in ("loss", "grad_norm"):
        top = axis.get_ylim()[1]
        for event, marker, name in (("spikes", "v", "spike"), ("skipped", "X", "skipped step")):
            style: dict[str, Any] = {
                "marker": marker,
                "linestyle": "none",
                "markeredgecolor": "black",
                "markeredgewidth": 0.8,
            }
            for run, _, _ in shown:
                raw_values = dict(zip(*run.series(key)))
                places = [p for p in run.events(event) if p in raw_values]
                if not places:
                    continue
                axis.plot(
                    places,
                    [min(raw_values[p], top) for p in places],
                    color=run.colour,
                    markersize=7,
                    zorder=5,
                    clip_on=False,
                    **style,
                )
                if name not in [n for _, n in extra]:
                    extra.append((plt.Line2D([], [], color="#bbbbbb", markersize=7, **style), name))
    axis.set_title(title)
    axis.set_ylabel(label)
    if key == "tokens_per_second":
        axis.set_ylim(0, 1.15 * max(smoothed))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: short(v) if v else "0"))
    if key == "lr":
        axis.set_ylim(0, 1.05 * max(values) or 1.0)
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    tokens_axis(axis)
    legend(figure, [axis], extra)
    return figure


def last_values(runs: list[Run], name: str, key: str) -> list[tuple[float, float | None, str]]:
    """[(mean, standard deviation, colour)] of the coloured groups' last evaluations on a set, the least first."""
    groups = list(dict.fromkeys(run.group for run in runs if not run.grey)) or list(
        dict.fromkeys(run.group for run in runs)
    )
    out = []
    for group in groups:
        values = [number(((run.last.get("sets") or {}).get(name) or {}).get(key)) for run in group.sound()]
        if mean(values) is not None:
            out.append((mean(values), deviation(values), group.first.colour))
    return sorted(out, key=lambda item: item[0])[:8]


def plot_validation(runs: list[Run], key: str, title: str, label: str) -> Figure | None:
    """One panel per validation set."""
    sets = []
    for run in runs:
        sets += [s for s in run.sets() if s not in sets]
    if not sets:
        return None
    figure, axes = new_figure(len(sets), 3.4)
    for axis, name in zip(axes, sets):
        for run in runs:
            x, y = run.eval_series(lambda e, n=name: ((e.get("sets") or {}).get(n) or {}).get(key))
            if x:
                axis.plot(x, y, color=run.colour, marker=run.marker, label=run.label, **markers_for(len(x)))
        axis.set_title(name if len(sets) > 1 else f"{title}: {name}")
        axis.set_ylabel(label)
        tokens_axis(axis)
        # The first evaluations, near chance, would flatten the rest.
        shown = [line for line in axis.lines if line.get_color() != GREY]
        curves = [list(line.get_ydata()) for line in shown or axis.lines]
        tails = [v for y in curves for v in y[len(y) // 5 :]]
        if tails:
            low, high = min(min(y) for y in curves), max(tails)
            margin = 0.1 * (high - low) or 0.05 * abs(high) or 1.0
            axis.set_ylim(low - margin, high + margin)
        for i, (value, spread, colour) in enumerate(last_values(runs, name, key)):
            axis.text(
                0.98,
                0.96 - 0.085 * i,
                with_spread(fixed(4), value, spread),
                color=colour,
                ha="right",
                va="top",
                transform=axis.transAxes,
                fontweight="bold",
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8},
            )
    if len(sets) > 1:
        figure.suptitle(title, fontweight="bold")
    legend(figure, axes)
    return figure


def plot_over_layers(
    runs: list[Run],
    title: str,
    label: str,
    over_time: Callable[..., Any],
    per_layer: list[tuple[str, Callable[..., Any]]],
    log: bool = False,
    unit: bool = False,
) -> Figure | None:
    """Left: over training. Right: layer by layer at the last evaluation. per_layer: [(name, pick)]."""
    figure, (left, right) = new_figure(2)
    left_values, right_values = [], []
    for run in runs:
        x, y = run.eval_series(over_time)
        if x:
            left.plot(x, y, color=run.colour, marker=run.marker, label=run.label, **markers_for(len(x)))
            left_values += y
        for i, (_, pick) in enumerate(per_layer):
            x, y = run.layers(pick)
            if x:
                right.plot(
                    x,
                    y,
                    color=run.colour,
                    marker=run.marker,
                    linestyle=DASHES[i % len(DASHES)],
                    label=run.label,
                    **markers_for(len(x)),
                )
                right_values += y
    if not right_values:
        plt.close(figure)
        return None
    left.set_title("over training")
    right.set_title("per layer, last evaluation")
    for axis, values in ((left, left_values), (right, right_values)):
        axis.set_ylabel(label)
        wide = log and log_if_wide(axis, values)
        if unit:
            axis.set_ylim(0, min(1.02, 1.15 * max(values + [0.01])))
        elif not wide:
            axis.set_ylim(min(0.0, 1.1 * min(values, default=0)), 1.1 * max(values, default=1) or 1.0)
    tokens_axis(left)
    layers_axis(right, runs)
    extra = []
    if len(per_layer) > 1:
        extra = [
            (plt.Line2D([], [], color="#555555", linestyle=DASHES[i % len(DASHES)]), name)
            for i, (name, _) in enumerate(per_layer)
        ]
    figure.suptitle(title, fontweight="bold")
    legend(figure, [left, right], extra)
    return figure


def plot_routers(runs: list[Run]) -> Figure | None:
    """Experts' loads and the routers' losses over training, and the loads layer by layer at the end."""
    runs = [r for r in runs if r.routers(lambda m: m.get("max_over_mean"))[0]]
    if not runs:
        return None
    panels = [
        ("busiest expert, worst layer", "tokens over the mean", lambda m: m.get("max_over_mean"), 1.0),
        ("balance loss, mean over layers", "loss (1: balanced)", lambda m: m.get("balance_loss"), 1.0),
        ("z loss, mean over layers", "mean squared log-sum-exp", lambda m: m.get("z_loss"), 0.0),
        ("experts without a token", "experts, all layers", lambda m: m.get("idle"), 0.0),
    ]
    figure, axes = new_figure(6, 3.2)
    for axis, (title, label, pick, floor) in zip(axes, panels):
        curves = []
        for run in runs:
            x, y = run.routers(pick)
            axis.plot(x, y, color=run.colour, alpha=0.22, linewidth=0.8)
            axis.plot(x, smooth(y), color=run.colour, linestyle=run.dash, label=run.label)
            curves += y
        axis.set_title(title)
        axis.set_ylabel(label)
        high = max(quantile(curves, 0.995) if curves else floor, floor)
        axis.set_ylim(floor, high + 0.08 * (high - floor) + 1e-3)
        tokens_axis(axis)
    last = [
        ("busiest expert, per layer", "tokens over the mean", "max_over_mean"),
        ("evenness, per layer", "entropy of the loads / log experts", "entropy"),
    ]
    for axis, (title, label, key) in zip(axes[4:], last):
        for run in runs:
            layers = [r["router"] for r in run.metrics if isinstance(r.get("router"), dict)][-1].get(
                "layers"
            ) or []
            axis.plot(
                [layer.get("layer") for layer in layers],
                [layer.get(key) for layer in layers],
                color=run.colour,
                marker=run.marker,
                linestyle="none" if len(layers) == 1 else run.dash,
                label=run.label,
            )
        axis.set_title(title + ", last step")
        axis.set_ylabel(label)
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axis.set_ylim(0, 1.03 if key == "entropy" else None)
    figure.suptitle("Routers", fontweight="bold")
    legend(figure, axes)
    return figure


def gate_picks(runs: list[Run]) -> list[tuple[str, Callable[..., Any]]]:
    count = max([r.gates() for r in runs], default=0)

    def pick(i: int) -> Callable[..., Any]:
        return lambda layer: (
            (layer.get("gate_scores") or [])[i] if i < len(layer.get("gate_scores") or []) else None
        )

    return [(f"gate {i + 1}", pick(i)) for i in range(count)]


def figures(runs: list[Run]) -> list[tuple[str, Callable[[], Figure | None], str]]:
    """(file name, figure, one sentence of explanation) of every plot there is data for."""
    gated = [r for r in runs if r.gates()]
    others = list(dict.fromkeys(name for run in runs for name in run.other_scalars()))
    return [
        (
            "train_loss",
            lambda: plot_metric(runs, "loss", "Training loss", "loss (nats per token)"),
            "Pale: every logged step. Strong: median and mean over 4 % of the run around it.",
        ),
        (
            "validation_loss",
            lambda: plot_validation(runs, "loss", "Validation loss", "loss (nats per token)"),
            "Held-out text, in file order. Numbers: the last evaluation, best first (of several seeds, the mean ± standard deviation).",
        ),
        (
            "validation_bits_per_byte",
            lambda: plot_validation(runs, "bits_per_byte", "Validation bits per byte", "bits per byte"),
            "Comparable between tokenizers, and with the size of a compressed file.",
        ),
        (
            "largest_residual",
            lambda: plot_over_layers(
                runs,
                "Largest residual activation",
                "max |activation|",
                lambda e: (e.get("analysis") or {}).get("largest_residual"),
                [
                    ("after attention", lambda layer: layer.get("attention_residual_max")),
                    ("after feed-forward", lambda layer: layer.get("ffn_residual_max")),
                ],
                log=True,
            ),
            "Massive activations: the largest absolute value in the residual stream after either branch.",
        ),
        (
            "first_token_attention",
            lambda: plot_over_layers(
                runs,
                "Attention on the first token",
                "share of attention",
                lambda e: (e.get("analysis") or {}).get("first_token_attention"),
                [("", lambda layer: layer.get("first_token_attention"))],
                unit=True,
            ),
            "The attention sink: mean attention, over queries and heads, on the first visible key.",
        ),
        (
            "gate_score",
            lambda: (
                plot_over_layers(
                    gated,
                    "Mean gate score",
                    "mean score",
                    lambda e: (e.get("analysis") or {}).get("mean_gate_score"),
                    gate_picks(gated),
                )
                if gated
                else None
            ),
            "Below one half, a sigmoid gate closes more than it opens. Runs without gates have no line.",
        ),
        (
            "routers",
            lambda: plot_routers(runs),
            "Load of the experts in each logged step. The losses are before their coefficients. Runs without experts have no line.",
        ),
        (
            "gradient_norm",
            lambda: plot_metric(
                runs, "grad_norm", "Gradient norm before clipping", "global L2 norm", log=True
            ),
            "Pale: every logged step. Strong: median and mean around it.",
        ),
        ("learning_rate", lambda: plot_metric(runs, "lr", "Learning rate", "learning rate", raw=False), ""),
        (
            "tokens_per_second",
            lambda: plot_metric(runs, "tokens_per_second", "Speed", "tokens per second"),
            "Between log lines, without evaluation and saving.",
        ),
        *(scalar_figure(runs, name) for name in others),
    ]


def scalar_figure(runs: list[Run], name: str) -> tuple[str, Callable[[], Figure | None], str]:
    """Of a number of the metrics that has no figure of its own."""
    words = name.replace("/", ": ").replace("_", " ")
    return (
        name.replace("/", "_"),
        lambda: plot_metric(runs, name, words[0].upper() + words[1:], words),
        "As metrics.jsonl has it; a loss is before its coefficient. Pale: every logged step. Strong: median and mean around it.",
    )
