"""What has become of the trials: the journal, the run folders, and locks that end with the processes that hold them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..reporting import shapes
from ..reporting.files import parse, read_object
from .plan import Mistake, output_of

if TYPE_CHECKING:
    from .sweep_file import SweepFile, Trial

# States; the first group can be run, the last has its result.
WAITING, PAUSED, RUNNING = "waiting", "paused", "running"
FAILED, STOPPED, DIVERGED, DONE = "failed", "stopped", "diverged", "done"
ENDS = (FAILED, STOPPED, DIVERGED, DONE)
HOST = socket.gethostname()


def read_json(path: str, shape: Any) -> dict[str, Any]:
    """An object; {} where there is none, or no whole one."""
    return read_object(path, shape)


def read_lines(path: str, start: int = 0, shape: Any = shapes.METRICS) -> tuple[list[dict[str, Any]], int]:
    """(objects of a JSON-lines file from the byte `start` on, where the last whole line ends)."""
    records: list[dict[str, Any]] = []
    misfits = shapes.Misfits(path)
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read()
    except OSError:
        return records, start
    whole = data.rfind(b"\n") + 1
    for i, line in enumerate(data[:whole].splitlines(), 1):
        try:
            record = parse(line.decode("utf-8", "replace"))
        except ValueError:
            continue  # torn by a death, then gone on
        if isinstance(record, dict):
            # From the middle of a file lines cannot be counted.
            records.append(shapes.fit(record, shape, misfits.at(i) if start == 0 else lambda *_: None))
    return records, start + whole


def last_record(path: str) -> dict[str, Any]:
    """Of a JSON-lines file of any length; {} without one."""
    try:
        size = os.path.getsize(path)
    except OSError:
        return {}
    for reach in (1 << 16, size):
        records = [r for r in read_lines(path, max(0, size - reach))[0] if isinstance(r.get("step"), int)]
        if records:
            return records[-1]
    return {}


def locked_file(path: str) -> int | None:
    """An open file that this process has locked, or None: another has it. The lock lives as long as any process has this opening
    of the file: given to a child as its output, it ends with the child and all that the child started."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def saved_step(folder: str) -> int:
    """Newest complete checkpoint's step; 0 without one."""
    steps = [0]
    try:
        for name in os.listdir(os.path.join(folder, "ckpt")):
            if (
                name.startswith("step_")
                and name[5:].isdigit()
                and os.path.exists(os.path.join(folder, "ckpt", name, "MANIFEST.json"))
            ):
                steps.append(int(name[5:]))
    except OSError:
        pass
    return max(steps)


class Journal:
    """OUTPUT/sweep.jsonl: what was begun and how it ended, a line each, never rewritten. A line torn by a death is passed over."""

    def __init__(self, output: str) -> None:
        self.path = os.path.join(output, "sweep.jsonl")

    def add(self, event: str, trial: Trial, **more: Any) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {
            "time": now,
            "event": event,
            "trial": trial.hash,
            "folder": os.path.basename(trial.folder),
            **more,
        }
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # nodes of a cluster share it
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, (("\n" if torn else "") + json.dumps(line) + "\n").encode())
            os.fsync(fd)
        finally:
            os.close(fd)

    def by_trial(self) -> dict[str, list[dict[str, Any]]]:
        """{hash: its events, oldest first}"""
        events: dict[str, list[dict[str, Any]]] = {}
        for record in read_lines(self.path, shape=shapes.JOURNAL)[0]:
            if isinstance(record.get("trial"), str) and isinstance(record.get("event"), str):
                events.setdefault(record["trial"], []).append(record)
        return events


