"""Figures 3 to 7 of the Gated Attention paper, of our runs: gate scores, attention's output, activations, layer by layer. They
read RUN/analysis. Needs matplotlib."""
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from .plots_paper import ELEMENTWISE, SHARED, gates_of, picks
from .style import first_column, layer_ticks, legend, log_if_wide, new_figure
from .values import number


# ---- figures 3 and 7

def histogram(gates):
    """Shares of the scores of all layers, in 50 bins, and the bins' edges; None where layers have other edges."""
    edges = {(g.get("edges_min"), g.get("edges_max")) for g in gates}
    if len(edges) != 1 or not all(g.get("histogram_50") for g in gates):
        return None
    counts = [sum(column) for column in zip(*[g["histogram_50"] for g in gates])]
    low, high = edges.pop()
    step = (high - low) / len(counts)
    total = sum(counts) or 1
    return [low + i * step for i in range(len(counts) + 1)], [c / total for c in counts]


def plot_gate_histograms(groups):
    made = []
    for p in picks(groups, [ELEMENTWISE, "value elementwise", SHARED]):
        for name, gates in gates_of(p):
            bins = histogram(gates)
            if bins:
                means = [number(g.get("mean")) for g in gates]
                means = [m for m in means if m is not None]
                made.append((p, name, sum(means) / len(means) if means else None, *bins))
    if not made:
        return None
    figure, axes = new_figure(min(len(made), 6), 3.0, shared=True)
    for axis, (p, name, mean, edges, shares) in zip(axes, made):
        axis.stairs(shares, edges, color=p.colour, fill=True, alpha=0.35)
        axis.stairs(shares, edges, color=p.colour)
        if mean is not None:
            axis.axvline(mean, color="#333333", linestyle="--", linewidth=1.2)
            right = mean < 0.5 * (edges[0] + edges[-1])
            axis.text(mean, 0.97, f" mean {mean:.3f} ", transform=axis.get_xaxis_transform(), va="top",
                      ha="left" if right else "right", fontsize=9)
        axis.set_title(name)
        axis.set_xlabel("gate score")
    for axis in first_column(axes):
        axis.set_ylabel("share of the scores")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    legend(figure, [])
    return figure


def plot_gate_layers(groups):
    made = []
    for p in picks(groups, [ELEMENTWISE, "sdpa_output headwise", SHARED, ELEMENTWISE + " ns_sigmoid"]):
        made += [(p, name, gates) for name, gates in gates_of(p)]
    if not made:
        return None
    figure, axes = new_figure(min(len(made), 6), 3.0, shared=True)
    for axis, (p, name, gates) in zip(axes, made):
        x = list(range(len(gates)))
        get = lambda key: [number(g.get(key)) if number(g.get(key)) is not None else float("nan") for g in gates]
        mean, std = get("mean"), get("std")
        low = [max(m - s, least) for m, s, least in zip(mean, std, get("min"))]
        high = [min(m + s, most) for m, s, most in zip(mean, std, get("max"))]
        axis.fill_between(x, low, high, color=p.colour, alpha=0.2, linewidth=0)
        axis.plot(x, mean, color=p.colour, marker="o", markersize=4.5)
        axis.plot(x, get("min"), color="#444444", linestyle=":", linewidth=1.3)
        axis.plot(x, get("max"), color="#444444", linestyle=":", linewidth=1.3)
        axis.set_title(name)
        layer_ticks(axis, len(gates))
    for axis in first_column(axes):
        axis.set_ylabel("gate score")
    grey = plt.Line2D([], [], color="#777777", marker="o", markersize=4.5)
    band = plt.Rectangle((0, 0), 1, 1, color="#777777", alpha=0.25, linewidth=0)
    dots = plt.Line2D([], [], color="#444444", linestyle=":", linewidth=1.3)
    legend(figure, [], [(grey, "mean"), (band, "mean ± deviation, within the extremes"), (dots, "least and greatest")])
    return figure


# ---- figures 4, 5 and 6

