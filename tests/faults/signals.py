"""Signals that ask to stop, in every phase, to one rank, all ranks, the launcher: saved, 75, continued to equal bits (P5)."""

import glob
import os
import signal
import time

from .harness import Failure, kill, saved_step, wait_until

KEYS = ["train.max_steps=60", "eval.every_steps=10"]
PHASES = ("init", "data", "step", "all_reduce", "save", "evaluate", "io")
SIGNALS = ("TERM", "USR1", "USR2", "INT", "HUP", "XCPU")
TARGETS = ("one rank", "all ranks", "launcher")
OF_ONE = ("save", "evaluate", "io")  # phases that may be rank 0's alone


def trial(world, tally, phase, name, target, ranks):
    run = world.run_folder("signalled")
    mark = os.path.join(world.folder, "paused")
    for old in glob.glob(mark + ".*"):
        os.remove(old)
    number = getattr(signal, "SIG" + name)
    step = 10 * world.random.randint(1, 4)
    at = world.random.randint(30, 90) if phase == "io" else 0 if phase == "init" else step
    where = "0:" if phase in OF_ONE else ""
    start = world.start(
        run,
        ranks,
        KEYS,
        environment={"SLUICE_PAUSE": f"{where}{phase}:{at}:{mark}"},
        launch=["--restarts", "0"] if target == "launcher" else None,
    )
    waiting = 1 if where else ranks
    if not wait_until(lambda: len(glob.glob(mark + ".*")) == waiting or start.over(), 60) or start.over():
        start.destroy()
        raise Failure(f"never came to {phase}\n{start.tail()}")
    if target == "launcher":
        kill(start.process.pid, number)
        time.sleep(min(5, 0.4 * world.options.slack))  # two hops to the ranks
    else:
        alive = start.ranks()
        victims = list(alive.values()) if target == "all ranks" else [alive[world.random.randrange(ranks)]]
        for pid in victims:
            kill(pid, number)
            if phase in ("save", "io"):  # a second one while the save is under way changes nothing
                time.sleep(0.02)
                kill(pid, number)
    begin = time.monotonic()
    for file in glob.glob(mark + ".*"):
        os.remove(file)
    code = start.wait()
    tally.largest("ended within", time.monotonic() - begin)
    if start.until_gone(3) is None:
        raise Failure("a process survived")
    if code != 75:
        raise Failure(f"exit code {code}\n{start.tail()}")
    # The step that was under way, and no more; with io it is not known which one that was.
    found = saved_step(run)
    if phase != "io" and not (found == 0 if phase == "init" else step <= found <= step + 1):
        raise Failure(f"saved step {found}\n{start.tail()}")
    if "stopped by" not in start.text():
        raise Failure(f"not a word of it\n{start.tail()}")
    start = world.start(run, world.random.choice((0, world.ranks(3))), KEYS)  # 0: without mpirun
    code = start.wait()
    if code != 0:
        raise Failure(f"not continued: exit code {code}\n{start.tail()}")
    world.require_equal(run, KEYS)
    world.require_tidy(run)


def check(world, tally, count):
    every = [
        (p, s, t)
        for p in PHASES
        for s in SIGNALS
        for t in TARGETS
        if t != "launcher" or s in ("TERM", "INT", "HUP")
    ]
    world.random.shuffle(every)
    # Each phase, each signal and each target is there before any comes again.
    chosen, seen = [], {}
    while every and len(chosen) < count:
        best = min(every, key=lambda x: sum(seen.get(part, 0) for part in x))
        every.remove(best)
        chosen.append(best)
        for part in best:
            seen[part] = seen.get(part, 0) + 1
    for n in world.turns(len(chosen)):
        phase, name, target = chosen[n]
        ranks = world.ranks(3)
        tally.trial(
            f"SIG{name} to {target} of {ranks} at {phase}",
            lambda: trial(world, tally, phase, name, target, ranks),
        )
