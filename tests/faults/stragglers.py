"""A rank that computes 30 % longer than the others is named within 50 steps, and no other; equal ranks are never named (P17)."""

import os
import re

from .harness import Failure, last_step

STEPS = 55  # the first two do not count, and the last is there to say it
# Steps are mostly sleep, so that what else runs on the machine weighs little.
# With the 2 to 10 ms that a step computes, the slow rank takes 1.28 to 1.30 times as long.
USUAL, SLOW = 120, 156
EVEN = 60  # where no rank is slow


def wrapper(world, usual, slow):
    """A program that takes `usual` milliseconds more for every step, on rank `slow` SLOW."""
    path = os.path.join(world.folder, "slowed")
    with open(path, "w") as file:
        file.write(
            "#!/bin/sh\n"
            f'if [ "$OMPI_COMM_WORLD_RANK" = {slow} ]; then extra={SLOW}; else extra={usual}; fi\n'
            f'SLUICE_SLOW=$OMPI_COMM_WORLD_RANK:$extra exec {world.binary} "$@"\n'
        )
    os.chmod(path, 0o755)
    return path


def start_slowed(world, run, ranks, usual, slow, steps):
    keys = [f"train.max_steps={steps}", "checkpoint.every_steps=0", "log.every_steps=1000", "log.bits=1"]
    binary = world.binary
    world.binary, slowed = wrapper(world, usual, slow), binary
    try:
        start = world.start(run, ranks, keys)
    finally:
        world.binary = slowed
    if start.wait(120 + steps) != 0:
        raise Failure(f"exit code {start.code()}\n{start.tail()}")
    return re.findall(r"rank (\d+) computes ([\d.]+) times", start.text()), keys


def trial(world, tally, ranks, slow):
    run = world.run_folder("slow")
    said, keys = start_slowed(world, run, ranks, USUAL, slow, STEPS)
    if [int(rank) for rank, _ in said] != [slow]:
        raise Failure(f"rank {slow} is slow, and these were named: {said}")
    tally.largest("times as long, at most", float(said[0][1]))
    world.require_equal(run, keys)
    tally.add("named")


def quiet(world, tally, ranks, steps):
    run = world.run_folder("even")
    said, _ = start_slowed(world, run, ranks, EVEN, -1, steps)
    tally.add("steps of equal ranks", last_step(run))
    if said:
        raise Failure(f"equal ranks were named: {said}")


def check(world, tally, count):
    for n in world.turns(count):
        ranks = (2, 3, 4)[n % 3]
        slow = n // 3 % ranks
        tally.trial(f"rank {slow} of {ranks}", lambda: trial(world, tally, ranks, slow))


def check_quiet(world, tally, count):
    """count: steps"""
    part = 250
    for n in world.turns(count, part):
        tally.trial("equal ranks", lambda: quiet(world, tally, (2, 3)[n % 2], part))
