"""Configuration keys that change between a save and a resumption, one at a time (P13): a key that matters is refused by name, one that
does not leaves the bits as they are; a misspelt key is refused with the right one."""

import json
import os
import re
import shutil

from .harness import Failure, Start, saved_step

KEYS = ["train.max_steps=20", "checkpoint.async=false"]
STEP = 10
# Of another place, or of another device or sum; what they change is another gate's matter.
PASSED_OVER = ("run_dir", "extends", "train.device", "parallel.determinism", "parallel.exact_sum")


def leaves(value, prefix=""):
    """(key, value) of everything that is no section."""
    for name, part in value.items():
        key = prefix + name
        if isinstance(part, dict):
            yield from leaves(part, key + ".")
        else:
            yield key, part


def words_of(world):
    """{key: its words} of the enumerations, by the reference."""
    found, path = {}, []
    for line in world.sluice("config", "reference").stdout.splitlines():
        match = re.match(r"( *)([a-z_0-9]+):(?: +(\S+))? *(?:# (.*))?$", line)
        if not match:
            continue
        depth = len(match[1]) // 2
        path = [*path[:depth], match[2]]
        words = re.match(r"([a-z_0-9]+(?: \| [a-z_0-9]+)+)", match[4] or "")
        if words:
            found[".".join(path)] = words[1].split(" | ")
    return found


def others(key, value, words):
    """Values other than this one, of which the first that a configuration allows is taken."""
    if isinstance(value, bool):
        return [json.dumps(not value)]
    if key in words:
        return [w for w in words[key] if w != value]
    if isinstance(value, int):
        return [str(n) for n in (value + 1, 2 * value, value // 2) if n != value]
    if isinstance(value, float):
        return [repr(x) for x in (value * 1.5, value / 2, 0.5) if x != value]
    if value is None:
        return ["2", "0.5"]
    return ["other"] if isinstance(value, str) and not value else []


def base(world):
    run = world.run_folder("base")
    Start(world, run, 0, KEYS, {"SLUICE_EXIT": f"0:{STEP + 1}:0"}).wait()
    if saved_step(run) != STEP:
        raise Failure(f"the run to continue has step {saved_step(run)}")
    return run


def resume(world, tally, run, key, value):
    trial = world.run_folder("drifted")
    shutil.copytree(run, trial, symlinks=True)
    start = Start(world, trial, 0, [*KEYS, f"{key}={value}"])
    code, text = start.wait(), start.text()
    if code == 0:
        differing = world.sluice("checkpoint", "diff", world.reference(KEYS), trial, check=False)
        if differing.returncode != 0 and saved_step(trial) == 20:
            raise Failure(f"{key}={value} was accepted and changed the bits: {differing.stdout}")
        tally.add("free, and the same bits")
        return
    said = (
        key.rsplit(".", 1)[-1] in text or code == 66 and value in text
    )  # of a file that does not exist its name
    if code not in (64, 65, 66, 71, 73) or not said:
        raise Failure(f"{key}={value}: exit code {code}, without the key's name\n{start.tail()}")
    if saved_step(trial) != STEP:
        raise Failure(f"{key}={value} was refused, and step {saved_step(trial)} is there")
    tally.add("refused by name")


def misspelt(world, tally, key):
    section, _, name = key.rpartition(".")
    at = world.random.randrange(len(name))
    wrong = (section + "." if section else "") + name[:at] + name[at + 1 :]
    done = world.sluice("config", "show", world.config, f"{wrong}=1", check=False)
    text = done.stdout + done.stderr
    if done.returncode != 64 or name not in text:
        raise Failure(f"{wrong}: exit code {done.returncode}\n{text}")
    tally.add("misspelt, and corrected")


def check(world, tally, count):
    """count: of keys, at most"""
    run = base(world)
    shown = json.loads(world.sluice("config", "show", os.path.join(run, "config.yaml"), "--json").stdout)
    words = words_of(world)
    keys = [(k, v) for k, v in leaves(shown) if not k.startswith(PASSED_OVER)]
    world.random.shuffle(keys)
    tally.figures["keys in all"] = len(keys)
    for n in world.turns(min(count, len(keys))):
        key, value = keys[n]
        tried = others(key, value, words)
        if len(key.rpartition(".")[2]) > 3:
            tally.trial(f"{key} misspelt", lambda: misspelt(world, tally, key))
        if not tried:
            tally.add("lists and names, not tried")
            continue
        valid = [
            t
            for t in tried
            if world.sluice("config", "show", world.config, f"{key}={t}", check=False).returncode == 0
        ]
        if not valid:
            tally.add("no other valid value, not tried")
            continue
        tally.trial(f"{key}", lambda: resume(world, tally, run, key, valid[0]))
