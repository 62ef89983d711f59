"""A router that sends all tokens to the same experts: said within 20 steps, without more memory, also over a resumption (P18)."""

import json
import os
import re
import signal
import time

from .harness import Failure, kill, last_step, saved_step, wait_until

ALARM = 20  # steps
# Bytes that a collapsed training may take beyond a balanced one: it uses more of the room that every rank has for received rows,
# 4.4 MiB of it where two ranks share the experts.
MORE_MEMORY = 8 << 20
MODEL = (
    "model.moe={num_experts: 8, num_experts_per_tok: 1, moe_intermediate_size: 32, "
    "load_balance: {coefficient: COEFFICIENT, scope: previous_step}}"
)
KEYS = ["model.num_hidden_layers=2", "train.max_steps=40", "log.every_steps=1", "log.bits=1"]
COLLAPSED = [MODEL.replace("COEFFICIENT", "0"), *KEYS]
BALANCED = [MODEL.replace("COEFFICIENT", "1"), *KEYS, "optimizer.lr=1e-4"]
# 2,048 tokens in a micro-batch, of which one expert gets all, of 1 KiB each in every buffer: room for as many in each of the eight
# experts would be 14 MiB more in each.
LARGE = [
    "model.hidden_size=64",
    "model.moe.moe_intermediate_size=256",
    "data.seq_len=128",
    "train.micro_batch_size=16",
    "train.global_batch_size=64",
    "train.max_steps=6",
    "checkpoint.every_steps=0",
]


def one_token(world):
    """Training data of one byte over and over: equal tokens have equal hidden states, and go where one of them goes."""
    prefix = os.path.join(world.folder, "same")
    if not os.path.exists(prefix + ".bin"):
        with open(prefix + ".txt", "w") as file:
            file.write("a" * 20000)
        world.sluice("tokenize", prefix + ".txt", "-o", prefix, "--force")
    return f"data.train=[{{name: same, path: {prefix}}}]"


def peak_memory(start):
    """Largest resident set of any rank so far, in bytes; 0 if none is there."""
    found = 0
    for pid in start.ranks().values() or [start.process.pid]:
        try:
            with open(f"/proc/{pid}/status") as file:
                found = max([found, *(1024 * int(n) for n in re.findall(r"VmHWM:\s+(\d+) kB", file.read()))])
        except OSError:
            pass
    return found


def train(world, run, ranks, keys):
    """The start, ended; its peak memory."""
    start, most = world.start(run, ranks, keys), 0
    while not start.over() and time.monotonic() - start.began < 120:
        most = max(most, peak_memory(start))
        time.sleep(0.005)
    if start.wait() != 0:
        raise Failure(f"exit code {start.code()}\n{start.tail()}")
    return start, most


def alarms(text):
    """The layers that the console names."""
    return sorted(int(n) for n in re.findall(r"router of layer (\d+): .*max/mean load", text))


def said_at(run):
    """The step at which each layer was named, by the newest checkpoint. The console cannot tell: mpirun forwards steps and
    warnings on two streams, and a busy machine mixes their lines."""
    with open(os.path.join(run, "ckpt", f"step_{saved_step(run):08d}", "state.json")) as file:
        return [layer["told_at"] for layer in json.load(file)["router"]["layers"]]


def require_said(tally, run):
    steps = said_at(run)
    tally.largest("said at step", max(steps))
    if len(steps) != 2 or not all(0 < step <= ALARM for step in steps):
        raise Failure(f"said at steps {steps}")


def collapse(world, tally, ranks, expert):
    layout = [f"parallel.expert={expert}"] if ranks else []
    keys = [*COLLAPSED, one_token(world)]
    run = world.run_folder("collapsed")
    start, _ = train(world, run, ranks, [*keys, *layout])
    if alarms(start.text()) != [0, 1]:
        raise Failure(f"layers that were named: {alarms(start.text())}\n{start.tail(40)}")
    require_said(tally, run)
    # The same model on data that spreads.
    even, _ = train(world, world.run_folder("even"), ranks, [*BALANCED, *layout])
    if alarms(even.text()):
        raise Failure(f"a router that does not collapse is named\n{even.tail(40)}")
    _, most = train(world, world.run_folder("large"), ranks, [*keys, *LARGE, *layout])
    _, usual = train(world, world.run_folder("large"), ranks, [*BALANCED, *LARGE, *layout])
    tally.largest("MiB more than a balanced training", (most - usual) / (1 << 20))
    if not most or not usual:
        raise Failure("no rank's memory could be read")
    if most > usual + MORE_MEMORY:
        raise Failure(f"{most} bytes instead of {usual}")
    # The count of skewed steps survives a kill, and so do the bits.
    again = world.run_folder("resumed")
    start = world.start(again, ranks, [*keys, *layout])
    target = world.random.randint(6, 18)
    wait_until(lambda: start.over() or (last_step(again) >= target and saved_step(again) > 0), 60, 0.001)
    for pid in start.ranks().values() if ranks else [start.process.pid]:
        kill(pid, signal.SIGKILL)
    start.until_gone(20)
    start.destroy()
    said = alarms(start.text())
    start, _ = train(world, again, ranks, [*keys, *layout])
    if not said and alarms(start.text()) != [0, 1]:
        raise Failure(f"after a kill: said of {alarms(start.text())}\n{start.tail(40)}")
    require_said(tally, again)
    world.require_equal(again, keys)
    tally.add("resumed")


def check(world, tally, count):
    for n in world.turns(count):
        ranks, expert = ((0, 1), (2, 2), (2, 1), (4, 4), (4, 2))[n % 5]
        tally.trial(
            f"{ranks or 1} ranks, experts over {expert}", lambda: collapse(world, tally, ranks, expert)
        )
