"""A crash before, and an error at, every I/O call of a training with two saves, on every rank (P1, P4)."""

import json
import os
import re
import shutil

from .harness import Failure, Start, last_step, require_resumed, saved_step

KEYS = ["train.max_steps=20", "checkpoint.async=false"]
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE", "EDQUOT")
RANKS = 2
CONTINUED = (
    10  # the training is continued from here: saves at 15 and 20, and two old checkpoints to rotate out
)


def base(world):
    run = world.run_folder("base")
    Start(world, run, 0, KEYS, {"SLUICE_EXIT": f"0:{CONTINUED + 1}:0"}).wait()
    if saved_step(run) != CONTINUED:
        raise Failure(f"the run to continue has step {saved_step(run)}")
    return run


def operations(world, run):
    """{rank: [what the n-th operation is]} of an undisturbed trial."""
    trial, trace = copy(world, run), os.path.join(world.folder, "trace")
    if os.path.exists(trace):
        os.remove(trace)
    start = world.start(trial, RANKS, KEYS, environment={"SLUICE_IOTRACE": trace})
    if start.wait() != 0:
        raise Failure(f"the undisturbed trial failed\n{start.tail()}")
    found = {rank: [] for rank in range(RANKS)}
    with open(trace) as file:
        for line in file:
            rank, _, what = line.rstrip("\n").split(" ", 2)
            found[int(rank)].append(what.replace(trial, "RUN"))
    return found


def check_protocol(lines, run):
    """What must be durable before what, whichever rank writes it (src/checkpoint/README.md), by the order of the calls."""
    ckpt = os.path.join(run, "ckpt")
    synced, dirty, durable_after, published = set(), {}, {}, 0
    for i, (action, path) in enumerate(lines):
        if action in ("create", "append to"):
            if path == os.path.join(ckpt, "LATEST"):
                raise Failure("LATEST is written in place")
            dirty[path] = "created"
        elif action == "write":
            dirty[path] = "written"
        elif action == "sync":
            dirty.pop(path, None)
        elif action == "remove":
            dirty.pop(path, None)
        elif action == "sync folder":
            synced.add((path, i))
            durable_after.setdefault(path, []).append(i)
        found = re.fullmatch(r"(rename|swap) (\S+) (?:to|and)", action)
        if found:
            origin = found[2]
            dirty[path] = dirty.pop(origin, None)
            if dirty[path] is None:
                del dirty[path]
            if os.path.dirname(origin) == ckpt and os.path.basename(origin).startswith(".staging-"):
                late = [p for p in dirty if p.startswith(origin + "/") or p.startswith(path + "/")]
                if late:
                    raise Failure(f"{path} is published, and not synced: {', '.join(late)}")
                if not any(f == origin for f, _ in synced):
                    raise Failure(f"{path} is published, and its folder was never synced")
                published += 1
            if os.path.basename(origin).startswith("step_") and ".trash-" in path or path.endswith("/LATEST"):
                if path in dirty:
                    raise Failure(f"{path} was not synced before its rename")
                last = max(
                    [n for n, (a, p) in enumerate(lines[:i]) if re.match(r"(rename|swap) .*\.staging-", a)],
                    default=None,
                )
                if last is None:
                    raise Failure(f"{path} goes before any checkpoint is published")
                if not any(n > last for n in durable_after.get(ckpt, [])):
                    raise Failure(f"{path}: the checkpoint before it is not durable yet")
    if published == 0:
        raise Failure("no checkpoint was published")


def protocol(world, run):
    """Of a training with two saves."""
    trial, trace = copy(world, run), os.path.join(world.folder, "protocol")
    start = world.start(trial, RANKS, KEYS, environment={"SLUICE_IOTRACE": trace})
    if start.wait() != 0:
        raise Failure(f"the undisturbed trial failed\n{start.tail()}")
    lines = []
    with open(trace) as file:
        for line in file:
            action, path = line.rstrip("\n").split(" ", 2)[2].rsplit(" ", 1)
            lines.append((action, path))
    check_protocol(lines, trial)


def copy(world, run):
    trial = world.run_folder("trial")
    shutil.copytree(run, trial, symlinks=True)
    return trial


def resume(world, trial):
    newest = saved_step(trial)
    start = world.start(trial, world.random.choice((0, 0, 0, 2)), KEYS)
    code = start.wait()
    if code != 0:
        raise Failure(f"not continued: exit code {code}\n{start.tail()}")
    require_resumed(start, newest)


