"""kill -9 at any moment: one rank, all ranks, mpirun alone; continued by another number of ranks until done (P1)."""

import re
import signal
import time

from .harness import Failure, kill, last_step, require_resumed, save_under_way, saved_step, wait_until


def check_durable(start, run):
    """What the program said it had saved is there."""
    reported = [int(n) for n in re.findall(r"saved step (\d+)", start.text())]
    if reported and max(reported) > saved_step(run):
        raise Failure(
            f"reported step {max(reported)} as saved, {saved_step(run)} is the newest whole checkpoint"
        )


def wait_for_moment(world, start, run, steps):
    """A moment of a start, uniform over its way to step `steps`, or, once in six, while it begins. Steps rather than seconds: a
    busy machine would otherwise be killed at its beginning every time."""
    if world.random.random() < 1 / 6:
        moment = world.random.uniform(0, 1.0)
        wait_until(lambda: start.over() or time.monotonic() - start.began > moment, 2, 0.002)
        return
    target = world.random.randint(0, steps)
    wait_until(lambda: start.over() or last_step(run) >= target, 120, 0.001)
    time.sleep(world.random.uniform(0, 0.02))


def one_run(world, tally, budget, steps, stride):
    keys = [f"train.max_steps={steps}"]
    run = world.run_folder("killed")
    interval = 5
    killed = 0
    while True:
        ranks = world.ranks()
        resumed_at = saved_step(run)
        start = world.start(run, ranks, keys)
        how = world.random.choice(("one rank", "all ranks", "mpirun"))
        if killed < budget:
            wait_for_moment(world, start, run, min(steps, resumed_at + stride))
        if killed < budget and not start.over():
            alive = start.ranks()
            if how != "mpirun" and not alive:
                how = "mpirun"  # no rank is there yet
            saving = save_under_way(run)
            victims = {
                "one rank": [world.random.choice(sorted(alive.values()) or [0])],
                "all ranks": list(alive.values()),
                "mpirun": [start.process.pid],
            }[how]
            for pid in victims:
                kill(pid, signal.SIGKILL)
            gone = start.until_gone(20, ranks_only=True)
            if gone is None:
                alive = start.who_lives()
                start.destroy()
                raise Failure(f"{how} killed: a process survived\n{alive}\n{start.tail()}")
            # Open MPI's own: ranks that die while they connect can leave mpirun waiting for ever. scripts/launch ends it then.
            if start.until_gone(20) is None:
                tally.add("mpirun hung")
                start.destroy()
            start.process.wait(10)
            killed += 1
            tally.add("kills")
            tally.add("inside a save", int(saving or save_under_way(run)))
            tally.add("litter", len(world.litter(run)))
            tally.largest("gone within", gone)
            lost = max(0, last_step(run) - saved_step(run))
            tally.add("lost steps", lost)
            tally.largest("lost at most", lost)
            if lost > 2 * interval:  # two, if the line of the step that is due is there before its save begins
                raise Failure(f"{lost} steps lost with a save every {interval}")
        else:
            code = start.wait()
            if code != 0:
                raise Failure(f"exit code {code} without a kill\n{start.tail()}")
        require_resumed(start, resumed_at)
        check_durable(start, run)
        if start.code() == 0:
            break
    world.require_equal(run, keys)
    world.require_tidy(run)
    return killed


def check(world, tally, count):
    quick = world.options.quick
    done = 0
    while done < count and world.more(done):
        before = tally.figures.get("kills", 0)
        tally.trial(
            f"after {done} kills",
            lambda: one_run(world, tally, min(count - done, 12), 100 if quick else 400, 20 if quick else 60),
        )
        if tally.figures.get("kills", 0) == before and tally.failures:
            break
        done = tally.figures.get("kills", 0)
    if done:
        tally.figures["lost on average"] = tally.figures.pop("lost steps", 0) / done
        share = tally.figures["inside a save"] / done
        tally.figures["inside a save"] = f"{tally.figures['inside a save']} ({100 * share:.0f}%)"
