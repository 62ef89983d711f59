"""What sparse attention selects, from the runs' evaluations: series, and the table of them. Standard library alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .sinks import percent
from .tables import Table, of_groups
from .values import fixed, mean, number, short

if TYPE_CHECKING:
    from .groups import Group
    from .runs import Run


def selections(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the layers of an evaluation that select keys."""
    layers = (record.get("analysis") or {}).get("layers") or []
    return [layer["selection"] for layer in layers if layer.get("selection")]


def values(record: dict[str, Any], key: str) -> list[float]:
    return [v for v in (number(s.get(key)) for s in selections(record)) if v is not None]


def series(run: Run, key: str) -> tuple[list[float], list[float]]:
    """(tokens, mean over layers) over the evaluations."""
    return run.eval_series(lambda record: mean(values(record, key)))


def by_layer(run: Run, key: str) -> tuple[list[float], list[float]]:
    """(layer, value) of the last evaluation."""
    return run.layers(lambda layer: (layer.get("selection") or {}).get(key))


def selection_table(groups: list[Group]) -> Table | None:
    """None where no run selects keys."""
    groups = [g for g in groups if any(selections(run.last) for run in g.sound())]
    if not groups:
        return None
    average = lambda key: lambda run: mean(values(run.last, key))
    least = lambda key: lambda run: min(values(run.last, key), default=None)
    most = lambda key: lambda run: max(values(run.last, key), default=None)
    spans: list[tuple[str, list[tuple[str, Any, Any]]]] = [
        ("", [("keys", average("keys"), short)]),
        (
            "keys of a query",
            [("least", least("keys_least"), short), ("most", most("keys_most"), short)],
        ),
        (
            "attention held",
            [("mean", average("mass_recall"), percent), ("least in a layer", least("mass_recall"), percent)],
        ),
        (
            "largest keys held",
            [("mean", average("top_recall"), percent), ("least in a layer", least("top_recall"), percent)],
        ),
        (
            "",
            [
                ("KL", average("kl"), fixed(3)),
                ("union of 8 over keys", average("union_of_8_over_keys"), fixed(2)),
                ("shared with the layer before", most("overlap_with_layer_before"), percent),
            ],
        ),
    ]
    columns = [column for _, of_span in spans for column in of_span]
    cells = [of_groups(groups, pick, write) for _, pick, write in columns]
    return Table(
        "Selected keys",
        [("", ["variant"]), *((whose, [heading for heading, *_ in of_span]) for whose, of_span in spans)],
        [[group.label, *row] for group, row in zip(groups, zip(*cells))],
        [
            "Of the last evaluation, means over layers and seeds, ± the standard deviation over seeds. Attention held: share of "
            "dense attention on the selected keys. Largest keys held: share of the keys with most dense attention, as many as "
            "are selected. KL: of the indexer's distribution from attention's, on the selected keys. Union of 8: keys that "
            "eight neighbouring queries select together, over the mean number of one (1: all the same). Shared: the largest "
            "over layers."
        ],
    )
