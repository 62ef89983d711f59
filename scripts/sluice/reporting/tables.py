"""Tables as text: cells are strings, so that Markdown, HTML and a terminal show the same. Standard library alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import paper as papers
from .comparing import RULE
from .groups import difference
from .runs import THRESHOLDS
from .values import DEVIATIONS, WINDOW, deviation, fixed, mean, number, short

if TYPE_CHECKING:
    from .groups import Group
    from .runs import Run


class Table:
    def __init__(
        self,
        title: str,
        spans: list[tuple[str, list[str]]],
        rows: list[list[str]],
        notes: Iterable[str] = (),
        text: str = "",
        bold: Iterable[tuple[int, int]] = (),
        colours: Iterable[str] = (),
    ) -> None:
        self.title, self.rows, self.notes, self.text = title, rows, list(notes), text
        self.spans = spans  # [(whose, [heading, ...])]
        self.headings = [h for _, hs in spans for h in hs]
        self.bold = set(bold)  # {(row, column)}
        self.colours = list(colours)  # of the dot before each row's first cell


def count_or_few(value: float | None) -> str:
    return "too few losses" if value is None else short(value)


# Key of Run.measures, heading, how a value is written, whether less (-1) or more (+1) is better (0: neither), and how a difference is
# written (None: none is shown).
COLUMNS = [
    ("parameters", "parameters", short, 0, None),
    ("active", "active per token", short, 0, None),
    ("tokens", "tokens seen", short, 0, None),
    ("loss", "validation loss", fixed(4), -1, fixed(4, "+")),
    ("ppl", "perplexity", fixed(3), -1, fixed(3, "+")),
    ("bpb", "bits/byte", fixed(4), -1, fixed(4, "+")),
    ("largest_residual", "largest residual", short, -1, fixed(2, "+")),
    ("first_token_attention", "first-token attention", fixed(3), 0, fixed(3, "+")),
    ("gate_score", "mean gate score", fixed(3), 0, None),
    ("spikes", "loss spikes", count_or_few, 0, None),
    ("speed", "tokens/s", short, 0, None),
]
HEADINGS = {key: heading for key, heading, *_ in COLUMNS}
COUNTS = ("parameters", "active", "tokens")  # usually equal for every seed, so shown once
COMPARED = [(key, heading, sign, write) for key, heading, _, sign, write in COLUMNS if write]


def with_spread(write: Callable[[float | None], str], value: float | None, spread: float | None) -> str:
    return write(value) + (f" ± {write(spread)}" if spread is not None else "")


def mean_text(group: Group, key: str, write: Callable[[float | None], str]) -> str:
    """The mean over the seeds ± their deviation, with its n where not all seeds that count have the value."""
    spread, few = group.spread(key), group.few(key)
    if key in COUNTS and not spread:
        spread = None
    return with_spread(write, group.value(key), spread) + (f" (n={few})" if few else "")


def source_note(groups: list[Group]) -> str:
    """Where the figures are from that both an evaluation and an analysis have."""
    what = "First-token attention, gate scores, M-Act and the imbalance of heads are of "
    counted = [run for group in groups for run in group.sound()]
    if any(run.from_analysis for run in counted):
        return what + "the analyses."
    analysed = sum(bool(run.deep) for run in counted)
    if not analysed:
        return ""
    return what + (
        f"the last evaluations: {analysed} of {len(counted)} runs have an analysis, which counts only where all have one, of the same "
        "step as the evaluation and all of the same tokens."
    )


def overview(groups: list[Group], baselines: dict[Group, Group]) -> Table:
    """A row per group: means over its seeds, and their standard deviations."""
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for y, group in enumerate(groups):
        cells = [group.label, str(len(group.sound()) or group.count())]
        for key, _, write, sign, _ in COLUMNS:
            delta = difference(group, baselines[group], key) if sign else None
            if delta and delta.better(sign):
                bold.add((y, len(cells)))
            cells.append(mean_text(group, key, write))
        rows.append(cells)
    notes = [source_note(groups)]
    notes += [
        f"{g.label}: no means of evaluations, since its seeds were {g.unequal()}."
        for g in groups
        if g.unequal()
    ]
    return Table(
        "",
        [("", ["variant", "n"]), ("", [heading for _, heading, *_ in COLUMNS])],
        rows,
        [note for note in notes if note],
        bold=bold,
        colours=[g.first.colour for g in groups],
    )


def difference_table(groups: list[Group], baselines: dict[Group, Group]) -> Table | None:
    """Every group less its baseline; None where there is nothing to compare."""
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for group in groups:
        base = baselines[group]
        if base is None or base is group:
            continue
        cells = [group.label, base.label]
        for key, _, sign, write in COMPARED:
            delta = difference(group, base, key)
            if delta and delta.better(sign):
                bold.add((len(rows), len(cells)))
            cells.append(delta.text(write) if delta else "-")
        rows.append(cells)
    if not rows:
        return None
    return Table(
        "Differences to the control",
        [("", ["variant", "less"]), ("", ["Δ " + heading for _, heading, _, _ in COMPARED])],
        rows,
        [
            RULE
            + " No difference (-): no seed that both have, other sets, or evaluations after other numbers of tokens."
        ],
        bold=bold,
    )


def seeds_table(groups: list[Group]) -> Table | None:
    """Every run by itself, where there are several of a group; those of the same seed that are not counted come last."""
    if all(g.count() + len(g.twins) == 1 for g in groups):
        return None
    rows = [
        [run.name, group.label, "-" if run.seed() is None else str(run.seed())]
        + [write(run.measures[key]) for key, _, write, _, _ in COLUMNS]
        + [run.outcome[1]]
        for group in groups
        for run in group.runs + group.twins
    ]
    return Table(
        "Every run",
        [("", ["run", "variant", "seed"]), ("", [h for _, h, *_ in COLUMNS] + ["how it ended"])],
        rows,
    )


def of_groups(
    groups: list[Group], pick: Callable[..., float | None], write: Callable[[float | None], str]
) -> list[str]:
    """By group, the mean ± deviation of the value that `pick` returns for the last evaluation of each run that counts, with its n where
    not all of them have it."""
    cells = []
    for group in groups:
        values = [value for value in map(pick, group.evaluated()) if value is not None]
        few = f" (n={len(values)})" if 0 < len(values) < len(group.sound()) else ""
        cells.append(with_spread(write, mean(values), deviation(values)) + few)
    return cells


def sets_table(groups: list[Group]) -> Table | None:
    """Loss, perplexity and bits per byte of every set, when there are several."""
    names = []
    for run in [run for group in groups for run in group.sound()]:
        names += [s for s in run.last.get("sets") or {} if s not in names]
    if len(names) < 2:
        return None
    shown = lambda pick, write: of_groups(groups, pick, write)
    if len(groups) > 6:  # one line per group, perplexities alone
        columns = [shown(lambda run, n=name: run.perplexities().get(n), fixed(3)) for name in names]
        columns.append(shown(lambda run: run.measures["ppl"], fixed(3)))
        rows = [[group.label, *cells] for group, cells in zip(groups, zip(*columns))]
        return Table("", [("", ["variant"]), ("", names + ["mean"])], rows)
    rows = []
    for name in names:
        value = lambda key: lambda run: number(((run.last.get("sets") or {}).get(name) or {}).get(key))
        columns = [
            shown(value("loss"), fixed(4)),
            shown(lambda run: run.perplexities().get(name), fixed(3)),
            shown(value("bits_per_byte"), fixed(4)),
            shown(value("tokens"), short),
        ]
        rows += [
            [name, group.label, *cells]
            for group, cells in zip(groups, zip(*columns))
            if any(c != "-" for c in cells)
        ]
    return Table("", [("", ["set", "variant"]), ("", ["loss", "perplexity", "bits/byte", "tokens"])], rows)


def spike_table(groups: list[Group]) -> Table:
    rows = []
    for group in groups:
        runs = group.runs
        shown = lambda pick, none="-": with_spread(
            lambda v: none if v is None else short(v),
            mean([pick(r) for r in runs]),
            deviation([pick(r) for r in runs]),
        )
        last = lambda key: shown(lambda r: number(r.metrics[-1].get(key)) if r.metrics else None)
        rows.append(
            [group.label, str(group.count())]
            + [shown(lambda r, i=i: number(r.spikes[0][i]), "too few losses") for i in range(len(THRESHOLDS))]
            + [
                shown(lambda r: number(r.spikes[1])),
                shown(lambda r: float(sum(number(m.get("loss")) is None for m in r.metrics))),
                last("spikes"),
                last("skipped"),
                group.state(),
            ]
        )
    return Table(
        "Spikes in the training loss",
        [
            ("", ["variant", "n"]),
            ("above the trailing line by more than", [f"{t:g}" for t in THRESHOLDS]),
            (
                "",
                [
                    "losses looked at",
                    "losses not finite",
                    "spikes while training",
                    "steps skipped",
                    "how it ended",
                ],
            ),
        ],
        rows,
        [
            f"Means over all seeds, ± their standard deviation. Looked at are logged losses after twice the warm-up that have {WINDOW} "
            "before them; a line through those, which single outliers do not move (medians of the first and the last third, height: "
            f"median), gives the loss expected. A spike lies above it by more than the threshold and by more than {DEVIATIONS} "
            f"deviations (1.4826 times the median distance from the line). With fewer than {WINDOW} losses to look at: too few losses. "
            "Spikes while training: steps whose loss or gradient norm was 6 deviations above the last 128."
        ],
    )


def lr_points(groups: list[Group]) -> list[tuple[str, list[tuple[float, Group]]]]:
    """Per variant and depth, where several learning rates were tried: [(lr, losses, diverged)] in the order of lr."""
    ladders: dict[tuple[Any, ...], list[tuple[float, Group]]] = {}
    for group in groups:
        lr = number(group.first.get("optimizer.lr"))
        if lr is None:
            continue
        key = (
            group.place.variant if group.place else group.variant,
            group.first.get("model.num_hidden_layers"),
            papers.model_text(group.first),
            papers.protocol(group.first, "dense"),
            str(group.first.get("train.max_steps")),
            group.first.get("train.global_batch_size"),
        )
        ladders.setdefault(key, []).append((lr, group))
    out = []
    for key, points in ladders.items():
        if len({lr for lr, _ in points}) < 2:
            continue
        first = points[0][1]
        name = (first.place.variant if first.place else "") or first.short
        out.append((name, key[1], sorted(((lr, g) for lr, g in points), key=lambda p: p[0])))
    depths = {depth for _, depth, _ in out}
    names = [name if len(depths) == 1 else f"{name}, {depth} layers" for name, depth, _ in out]
    # Models that differ in a key without a word of its own are told apart by a run's name.
    return [
        (name if names.count(name) == 1 else f"{name} ({points[0][1].first.name})", points)
        for name, (_, _, points) in zip(names, out)
    ]


def lr_table(groups: list[Group]) -> Table | None:
    rows = []
    for name, points in lr_points(groups):
        for lr, group in points:
            rows.append(
                [
                    name,
                    f"{lr:g}",
                    group.state(),
                    "diverged" if group.diverged() else mean_text(group, "loss", fixed(4)),
                ]
            )
    if not rows:
        return None
    return Table(
        "Learning-rate tolerance",
        [("", ["variant", "learning rate", "state", "validation loss"])],
        rows,
        ["Mean ± standard deviation over seeds of the runs that did not diverge."],
    )


def missing_pieces(runs: list[Run]) -> list[str]:
    """What was not found, and the command that makes it."""
    out = []
    analysed = [run for run in runs if run.deep]
    for run in runs:
        if not run.deep:
            out.append(
                f"{run.name}: no analysis of this run, so it is in no figure of layers and heads; "
                f"sluice analyze {run.folder} -o {run.folder}/analysis"
            )
        elif not run.deep_is_current():
            out.append(
                f"{run.name}: the analysis is of step {run.deep.data.get('step')}, the last evaluation of step "
                f"{run.last.get('step')}: figures of layers and heads show the former, tables the latter"
            )
        elif analysed and run.analysed() != analysed[0].analysed():
            out.append(
                f"{run.name}: the analysis is of other tokens than that of {analysed[0].name}: figures of layers and heads show each its "
                "own, tables the evaluations"
            )
        if not run.evals:
            out.append(f"{run.name}: no evaluation yet (eval.jsonl)")
        if not run.config:
            out.append(f"{run.name}: no config.yaml, so it is no row of a table")
    return out