def faulty(world, trial, fault):
    """A start with this fault, and where it notes its operations."""
    trace = os.path.join(world.folder, "trace")
    if os.path.exists(trace):
        os.remove(trace)
    return world.start(trial, RANKS, KEYS, environment={**fault, "SLUICE_IOTRACE": trace}), trace


def not_reached(tally, trace, rank, n):
    """Whether the rank ended before its n-th operation: how many lines the console gets depends on the clock."""
    with open(trace) as file:
        count = sum(line.startswith(f"{rank} ") for line in file)
    if count < n:
        tally.add("not reached")
    return count < n


def crash(world, tally, run, rank, n, torn):
    trial = copy(world, run)
    start, trace = faulty(world, trial, {"SLUICE_CRASH": f"{rank}:{n}{torn}"})
    code = start.wait()
    if code == 0:
        if not_reached(tally, trace, rank, n):
            return
        raise Failure(f"nothing was killed\n{start.tail()}")
    if start.until_gone(5) is None:
        raise Failure("a process survived")
    if saved_step(trial) < CONTINUED:
        raise Failure(f"the newest checkpoint is of step {saved_step(trial)}")
    resume(world, trial)
    world.require_equal(trial, KEYS)
    world.require_tidy(trial)
    with open(os.path.join(trial, "status.json")) as file:
        state = json.load(file)["state"]
    if state != "done":
        raise Failure(f"at the end status.json says {state}")


def failing(world, tally, run, rank, n, error, what):
    trial = copy(world, run)
    start, trace = faulty(world, trial, {"SLUICE_IOFAIL": f"{rank}:{n}:{error}"})
    code = start.wait()
    text = start.text()
    tally.add(f"exit {code}")
    if error not in text:
        if code == 0 and not_reached(tally, trace, rank, n):
            return
        raise Failure(f"not a word of {error}\n{start.tail()}")
    if code not in (0, 73, 74):
        raise Failure(f"exit code {code}\n{start.tail()}")
    # Before the first step the run may be refused, and at the end the last checkpoint is what counts; in between it goes on.
    steps = last_step(trial)
    if code == 73 and steps > CONTINUED + 1 or code == 74 and steps < 20:
        raise Failure(f"exit code {code} at step {steps}\n{start.tail()}")
    if code == 74 and not re.search(r"the final checkpoint could not be written", text):
        raise Failure(f"exit code 74 without its message\n{start.tail()}")
    if saved_step(trial) < CONTINUED:
        raise Failure(f"the newest checkpoint is of step {saved_step(trial)}")
    if code == 0 and saved_step(trial) != 20:
        raise Failure(f"exit code 0, and the newest checkpoint is of step {saved_step(trial)}")
    if code:
        resume(world, trial)
    world.require_equal(trial, KEYS, lines_may_miss=True)
    if code:
        world.require_tidy(trial)


def check(world, tally, count, kinds=("crash", "error")):
    """count: trials at most, spread over crashes, torn writes and errors; 0: all of them."""
    run = base(world)
    found = operations(world, run)
    tally.trial("the order of calls", lambda: protocol(world, run))
    trials = []
    for rank, names in found.items():
        tally.figures[f"calls of rank {rank}"] = len(names)
        for n, what in enumerate(names, 1):
            trials.append(("crash", rank, n, "", what))
            if what.startswith("write "):
                trials.append(("crash", rank, n, ":torn", what))
            trials += [("error", rank, n, error, what) for error in ERRORS]
    trials = [t for t in trials if t[0] in kinds]
    tally.figures["places and kinds"] = len(trials)
    if count and count < len(trials) or world.deadline is not None:
        world.random.shuffle(trials)
    if count and count < len(trials):
        crashes = [t for t in trials if t[0] == "crash"]
        errors = [t for t in trials if t[0] == "error"]
        failing_too = count // 2 if crashes and errors else count if errors else 0
        trials = crashes[: count - failing_too] + errors[:failing_too]
    for i in world.turns(len(trials)):
        kind, rank, n, more, what = trials[i]
        tally.add("crashes" if kind == "crash" else "errors")
        name = f"{kind} of rank {rank} at operation {n}{':' + more.strip(':') if more else ''} ({what})"
        if kind == "crash":
            tally.trial(name, lambda: crash(world, tally, run, rank, n, more))
        else:
            tally.trial(name, lambda: failing(world, tally, run, rank, n, more, what))
