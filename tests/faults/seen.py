"""Which samples a training sees, from outside (P10): every sample is another text, weights stay as they are, so that a step's loss
says which sample it was. Each is seen once in every epoch, in one order, over kills and signals; other numbers of ranks see the same."""

import json
import os
import signal

from .harness import Failure, kill, last_step, saved_step, wait_until

SAMPLES = 400
EPOCHS = 3
LENGTH = 16  # data.seq_len
# A rate that changes no weight; one sample is one step.
KEYS = ["optimizer.lr=1e-30", "optimizer.weight_decay=0", "log.every_steps=1", "log.bits=1000000"]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def data(world):
    prefix = os.path.join(world.folder, "told-apart")
    if not os.path.exists(prefix + ".bin"):
        pairs = [a + b for a in LETTERS for b in LETTERS if a != b]
        world.random.shuffle(pairs)
        with open(prefix + ".txt", "w") as file:
            file.write("".join(pair * (LENGTH // 2) for pair in pairs[:SAMPLES]) + "A")
        world.sluice("tokenize", prefix + ".txt", "-o", prefix, "--force")
    return f"data.train=[{{name: apart, path: {prefix}}}]"


def losses(run):
    with open(os.path.join(run, "metrics.jsonl")) as file:
        found = [json.loads(line) for line in file]
    return [(line["step"], line["loss"]) for line in found if "loss" in line]


def interrupted(world, tally, run, keys, sizes, interruptions, steps):
    done = 0
    while True:
        start = world.start(run, world.random.choice(sizes), keys)
        if done < interruptions:
            target = last_step(run) + world.random.randint(1, max(2, 2 * steps // interruptions))
            wait_until(lambda: start.over() or progress(run) >= target, 60, 0.002)
        if done >= interruptions or start.over():
            code = start.wait()
            if code != 0:
                raise Failure(f"exit code {code}\n{start.tail()}")
            break
        number = world.random.choice((signal.SIGKILL, signal.SIGUSR1))
        for pid in start.ranks().values() or [start.process.pid]:
            kill(pid, number)
        if start.until_gone(30) is None:
            start.destroy()
            raise Failure(f"a process survived\n{start.tail()}")
        done += 1
    tally.add("interruptions", done)


def progress(run):
    """The last step in metrics.jsonl, or saved."""
    try:
        with open(os.path.join(run, "metrics.jsonl"), "rb") as file:
            lines = file.read().split(b"\n")
        return max(saved_step(run), len(lines) - 1)
    except OSError:
        return 0


def epochs(world, tally, interruptions):
    steps = SAMPLES * EPOCHS
    keys = [
        *KEYS,
        data(world),
        "train.global_batch_size=1",
        f"train.max_steps={steps}",
        "checkpoint.every_steps=20",
    ]
    run = world.run_folder("seen")
    interrupted(world, tally, run, keys, (0,), interruptions, steps)
    seen = losses(run)
    if [step for step, _ in seen] != list(range(1, steps + 1)):
        raise Failure("metrics.jsonl does not have every step once")
    samples = set(loss for _, loss in seen)
    if len(samples) != SAMPLES:
        raise Failure(f"{len(samples)} different losses of {SAMPLES} samples")
    orders = []
    for epoch in range(EPOCHS):
        orders.append([loss for _, loss in seen[epoch * SAMPLES : (epoch + 1) * SAMPLES]])
        if set(orders[-1]) != samples:
            missing = len(samples - set(orders[-1]))
            raise Failure(f"epoch {epoch + 1} misses {missing} samples, and has others twice")
    if orders[0] == orders[1]:
        raise Failure("two epochs have the same order")
    if seen != losses(world.reference(keys)):
        raise Failure("the order is not that of the uninterrupted training")
    tally.add("samples seen once an epoch", steps)


def over_ranks(world, tally, interruptions):
    steps = SAMPLES * EPOCHS // 12
    keys = [*KEYS, data(world), f"train.max_steps={steps}", "checkpoint.every_steps=5"]
    run = world.run_folder("seen-by-ranks")
    interrupted(world, tally, run, keys, (0, 2, 3, 4, 6), interruptions, steps)
    if losses(run) != losses(world.reference(keys)):
        raise Failure("other numbers of ranks saw other samples")
    tally.add("batches of 12 seen by any ranks", steps)


def check(world, tally, count):
    """count: interruptions"""
    done, part = 0, 10
    while done < count and world.more(done):
        tally.trial("three epochs of one rank", lambda: epochs(world, tally, part))
        tally.trial("batches over ranks", lambda: over_ranks(world, tally, part))
        done += 2 * part
