"""What the trials will cost, where they are, and what came out."""

from __future__ import annotations

import csv
import io
import os
import statistics
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..reporting.comparing import RULE, choose_baselines
from ..reporting.files import is_run
from ..reporting.groups import Group, choose_sources, difference, same_data
from ..reporting.runs import Run
from ..reporting.tables import count_or_few, mean_text, source_note, with_spread
from ..reporting.values import deviation, mean, short
from ..reporting.values import fixed as shared_fixed
from . import state
from .plan import flops
from .state import DONE, ENDS, RUNNING
from .text import count, duration, finite, fixed, table

if TYPE_CHECKING:
    from .state import Look
    from .sweep_file import SweepFile, Trial


class Speed:
    """FLOP/s of this sweep's trials so far; of the same configuration where one has been trained, else of all."""

    def __init__(self, found: dict[str, Look]) -> None:
        self.of: dict[tuple[str, ...], list[float]] = {}
        self.all: list[float] = []
        for look in found.values():
            record = look.progress()
            seconds, tokens = finite(record.get("seconds")), finite(record.get("tokens"))
            # A beginning says little.
            if not seconds or not tokens or (look.state != DONE and record["step"] < 20):
                continue
            rate = tokens * look.trial.plan["flops_per_token"] / seconds
            self.of.setdefault(look.trial.configuration(), []).append(rate)
            self.all.append(rate)

    def seconds(self, trial: Trial, tokens: float) -> float | None:
        """Training alone, without evaluation and saving; None while nothing is measured."""
        rates = self.of.get(trial.configuration()) or self.all
        return tokens * trial.plan["flops_per_token"] / statistics.median(rates) if rates else None


def tokens_left(look: Look) -> int:
    if look.state in state.ENDS:
        return 0
    return max(0, look.trial.plan["tokens"] - int(finite(look.progress().get("tokens")) or 0))


def short_state(look: Look) -> str:
    if look.state in (state.STOPPED, state.DIVERGED) and "step" in look.verdict:
        return f"{look.state} at {look.verdict['step']}"
    if look.state == state.FAILED:
        return f"failed ({look.verdict.get('code')})"
    return "recorded" if look.state == DONE and look.recorded() else look.state


def tally(found: dict[str, Look]) -> str:
    """ "4 done, 2 waiting" """
    states = [look.state for look in found.values()]
    order = (DONE, state.STOPPED, state.DIVERGED, state.FAILED, RUNNING, state.PAUSED, state.WAITING)
    text = ", ".join(f"{states.count(s)} {s}" for s in order if s in states)
    recorded = sum(look.recorded() for look in found.values() if look.state == DONE)
    return text + (f" ({recorded} of them recorded)" if recorded else "")


def plan_text(sweep: SweepFile, found: dict[str, Look], merged: list[tuple[Trial, Trial]]) -> str:
    speed = Speed(found)
    rows, left, seconds = [], 0.0, 0.0
    for i, trial in enumerate(sweep.trials):
        look = found[trial.hash]
        time, tokens = speed.seconds(trial, trial.plan["tokens"]), tokens_left(look)
        left += tokens * trial.plan["flops_per_token"]
        seconds += speed.seconds(trial, tokens) or 0
        rows.append(
            (
                i,
                trial.name,
                count(trial.plan["parameters"]),
                count(trial.plan["steps"]),
                count(trial.plan["tokens"]),
                f"{flops(trial):.2g}",
                "-" if time is None else duration(time),
                short_state(look),
            )
        )
    out = (
        table(("#", "trial", "parameters", "steps", "tokens", "FLOPs", "time", "state"), rows, left=2) + "\n"
    )
    for trial, same in merged:
        out += f"{trial.name} is {same.name} by another name: trained once\n"
    resources = sweep.resources
    out += f"\n{len(sweep.trials)} trials: {tally(found)}. {sum(map(flops, sweep.trials)):.2g} FLOPs, {left:.2g} of them to come; "
    slots = f"{resources.slots} slot{'s' if resources.slots > 1 else ''}"
    if not left:
        out += "nothing to run.\n"
    elif not speed.all:
        out += f"how long in {slots}: known when the first trial is done.\n"
    else:
        waits = max((speed.seconds(t, tokens_left(found[t.hash])) or 0 for t in sweep.trials), default=0)
        out += f"about {duration(max(seconds / resources.slots, waits))} in {slots}, by the speed of those that have run.\n"
    for rule in sweep.rules:
        out += f"A trial is stopped when {rule}.\n"
    return out


