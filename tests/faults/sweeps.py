"""kill -9 of scripts/sweep, of its trials, of both, at any moment; run again until done: each trial is trained exactly once (P19)."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

from .harness import SOURCE, TAG, Failure, kill, processes, saved_step, wait_until

SWEEP = """base: [tiny.yaml, plain.yaml]
set: {{train.global_batch_size: 2, train.max_steps: {steps}, log.every_steps: 1}}
grid: {{optimizer.lr: [1e-2, 3e-3]}}
seeds: [{seeds}]
output: {output}
resources: {{slots: 2, threads: 1}}
"""
FIXED = ["train.global_batch_size=2", "log.every_steps=1", "train.threads=1"]


class Sweep:
    """One start of scripts/sweep run."""

    count = 0

    def __init__(self, world, file):
        Sweep.count += 1
        self.tag = f"{os.getpid()}-sweep-{Sweep.count}"
        self.log = os.path.join(world.folder, f"sweep-{Sweep.count}.log")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [os.path.join(SOURCE, "scripts", "sweep"), "run", file, "--sluice", world.binary],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=dict(os.environ, **{TAG: self.tag}),
            )

    def trials(self):
        """{pid: run folder} of the trainings that it started."""
        found = {}
        for pid in processes(self.tag):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().decode().split("\0")
            except OSError:
                continue
            folder = [w[8:] for w in words if w.startswith("run_dir=")]
            if folder and "train" in words[:2]:
                found[pid] = folder[0]
        return found

    def text(self):
        with open(self.log, errors="replace") as file:
            return file.read()


def lines_of(path):
    with open(path, "rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def trained_once(world, output, steps, trials):
    """The folders, the journal and the curves say so, and an uninterrupted training says the same bits."""
    folders = sorted(e for e in os.listdir(output) if os.path.isdir(os.path.join(output, e)) and e != "logs")
    if len(folders) != trials:
        raise Failure(f"{len(folders)} run folders of {trials} trials: {folders}")
    ended = {}
    for event in lines_of(os.path.join(output, "sweep.jsonl")):
        if event is None:
            continue
        if ended.get(event["folder"]):
            raise Failure(f"{event['folder']}: {event['event']} after it was {ended[event['folder']]}")
        if event["event"] in ("done", "failed", "stopped", "diverged"):
            ended[event["folder"]] = event["event"]
    for folder in folders:
        run = os.path.join(output, folder)
        if ended.get(folder, "done") != "done":
            raise Failure(f"{folder} ended as {ended[folder]}")
        with open(os.path.join(run, "status.json")) as file:
            status = json.load(file)
        told = [record and record["step"] for record in lines_of(os.path.join(run, "metrics.jsonl"))]
        if told != list(range(1, steps + 1)):
            raise Failure(f"{folder}: metrics.jsonl has the steps {told}")
        evaluated = [record and record["step"] for record in lines_of(os.path.join(run, "eval.jsonl"))]
        if evaluated.count(steps) != 1 or saved_step(run) != steps:
            raise Failure(f"{folder}: evaluated at {evaluated}, saved at {saved_step(run)}, status {status}")
        with open(os.path.join(output, "logs", folder + ".log"), errors="replace") as file:
            if "is in use by another run" in file.read():
                raise Failure(f"{folder} was started twice at once")
        rate, seed = re.search(r"lr_([^-]+-[0-9]+)-s(\d+)-", folder).groups()
        gates = ["model.attention.gates=[]"] if folder.startswith("plain") else []
        world.require_equal(
            run, [f"train.max_steps={steps}", f"optimizer.lr={rate}", f"train.seed={seed}", *FIXED, *gates]
        )
        world.require_tidy(run)


def one_sweep(world, tally, budget, seeds, steps):
    output = os.path.join(world.folder, "swept")
    shutil.rmtree(output, ignore_errors=True)
    with open(os.path.join(world.folder, "plain.yaml"), "w") as file:
        file.write("extends: tiny.yaml\nmodel: {attention: {gates: []}}\n")
    path = os.path.join(world.folder, "sweep.yaml")
    with open(path, "w") as file:
        file.write(
            SWEEP.format(steps=steps, seeds=", ".join(str(s + 1) for s in range(seeds)), output=output)
        )
    killed, struck, tags = 0, {}, []
    while True:
        sweep = Sweep(world, path)
        tags.append(sweep.tag)
        began = time.monotonic()
        while killed < budget and sweep.process.poll() is None:
            # Once in six while it begins, else while its trials do or are under way.
            if world.random.random() > 1 / 6:
                wait_until(
                    lambda: (
                        sweep.process.poll() is not None
                        or " begins" in sweep.text()
                        or " goes on" in sweep.text()
                    ),
                    60,
                )
            time.sleep(world.random.uniform(0, 0.6))
            how = world.random.choice(("sweep", "sweep", "trial", "all"))
            trials = sweep.trials()
            # The third loss in vain is a failure, as it should be; that is not what is tried here.
            trials = {
                pid: run
                for pid, run in trials.items()
                if how != "trial" or struck.get((run, saved_step(run)), 0) < 1
            }
            if sweep.process.poll() is not None or (how == "trial" and not trials):
                continue
            if how == "trial":
                pid = world.random.choice(sorted(trials))
                struck[trials[pid], saved_step(trials[pid])] = 1
                kill(pid, signal.SIGKILL)
            else:
                kill(sweep.process.pid, signal.SIGKILL)
                for pid in trials if how == "all" else ():
                    kill(pid, signal.SIGKILL)
                sweep.process.wait()
            killed += 1
            tally.add("kills")
            tally.add({"sweep": "of the sweep alone", "trial": "of a trial alone", "all": "of all"}[how])
            tally.add("while trials ran", int(bool(trials)))
            tally.add("orphaned", int(how == "sweep" and bool(trials)))
        try:
            code = sweep.process.wait(120)
        except subprocess.TimeoutExpired:
            kill(sweep.process.pid, signal.SIGKILL)
            raise Failure(f"no end in sight after {time.monotonic() - began:.0f} s\n{sweep.text()}") from None
        if code == 0:
            break
        if code != -signal.SIGKILL:
            raise Failure(f"exit code {code}\n{sweep.text()}")
    orphans = [pid for tag in tags for pid in processes(tag)]
    if orphans:
        raise Failure(f"left running: {orphans}")
    trained_once(world, output, steps, 4 * seeds)
    saved = 0  # trials whose sweep was killed receive the signal to save
    for name in os.listdir(os.path.join(output, "logs")):
        with open(os.path.join(output, "logs", name), errors="replace") as file:
            saved += file.read().count("stopped by SIGTERM")
    tally.add("saved then", saved)
    tally.add("trainings", 4 * seeds)
    tally.add(
        "starts",
        sum(
            event is not None and event["event"] == "started"
            for event in lines_of(os.path.join(output, "sweep.jsonl"))
        ),
    )
    again = Sweep(world, path)
    if again.process.wait(60) != 0 or "begins" in again.text() or "goes on" in again.text():
        raise Failure(f"a finished sweep is not left alone\n{again.text()}")


def check(world, tally, count):
    quick, done = world.options.quick, 0
    while done < count and world.more(done):
        tally.trial(
            f"after {done} kills",
            lambda: one_sweep(world, tally, min(count - done, 12), 1 if quick else 2, 40 if quick else 200),
        )
        if tally.figures.get("kills", 0) == done:
            break  # nothing could be killed
        done = tally.figures["kills"]
    orphaned = tally.figures.get("orphaned", 0)
    if orphaned >= 4 and not tally.figures.get("saved then"):
        raise Failure(f"trials were orphaned {orphaned} times, and none saved itself")
