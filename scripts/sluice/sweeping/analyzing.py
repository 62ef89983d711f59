"""`sluice analyze` of every finished trial that has no analysis yet: as many at once as there are slots, each exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from ..program import working_folder
from ..reporting.files import Analysis
from . import state
from .runner import SIGNALS, before_exec, kill_tree, last_words

if TYPE_CHECKING:
    from .runner import Runner
    from .sweep_file import Trial


def folder_of(trial: Trial) -> str:
    return os.path.join(trial.folder, "analysis")


def is_analyzed(trial: Trial) -> bool:
    """Whether there is a whole analysis of the last step: the program writes analysis.json last. A damaged one is reported, and made
    again."""
    analysis = Analysis(folder_of(trial))
    return bool(analysis) and analysis.data.get("step") == trial.plan["steps"]


class One:
    """An analysis under way."""

    def __init__(self, trial: Trial, process: subprocess.Popen[bytes], log: str) -> None:
        self.trial, self.process, self.log = trial, process, log


class Analyzer:
    def __init__(self, work: Runner) -> None:
        self.work, self.display, self.sweep = work, work.display, work.sweep
        self.running: dict[int, One] = {}  # slot: analysis
        self.signals = 0
        self.worst = self.made = self.failed = 0

    def on_signal(self, _number: int, _frame: object) -> None:
        self.signals += 1

    def threads(self) -> int:
        resources = self.sweep.resources
        return resources.threads or max(1, len(os.sched_getaffinity(0)) // resources.slots)

    def command(self, trial: Trial) -> list[str]:
        run = trial.run_dir()
        # What lies in the folder is of an analysis that was broken off.
        options = ["-o", os.path.join(run, "analysis"), "--force", "--quiet"]
        return [self.work.program, "analyze", run, *options, f"train.threads={self.threads()}"]

    def start(self, trial: Trial, slot: int) -> bool:
        """False when there is nothing to start: another process analyzes it, or has done so meanwhile."""
        path = os.path.join(self.work.output, "logs", os.path.basename(trial.folder) + ".analysis.log")
        log = state.locked_file(path)
        if log is None:
            self.display.event(trial, "is being analyzed by another process")
            return False
        try:
            if is_analyzed(trial):
                return False
            os.ftruncate(log, 0)
            parent = os.getpid()
            process = subprocess.Popen(
                self.command(trial),
                env=self.work.environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=working_folder(),
                start_new_session=True,
                preexec_fn=lambda: before_exec(parent, signal.SIGTERM),
            )
        finally:
            os.close(log)
        self.running[slot] = One(trial, process, path)
        return True

    def reap(self) -> None:
        for slot, one in list(self.running.items()):
            code = one.process.poll()
            if code is None:
                continue
            del self.running[slot]
            if code == 0 and is_analyzed(one.trial):
                self.made += 1
                self.display.event(one.trial, "analyzed")
            elif not self.signals:
                code = 128 - code if code < 0 else code or 70
                self.worst, self.failed = max(self.worst, code), self.failed + 1
                words = last_words(one.log)
                self.display.event(
                    one.trial, f"analysis failed: exit status {code}: {words}; its words: {one.log}"
                )

    def run(self) -> int:
        """Exit code: 0 when every finished trial is analyzed, 75 when a signal came first, else the worst of those that failed."""
        found = state.looks(self.sweep.trials, self.work.output)
        finished = [trial for trial in self.sweep.trials if found[trial.hash].state == state.DONE]
        done = [trial for trial in finished if not found[trial.hash].recorded()]
        waiting = [trial for trial in done if not is_analyzed(trial)]
        before = len(done) - len(waiting)
        self.work.gpus = self.work.find_gpus()
        for number in SIGNALS:
            signal.signal(number, self.on_signal)
        while (waiting or self.running) and not self.signals:
            for slot in range(self.sweep.resources.slots):
                while waiting and slot not in self.running and not self.start(waiting.pop(0), slot):
                    pass
            self.reap()
            time.sleep(0.05)
        for one in self.running.values():
            kill_tree(one.process.pid)
            one.process.wait()
        if self.signals:
            self.display.say("stopped; the same command goes on with what is missing")
            return 75
        others, recorded = len(self.sweep.trials) - len(finished), len(finished) - len(done)
        self.display.say(
            f"{self.made} analyzed now, {before} before, {self.failed} failed; {others} of {len(self.sweep.trials)} trials are not "
            "finished" + (f"; {recorded} are recorded, without weights to analyze" if recorded else "")
        )
        return self.worst
