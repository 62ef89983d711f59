"""Ranks that die, each in its way, and mpirun: all others are gone at once, the dead one is named, the run continues (P6)."""

import re
import signal
import time

from .harness import Failure, kill, last_step, wait_until

KEYS = ["train.max_steps=2000", "checkpoint.every_steps=50"]
LIMIT = 2.0  # seconds until all processes have ended
KINDS = ("SIGKILL", "SIGSEGV", "SIGABRT", "exit 0", "exit 3", "mpirun")


def keep_stopped(pid, seconds):
    """The kernel continues the stopped processes that a dead launcher leaves; this one must stay unable to notice."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and kill(pid, signal.SIGSTOP):
        time.sleep(0.0005)


def trial(world, tally, kind, ranks, victim):
    run = world.run_folder("died")
    step = world.random.randint(20, 120)
    environment = {"SLUICE_EXIT": f"{victim}:{step}:{kind[-1]}"} if kind.startswith("exit") else {}
    start = world.start(run, ranks, KEYS, environment=environment)
    if kind.startswith("exit"):
        wait_until(lambda: last_step(run) >= step or start.over(), 60)
        pid = start.ranks().get(victim)
        wait_until(lambda: victim not in start.ranks(), 10, 0.002)
    else:
        if not wait_until(lambda: last_step(run) >= step or start.over(), 60) or start.over():
            start.destroy()
            raise Failure(f"never came to step {step}\n{start.tail()}")
        rank = start.ranks()[victim]
        if kind == "mpirun":
            kill(rank, signal.SIGSTOP)
        pid = start.process.pid if kind == "mpirun" else rank
        kill(pid, signal.SIGKILL if kind == "mpirun" else getattr(signal, kind))
    begin = time.monotonic()
    if kind == "mpirun":
        keep_stopped(rank, 0.5)
    kept = time.monotonic() - begin
    gone = start.until_gone(20, ranks_only=True)
    if gone is not None:
        gone += kept
    if gone is None or start.until_gone(20) is None:
        start.destroy()
        raise Failure("a process survived")
    code = start.wait()
    tally.largest("ranks gone within", gone)
    tally.largest("and mpirun", time.monotonic() - begin)
    if gone > LIMIT * world.options.slack:
        raise Failure(f"gone after {gone:.2f} s")
    if code == 0:
        raise Failure(f"exit code 0\n{start.tail()}")
    text = start.text()
    if kind != "mpirun" and not re.search(rf"rank {victim}\b|,{victim}\]", text):
        raise Failure(f"rank {victim} is not named\n{start.tail()}")
    # mpirun names it, too; what the program itself says first must agree. mpirun then ends the others.
    gone = re.search(r"rank (\d+) \(pid \d+\) is gone", text)
    if kind != "mpirun" and gone:
        tally.add("named by the program")
        if int(gone[1]) != victim:
            raise Failure(f"rank {gone[1]} is named instead of {victim}\n{start.tail()}")
    if last_step(run) >= 2000:
        raise Failure("it went on to its end")


def check(world, tally, count):
    for n in world.turns(count):
        kind = KINDS[n % len(KINDS)]
        ranks = world.ranks()
        victim = n // len(KINDS) % ranks
        tally.trial(f"{kind} of rank {victim} of {ranks}", lambda: trial(world, tally, kind, ranks, victim))
