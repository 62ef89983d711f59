"""Results of finished trials as a small text file that can be kept with the sweep file and added to on any machine: a line of JSON
for each trial, known by the hash of its configuration. A recorded trial is not trained again; it counts as done, without weights."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from .. import yaml
from ..program import working_folder
from ..reporting import shapes
from ..reporting.files import open_file, parse, read_lines, read_object, read_text
from . import state
from .plan import Mistake

if TYPE_CHECKING:
    from .state import Look
    from .sweep_file import SweepFile, Trial

SCHEMA = 1
EVALUATIONS = 5  # that are kept of a training, evenly over its length, the last one among them
DIGITS = 8
# Of run.json: what bears on results. Hosts, times and paths stay where they are.
KEPT = (
    "version",
    "build",
    "parameters",
    "parameters_active",
    "parameters_non_embedding",
    "max_steps",
    "tokens_per_step",
    "precision",
    "ranks",
    "threads",
    "instruction_set",
    "bf16_products",
    "device",
    "data_fingerprint",
    "validation_fingerprints",
    "tokenizer_fingerprint",
    "changes",
)
KEPT_OF_START = ("step", "fingerprint")  # of run.json's init_from; its path is the configuration's

# Of the run's configuration: how it was evaluated, which the hash leaves out and the sweep file may say otherwise later. Tasks are
# files of the machine, prompts have no numbers.
SETTINGS = ("eval", "analysis")
NO_SETTINGS = ("eval.tasks", "eval.prompts")
# Of metrics.jsonl, column by column. Speeds are not comparable between machines.
COLUMNS = ("step", "tokens", "loss", "grad_norm", "spikes", "skipped")
SHAPE = {
    "schema": shapes.WHOLE,
    "hash": shapes.TEXT,
    "trial": shapes.TEXT,
    "run": {
        **shapes.RUN,
        "data_fingerprint": shapes.TEXT,
        "instruction_set": shapes.TEXT,
        "precision": shapes.TEXT,
        "bf16_products": shapes.TEXT,
        "build": {"commit": shapes.TEXT},
    },
    "settings": {section: {} for section in SETTINGS},
    "steps": shapes.WHOLE,
    "metrics": {"*": [shapes.NUMBER]},
    "evaluations": [shapes.EVALUATION],
}

# Without these, and the number of parameters, a record is not whole.
WHOLE = ("hash", "run", "steps", "metrics", "evaluations")


def rounded(value: Any) -> Any:
    """Numbers to eight digits, more than tables show; what is not finite, null."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
    return value


def evenly(items: list[Any], most: int) -> list[Any]:
    """At most `most` of the items, the last one among them."""
    if len(items) <= most:
        return items
    return [items[round((i + 1) * len(items) / most) - 1] for i in range(most)]


def settings_of(trial: Trial, program: str | None) -> dict[str, Any]:
    """The sections of SETTINGS, from what the run folder says; {} where its configuration cannot be read."""
    path = os.path.join(trial.folder, "config.yaml")
    try:
        config = yaml.read_plain(path, read_text(path), program)
    except yaml.Refused as error:
        raise Mistake(65, str(error)) from None
    kept: dict[str, Any] = {}
    for section in SETTINGS:
        for key, value in yaml.leaves(config.get(section) or {}, section).items():
            if key not in NO_SETTINGS:
                kept.setdefault(section, {})[key[len(section) + 1 :]] = value
    return kept


def kept_of(run: dict[str, Any]) -> dict[str, Any]:
    """What a record holds of run.json."""
    kept = {key: run[key] for key in KEPT if key in run}
    start = {key: (run.get("init_from") or {}).get(key) for key in KEPT_OF_START}
    return kept | ({"init_from": start} if any(start.values()) else {})


def of_run(trial: Trial, program: str | None = None) -> dict[str, Any]:
    """The record of a finished trial."""
    read = lambda name, shape: read_lines(os.path.join(trial.folder, name), shape)
    metrics = read("metrics.jsonl", shapes.METRICS)
    run = read_object(os.path.join(trial.folder, "run.json"), shapes.RUN, must=True)
    return {
        "schema": SCHEMA,
        "hash": trial.hash,
        "trial": trial.name,
        "run": kept_of(run),
        "settings": settings_of(trial, program),
        "steps": trial.plan["steps"],
        "metrics": {
            key: rounded([line.get(key) for line in metrics])
            for key in COLUMNS
            if any(line.get(key) is not None for line in metrics)
        },
        "evaluations": rounded(evenly(read("eval.jsonl", shapes.EVALUATION), EVALUATIONS)),
    }


