"""Damaged checkpoints: the newest, the two newest, or all; skipped with a warning, or refused; never silent (P3)."""

import glob
import os
import re
import shutil

from .harness import Failure, Start, saved_step

KEYS = ["train.max_steps=30", "checkpoint.async=false", "checkpoint.keep_last=3"]
STEPS = (15, 20, 25)
PAGE = 4096


def base(world):
    run = world.run_folder("base")
    Start(world, run, 0, KEYS, {"SLUICE_EXIT": f"0:{STEPS[-1] + 1}:0"}).wait()
    if saved_step(run) != STEPS[-1]:
        raise Failure(f"the run to damage has step {saved_step(run)}")
    return run


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def damage(random, folder, other, kind):
    """Damages one file of a checkpoint (`other`: a whole one of another step); its name, or None where nothing changes there."""
    names = sorted(os.listdir(folder))
    name = random.choice(names)
    path = os.path.join(folder, name)
    data = read(path)
    changed = bytearray(data)
    if kind == "flip":
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == "set":
        changed[random.randrange(len(data))] = random.randrange(256)
    elif kind == "truncate":
        del changed[random.randrange(len(data)) :]
    elif kind == "extend":
        changed += random.randbytes(random.randint(1, 2 * PAGE))
    elif kind == "zero page":
        begin = random.randrange(len(data)) // PAGE * PAGE
        end = min(begin + PAGE, len(data))
        changed[begin:end] = bytes(end - begin)
    elif kind == "stale":
        changed = read(os.path.join(other, name))
    elif kind == "swap":
        partner = os.path.join(folder, random.choice([n for n in names if n != name]))
        changed = read(partner)
        if changed != data:
            write(partner, data)
    elif kind == "delete":
        os.remove(path)
        return name
    elif kind == "symlink":
        shutil.move(path, folder + "-" + name)
        os.symlink(folder + "-" + name, path)
        return name
    elif kind == "directory":
        os.remove(path)
        os.mkdir(path)
        return name
    elif kind == "FIFO":
        os.remove(path)
        os.mkfifo(path)
        return name
    if bytes(changed) == data:
        return None
    write(path, changed)
    return name


KINDS = (
    "flip",
    "set",
    "truncate",
    "extend",
    "zero page",
    "delete",
    "swap",
    "stale",
    "symlink",
    "directory",
    "FIFO",
)


def trial(world, tally, run, kind, reach, ranks):
    folder = world.run_folder("damaged")
    shutil.copytree(run, folder)
    ckpt = os.path.join(folder, "ckpt")
    hit = []
    for i, step in enumerate(reversed(STEPS[-reach:])):
        path = os.path.join(ckpt, f"step_{step:08d}")
        other = os.path.join(run, "ckpt", f"step_{STEPS[0] if step != STEPS[0] else STEPS[1]:08d}")
        name = None
        while name is None:
            name = damage(world.random, path, other, kind)
        hit.append((step, name))
        kind = world.random.choice(KINDS)  # of the older ones
    start = world.start(folder, ranks, KEYS)
    code = start.wait()
    text = start.text()
    for step, name in hit:
        if f"step_{step:08d}" not in text:
            raise Failure(f"nothing was said of step {step} ({name})\n{start.tail()}")
    if reach == len(STEPS):
        tally.add("refused")
        if code != 65 or "refusing to start from scratch" not in text:
            raise Failure(f"all damaged ({hit}): exit code {code}\n{start.tail()}")
        return
    tally.add("passed over")
    if code != 0:
        raise Failure(f"{hit}: exit code {code}\n{start.tail()}")
    resumed = re.findall(r"\(step (\d+)\)", text)
    if not resumed or int(resumed[0]) != STEPS[-1 - reach]:
        raise Failure(f"{hit}: resumed from {resumed}\n{start.tail()}")
    world.require_equal(folder, KEYS)


def check(world, tally, count):
    run = base(world)
    for i in world.turns(count):
        kind, reach = KINDS[i % len(KINDS)], i % len(STEPS) + 1
        ranks = 2 if i % 10 == 9 else 0
        tally.trial(
            f"{kind}, {reach} damaged, {ranks or 1} ranks",
            lambda: trial(world, tally, run, kind, reach, ranks),
        )


def check_many(world, tally, count):
    """Damage in one of two checkpoints, which `checkpoint verify` must call damaged, and the other one whole."""
    run = base(world)
    sound, other = (os.path.join(run, "ckpt", f"step_{step:08d}") for step in STEPS[:2])
    folder = os.path.join(world.folder, "many")
    for n in world.turns(count):
        if n % 100 == 0:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(other, os.path.join(folder, os.path.basename(other)))
        path = os.path.join(folder, os.path.basename(sound))
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(sound, path)
        kind, name = KINDS[n % len(KINDS)], None
        while name is None:
            name = damage(world.random, path, other, kind)

        def detected():
            done = world.sluice("checkpoint", "verify", folder, check=False)
            lines = sorted(line.split()[0] for line in done.stdout.splitlines())
            if done.returncode != 65 or lines != ["damaged", "whole"]:
                raise Failure(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
            if not any(x.startswith("damaged") and path in x for x in done.stdout.splitlines()):
                raise Failure(f"the wrong one\n{done.stdout}")

        tally.trial(f"{kind} of {name}", detected)
        for link in glob.glob(path + "-*"):  # what a link points at
            os.remove(link)
