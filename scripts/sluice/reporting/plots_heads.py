"""The sink-aware paper's figures, of our runs: importance of heads, imbalance, value norms, queries and keys. Needs
matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from .curves import curves_of, seeds_text
from .groups import size
from .looks import COLOURS, GREY, MOST
from .plots_paper import picks
from .sinks import strongest
from .style import DASHES, first_column, legend, new_figure, tokens_axis, wrapped
from .values import ema, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .groups import Group
    from .plots_paper import Pick

PAIRS = [
    "plain",
    "plain balanced",
    "sink",
    "sink balanced",
    "sdpa_output headwise",
    "sdpa_output headwise balanced",
]


def grid(count: int, width: float, height: float, most: int = 3, **options: Any) -> tuple[Figure, list[Axes]]:
    """Panels for images, which share a colour bar."""
    columns = min(count, most)
    rows = (count + columns - 1) // columns
    figure, axes = plt.subplots(
        rows,
        columns,
        squeeze=False,
        layout="constrained",
        figsize=(width * columns + 0.8, height * rows + 0.3),
        **options,
    )
    flat = [axis for row in axes for axis in row]
    for axis in flat[count:]:
        axis.set_visible(False)
    for axis in flat[:count]:
        axis.grid(False)
    return figure, flat[:count]


def importance(layers: list[Any]) -> list[list[float]]:
    """None where a head has none: of gates that heads share."""
    rows = [((layer.get("heads") or {}).get("importance")) for layer in layers]
    return (
        [[number(v) for v in row] for row in rows]
        if rows and all(rows) and len({len(r) for r in rows}) == 1 and None not in sum(rows, [])
        else None
    )


def chosen_picks(groups: list[Group]) -> list[Pick]:
    own = [g for g in groups if any(row.startswith("S1") for row in g.rows)]
    return picks(own, PAIRS) or picks(
        groups, ["plain", "sdpa_output elementwise", "sdpa_output headwise", "value elementwise"], MOST
    )


def heat(axis: Axes, rows: Any, title: str) -> Any:
    image = axis.imshow(rows, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("head")
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    if len(rows) * len(rows[0]) <= 64:
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                if value is not None:
                    axis.text(
                        x,
                        y,
                        f"{value:.2f}",
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if value < 0.55 else "black",
                    )
    return image


def plot_importance(groups: list[Group]) -> Figure | None:
    made = [(p, importance(p.first.layers)) for p in chosen_picks(groups)]
    made = [(p, rows) for p, rows in made if rows][:9]
    if not made:
        return None
    layers, heads = len(made[0][1]), len(made[0][1][0])
    figure, axes = grid(len(made), max(3.2, min(4.4, 0.4 * heads)), max(2.2, min(4.0, 0.3 * layers + 0.9)))
    for axis, (p, rows) in zip(axes, made):
        imbalance = number(p.first.total.get("imbalance"))
        image = heat(axis, rows, wrapped(p.group.label, 22) + (f"\nimbalance {imbalance:.3f}" if imbalance is not None else ""))
    for axis in first_column(axes):
        axis.set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.85, label="importance (mean gate)")
    return figure


def plot_importance_sets(groups: list[Group]) -> Figure | None:
    """Of one run, how far each set's importance is from the mean over sets."""
    for p in chosen_picks(groups):
        sets = [
            (s.get("name"), s.get("importance"))
            for s in p.first.data.get("sets") or []
            if s.get("importance")
        ]
        if len(sets) > 1:
            break
    else:
        return None
    mean = [[sum(column) / len(sets) for column in zip(*rows)] for rows in zip(*[rows for _, rows in sets])]
    off = [(name, [[a - b for a, b in zip(r, m)] for r, m in zip(rows, mean)]) for name, rows in sets]
    reach = max(abs(v) for _, rows in off for row in rows for v in row) or 1.0
    figure, axes = grid(len(off), 3.0, 2.2)
    for axis, (name, rows) in zip(axes, off):
        image = axis.imshow(
            rows, cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest"
        )
        axis.set_title(str(name), fontsize=10)
        axis.set_xlabel("head")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axis in first_column(axes):
        axis.set_ylabel(f"{wrapped(p.group.label)}\nlayer")
    figure.colorbar(image, ax=axes, shrink=0.85, label="importance less the mean over sets")
    return figure