class Records:
    """The file that a sweep file's `record` names."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines: dict[str, dict[str, Any]] = {}  # by hash, in the order of the file
        self.unread: list[str] = []  # of another schema, or damaged: kept as they are
        misfits = shapes.Misfits(path)
        try:
            with open_file(path) as file:
                texts = file.read().splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise Mistake(66, f"{path}: {error.strerror}") from None
        for i, text in enumerate(texts, 1):
            try:
                line = parse(text)
            except ValueError:
                self.unread.append(text)
                misfits.add(f"{i}: not a whole JSON object, passed over")
                continue
            line = shapes.fit(line, SHAPE, misfits.at(i)) if isinstance(line, dict) else {}
            whole = all(line.get(key) for key in WHOLE) and line["run"].get("parameters")
            if whole and line.get("schema") == SCHEMA and line["hash"] not in self.lines:
                self.lines[line["hash"]] = line
                continue
            self.unread.append(text)
            if line.get("schema") != SCHEMA:
                misfits.add(f"{i}: no record of a trial of schema {SCHEMA}, passed over")
            elif line.get("hash") in self.lines:
                misfits.add(f"{i}: {line['hash']} is recorded twice, passed over")
            else:
                misfits.add(f"{i}: the record is not whole, passed over")

    def write(self, order: list[str]) -> None:
        """The trials of the sweep file first, in its order."""
        hashes = [h for h in order if h in self.lines]
        hashes += [h for h in self.lines if h not in order]
        with open(self.path + ".tmp", "w", encoding="utf-8") as file:
            for name in hashes:
                file.write(json.dumps(self.lines[name], separators=(",", ":")) + "\n")
            for text in self.unread:
                file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())  # it may be the only copy: a crash leaves the old file or the new one, never an empty one
        os.replace(self.path + ".tmp", self.path)

    def make_folders(self, found: dict[str, Look], program: str) -> None:
        """A run folder without checkpoints for every recorded trial that has no finished folder here. An unfinished one is
        refused: it would hide the result."""
        missing = [look for look in found.values() if look.record]
        hiding = [look.trial.folder for look in missing if os.path.exists(look.trial.folder)]
        if hiding:
            raise Mistake(
                73,
                f"{self.path} has the results of trials whose trainings are unfinished here: {len(hiding)}. Remove these run "
                f"folders to count the results: rm -r {shlex.join(hiding)}",
            )
        for look in missing:
            make_folder(look.trial, look.record, program)


def make_folder(trial: Trial, line: dict[str, Any], program: str) -> None:
    # Later ones win: it was evaluated as its record says, whatever the sweep file says now. Older records do not say.
    evaluated = [
        f"{section}.{key}={json.dumps(value)}"
        for section, keys in (line.get("settings") or {}).items()
        if section in SETTINGS
        for key, value in keys.items()
    ]
    # A run's own file names the vocabulary that the tokenizer gave it.
    vocabulary = [f"model.vocab_size={trial.plan['vocab_size']}"] if trial.plan.get("vocab_size") else []
    command = [program, "config", "show", trial.base, *trial.overrides(), *vocabulary, *evaluated]
    shown = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=working_folder()
    )
    if shown.returncode != 0:
        raise Mistake(shown.returncode, f"the trial {trial.name} cannot be:\n{shown.stderr.strip()}")
    columns, last = line["metrics"], line["evaluations"][-1]
    steps = columns.get("step") or []
    run = {"schema": 1, "name": trial.name, **line["run"], "config_hash": trial.hash, "recorded": True}
    status = {
        "state": state.DONE,
        "step": line["steps"],
        "max_steps": line["steps"],
        "tokens": last.get("tokens"),
    }
    whole = {key: values for key, values in columns.items() if len(values) == len(steps)}
    metrics = [{"schema": 1, **{key: values[i] for key, values in whole.items()}} for i in range(len(steps))]
    text = lambda objects: "".join(json.dumps(o) + "\n" for o in objects)
    temporary = f"{trial.folder}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    for name, content in (
        ("config.yaml", shown.stdout),
        ("metrics.jsonl", text(metrics)),
        ("eval.jsonl", text(line["evaluations"])),
        ("status.json", json.dumps(status, indent=2) + "\n"),
        ("run.json", json.dumps(run, indent=2) + "\n"),
    ):
        with open(os.path.join(temporary, name), "w", encoding="utf-8") as file:
            file.write(content)
    try:
        os.rename(temporary, trial.folder)
    except OSError:  # another process has made it meanwhile
        shutil.rmtree(temporary)
        if not os.path.isdir(trial.folder):
            raise


def record(sweep: SweepFile, found: dict[str, Look], path: str, program: str) -> str:
    """Adds the finished trials that are not recorded yet; says how many. One process at a time."""
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = Records(path)
        done = [look.trial for look in found.values() if look.state == state.DONE]
        new = {t.hash: of_run(t, program) for t in done if t.hash not in records.lines}
        bare = [line["trial"] for line in new.values() if not line["evaluations"]]
        if bare:
            raise Mistake(
                64, f"{bare[0]} has no evaluation, so there is nothing to record; set data.validation"
            )
        records.lines.update(new)
        records.write([trial.hash for trial in sweep.trials])
    finally:
        os.close(lock)
    known = sum(trial.hash in records.lines for trial in sweep.trials)
    strange = len(records.lines) - known
    return f"{len(new)} recorded now; {known} of {len(sweep.trials)} trials are in {path}" + (
        f", and {strange} of configurations that this sweep does not have" if strange else ""
    )


def validation_data(run: dict[str, Any]) -> str:
    """The fingerprints of its sets; "" of a run from before they were written."""
    return " ".join(
        f"{name} {text}" for name, text in sorted((run.get("validation_fingerprints") or {}).items())
    )


def bf16_products(run: dict[str, Any]) -> str | None:
    """What multiplied, where it bears on the result; None of a training in f32."""
    return run.get("bf16_products") if run.get("precision") == "bf16" else None


def mixtures(found: dict[str, Look]) -> list[str]:
    """What finished trials do not have in common though they should: lines for readers of a table."""
    done = [look for look in found.values() if look.state == state.DONE]
    out = []
    for what, pick in (
        ("training data", lambda run: run.get("data_fingerprint")),
        ("validation data", validation_data),
        ("commits of the program", lambda run: (run.get("build") or {}).get("commit")),
        ("instruction sets", lambda run: run.get("instruction_set")),
        ("units for products of bf16", bf16_products),
    ):
        values = [pick(look.run) for look in done]
        names = list(dict.fromkeys(str(value) for value in values if value))
        if len(names) > 1:
            counts = ", ".join(f"{name} ({values.count(name)} trials)" for name in names)
            out.append(f"of several {what}: {counts}")
    starts: dict[str, set[str]] = {}  # by the name of the weights
    for look in done:
        mark = (look.run.get("init_from") or {}).get("fingerprint")
        if mark:
            starts.setdefault(start_of(look.trial), set()).add(mark)
    changed = [name for name, marks in starts.items() if len(marks) > 1]
    changed += [
        look.trial.after.name for look in done if look.trial.after and younger(look.trial.after, look.trial)
    ]
    if changed:
        out.append(
            f"of several weights of {', '.join(dict.fromkeys(changed))}, which was trained again while trials that start from it "
            "were kept"
        )
    return out


def start_of(trial: Trial) -> str:
    """What the weights that it starts from are called."""
    if trial.after:
        return trial.after.name
    given = [text for text in trial.overrides() if text.startswith("train.init_from=")]
    return given[-1].partition("=")[2] if given else "train.init_from"


def younger(source: Trial, trial: Trial) -> bool:
    """Whether the last weights of the source are from after the last start of the trial that starts from them."""
    weights = os.path.join(working_folder(), source.last_weights(), "MANIFEST.json")
    try:
        return os.path.getmtime(weights) > os.path.getmtime(os.path.join(trial.folder, "run.json"))
    except OSError:  # recorded, or removed
        return False