def plot_mean_abs(groups):
    chosen = [p for p in picks(groups, ["plain", ELEMENTWISE]) if p.values("attention_output", "mean_abs_before")[1]]
    if not chosen:
        return None
    figure, (axis,) = new_figure()
    seen = []
    for p in chosen:
        gated = any(layer.get("gates") for layer in p.layers)
        for key, name, dash in (("mean_abs_before", "before the gate" if gated else "no gate", "-"),
                                ("mean_abs_after", "after the gate", "--")):
            x, y = p.values("attention_output", key)
            if y and (gated or key == "mean_abs_before"):
                axis.plot(x, y, color=p.colour, linestyle=dash, marker=p.marker, markersize=5,
                          label=f"{p.name}, {name} (mean {sum(y) / len(y):.2g})")
                seen += y
    if not log_if_wide(axis, seen):
        axis.set_ylim(0, 1.1 * max(seen))
    axis.set_title("Mean |attention output| per layer")
    axis.set_ylabel("mean absolute value")
    layer_ticks(axis, max(len(p.layers) for p in chosen))
    legend(figure, [axis], width=2)
    return figure


def plot_shares(groups):
    chosen = [p for p in picks(groups, ["plain", ELEMENTWISE]) if p.values("attention_output", "below_1e-2_before")[1]]
    if not chosen:
        return None
    figure, axes = new_figure(2, 3.6)
    for axis, threshold in zip(axes, ("1e-2", "1e-3")):
        top = 0.01
        for p in chosen:
            gated = any(layer.get("gates") for layer in p.layers)
            for key, name, dash in (("before", "before the gate" if gated else "no gate", "-"), ("after", "after the gate", "--"),
                                    ("before_times_mean_gate", "before, times the mean gate score", ":")):
                x, y = p.values("attention_output", f"below_{threshold}_{key}")
                if y and (gated or key == "before"):
                    axis.plot(x, y, color=p.colour, linestyle=dash, marker=p.marker, markersize=4.5, label=f"{p.name}, {name}")
                    top = max([top] + y)
        axis.set_ylim(0, 1.1 * top)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if top > 0.05 else 1))
        axis.set_title(f"|attention output| < {threshold}")
        axis.set_ylabel("share of the values")
        layer_ticks(axis, max(len(p.layers) for p in chosen))
    legend(figure, axes, width=2)
    return figure


def plot_maxima(groups):
    chosen = picks(groups, ["plain", ELEMENTWISE, "value elementwise", SHARED, ELEMENTWISE + " ns_sigmoid"], 5)
    panels = [("attention output", ("max", "attention_output")), ("residual after attention", ("max", "attention_residual")),
              ("first-token attention", ("first_token_attention",)), ("feed-forward output", ("max", "ffn_output")),
              ("residual after feed-forward", ("max", "ffn_residual"))]
    if not any(p.values("max", "ffn_residual")[1] for p in chosen):
        return None
    figure, axes = new_figure(5, 3.1)
    # One kind of scale for all four.
    ranges = [[v for p in chosen for v in p.values(*path)[1] if v > 0] for _, path in panels if path[0] == "max"]
    wide = any(values and max(values) > 8 * min(values) for values in ranges)
    for axis, (title, path) in zip(axes, panels):
        seen = []
        for p in chosen:
            x, y = p.values(*path)
            axis.plot(x, y, color=p.colour, marker=p.marker, markersize=4.5, linewidth=1.5, label=p.name)
            seen += y
        axis.set_title(title)
        if path[0] == "max":
            axis.set_ylabel("largest |value|")
            if seen and not (wide and log_if_wide(axis, seen, 1)):
                axis.set_ylim(0, 1.1 * max(seen))
        else:
            axis.set_ylim(0, min(1.02, 1.15 * max(seen + [0.01])))
            axis.set_ylabel("share of attention")
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if max(seen + [0.01]) > 0.05 else 1))
        layer_ticks(axis, max(len(p.layers) for p in chosen))
    legend(figure, axes, width=3)
    return figure


def figures(groups):
    made = [
        ("figure3_gate_scores", lambda: plot_gate_histograms(groups),
         "Figure 3: scores over all layers, 50 bins. Sparse gates stand far left."),
        ("figure4_mean_abs", lambda: plot_mean_abs(groups),
         "Figure 4: mean absolute value of attention's output before and after the gate."),
        ("figure5_shares", lambda: plot_shares(groups),
         "Figure 5: how many values of attention's output are next to nothing. Dotted: what scaling by the mean score "
         "alone would do."),
        ("figure6_maxima", lambda: plot_maxima(groups),
         "Figure 6: the largest absolute values in a layer, and attention on the first token."),
        ("figure7_gate_layers", lambda: plot_gate_layers(groups), "Figure 7: gate scores layer by layer."),
    ]
    return made