def status_text(sweep: SweepFile, found: dict[str, Look]) -> str:
    rows = []
    for i, trial in enumerate(sweep.trials):
        look = found[trial.hash]
        record = look.progress()
        speed, step = finite(record.get("tokens_per_second")), record.get("step", 0)
        left = tokens_left(look) / speed if speed and look.state == RUNNING else None
        why = look.verdict.get("reason", "") if look.state == look.verdict.get("event") else ""
        rows.append(
            (
                i,
                trial.name,
                short_state(look),
                f"{step}/{trial.plan['steps']}",
                fixed(finite(record.get("loss")), 3),
                "-" if speed is None else count(speed),
                "-" if left is None else duration(left),
                why[:100],
            )
        )
    return (
        table(("#", "trial", "state", "step", "loss", "tok/s", "ETA", ""), rows, left=3)
        + f"\n\n{tally(found)}\n"
    )


class Result:
    """Figures of one trial, as scripts/report reads them: of its last evaluation, and of its training."""

    def __init__(self, look: Look) -> None:
        self.look, folder = look, look.trial.folder
        self.run = Run(folder) if is_run(folder) else None
        self.record = look.progress()

    def value(self, key: str) -> float | None:
        return self.run.measures[key] if self.run else None

    def of_set(self, name: str, key: str) -> float | None:
        """loss, perplexity or bits_per_byte of one set."""
        values = (self.run.last.get("sets") or {}).get(name) if self.run else None
        return finite((values or {}).get(key))

    def configuration(self) -> tuple[str, ...]:
        return self.look.trial.configuration()


def results_of(sweep: SweepFile, found: dict[str, Look]) -> list[Result]:
    """Of all trials, whose figures are all of the evaluations or all of the analyses."""
    results = [Result(found[trial.hash]) for trial in sweep.trials]
    choose_sources(group for group, _ in groups_of(results) if group)
    return results


def csv_text(sweep: SweepFile, results: list[Result]) -> str:
    keys = list(dict.fromkeys(key for trial in sweep.trials for key in trial.values))
    sets = set_names(results)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "trial",
            "group",
            "base",
            *keys,
            "seed",
            "hash",
            "folder",
            "state",
            "reason",
            "step",
            "steps",
            "tokens",
            "parameters",
            "flops",
            "train_loss",
            "grad_norm",
            "spikes",
            "skipped",
            "seconds",
            "tokens_per_second",
            "val_loss",
            "val_perplexity",
            *(f"val_loss/{s}" for s in sets),
            *(f"val_perplexity/{s}" for s in sets),
            *(f"val_bits_per_byte/{s}" for s in sets),
            "first_token_attention",
            "mean_gate_score",
            "largest_residual",
        ]
    )
    for r in results:
        trial, look, record = r.look.trial, r.look, r.record
        writer.writerow(
            [
                "" if cell is None else cell
                for cell in [
                    trial.name,
                    trial.group,
                    trial.base,
                    *(trial.values[k].flow() if k in trial.values else "" for k in keys),
                    trial.seed.text if trial.seed else "",
                    trial.hash,
                    os.path.basename(trial.folder),
                    look.state,
                    look.verdict.get("reason", "") if look.state == look.verdict.get("event") else "",
                    record.get("step", 0),
                    trial.plan["steps"],
                    record.get("tokens"),
                    trial.plan["parameters"],
                    flops(trial),
                    finite(record.get("loss")),
                    finite(record.get("grad_norm")),
                    record.get("spikes"),
                    record.get("skipped"),
                    finite(record.get("seconds")),
                    finite(record.get("tokens_per_second")),
                    r.value("loss"),
                    r.value("ppl"),
                    *(r.of_set(s, key) for key in ("loss", "perplexity", "bits_per_byte") for s in sets),
                    r.value("first_token_attention"),
                    r.value("gate_score"),
                    r.value("largest_residual"),
                ]
            ]
        )
    return out.getvalue()


def set_names(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(name for r in results if r.run for name in r.run.sets()))


