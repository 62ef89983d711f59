"""Ranks that hang: stopped, in an endless loop, in another collective; all end, the culprit is named; no false alarm (P7)."""

import os
import re
import signal
import time

from .harness import Failure, kill, last_step, wait_until

TIMEOUT = 4.0
SLACK = 1.0  # seconds after the timeout until all processes have ended
KEYS = [
    "train.max_steps=1000000",
    "checkpoint.every_steps=0",
    f"parallel.timeout_seconds={TIMEOUT:g}",
    "log.every_steps=1000",
    "log.bits=1000000",
]
KINDS = ("stopped", "endless", "mismatched", "stopped while saving")
NAMED = {
    "stopped": r"rank {} has not been heard of",
    "stopped while saving": r"rank {} has not been heard of",
    "endless": r"rank {} computes without end",
    "mismatched": r"rank {} (calls another operation|is behind)|different operations:.*rank {} in barrier",
}


def trial(world, tally, kind, ranks, victim):
    run = world.run_folder("hung")
    step = world.random.randint(30, 100)
    switch = {"endless": "SLUICE_HANG", "mismatched": "SLUICE_MISMATCH"}.get(kind)
    environment, keys, pause = (
        {switch: f"{victim}:{step}"} if switch else {},
        KEYS,
        os.path.join(world.folder, f"pause-{tally.trials}"),
    )
    if kind == "stopped while saving":
        environment, keys = (
            {"SLUICE_PAUSE": f"{victim}:save:{step}:{pause}"},
            [*KEYS, f"checkpoint.every_steps={step}"],
        )
    start = world.start(run, ranks, keys, environment=environment)
    if not wait_until(lambda: last_step(run) >= step or start.over(), 60) or start.over():
        start.destroy()
        raise Failure(f"never came to step {step}\n{start.tail()}")
    if kind == "stopped while saving" and not wait_until(lambda: os.path.exists(f"{pause}.{victim}"), 30):
        start.destroy()
        raise Failure(f"never came to save\n{start.tail()}")
    if kind.startswith("stopped"):
        kill(start.ranks()[victim], signal.SIGSTOP)
    begin = time.monotonic()
    gone = start.until_gone(TIMEOUT + 30, ranks_only=True)
    if gone is None:
        start.destroy()
        raise Failure(f"the hang was not detected\n{start.tail()}")
    code = start.wait()
    tally.largest("ranks gone within", gone)
    tally.largest("and mpirun", time.monotonic() - begin)
    if code != 76:
        raise Failure(f"exit code {code}\n{start.tail()}")
    if not re.search(NAMED[kind].format(victim, victim), start.text()):
        raise Failure(f"rank {victim} is not named\n{start.tail()}")
    if gone > TIMEOUT + SLACK * world.options.slack:
        raise Failure(f"gone after {gone:.2f} s, the timeout is {TIMEOUT:g} s")


def stuck_save(world, tally):
    """A save that never begins is given twenty times as long, and not forever."""
    run = world.run_folder("stuck")
    timeout = 0.5
    start = world.start(
        run,
        2,
        [*KEYS, "checkpoint.every_steps=20", f"parallel.timeout_seconds={timeout}"],
        environment={"SLUICE_PAUSE": f"0:save:20:{os.path.join(world.folder, 'never-removed')}"},
    )
    code = start.wait(20 * timeout + 40)
    if code != 76 or not re.search(r"rank 0 computes without end: step 20, phase save", start.text()):
        raise Failure(f"exit code {code}\n{start.tail()}")


def false_alarms(world, tally, length):
    """Ranks that pause for up to half the timeout, and are waited for."""
    run = world.run_folder("paused")
    ranks = 3
    start = world.start(run, ranks, KEYS)
    if not wait_until(lambda: last_step(run) >= 5 or start.over(), 60) or start.over():
        raise Failure(f"never began\n{start.tail()}")
    end = time.monotonic() + length
    while time.monotonic() < end and not start.over():
        alive = sorted(start.ranks().values())
        if not alive:  # mpirun alone is left
            time.sleep(0.05)
            continue
        pid = world.random.choice(alive)
        kill(pid, signal.SIGSTOP)
        time.sleep(world.random.uniform(0, TIMEOUT / 2))
        kill(pid, signal.SIGCONT)
        tally.add("pauses")
        time.sleep(world.random.uniform(0, 0.3))
    if start.over():
        raise Failure(f"ended while ranks paused: exit code {start.code()}\n{start.tail()}")
    tally.add("steps among pauses", last_step(run))
    kill(list(start.ranks().values())[0], signal.SIGUSR1)
    if start.wait() != 75:
        raise Failure(f"exit code {start.code()}\n{start.tail()}")


def check(world, tally, count):
    for n in world.turns(count):
        kind = KINDS[n % len(KINDS)]
        ranks = world.ranks(3)
        victim = n // len(KINDS) % ranks
        tally.trial(f"{kind} rank {victim} of {ranks}", lambda: trial(world, tally, kind, ranks, victim))
    if world.options.quick:
        return
    tally.trial("a stuck save", lambda: stuck_save(world, tally))
    tally.trial("pauses", lambda: false_alarms(world, tally, min(300, 10 * count)))


def check_pauses(world, tally, count):
    """count: steps among pauses"""
    seconds = 60 if world.deadline is None else max(60, min(900, world.deadline - time.monotonic()))
    while tally.figures.get("steps among pauses", 0) < count and world.more(tally.trials):
        before = tally.trials
        tally.trial("pauses", lambda: false_alarms(world, tally, seconds))
        if tally.failures or tally.trials == before:
            break
