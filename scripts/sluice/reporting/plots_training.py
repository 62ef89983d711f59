"""Plots of the runs' own records: losses, speed, residuals, sinks, gates and routers over training. Needs matplotlib."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .curves import curves_of
from .looks import GREY
from .runs import Run
from .style import DASHES, layers_axis, legend, log_if_wide, markers_for, new_figure, tokens_axis
from .tables import with_spread
from .values import deviation, fixed, mean, number, quantile, short, smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .curves import Points

MOST_NUMBERS = 5  # beside curves; more would cover them
SEEDS = "Of several seeds: the mean, and a band of one standard deviation to either side."
AVERAGED = (
    "Pale: every logged step of a single run. Strong: its median and mean over 4 % of the run around it; of several seeds the mean of "
    "those, and a band of one standard deviation to either side. Thin: a seed that is not in the mean."
)


def plot_metric(runs: list[Run], key: str, label: str, raw: bool = True, log: bool = False) -> Figure | None:
    """One key of metrics.jsonl over training: one run's values pale, their running average on top; of several seeds the mean of
    the averages with a band of their deviation."""
    figure, (axis,) = new_figure()
    extra: list[tuple[Any, str]] = []

    def averaged(run: Run) -> Points:
        x, y = run.series(key)
        return x, smooth(y) if raw and y else y

    lines = curves_of(runs, averaged)
    for i, curve in enumerate(lines):
        # Equal curves stay visible: the first one is the widest.
        width = 1.8 if raw else 1.6 + 2.2 * (len(lines) - 1 - i) / max(1, len(lines) - 1)
        if curve.run.grey:
            width = 1.0
        elif raw and not curve.spread and not curve.aside:
            axis.plot(*curve.run.series(key), color=curve.run.colour, alpha=0.22, linewidth=0.8)
        curve.draw(axis, linestyle=curve.run.dash, linewidth=width)
    if not lines:
        plt.close(figure)
        return None
    # Grey runs may leave the picture: one that diverged would flatten the rest.
    shown = [line for line in lines if not line.run.grey or key == "lr"] or lines
    with_points = [run for run in runs if run.series(key)[0]]
    marked = [run for run in with_points if not run.grey or key == "lr"] or with_points
    values = [v for run in marked for v in run.series(key)[1]]
    smoothed = [v for line in shown for v in line.reach()]
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
            for run in marked:
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
    """[(mean, standard deviation, colour)] of the coloured groups' last evaluations on a set, the least first; none
    where there are many."""
    groups = list(dict.fromkeys(run.group for run in runs if not run.grey)) or list(
        dict.fromkeys(run.group for run in runs)
    )
    out = []
    for group in groups:
        values = [
            number(((run.last.get("sets") or {}).get(name) or {}).get(key)) for run in group.evaluated()
        ]
        if mean(values) is not None:
            out.append((mean(values), deviation(values), group.first.colour))
    return sorted(out, key=lambda item: item[0]) if len(out) <= MOST_NUMBERS else []


def set_points(run: Run, name: str, key: str) -> Points:
    """(tokens, values) of one validation set."""
    return run.eval_series(lambda e: ((e.get("sets") or {}).get(name) or {}).get(key))


def plot_validation(runs: list[Run], key: str, label: str) -> Figure | None:
    """One panel per validation set, named where there are several."""
    sets = []
    for run in runs:
        sets += [s for s in run.sets() if s not in sets]
    if not sets:
        return None
    figure, axes = new_figure(len(sets), 3.4)
    for axis, name in zip(axes, sets):
        drawn = curves_of(runs, functools.partial(set_points, name=name, key=key))
        for curve in drawn:
            curve.draw(axis, marker=curve.run.marker, **markers_for(len(curve.x)))
        if len(sets) > 1:
            axis.set_title(name)
        axis.set_ylabel(label)
        tokens_axis(axis)
        # The first evaluations, near chance, would flatten the rest.
        shown = [curve for curve in drawn if curve.colour != GREY] or drawn
        edges = [edge for curve in shown for edge in curve.edges()]
        tails = [v for y in edges for v in y[len(y) // 5 :]]
        if tails:
            low, high = min(min(y) for y in edges), max(tails)
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
    legend(figure, axes)
    return figure


def plot_over_layers(
    runs: list[Run],
    label: str,
    over_time: Callable[..., Any],
    per_layer: list[tuple[str, Callable[..., Any]]],
    log: bool = False,
    unit: bool = False,
) -> Figure | None:
    """Left: over training. Right: layer by layer at the last evaluation. per_layer: [(name, pick)]."""
    figure, (left, right) = new_figure(2)
    left_values, right_values = [], []
    for curve in curves_of(runs, lambda run: run.eval_series(over_time)):
        curve.draw(left, marker=curve.run.marker, **markers_for(len(curve.x)))
        left_values += curve.reach()
    for i, (_, pick) in enumerate(per_layer):
        for curve in curves_of(runs, functools.partial(Run.layers, pick=pick)):
            style = {"marker": curve.run.marker, "linestyle": DASHES[i % len(DASHES)]}
            curve.draw(right, **style, **markers_for(len(curve.x)))
            right_values += curve.reach()
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
    legend(figure, [left, right], extra)
    return figure


def smoothed_routers(run: Run, pick: Callable[..., Any]) -> Points:
    x, y = run.routers(pick)
    return x, smooth(y) if y else y


def last_loads(run: Run, key: str) -> Points:
    """(layer, value) of the routers at the last logged step that has them."""
    routers = [r["router"] for r in run.metrics if isinstance(r.get("router"), dict)]
    layers = (routers[-1].get("layers") or []) if routers else []
    pairs = [(number(layer.get("layer")), number(layer.get(key))) for layer in layers]
    pairs = [(x, y) for x, y in pairs if x is not None and y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


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
            curves += run.routers(pick)[1]
        for curve in curves_of(runs, functools.partial(smoothed_routers, pick=pick)):
            if not curve.spread and not curve.aside:
                axis.plot(*curve.run.routers(pick), color=curve.run.colour, alpha=0.22, linewidth=0.8)
            curve.draw(axis, linestyle=curve.run.dash)
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
        for curve in curves_of(runs, functools.partial(last_loads, key=key)):
            alone = "none" if len(curve.x) == 1 else curve.run.dash
            curve.draw(axis, marker=curve.run.marker, linestyle=alone)
        axis.set_title(title + ", last step")
        axis.set_ylabel(label)
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axis.set_ylim(0, 1.03 if key == "entropy" else None)
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
            lambda: plot_metric(runs, "loss", "loss (nats per token)"),
            f"Training loss. {AVERAGED}",
        ),
        (
            "validation_loss",
            lambda: plot_validation(runs, "loss", "loss (nats per token)"),
            "Validation loss. Held-out text, in file order. Numbers: the last evaluation, best first, ± the standard deviation. "
            + SEEDS,
        ),
        (
            "validation_bits_per_byte",
            lambda: plot_validation(runs, "bits_per_byte", "bits per byte"),
            "Validation bits per byte: comparable between tokenizers, and with the size of a compressed file. "
            + SEEDS,
        ),
        (
            "largest_residual",
            lambda: plot_over_layers(
                runs,
                "max |activation|",
                lambda e: (e.get("analysis") or {}).get("largest_residual"),
                [
                    ("after attention", lambda layer: layer.get("attention_residual_max")),
                    ("after feed-forward", lambda layer: layer.get("ffn_residual_max")),
                ],
                log=True,
            ),
            "Massive activations: the largest absolute value in the residual stream after either branch. "
            + SEEDS,
        ),
        (
            "first_token_attention",
            lambda: plot_over_layers(
                runs,
                "share of attention",
                lambda e: (e.get("analysis") or {}).get("first_token_attention"),
                [("", lambda layer: layer.get("first_token_attention"))],
                unit=True,
            ),
            "The attention sink: mean attention, over queries and heads, on the first visible key. " + SEEDS,
        ),
        (
            "gate_score",
            lambda: (
                plot_over_layers(
                    gated,
                    "mean score",
                    lambda e: (e.get("analysis") or {}).get("mean_gate_score"),
                    gate_picks(gated),
                )
                if gated
                else None
            ),
            "Mean gate score. Below one half, a sigmoid gate closes more than it opens. Runs without gates have no line. "
            + SEEDS,
        ),
        (
            "routers",
            lambda: plot_routers(runs),
            "Routers: load of the experts in each logged step. The losses are before their coefficients. Runs without experts have "
            "no line. " + SEEDS,
        ),
        (
            "gradient_norm",
            lambda: plot_metric(runs, "grad_norm", "global L2 norm", log=True),
            f"Gradient norm before clipping. {AVERAGED}",
        ),
        (
            "learning_rate",
            lambda: plot_metric(runs, "lr", "learning rate", raw=False),
            "Learning rate.",
        ),
        (
            "tokens_per_second",
            lambda: plot_metric(runs, "tokens_per_second", "tokens per second"),
            "Speed: tokens per second between log lines, without evaluation and saving. " + SEEDS,
        ),
        *(scalar_figure(runs, name) for name in others),
    ]


def scalar_figure(runs: list[Run], name: str) -> tuple[str, Callable[[], Figure | None], str]:
    """Of a number of the metrics that has no figure of its own."""
    words = name.replace("/", ": ").replace("_", " ")
    return (
        name.replace("/", "_"),
        lambda: plot_metric(runs, name, words),
        f"{words[0].upper() + words[1:]}, as metrics.jsonl has it; a loss is before its coefficient. {AVERAGED}",
    )