def groups_of(results: list[Result]) -> list[tuple[Group | None, list[Result]]]:
    """[(Group of scripts/report or None, [Result])]: seeds together, in the order of the file."""
    by_configuration: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        by_configuration.setdefault(result.configuration(), []).append(result)
    out = []
    for members in by_configuration.values():
        runs = [m.run for m in members if m.run]
        group = Group(runs) if runs else None
        if group:
            group.label = group.short = members[0].look.trial.group
            group.places = [place for place in [members[0].look.trial.place] if place]
        out.append((group, members))
    return out


def lowest(groups: list[Group], name: str, pick: Callable[..., Any], of_set: str | None = None) -> str:
    """A line on the best variant of these, of those that finished; that there is none where they were evaluated on different data."""
    found = [
        (mean([pick(run) for run in g.evaluated()]), g) for g in groups if g.finished() and not g.diverged()
    ]
    values = [(value, g) for value, g in found if value is not None]
    if not values:
        return ""
    if not same_data((run for _, g in values for run in g.evaluated()), of_set):
        return f"no lowest {name}: configurations were evaluated on different data\n"
    value, best = min(values, key=lambda item: item[0])
    return f"lowest {name}: {value:.4f}  {best.label} ({len(best.sound())} seed{'s' if len(best.sound()) > 1 else ''})\n"


def results_text(sweep: SweepFile, results: list[Result], control: str | None = None) -> str:
    """Seeds together: means, deviations and differences to the control, computed as scripts/report does."""
    sets, made = set_names(results), groups_of(results)
    several = sets if len(sets) > 1 else []
    groups = [group for group, _ in made if group]
    bases = choose_baselines(groups, control) if groups else {}
    rows = []
    for group, members in made:
        name = members[0].look.trial.group
        others = [m.look.state for m in members if m.look.state != DONE]
        notes = [f"{others.count(state)} {state}" for state in dict.fromkeys(others)]
        # A trial that trained to its end, but to a loss that says that it diverged, is in no mean.
        ended = [m for m in members if m.look.state == DONE]
        lost = sum(m.run is not None and m.run.outcome[0] == "diverged" for m in ended)
        done = len(ended) - lost
        notes += [f"{lost} diverged (loss at end)"] if lost else []
        notes += [group.unequal()] if group and group.unequal() else []
        note = ", ".join(notes)
        if not group:
            rows.append((name, f"0/{len(members)}", *["-"] * (7 + len(several)), note))
            continue
        delta, ppl = (
            difference(group, bases[group], "loss"),
            lambda s: [run.perplexities().get(s) for run in group.evaluated()],
        )
        shown = lambda key, write: mean_text(group, key, write)
        rows.append(
            (
                name,
                f"{done}/{len(members)}",
                shown("loss", shared_fixed(4)),
                "control" if bases[group] is group else delta.text(shared_fixed(4, "+")) if delta else "-",
                "*" if delta and delta.better(-1) else "",
                shown("ppl", shared_fixed(3)),
                *(with_spread(shared_fixed(3), mean(ppl(s)), deviation(ppl(s))) for s in several),
                shown("spikes", count_or_few),
                shown("first_token_attention", shared_fixed(3)),
                shown("largest_residual", short),
                note,
            )
        )
    header = (
        "configuration",
        "seeds",
        "val loss",
        "less the control",
        "",
        "perplexity",
        *(f"ppl {s}" for s in several),
        "spikes",
        "first token",
        "residual max",
        "",
    )
    out = table(header, rows) + "\n"
    out += (
        "\n"
        + textwrap.fill(
            "Means of the finished seeds (of those under way where none has finished), ± their standard deviation; over sets, "
            "means of their losses and of their perplexities. *: the bold of scripts/report. "
            + " ".join(text for text in (source_note(groups), RULE) if text),
            130,
        )
        + "\n"
    )
    out += "".join(f"control: {name}\n" for name in dict.fromkeys(base.label for base in bases.values() if base))
    complete = [g for g, members in made if g and all(m.look.state in ENDS for m in members)]
    out += lowest(complete, "validation loss", lambda run: run.measures["loss"])
    for name in several:
        out += lowest(
            complete,
            f"loss on {name}",
            lambda run: finite(((run.last.get("sets") or {}).get(name) or {}).get("loss")),
            name,
        )
    return out
