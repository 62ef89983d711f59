"""Runs that differ in the seed alone are one group: means, spread, and differences to another group."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import paper as papers
from .comparing import Difference, paired
from .values import deviation, mean, number

if TYPE_CHECKING:
    from .runs import Run
    from .study import Place


def how_far(run: Run) -> float:
    return run.status.get("step") or (run.metrics[-1]["step"] if run.metrics else 0)


def common_name(runs: list[Run]) -> str:
    """What the names of several seeds' runs share: lr_1e-2 of lr_1e-2-s1 and lr_1e-2-s2; the first name where they share nothing."""
    for names in ([r.title for r in runs], [r.base for r in runs]):
        stems = {
            re.sub(
                rf"([-_. ]+s?|[-_. ]*seed[-_. ]*){re.escape(str(run.seed()))}(-[0-9a-f]{{12}})?$", "", name
            )
            or name
            for run, name in zip(runs, names)
        }
        if len(stems) == 1 and len(runs) > 1:
            return stems.pop()
    return runs[0].name


# Of Run.measures: what is known without an evaluation.
OF_TRAINING = ("parameters", "active", "tokens", "spikes", "speed")


def one_of(values: Iterable[Any]) -> bool:
    return len(set(values)) < 2


def replaced(prints: Iterable[Mapping[Any, str]]) -> Any:
    """The first name under which two runs have read different contents, of {name: fingerprint} of each; None where there is none."""
    found: dict[Any, str] = {}
    for of_run in prints:
        for name, text in of_run.items():
            if found.setdefault(name, text) != text:
                return name
    return None


def same_contents(runs: list[Run]) -> bool:
    """Whether no validation set is known to have held other text in one run than in another. Runs from before fingerprints were
    written say nothing of it."""
    return replaced(run.fingerprints() for run in runs) is None


def same_data(runs: Iterable[Run], name: str | None = None) -> bool:
    """Whether the last evaluations read the same tokens of the same sets, or of the set `name`, as far as is known."""
    runs = list(runs)
    of_set = lambda pairs: [pair for pair in pairs if name in (None, pair[0])]
    return (
        one_of(tuple(of_set(run.evaluated())) for run in runs)
        and replaced(dict(of_set(run.fingerprints().items())) for run in runs) is None
    )


def unequal(runs: list[Run]) -> str:
    """Why numbers of the last evaluations are of different things, so that neither a mean nor a difference of them means anything; ""
    where they are of one. Runs that were never evaluated have no such numbers."""
    runs = [run for run in runs if run.evals]
    if read := replaced(run.trained_on() for run in runs):
        return f"trained with {read[0]} of one name and different contents"
    if not one_of(run.changed() for run in runs):
        keys = sorted({key for run in runs for _, key, *_ in run.changed()})
        return f"trained with changes on the way ({', '.join(keys)}) in some runs only"
    if not one_of(run.last.get("tokens") for run in runs):
        return "evaluated after different numbers of tokens"
    if not one_of(run.evaluated() for run in runs):
        return "evaluated on different tokens"
    return "" if same_contents(runs) else "evaluated on validation sets of different contents"


def choose_sources(groups: Iterable[Group]) -> bool:
    """First-token attention, gate scores, M-Act and the imbalance of heads: of the analyses, where every run that counts has one of its
    last evaluation's step and all are of the same tokens; else of the evaluations, for all runs."""
    groups = list(groups)
    counted = [run for group in groups for run in group.sound()]
    wanted = (
        bool(counted)
        and all(run.deep_is_current() for run in counted)
        and one_of(run.analysed() for run in counted)
        and same_contents(counted)
    )
    for group in groups:
        for run in group.runs + group.twins:
            run.read_from_analysis(wanted)
    return wanted


