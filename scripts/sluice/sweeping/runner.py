"""Runs trials in slots of this machine: starts, watches, stops, and starts again what was lost."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..program import SCRIPTS, working_folder
from . import state
from .plan import Mistake
from .state import DIVERGED, DONE, FAILED, PAUSED, STOPPED, WAITING

if TYPE_CHECKING:
    from .state import Look
    from .stop_rules import StopRule
    from .sweep_file import SweepFile, Trial
    from .text import Display

PR_SET_PDEATHSIG = 1
# 73: another run has the folder. 75: stopped by another process after saving. 76: a rank hung or was lost; besides deaths by signals.
LOST = {73, 75, 76}
NUMERIC = 78
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IN_VAIN = 3  # losses without a newer checkpoint after which a trial has failed
libc = ctypes.CDLL(None)


def given_up(verdict: dict[str, Any]) -> int:
    """The exit code of a job whose trial has failed for good: never one that asks for another start."""
    code = int(verdict.get("code") or 70)
    return 70 if code in LOST or code > 128 else code


def before_exec(parent: int, number: int) -> None:
    """In the new process: a signal comes should the sweep be killed, so that the trial saves and ends."""
    libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(75)  # it already was


def kill_tree(pid: int) -> None:
    """All descendants, whichever groups they made themselves: launchers do."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parents[int(entry)] = int(file.read().rsplit(")", 1)[1].split()[1])
            except OSError:
                pass
    doomed, grown = {pid}, True
    while grown:
        more = {p for p, parent in parents.items() if parent in doomed} - doomed
        doomed |= more
        grown = bool(more)
    for p in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(p, signal.SIGKILL)


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [g for g in given.split(",") if g]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return []
    return [str(i) for i, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]


