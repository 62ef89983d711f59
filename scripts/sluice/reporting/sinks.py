"""Attention sinks and the health of gates, from the runs' evaluations: series, and the tables of them. Standard library alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .groups import one_of
from .tables import Table, of_groups
from .values import fixed, mean, number, short

if TYPE_CHECKING:
    from .groups import Group
    from .runs import Run

LATER = "first_token_attention_without_first_query"
BY_CLASS = "first_token_attention_by_class"


def sinks(run: Run) -> dict[str, Any]:
    """Of the last evaluation; {} where it measured none, as those of older programs."""
    return run.analysis.get("sinks") or {}


def by_head(layers: list[Any]) -> dict[tuple[int, int], float]:
    """{(layer, head): attention on the first token, of queries that are not the first token themselves}"""
    return {
        (i, h): value
        for i, layer in enumerate(layers)
        for h, value in enumerate(map(number, (layer.get("heads") or {}).get(LATER) or []))
        if value is not None
    }


def strongest(layers: list[Any]) -> tuple[int, int] | None:
    """(layer, head) with the most attention on the first token."""
    heads = by_head(layers)
    return max(heads, key=lambda place: heads[place]) if heads else None


def head_series(
    run: Run, place: tuple[int, int], of_class: str | None = None
) -> tuple[list[float], list[float]]:
    """(tokens, attention of a head on the first token) over the evaluations, of queries of one class or of all."""

    def pick(record: dict[str, Any]) -> Any:
        layers = (record.get("analysis") or {}).get("layers") or []
        heads = (layers[place[0]].get("heads") or {}) if place[0] < len(layers) else {}
        values = (heads.get(BY_CLASS) or {}).get(of_class) if of_class else heads.get(LATER)
        return values[place[1]] if values and place[1] < len(values) else None

    return run.eval_series(pick)


def query_classes(runs: list[Run]) -> list[str]:
    """Names of the classes of the runs' queries, "other" last."""
    names: list[str] = []
    for run in runs:
        names += [n for n in (sinks(run).get("strongest") or {}).get("by_class") or {} if n not in names]
    return sorted(names, key=lambda name: name == "other")


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def layer_of_strongest(run: Run) -> dict[str, Any]:
    place = strongest(run.analysis.get("layers") or [])
    return run.analysis["layers"][place[0]] if place else {}


def most(run: Run, key: str) -> float | None:
    values = [number(layer.get(key)) for layer in run.analysis.get("layers") or []]
    return max([v for v in values if v is not None], default=None)


def value_ratio(run: Run) -> float | None:
    layer = layer_of_strongest(run)
    first, rest = number(layer.get("value_norm_first")), number(layer.get("value_norm_rest"))
    return first / rest if first is not None and rest else None


def sinks_table(groups: list[Group]) -> Table | None:
    """None where no run has measured sinks."""
    groups = [g for g in groups if any(sinks(run) for run in g.sound())]
    if not groups:
        return None
    measured = [sinks(run) for g in groups for run in g.sound() if sinks(run)]
    thresholds = {s["threshold"] for s in measured if number(s.get("threshold")) is not None}
    lengths = {s["length"] for s in measured if s.get("length")}
    epsilon = f"{thresholds.pop():g}" if len(thresholds) == 1 else "ε"
    length = str(lengths.pop()) if len(lengths) == 1 else "T"
    classes = query_classes([run for g in groups for run in g.sound()])
    # Seeds that were measured with different thresholds or lengths have no mean.
    setting = lambda run: (sinks(run).get("threshold"), sinks(run).get("length"))
    alike = [g for g in groups if one_of(setting(run) for run in g.sound() if sinks(run))]
    of = lambda key: lambda run: number(sinks(run).get(key)) if run.group in alike else None
    strong = lambda run: sinks(run).get("strongest") or {}
    columns = [
        (f"Sink^{epsilon}", of("share"), percent),
        (f"first {length} queries", of("share_leading"), percent),
        (f"heads above {epsilon}", of("heads"), short),
        ("of", of("of"), short),
        ("strongest head", lambda run: number(strong(run).get("first_token_attention")), percent),
        *(
            (f"on {name}", lambda run, n=name: number((strong(run).get("by_class") or {}).get(n)), percent)
            for name in classes
        ),
        ("|v| first / others", value_ratio, fixed(3)),
        ("largest residual, first", lambda run: most(run, "residual_max_first"), short),
        ("largest residual, others", lambda run: most(run, "residual_max_rest"), short),
    ]
    cells = [of_groups(groups, pick, write) for _, pick, write in columns]
    return Table(
        "Attention sinks",
        [("", ["variant"]), ("", [heading for heading, *_ in columns])],
        [[group.label, *row] for group, row in zip(groups, zip(*cells))],
        [
            "Of the last evaluation; means over seeds, ± their standard deviation. Sink^ε (Gu et al. 2024): share of the layers, "
            "heads and sequences whose mean attention on the first token exceeds ε. Heads above: heads whose mean over all "
            "sequences does, without the first query itself. Strongest head: the one with the largest such mean"
            + (", and that mean over the queries of each class" if classes else "")
            + ". |v|: mean norm of the values at first tokens over that at others, in the strongest head's layer."
        ],
    )


