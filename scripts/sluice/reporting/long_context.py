"""Long contexts: losses by position, and RULER's scores beside the paper's. Standard library alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .tables import Table, with_spread
from .values import deviation, fixed, mean, number

if TYPE_CHECKING:
    from .groups import Group
    from .runs import Run

# Table 5 of the Gated Attention paper: 1.7B models, all thirteen tasks, {length: score in percent}.
PAPER = {
    "baseline, trained at 32k": {4096: 88.89, 8192: 85.88, 16384: 83.15, 32768: 79.50},
    "gate, trained at 32k": {4096: 90.56, 8192: 87.11, 16384: 84.61, 32768: 79.77},
    "baseline, YaRN to 128k": {
        4096: 82.90,
        8192: 71.52,
        16384: 61.23,
        32768: 37.94,
        65536: 37.51,
        131072: 31.65,
    },
    "gate, YaRN to 128k": {
        4096: 88.13,
        8192: 80.01,
        16384: 76.74,
        32768: 72.88,
        65536: 66.60,
        131072: 58.82,
    },
}


def short_length(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def by_position(run: Run, name: str) -> tuple[list[float], list[float]]:
    """(middle of the octave, loss) of the last evaluation of a set."""
    octaves = ((run.last.get("sets") or {}).get(name) or {}).get("by_position") or []
    triples = [(number(o.get("from")), number(o.get("to")), number(o.get("loss"))) for o in octaves]
    kept = [(a, b, y) for a, b, y in triples if a is not None and b is not None and y is not None]
    return [(a + b) / 2 for a, b, _ in kept], [y for _, _, y in kept]


def factor(summary: dict[str, Any]) -> float:
    return number(summary.get("yarn")) or 1.0


def asked(summary: dict[str, Any]) -> tuple[Any, ...]:
    """What was asked: factor of YaRN, whether the prompts were given, seed of the prompts made here, and the contents of what prompts
    are made of or taken from."""
    given = bool(summary.get("prompts"))
    seed = -1 if given else summary.get("seed") or 0
    return factor(summary), given, seed, summary.get("prompts") or summary.get("texts") or ""


def newest(run: Run) -> list[dict[str, Any]]:
    """Of everything that a run was asked, the summary of its latest checkpoint."""
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for summary in sorted(run.ruler, key=lambda s: number(s.get("step")) or 0):
        latest[asked(summary)] = summary
    return [latest[what] for what in sorted(latest)]


def answered(summary: dict[str, Any]) -> tuple[Any, ...]:
    """How many samples of every task and length have an answer: fewer where a run was broken off."""
    return tuple(
        sorted(
            (str(c.get("task")), c.get("length") or 0, c.get("samples") or 0)
            for c in summary.get("cells") or []
        )
    )


def alike(runs: list[Run]) -> list[list[dict[str, Any]]]:
    """The summaries that have a mean: of the same step, prompts, tasks, lengths and numbers of samples; a list for each such kind."""
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        for summary in newest(run):
            kinds.setdefault((asked(summary), summary.get("step") or 0, answered(summary)), []).append(summary)
    return [kinds[kind] for kind in sorted(kinds)]


def several_texts(groups: list[Group]) -> bool:
    """Whether prompts of one kind were made of, or taken from, different files."""
    kinds = {asked(s)[1::2] for group in groups for run in group.sound() for s in newest(run)}
    return len({given for given, _ in kinds}) < len(kinds)


def words(summary: dict[str, Any], with_texts: bool) -> str:
    """step 1,000, seed 42, 100 samples"""
    _, given, seed, texts = asked(summary)
    samples = sorted({n for _, _, n in answered(summary)})
    count = " to ".join(str(n) for n in dict.fromkeys((samples[0], samples[-1]))) if samples else "no"
    parts = [f"step {summary.get('step') or 0:,}", "given prompts" if given else f"seed {seed}"]
    parts += [f"texts {texts[:8]}"] if with_texts and texts else []
    return ", ".join([*parts, f"{count} samples"])


def scores(summary: dict[str, Any]) -> dict[tuple[str, int], float]:
    """{(task, length): score}"""
    return {
        (c["task"], c["length"]): c["score"]
        for c in summary.get("cells") or []
        if number(c.get("score")) is not None and c.get("task") and c.get("length")
    }


def averages(summary: dict[str, Any]) -> dict[int, float]:
    """{length: score}"""
    values = {k: number(v) for k, v in (summary.get("average") or {}).items()}
    return {int(k): v for k, v in values.items() if v is not None and k.isascii() and k.isdigit()}


def ruler_table(groups: list[Group]) -> Table | None:
    """None where no run has answered RULER's prompts."""
    rows: list[tuple[str, str, str, str, dict[int, str]]] = []
    lengths: set[int] = set()
    with_texts = several_texts(groups)
    for group in groups:
        for summaries in alike([run for run in group.sound() if run.ruler]):
            yarn = factor(summaries[0])
            title = group.label if yarn == 1 else f"{group.label}, YaRN {yarn:g}"
            lines: dict[str, dict[int, list[float]]] = {}
            for summary in summaries:
                for (task, length), score in scores(summary).items():
                    lines.setdefault(task, {}).setdefault(length, []).append(score)
                for length, score in averages(summary).items():
                    lines.setdefault("average", {}).setdefault(length, []).append(score)
            if "average" in lines:
                lines["average"] = lines.pop("average")  # last
            for task, cells in lines.items():
                lengths |= set(cells)
                shown = {n: with_spread(fixed(1), mean(v), deviation(v)) for n, v in cells.items()}
                rows.append((title, words(summaries[0], with_texts), str(len(summaries)), task, shown))
    if not rows:
        return None
    order = sorted(lengths)
    theirs = {name: {n: fixed(1)(v) for n, v in row.items()} for name, row in PAPER.items()}
    others = [
        (f"the paper's 1.7B {name}", "-", "-", "average", row) for name, row in theirs.items() if set(row) & lengths
    ]
    return Table(
        "RULER",
        [("", ["variant", "prompts", "n", "task"]), ("tokens", [short_length(n) for n in order])],
        [[*words_, *(cells.get(n, "-") for n in order)] for *words_, cells in rows + others],
        [
            "Share of the references found, percent; means over n seeds, ± their standard deviation, of answers to the same prompts after "
            "as many steps: others have rows of their own. Of each run the latest checkpoint that answered. Prompts are those of `sluice "
            "ruler`, whose generators are this program's own, with the seed named, or given in files (--prompts); averages are over the tasks that have every length of a run, which may be fewer than "
            "RULER's thirteen."
            + (
                " Rows that begin with \"the paper's\" are table 5 of Gated Attention (arXiv 2505.06708), for models of another size "
                "and other prompts: they stand for the shape, not for comparison of numbers."
                if others
                else ""
            )
        ],
    )


def depth_map(summary: dict[str, Any]) -> tuple[list[int], list[float], dict[tuple[float, int], float]]:
    """(lengths, depths, {(depth, length): mean score over the tasks})"""
    found: dict[tuple[float, int], list[tuple[float, float]]] = {}
    for c in summary.get("depths") or []:
        depth, length = number(c.get("depth")), c.get("length")
        score, samples = number(c.get("score")), number(c.get("samples"))
        if depth is not None and length and score is not None and samples and samples > 0:
            found.setdefault((depth, length), []).append((score, samples))
    cells = {
        at: sum(s * n for s, n in values) / sum(n for _, n in values) for at, values in found.items()
    }
    return sorted({n for _, n in cells}), sorted({d for d, _ in cells}), cells