class Group:
    def __init__(self, runs: list[Run]) -> None:
        # The same seed trained twice is one sample: the run that came furthest stands for it.
        self.runs: list[Run] = []
        self.twins: list[Run] = []
        for run in sorted(runs, key=lambda r: (number(r.seed()) or 0, -how_far(r))):
            twin = run.seed() is not None and any(run.seed() == r.seed() for r in self.runs)
            (self.twins if twin else self.runs).append(run)
        runs = self.runs
        self.places: list[Place] = []  # in sweeps with variants
        self.named = False  # the label is the sweep's or the paper's, not the run's
        self.rows: list[str] = []  # ids of the papers' rows
        self.variant = papers.variant(runs[0].config) if runs[0].config else runs[0].name
        self.label = self.short = common_name(runs)
        self.endings = [run.outcome for run in runs]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def place(self) -> Place | None:
        """The first of its places, by which it is called."""
        return self.places[0] if self.places else None

    def sound(self) -> list[Run]:
        """Runs whose numbers count: the finished ones; where none is, those that have begun. None that diverged."""
        done = [run for run, (state, _) in zip(self.runs, self.endings) if state == "done"]
        return done or [
            run for run, (state, _) in zip(self.runs, self.endings) if state not in ("diverged", "not begun")
        ]

    def finished(self) -> bool:
        return bool(self.runs) and all(state in ("done", "diverged") for state, _ in self.endings)

    def diverged(self) -> bool:
        return all(state == "diverged" for state, _ in self.endings)

    def unequal(self) -> str:
        """Why the evaluations of the seeds have no mean; "" where they have."""
        return unequal(self.sound())

    def evaluated(self) -> list[Run]:
        """Runs whose evaluations count: none where they are not of the same tokens, after as many."""
        return [] if self.unequal() else self.sound()

    def values(self, key: str) -> list[float]:
        """Of the runs that count, where there is one."""
        runs = self.sound() if key in OF_TRAINING else self.evaluated()
        return [value for value in (run.measures[key] for run in runs) if value is not None]

    def value(self, key: str) -> float | None:
        return mean(self.values(key))

    def spread(self, key: str) -> float | None:
        return deviation(self.values(key))

    def few(self, key: str) -> int | None:
        """How many runs have the value, where some that count have none: the mean is of those alone."""
        count = len(self.values(key))
        return count if 0 < count < len(self.sound()) else None

    def by_seed(self, key: str) -> dict[Any, float | None]:
        """{seed: value} of the runs that count."""
        return {run.seed(): run.measures[key] for run in self.sound()}

    def count(self) -> int:
        return len(self.runs)

    def state(self) -> str:
        """For the table: done (n=3), or what happened."""
        words = []
        for word in ("diverged", "stopped", "running", "not begun"):
            hits = [text for state, text in self.endings if state == word]
            if len(hits) == 1 and self.count() == 1:
                words.append(hits[0])
            elif hits:
                words.append(f"{len(hits)} of {self.count()} {word}")
        words = words or [f"done, n={self.count()}"]
        return "; ".join(words + [self.unequal()] if self.unequal() else words)


def difference(group: Group | None, base: Group | None, key: str) -> Difference | None:
    """Less the baseline, over the seeds that both have; only between evaluations after as many tokens, on the same tokens of the
    same sets."""
    if group is None or base is None or group is base or unequal(group.sound() + base.sound()):
        return None
    return paired(group.by_seed(key), base.by_seed(key))


def group_runs(
    runs: list[Run], paper: dict[str, Any], places: Mapping[str, list[Place]] | None = None
) -> list[Group]:
    """Groups in the order of a sweep's variants, then of the papers' rows, then of the runs given. Every run learns its group. places:
    of the sweeps' trials, by the hash of their configurations."""
    by_text: dict[str, list[Run]] = {}
    by_place: dict[
        tuple[str, ...], str
    ] = {}  # trials that a sweep takes for one are one, whatever program wrote them
    found: list[list[Run]] = []
    for run in runs:
        text = run.without_seed() or os.path.abspath(run.folder)
        found_places = places.get(str(run.info.get("config_hash"))) if places else None
        if found_places:
            text = by_place.setdefault(found_places[0].key(), text)
        if text not in by_text:
            by_text[text] = []
            found.append(by_text[text])
        by_text[text].append(run)
    groups = [Group(g) for g in found]
    order = {row["id"]: i for i, row in enumerate(r for t in paper["tables"] for r in t["rows"])}
    known = [g for g in groups if g.first.config]
    for group, geometry in zip(known, papers.geometries([g.first for g in known])):
        for run in group.runs + group.twins:
            group.rows = sorted({*group.rows, *papers.rows_of(run, geometry, paper)}, key=order.get)
    for group in groups:
        of_runs = [places.get(str(r.info.get("config_hash"))) for r in group.runs] if places else []
        group.places = next((found_places for found_places in of_runs if found_places), [])
    groups.sort(
        key=lambda g: (
            g.place.order if g.place else math.inf,
            min([order[r] for r in g.rows], default=len(order)),
            "" if g.rows else g.variant,
            number(g.first.get("optimizer.lr")) or 0,
        )
    )  # stable
    label_groups(groups, paper)
    label_places([g for g in groups if g.place])
    for group in groups:
        for run in group.runs + group.twins:
            run.group = group
    choose_sources(groups)
    return groups


