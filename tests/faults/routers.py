"""A router that sends all tokens to the same experts: said within 20 steps, without more memory, also over a resumption (P18)."""

import os
import re
import signal
import time

from .harness import Failure, kill, last_step, saved_step, wait_until

ALARM = 20  # steps
MORE_MEMORY = 8 << 20  # bytes that a collapsed training may take beyond a balanced one
MODEL = (
    "model.moe={num_experts: 8, num_experts_per_tok: 1, moe_intermediate_size: 32, "
    "load_balance: {coefficient: COEFFICIENT, scope: previous_step}}"
)
KEYS = ["model.num_hidden_layers=2", "train.max_steps=40", "log.every_steps=1", "log.bits=1"]
COLLAPSED = [MODEL.replace("COEFFICIENT", "0"), *KEYS]
BALANCED = [MODEL.replace("COEFFICIENT", "1"), *KEYS, "optimizer.lr=1e-4"]


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


def collapse(world, tally, ranks, expert):
    layout = [f"parallel.expert={expert}"] if ranks else []
    keys = [*COLLAPSED, one_token(world)]
    run = world.run_folder("collapsed")
    start, most = train(world, run, ranks, [*keys, *layout])
    if alarms(start.text()) != [0, 1]:
        raise Failure(f"layers that were named: {alarms(start.text())}\n{start.tail(40)}")
    before = start.text()[: start.text().index("router of layer")]
    steps = [int(n) for n in re.findall(r"^step +(\d+)/", before, re.M)]
    tally.largest("said after steps", max(steps, default=0))
    if max(steps, default=0) > ALARM:
        raise Failure(f"said after step {max(steps)}\n{start.tail(40)}")
    # The same model on data that spreads.
    even, usual = train(world, world.run_folder("even"), ranks, [*BALANCED, *layout])
    if alarms(even.text()):
        raise Failure(f"a router that does not collapse is named\n{even.tail(40)}")
    tally.largest("MiB more than a balanced training", (most - usual) / (1 << 20))
    if most and usual and most > usual + MORE_MEMORY:
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
    steps = [int(n) for n in re.findall(r"^step +(\d+)/", start.text().partition("router of layer")[0], re.M)]
    if not said and (alarms(start.text()) != [0, 1] or max(steps, default=0) > ALARM):
        raise Failure(f"after a kill: said of {alarms(start.text())} after step {steps}\n{start.tail(40)}")
    world.require_equal(again, keys)
    tally.add("resumed")


def check(world, tally, count):
    for n in world.turns(count):
        ranks, expert = ((0, 1), (2, 2), (2, 1), (4, 4), (4, 2))[n % 5]
        tally.trial(
            f"{ranks or 1} ranks, experts over {expert}", lambda: collapse(world, tally, ranks, expert)
        )