class Look:
    """A trial at one moment."""

    def __init__(
        self,
        trial: Trial,
        events: list[dict[str, Any]],
        folder_of_logs: str,
        record: dict[str, Any] | None = None,
    ) -> None:
        """record: the trial's line of the sweep's record, for one that has no finished folder."""
        self.trial = trial
        self.run = read_json(os.path.join(trial.folder, "run.json"), shapes.RUN)
        self.status = read_json(os.path.join(trial.folder, "status.json"), shapes.STATUS)
        self.log = os.path.join(folder_of_logs, os.path.basename(trial.folder) + ".log")
        self.locked = is_locked(self.log)
        self.record: dict[str, Any] = {}
        if record and not (self.finished() or self.locked or self.foreign()):
            self.record = record
            self.run = {**record["run"], "config_hash": trial.hash, "recorded": True}
            self.status = {"state": DONE, "step": record["steps"]}
        self.events = events
        # A retry takes back how it ended.
        since = max([i + 1 for i, e in enumerate(events) if e["event"] == "retry"], default=0)
        self.since_retry = events[since:]
        verdicts = [e for e in self.since_retry if e["event"] in ENDS]
        self.verdict = verdicts[-1] if verdicts else {}
        self.state = self.judge()

    def finished(self) -> bool:
        """Whether the folder holds a whole training."""
        return bool(self.run) and self.status.get("state") == DONE

    def foreign(self) -> str:
        """Why the folder is another training's; "" when it is ours or new."""
        theirs = self.run.get("config_hash")
        if theirs is not None and theirs != self.trial.hash:
            return f"its configuration has the hash {theirs}, the trial's is {self.trial.hash}"
        if theirs is None and os.path.isdir(os.path.join(self.trial.folder, "ckpt")):
            return "it holds checkpoints and no run.json"
        return ""

    def judge(self) -> str:
        if self.finished():
            return DONE
        if self.verdict and (
            self.verdict["event"] != DONE or self.run
        ):  # done, but its folder is gone: it is run again
            return self.verdict["event"]
        if self.locked:
            return RUNNING
        return PAUSED if self.run else WAITING

    def recorded(self) -> bool:
        """Whether it was trained elsewhere: results without weights, from the sweep's record."""
        return bool(self.run.get("recorded"))

    def lost_in_vain(self) -> int:
        """How often in a row it was lost without a newer checkpoint."""
        count, saved = 0, saved_step(self.trial.folder)
        for event in reversed(self.since_retry):
            if event["event"] == "lost":
                if event.get("saved", 0) != saved:
                    break
                count += 1
            elif event["event"] != "started":
                break
        return count

    def slot(self) -> int | None:
        """Which of this machine's slots it occupies, if it runs here without us; else None."""
        started = [e for e in self.events if e["event"] == "started"]
        return (
            started[-1].get("slot") if self.locked and started and started[-1].get("host") == HOST else None
        )

    def progress(self) -> dict[str, Any]:
        """Newest record of metrics.jsonl, or {}."""
        if self.record:
            return {key: values[-1] for key, values in self.record["metrics"].items() if values}
        return last_record(os.path.join(self.trial.folder, "metrics.jsonl"))


def refuse_foreign(found: dict[str, Look]) -> None:
    """Nothing is begun, shown or recorded where a folder is another's."""
    for look in found.values():
        if look.foreign():
            raise Mistake(
                73, f"{look.trial.folder} is another training's: {look.foreign()}; move it away"
            )


def looks(
    trials: list[Trial], output: str, records: dict[str, dict[str, Any]] | None = None
) -> dict[str, Look]:
    """{hash: Look} of every trial. records: lines of the sweep's record, by hash."""
    events, lines, logs = Journal(output).by_trial(), records or {}, os.path.join(output, "logs")
    return {t.hash: Look(t, events.get(t.hash, []), logs, lines.get(t.hash)) for t in trials}


def refuse_early(sweep: SweepFile, trials: list[Trial], output: str, again: Sequence[str] = ()) -> None:
    """Nothing is begun whose weights to start from are not there yet, or no longer. again: states that are tried again."""
    if not sweep.after:
        return
    looked = looks(trials, output).values()
    begun = [look.trial for look in looked if look.state not in ENDS or look.state in again]
    sources = [trial.after for trial in begun if trial.after]
    folder = output_of(sweep.after)
    waiting = [look.trial.name for look in looks(sources, folder).values() if look.state != DONE]
    if waiting:
        raise Mistake(
            66,
            f"{len(waiting)} trials of {sweep.after.path} come first and are not done, {waiting[0]} among them: "
            f"scripts/sweep run {sweep.after.path}",
        )
    for trial in sources:
        if trial.folder != trial.own_folder(folder):
            raise Mistake(
                73,
                f"{trial.folder} has another name than its trial, and the trials that start from it are known by that "
                f"name; mv {trial.folder} {trial.own_folder(folder)}",
            )
        if not os.path.isdir(os.path.join(trial.folder, "ckpt")):
            raise Mistake(
                66,
                f"{trial.folder} has no weights to start from (the results of a recorded trial have none); train it: "
                f"remove the folder, and the trial from {sweep.after.record or 'the record'}",
            )