def label_groups(groups: list[Group], paper: dict[str, Any]) -> None:
    """A row's name in the paper, with depth and learning rate where the paper's rows differ in them, and what tells equal
    ones apart; the run's own name where it is no row."""
    rows = {row["id"]: row for t in paper["tables"] for row in t["rows"]}
    by_variant: dict[str, str] = {}
    for row in rows.values():
        if row["family"] not in ("0.6B", "1B", "2B"):
            by_variant.setdefault(row["variant"], row["label"])
    for group in groups:
        group.short = by_variant.get(group.variant, group.variant)
    groups = [g for g in groups if not g.place]
    shown = [g for g in groups if g.rows]
    # At another learning rate than any row's, beside runs that are rows: named alike.
    shown += [
        g for g in groups if not g.rows and g.variant in by_variant and size(g) in {size(t) for t in shown}
    ]

    def label(group: Group, more: tuple[str, ...]) -> str:
        row: dict[str, Any] = rows[group.rows[0]] if group.rows else {"label": group.short, "lr": 1}
        text = row["label"]
        depths = ({row["family"]} if group.rows else papers.families(group.first)) & {"28l", "48l"}
        extra = [f"{depth[:-1]}L" for depth in depths]
        if "depth" in more and not extra:
            extra.append(f"{group.first.get('model.num_hidden_layers')} layers")
        if "lr" in more or row.get("lr"):
            extra.append(
                f"lr {group.first.get('optimizer.lr'):g}" if group.first.get("optimizer.lr") else "lr -"
            )
        if "steps" in more:
            extra.append(f"{group.first.info.get('max_steps') or 0:,} steps")
        if "experts" in more:
            extra.append(f"top {group.first.get('model.moe.num_experts_per_tok')}")
        return ", ".join([text] + extra)

    by_name: dict[str, list[Group]] = {}
    for group in shown:  # others keep their runs' names
        by_name.setdefault(label(group, ()), []).append(group)
    for same in by_name.values():
        for more in ((), ("lr",), ("depth",), ("depth", "lr"), ("experts",), ("steps",), ("lr", "steps")):
            labels = [label(g, more) for g in same]
            if len(set(labels)) == len(labels):
                break
        else:
            labels = [f"{label(g, ())}: {g.first.name}" for g in same]
            if len(set(labels)) < len(labels):
                labels = [f"{label(g, ())}: {g.first.folder}" for g in same]
        for group, text in zip(same, labels):
            group.label, group.named = text, True


def label_places(groups: list[Group]) -> None:
    """The sweep's names, with the sweep's own where two sweeps use one; all of them where sweeps share a training."""
    for group in groups:
        same = [g for g in groups if g.place.group == group.place.group]
        group.label = group.place.group if len(same) == 1 else f"{group.place.study}: {group.place.group}"
        others = dict.fromkeys(place.group for place in group.places if place.group != group.place.group)
        group.label += "".join(f" / {name}" for name in others)
        group.short, group.named = group.label, True


def size(group: Group) -> tuple[Any, ...]:
    """Groups of one size may be compared."""
    get = group.first.get
    return (
        get("model.hidden_size"),
        get("model.num_hidden_layers"),
        get("model.head_dim"),
        bool(get("model.moe.num_experts", 0)),
    )


def by_size(groups: list[Group]) -> list[list[Group]]:
    """Lists of groups of one size, the longest first."""
    out: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        out.setdefault(size(group), []).append(group)
    return sorted(out.values(), key=len, reverse=True)