def plot_imbalance(groups: list[Group]) -> Figure | None:
    """Colours are mechanisms; a run with the auxiliary loss has its mechanism's colour, dashed."""
    evaluated = lambda run: run.eval_series(lambda e: (e.get("analysis") or {}).get("imbalance"))
    averaged = lambda run: (run.heads("imbalance")[0], ema(run.heads("imbalance")[1]))
    groups = [g for g in groups if any(r.heads("imbalance")[0] or evaluated(r)[0] for r in g.runs)]
    if not groups:
        return None
    known: dict[tuple[Any, ...], int] = {}
    kind = lambda g: (g.variant.removesuffix(" balanced"), size(g), g.first.get("optimizer.lr"))
    figure, (axis,) = new_figure(1, 3.8)
    for group in groups:
        known.setdefault(kind(group), len(known))
    colours = COLOURS  # nine are needed: the paper's three mechanisms at three sizes
    shown = False
    for group in sorted(groups, key=lambda g: known[kind(g)] < len(colours)):
        at = known[kind(group)]
        colour = colours[at] if at < len(colours) else GREY
        balanced = group.variant.endswith(" balanced")
        name = group.label + seeds_text(group) if colour != GREY else "_other" if shown else "others"
        shown = shown or colour == GREY
        logged = any(run.heads("imbalance")[0] for run in group.runs)
        for run in group.runs if logged and group.count() == 1 else []:
            axis.plot(*run.heads("imbalance"), color=colour, alpha=0.2, linewidth=0.8)
        for i, curve in enumerate(curves_of(group.runs, averaged if logged else evaluated)):
            curve.recolour(colour, "_seed" if i else name)
            dots = {} if logged else {"marker": "o", "markersize": 4}
            curve.draw(axis, linestyle=DASHES[balanced], linewidth=1.6 if logged else 1.2, **dots)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("mean over layers of deviation / mean")
    tokens_axis(axis)
    legend(figure, [axis], width=3)
    return figure


def plot_value_norms(groups: list[Group]) -> Figure | None:
    import numpy

    made = [(p, p.seeds.array("value_norms")) for p in chosen_picks(groups)]
    made = [(p, norms) for p, norms in made if norms is not None and norms.ndim == 3][:9]
    if not made:
        return None

    def ratio_of(norms: Any) -> Any:
        mean = norms.mean(axis=1)  # over key/value heads
        return numpy.log2(mean / numpy.maximum(numpy.median(mean, axis=1, keepdims=True), 1e-12) + 1e-12)

    made = [(p, ratio_of(norms)) for p, norms in made]
    reach = min(4.0, max(0.5, max(float(numpy.abs(ratio[:, :64]).max()) for _, ratio in made)))
    figure, axes = grid(len(made), 3.7, 2.4)
    for axis, (p, ratio) in zip(axes, made):
        image = axis.imshow(
            ratio[:, :64], cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest"
        )
        axis.set_title(
            f"{wrapped(p.name)}\nfirst token: {2 ** float(ratio[:, 0].mean()):.2f} of the layer's median", fontsize=10
        )
        axis.set_xlabel("position")
        axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axis in first_column(axes):
        axis.set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.85, label="log2 of |v| over the layer's median")
    return figure