def classes_table(groups: list[Group]) -> Table | None:
    """Losses by class of the input token; None where no run has classes."""
    rows = []
    sets: list[str] = []
    for run in [run for g in groups for run in g.sound()]:
        sets += [name for name in run.last.get("sets") or {} if name not in sets]
    for name in sets:
        value = lambda n, of_class, key: (
            lambda run: number(
                ((((run.last.get("sets") or {}).get(n) or {}).get("classes") or {}).get(of_class) or {}).get(
                    key
                )
            )
        )
        classes: list[str] = []
        for run in [run for g in groups for run in g.sound()]:
            found = ((run.last.get("sets") or {}).get(name) or {}).get("classes") or {}
            classes += [c for c in found if c not in classes]
        for of_class in classes:
            columns = [
                of_groups(groups, value(name, of_class, key), write)
                for key, write in (("loss", fixed(4)), ("share_likely", percent), ("tokens", short))
            ]
            rows += [
                [name, of_class, group.label, *cells]
                for group, cells in zip(groups, zip(*columns))
                if cells[0] != "-"
            ]
    if not rows:
        return None
    return Table(
        "Loss by class of the input token",
        [("", ["set", "class", "variant"]), ("", ["loss", "probability above 1/2", "tokens"])],
        rows,
        [
            "Of the targets that follow a token of the class. Probability above 1/2: share of the targets that have one, a "
            "lower bound of the accuracy."
        ],
    )


def gate_names(run: Run) -> list[str]:
    gates = run.get("model.attention.gates") or []
    return [f"{g.get('position')} {g.get('granularity')}" for g in gates if isinstance(g, dict)]


def health_of(run: Run, i: int) -> list[dict[str, Any]]:
    """Of the i-th gate, layer by layer."""
    layers = [layer.get("gates") or [] for layer in run.analysis.get("layers") or []]
    return [gates[i] for gates in layers if i < len(gates)]


def gate_health_table(groups: list[Group]) -> Table | None:
    """None where no evaluation has measured gates."""
    rows = []
    for group in groups:
        runs = [run for run in group.evaluated() if health_of(run, 0)]
        for i in range(max([len(gate_names(run)) for run in runs], default=0)):
            of_run = lambda pick: [pick(health_of(run, i)) for run in runs]
            average = lambda key: mean(
                of_run(lambda layers, k=key: mean([number(gate.get(k)) for gate in layers]))
            )
            highest = lambda key: mean(
                of_run(
                    lambda layers, k=key: max(
                        [v for v in (number(gate.get(k)) for gate in layers) if v is not None], default=None
                    )
                )
            )
            shut = mean(of_run(lambda layers: mean([number(gate.get("shut_heads")) for gate in layers])))
            heads = [
                len((gate.get("heads") or {}).get("row_norm") or []) for gate in health_of(runs[0], i)
            ]
            norms = [
                v
                for run in runs
                for gate in health_of(run, i)
                for v in map(number, (gate.get("heads") or {}).get("row_norm") or [])
                if v is not None
            ]
            rows.append(
                [
                    group.label,
                    gate_names(runs[0])[i] if i < len(gate_names(runs[0])) else str(i + 1),
                    percent(average("below_0.05")),
                    percent(highest("below_0.05")),
                    percent(average("above_0.95")),
                    percent(highest("above_0.95")),
                    "-" if shut is None else f"{shut * sum(heads):.3g} of {sum(heads)}",
                    short(min(norms, default=None)),
                    short(mean(norms)),
                    short(max(norms, default=None)),
                ]
            )
    if not rows:
        return None
    return Table(
        "Health of gates",
        [
            ("", ["variant", "gate"]),
            ("scores below 0.05", ["mean", "most in a layer"]),
            ("scores above 0.95", ["mean", "most in a layer"]),
            ("", ["heads shut"]),
            ("norm of a head's rows", ["least", "mean", "largest"]),
        ],
        rows,
        [
            "Of the last evaluation, means over seeds. A head is shut if its score is below 0.05 for more than 99 % of the "
            "tokens. Gates whose scores are not bounded have no shares."
        ],
    )
