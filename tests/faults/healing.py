"""One long run under scripts/launch with fault after fault: it finishes by itself, with the bits of a run without any (P23)."""

import signal
import time

from .harness import Failure, kill, last_step, saved_step, wait_until

KINDS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGSTOP", "all ranks", "mpirun")


def trial(world, tally, count, steps):
    keys = [f"train.max_steps={steps}", "parallel.timeout_seconds=3"]
    run = world.run_folder("healed")
    ranks = 3
    start = world.start(run, ranks, keys, launch=["--restarts", str(count + 10)])
    injected, began, newest = 0, time.monotonic(), -1
    while injected < count and not start.over():
        # Faults come once a start is at work, spread over what is left of the run.
        target = last_step(run) + world.random.randint(
            1, max(2, 2 * (steps - last_step(run)) // (count - injected + 2))
        )
        wait_until(lambda: start.over() or last_step(run) >= target and len(start.ranks()) == ranks, 60)
        # A third death without a newer checkpoint would rightly be the last one.
        wait_until(lambda: start.over() or saved_step(run) > newest, 60)
        alive = start.ranks()
        if start.over() or len(alive) != ranks:
            continue
        newest = saved_step(run)
        kind = KINDS[injected % len(KINDS)]
        victim = world.random.randrange(ranks)
        parents = [
            int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
            for pid in list(alive.values())[:1]
        ]
        for pid in {"all ranks": list(alive.values()), "mpirun": parents}.get(kind, [alive[victim]]):
            kill(pid, getattr(signal, kind, signal.SIGKILL))
        injected += 1
        tally.add("faults")
        before = set(alive.values())
        if not wait_until(lambda: not before & set(start.ranks().values()), 30):
            alive, stopped = start.who_lives(), alive[victim]
            start.destroy()
            raise Failure(f"{kind} of {stopped}: a process survived\n{alive}\n{start.tail()}")
    code = start.wait(300)
    tally.figures["seconds a fault"] = (time.monotonic() - began) / max(1, injected)
    if code != 0:
        raise Failure(f"exit code {code} after {injected} faults, at step {last_step(run)}\n{start.tail()}")
    # On a busy machine the training may end first; the table shows how many faults came of how many were meant.
    if injected == 0 and steps < 10_000:
        return trial(world, tally, count, 4 * steps)
    if injected == 0:
        raise Failure("no fault came before the end")
    tally.figures["steps"] = saved_step(run)
    world.require_equal(run, keys)
    world.require_tidy(run)


def gives_up(world, tally):
    """A run that dies at the same step each time is not restarted forever."""
    keys = ["train.max_steps=100"]
    run = world.run_folder("hopeless")
    start = world.start(run, 2, keys, environment={"SLUICE_CRASH": "0:30"}, launch=["--restarts", "20"])
    code = start.wait()
    if code != 137 or "three times without a checkpoint beyond step" not in start.text():
        raise Failure(f"exit code {code}\n{start.tail()}")


def check(world, tally, count):
    tally.trial("one run", lambda: trial(world, tally, count, 300 if world.options.quick else 2000))
    if not world.options.quick:
        tally.trial("the same step again and again", lambda: gives_up(world, tally))