def plot_pca(groups: list[Group]) -> Figure | None:
    """Queries and keys of one head of each run: the one that looks most at the first token."""
    made = []
    # One per mechanism before its balanced twin.
    for p in sorted(chosen_picks(groups), key=lambda p: p.group.variant.endswith(" balanced")):
        queries, keys = p.first.array("query_pca"), p.first.array("key_pca")
        if queries is None or keys is None or queries.ndim != 4:
            continue
        shares = [
            (number(v) or 0.0, i, h)
            for i, layer in enumerate(p.first.layers)
            for h, v in enumerate((layer.get("heads") or {}).get("first_token_attention") or [])
        ]
        layer, head = strongest(p.first.layers) or max(shares, default=(0.0, 0, 0))[1:]
        kv = head * keys.shape[1] // queries.shape[1]
        explained = [
            (p.first.array(name), at)
            for name, at in (("query_explained_variance", head), ("key_explained_variance", kv))
        ]
        made.append(
            (
                p,
                layer,
                head,
                (queries[layer, head], keys[layer, kv]),
                [None if a is None else a[layer, at] for a, at in explained],
            )
        )
    made = made[:4]
    if not made:
        return None
    figure, axes = plt.subplots(
        2, len(made), squeeze=False, layout="constrained", figsize=(3.1 * len(made) + 0.8, 6.2)
    )
    for column, (p, layer, head, both, explained) in enumerate(made):
        tokens = (p.first.data.get("maps") or {}).get("tokens") or 0
        for row, (name, points, share) in enumerate(zip(("queries", "keys"), both, explained)):
            axis = axes[row][column]
            # Several sequences one after the other: each has a first token.
            period = tokens if tokens and len(points) % tokens == 0 else len(points)
            place = [i % period for i in range(len(points))]
            rest = [i for i in range(len(points)) if place[i]]
            first = [i for i in range(len(points)) if not place[i]]
            dots = axis.scatter(
                points[rest, 0],
                points[rest, 1],
                c=[place[i] for i in rest],
                cmap="viridis",
                s=9,
                linewidths=0,
            )
            axis.scatter(
                points[first, 0],
                points[first, 1],
                marker="*",
                s=120,
                color="#D55E00",
                edgecolors="black",
                linewidths=0.7,
                zorder=4,
            )
            axis.set_title(
                (f"{wrapped(p.group.label)}\nlayer {layer}, head {head}: " if row == 0 else "") + name, fontsize=9.5
            )
            axis.tick_params(labelsize=8)
            shown = [f" ({100 * float(v):.0f} %)" for v in share] if share is not None else ["", ""]
            axis.set_xlabel("first component" + shown[0], fontsize=9)
            axis.set_ylabel("second component" + shown[1], fontsize=9)
    figure.colorbar(dots, ax=axes, shrink=0.8, label="position in its sequence (stars: the first)")
    return figure


def figures(groups: list[Group]) -> list[tuple[str, Callable[[], Figure | None], str]]:
    return [
        (
            "heads_importance",
            lambda: plot_importance(groups),
            "How open each head is on average: its explicit gate, or the implicit one of softmax (1 less the first token's share) "
            "or sink attention. Heads of different seeds have nothing in common: of several seeds the first.",
        ),
        (
            "heads_importance_by_set",
            lambda: plot_importance_sets(groups),
            "Whether heads are open for other texts than others; of the first seed.",
        ),
        (
            "heads_imbalance",
            lambda: plot_imbalance(groups),
            "Head imbalance over training. Pale: every logged step of a single run; strong: EMA (0.9), of several seeds the mean with a "
            "band of one standard deviation. Dashed: with the auxiliary loss. Dots: evaluations, of runs that do not log it.",
        ),
        (
            "value_norms",
            lambda: plot_value_norms(groups),
            "Norms of the values, mean over key/value heads, of the first 64 positions, mean over seeds. Blue: smaller.",
        ),
        (
            "query_key_pca",
            lambda: plot_pca(groups),
            "Two principal components of a head's queries and keys; the head is the one that looks most at the first token. "
            "In brackets: the share of the variance. Of several seeds the first.",
        ),
    ]