def last_words(path: str) -> str:
    """The error that the program printed into its log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    errors = [line.strip() for line in lines if "error" in line.lower()]
    return (errors or [line.strip() for line in lines if line.strip()] or [""])[-1][:300]


class Tail:
    """New records of a JSON-lines file; from its beginning when the program has rewritten it."""

    def __init__(self, path: str) -> None:
        self.path, self.at = path, 0
        self.inode: int | None = None

    def new(self) -> list[dict[str, Any]]:
        try:
            stat = os.stat(self.path)
        except OSError:
            return []
        if stat.st_ino != self.inode or stat.st_size < self.at:
            self.inode, self.at = stat.st_ino, 0
        if stat.st_size == self.at:
            return []
        records, self.at = state.read_lines(self.path, self.at)
        return [r for r in records if isinstance(r.get("step"), int)]


class Running:
    """A started trial."""

    def __init__(self, look: Look, process: subprocess.Popen[bytes], slot: int | None) -> None:
        self.look, self.trial, self.process, self.slot = look, look.trial, process, slot
        self.metrics = Tail(os.path.join(self.trial.folder, "metrics.jsonl"))
        self.evals = Tail(os.path.join(self.trial.folder, "eval.jsonl"))
        self.last: dict[str, Any] = {}
        self.verdict: str | None = None

    def reason_to_stop(
        self, rules: list[StopRule], say: Callable[..., None]
    ) -> tuple[StopRule, dict[str, Any]] | None:
        """The first rule that holds in the run's records since the last look: (rule, record), or None."""
        found = None
        metrics, evals = self.metrics.new(), self.evals.new()
        self.last = metrics[-1] if metrics else self.last
        for records, wanted in ((metrics, False), ([{**r, "val": r.get("sets")} for r in evals], True)):
            for rule in rules:
                if rule.metric.startswith("val.") != wanted:
                    continue
                for record in records:
                    holds = rule.holds(record)
                    if holds is None:
                        say(
                            f"{self.trial.name}: its records have no {rule.metric}, which stop_if asks for; they have {', '.join(record)}",
                            once=rule,
                        )
                    elif holds and found is None:
                        found = (rule, record)
        return found

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Runner:
    def __init__(
        self, sweep: SweepFile, output: str, program: str, launcher: str | None, display: Display
    ) -> None:
        self.sweep, self.output, self.program, self.launcher, self.display = (
            sweep,
            output,
            program,
            launcher,
            display,
        )
        self.journal = state.Journal(output)
        self.running: dict[int | None, Running] = {}  # slot: Running
        self.not_before: dict[str, float] = {}  # hash: when a lost trial is started again
        self.signals, self.told_signals = 0, 0
        self.gpus: list[str] = []
        os.makedirs(os.path.join(output, "logs"), exist_ok=True)

    def find_gpus(self) -> list[str]:
        wanted = self.sweep.resources.gpus
        if not wanted:
            return []
        gpus = visible_gpus()
        if len(gpus) < wanted:
            raise Mistake(64, f"resources.gpus is {wanted} for each trial, this machine shows {len(gpus)}")
        return gpus

    def threads(self) -> int:
        """Of each rank; the machine shared by the slots when nothing is said."""
        resources = self.sweep.resources
        return resources.threads or max(
            1, len(os.sched_getaffinity(0)) // (resources.slots * resources.procs)
        )

    def command(self, trial: Trial) -> list[str]:
        ranks = self.sweep.resources.procs
        program = [
            self.program,
            "train",
            trial.base,
            *trial.overrides(),
            f"name={trial.name}",
            f"run_dir={trial.run_dir()}",
            f"train.threads={self.threads()}",
        ]
        if self.launcher:
            words = shlex.split(self.launcher)
            if os.sep in words[0]:
                words[0] = os.path.abspath(words[0])
            return [*words, *program]
        return (
            program
            if ranks == 1
            else [os.path.join(SCRIPTS, "launch"), "-n", str(ranks), "--restarts", "0", *program]
        )

    def environment(self, slot: int | None) -> dict[str, str]:
        environment = dict(os.environ)
        wanted = self.sweep.resources.gpus
        if (
            wanted is not None and slot is not None
        ):  # more slots than GPUs share them in turn; a cluster's job has its own
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(
                self.gpus[(slot * wanted + i) % len(self.gpus)] for i in range(wanted)
            )
        return environment

    def stop_signal(self) -> signal.Signals:
        """What ends a trial: srun hands SIGUSR1 on, and the ranks save."""
        return (
            signal.SIGUSR1
            if self.launcher and os.path.basename(shlex.split(self.launcher)[0]) == "srun"
            else signal.SIGTERM
        )

    # ---- one trial

    def look(self, trial: Trial) -> Look:
        events = self.journal.by_trial().get(trial.hash, [])
        return state.Look(trial, events, os.path.join(self.output, "logs"))

    def start(self, trial: Trial, slot: int | None) -> Running | None:
        """Running, or None when there is nothing to start: another has the trial, or has ended it meanwhile."""
        look = self.look(trial)
        log = state.locked_file(look.log)
        if log is None:
            return None
        try:
            look = self.look(trial)  # it does not change from here on
            if look.state in state.ENDS:
                return None
            if look.foreign():
                raise Mistake(73, f"{trial.folder} is another training's: {look.foreign()}")
            self.journal.add(
                "started", trial, slot=slot, host=state.HOST, saved=state.saved_step(trial.folder)
            )
            parent, number = os.getpid(), self.stop_signal()
            # A separate process group, so that a terminal's Ctrl-C reaches only this script.
            process = subprocess.Popen(
                self.command(trial),
                env=self.environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=working_folder(),
                start_new_session=True,
                preexec_fn=lambda: before_exec(parent, number),
            )
        finally:
            os.close(log)
        return Running(look, process, slot)

    def stop(self, running: Running, rule: StopRule, record: dict[str, Any]) -> None:
        """The verdict is written before the signal is sent: whatever dies in between, it stands."""
        value: Any = record
        for part in rule.metric.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        running.verdict = DIVERGED if rule.op == "nonfinite" else STOPPED
        self.journal.add(running.verdict, running.trial, reason=str(rule), step=record["step"], value=value)
        self.display.event(running.trial, f"{running.verdict} at step {record['step']}: {rule} ({value})")
        running.signal(self.stop_signal())

    def ended(self, running: Running) -> bool:
        """Writes down how; true when it is to be started again."""
        trial, code = running.trial, running.process.returncode
        code = 128 - code if code < 0 else code  # as shells say it
        if running.verdict:
            return False
        look = self.look(trial)
        if code == 0 and look.run.get("config_hash") == trial.hash:
            self.journal.add(DONE, trial)
            self.display.event(trial, "done")
            return False
        if self.signals and (code in (75, 128 + signal.SIGTERM) or self.signals > 1):
            self.journal.add("preempted", trial, saved=state.saved_step(trial.folder))
            return False
        if code == NUMERIC:
            self.journal.add(DIVERGED, trial, reason=last_words(look.log), code=code)
            self.display.event(trial, f"diverged: {last_words(look.log)}")
            return False
        # 1 is mpirun's own word for a rank that went without one.
        if code in LOST or code > 128 or (code == 1 and self.sweep.resources.procs > 1):
            self.journal.add("lost", trial, code=code, saved=state.saved_step(trial.folder))
            if self.look(trial).lost_in_vain() < IN_VAIN:
                what = "was stopped, and saved" if code == 75 else f"lost (exit status {code})"
                self.display.event(trial, f"{what}; it goes on from step {state.saved_step(trial.folder)}")
                self.not_before[trial.hash] = time.monotonic() + 0.5
                return True
        reason = f"exit status {code}: {last_words(look.log)}" if code else "it ended without being finished"
        self.journal.add(FAILED, trial, code=code or 70, reason=reason)
        self.display.event(trial, f"failed: {reason}; its words: {look.log}")
        return False

    # ---- all of them

    def on_signal(self, _number: int, _frame: object) -> None:
        self.signals += 1

    @staticmethod
    def ignore_signals() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def hand_on_signals(self) -> None:
        while self.told_signals < self.signals:
            self.told_signals += 1
            if self.told_signals == 1:
                self.display.say(
                    f"stopping: what runs saves and ends (trials: {len(self.running)}); a second signal kills it"
                )
            for running in self.running.values():
                if self.told_signals == 1:
                    running.signal(self.stop_signal())
                else:
                    kill_tree(running.process.pid)

    def reap(self) -> None:
        for slot, running in list(self.running.items()):
            # Its end first, then its last records: a rule that the end itself broke is not missed, and a finished trial is finished.
            over = running.process.poll() is not None
            found = running.reason_to_stop(self.sweep.rules, self.display.say)
            if found and not over and not running.verdict:
                self.stop(running, *found)
            if over:
                del self.running[slot]
                self.ended(running)

    def start_more(self) -> bool:
        """Fills the slots. False when nothing is left that could be started, now or later."""
        found = state.looks(self.sweep.trials, self.output)
        ours = {running.trial.hash for running in self.running.values()}
        others = [look for look in found.values() if look.locked and look.trial.hash not in ours]
        busy = set(self.running) | {look.slot() for look in others}
        free = [slot for slot in range(self.sweep.resources.slots) if slot not in busy]
        left = False
        for trial in self.sweep.trials:
            look = found[trial.hash]
            if trial.hash in ours or look.state in state.ENDS:
                continue
            left = True
            if (
                free
                and look.state in (WAITING, PAUSED)
                and self.not_before.get(trial.hash, 0) <= time.monotonic()
            ):
                at = state.saved_step(trial.folder)  # a short trial may save before start() returns
                running = self.start(trial, free[0])
                if running:
                    self.running[free.pop(0)] = running
                    self.display.event(trial, f"goes on from step {at}" if at else "begins")
        # Another's trial is waited for: it may end unfinished.
        return left or any(look.state == state.RUNNING for look in others)

    def own(self) -> None:
        """Takes the sweep's lock; it ends with this process."""
        path = os.path.join(self.output, "sweep.lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        end = (
            time.monotonic() + 2
        )  # a child of a killed sweep may hold it for a moment, until it executes its own program
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    raise Mistake(
                        73,
                        f"{self.output} is in use by another sweep ({os.pread(fd, 200, 0).decode('utf-8', 'replace')})",
                    ) from None
                time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {state.HOST}".encode(), 0)

    def run(self) -> int:
        """Exit code: 0 when every trial has its result, 75 when a signal came first, else the worst of the failed ones. Call own() first."""
        state.refuse_foreign(state.looks(self.sweep.trials, self.output))
        self.gpus = self.find_gpus()
        for number in SIGNALS:
            signal.signal(number, self.on_signal)
        next_look = 0.0
        while True:
            before = len(self.running)
            self.hand_on_signals()
            self.reap()
            if self.signals:
                if not self.running:
                    return 75
            elif len(self.running) < before or time.monotonic() >= next_look:
                next_look = time.monotonic() + 0.5
                if not self.start_more() and not self.running:
                    break
            self.display.refresh(self.running)
            time.sleep(0.05)
        failed = [
            look for look in state.looks(self.sweep.trials, self.output).values() if look.state == FAILED
        ]
        return max([int(look.verdict.get("code") or 70) for look in failed], default=0)

    def run_one(self, trial: Trial) -> int:
        """One trial, once, as a job of a cluster does. 0 when it has its result; what a restart can mend keeps its code."""
        for number in (*SIGNALS, signal.SIGUSR1):
            signal.signal(number, self.on_signal)
        look = self.look(trial)
        if look.state in state.ENDS:
            self.display.say(
                f"{trial.name} is {look.state}"
                + (f": {look.verdict['reason']}" if look.verdict.get("reason") else "")
            )
            return given_up(look.verdict) if look.state == FAILED else 0
        running = self.start(trial, None)
        if running is None:
            raise Mistake(73, f"{trial.folder} is being trained by another")
        self.running[None] = running
        while self.running:
            self.hand_on_signals()
            self.reap()
            time.sleep(0.05)
        look = self.look(trial)
        if look.state in state.ENDS:
            return given_up(look.verdict) if look.state == FAILED else 0
        code = running.process.returncode
        return 75 if self.signals else 128 - code if code < 0 else code
