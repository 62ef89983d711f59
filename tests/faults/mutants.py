"""Plants known bugs in a copy of the sources, one by one, builds what changed, and runs the check that must fail (P22)."""

import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from .harness import SOURCE, Failure
from .mutant_table import MUTANTS

PARTS = (
    "CMakeLists.txt",
    "README.md",
    "LICENSE",
    "src",
    "tools",
    "tests",
    "cuda",
    "scripts",
    "configs",
    "third_party",
)


# A bug may leave unused what the code without it needs; the build may take warnings for errors.
TOLERANT = "".join(
    f'#pragma GCC diagnostic ignored "-Wunused-{what}"\n'
    for what in ("parameter", "variable", "function", "but-set-variable", "but-set-parameter")
)


def copy_sources(folder):
    """Only what differs is written, so that a second time builds little."""
    for part in PARTS:
        origin = os.path.join(SOURCE, part)
        files = (
            [origin]
            if os.path.isfile(origin)
            else [os.path.join(d, n) for d, _, names in os.walk(origin) for n in names]
        )
        for file in files:
            target = os.path.join(folder, os.path.relpath(file, SOURCE))
            if os.path.exists(target) and filecmp.cmp(file, target, shallow=False):
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy2(file, target)
            os.utime(target)


def run(command, folder, log, environment=None):
    with open(log, "ab") as output:
        return subprocess.run(
            command, cwd=folder, stdout=output, stderr=output, env={**os.environ, **(environment or {})}
        ).returncode


def check_command(check, folder, build):
    words = shlex.split(check)
    if words[0] == "faults":
        return [sys.executable, os.path.join(folder, "scripts", "faults"), *words[1:]]
    # One failure is enough; the text of thousands has taken longer than the build.
    return [os.path.join(build, "tests", words[0]), *words[1:], "--abort"]


def misfit(path, file, old):
    """Why a bug cannot be planted; "" when its place is there, once."""
    count = 0
    if os.path.exists(path):
        with open(path) as source:
            count = source.read().count(old)
    return "" if count == 1 else f"STALE: {count} times the old text in {file}"


def stale(chosen):
    """Reports which bugs can no longer be planted; builds nothing."""
    bad = 0
    for name, file, old, *_ in chosen:
        problem = misfit(os.path.join(SOURCE, file), file, old)
        if problem:
            bad += 1
            print(f"{name}: {problem}")
    print(f"{len(chosen) - bad} of {len(chosen)} can be planted")
    return 1 if bad else 0


def prepare(scratch, cmake, jobs, targets, log):
    """The sources as they are, copied and built; why not, or "". The folder's name is that of scripts/test, for the compiler cache."""
    copy_sources(scratch)
    build = os.path.join(scratch, "build-test")
    configure = ["cmake", "-S", scratch, "-B", build, "-G", "Ninja", "-DSLUICE_CUDA=off", *shlex.split(cmake)]
    if run(configure, scratch, log) != 0:
        return f"cmake failed: {log}"
    if run(["ninja", "-C", build, "-j", str(jobs), *sorted(targets)], scratch, log) != 0:
        return f"the sources as they are do not build: {log}"
    return ""


def plant(mutant, scratch, jobs, sound, log):
    """What became of one bug: "caught", or what else. `sound` keeps which checks pass without it: one that fails anyway catches
    nothing."""
    name, file, old, new, target, check = mutant
    build = os.path.join(scratch, "build-test")
    environment = {"SLUICE_BINARY": os.path.join(build, "sluice")}
    path = os.path.join(scratch, file)
    problem = misfit(path, file, old)
    if problem:
        return problem
    if check not in sound:
        sound[check] = run(check_command(check, scratch, build), scratch, log, environment) == 0
    if not sound[check]:
        return "UNSOUND: the check fails without it"
    with open(path) as source:
        text = source.read()
    try:
        with open(path, "w") as source:
            source.write(TOLERANT + text.replace(old, new))
        if run(["ninja", "-C", build, "-j", str(jobs), target], scratch, log) != 0:
            return "DOES NOT BUILD"
        caught = run(check_command(check, scratch, build), scratch, log, environment) != 0
        return "caught" if caught else "SURVIVED"
    finally:
        with open(path, "w") as source:
            source.write(text)
        run(["ninja", "-C", build, "-j", str(jobs), target], scratch, log)


def targets_of(chosen):
    return (
        {m[4] for m in chosen}
        | {m[5].split()[0] for m in chosen if not m[5].startswith("faults")}
        | {"sluice"}
    )


def main(options):
    chosen = [m for m in MUTANTS if not options.only or m[0] in options.only]
    unknown = set(options.only) - {m[0] for m in MUTANTS}
    if unknown:
        print(
            f"no such mutant: {', '.join(sorted(unknown))}; there are: {', '.join(m[0] for m in MUTANTS)}",
            file=sys.stderr,
        )
        return 64
    if options.quick:
        return stale(chosen)
    scratch = (
        os.path.abspath(options.folder) if options.folder else tempfile.mkdtemp(prefix="sluice-mutants-")
    )
    log = os.path.join(scratch, "mutants.log")
    problem = prepare(scratch, options.cmake, options.jobs, targets_of(chosen), log)
    if problem:
        print(problem, file=sys.stderr)
        return 1
    sound, rows, bad = {}, [], 0
    for mutant in chosen:
        began = time.monotonic()
        outcome = plant(mutant, scratch, options.jobs, sound, log)
        bad += outcome != "caught"
        rows.append(f"{mutant[0]:<45} {outcome:<10} {time.monotonic() - began:6.0f} s  {mutant[5]}")
        print(rows[-1], flush=True)
    print(f"\n{len(rows) - bad} of {len(rows)} caught; log {log}")
    if not options.folder and not bad:
        shutil.rmtree(scratch)
    return 1 if bad else 0


def check(world, tally, count):
    """count: of bugs. The copy of the sources is kept beside the table, so that a second run builds little."""
    scratch = os.path.abspath(world.options.mutants)
    os.makedirs(scratch, exist_ok=True)
    log = os.path.join(scratch, "mutants.log")
    chosen = list(MUTANTS)
    world.random.shuffle(chosen)
    chosen = chosen[:count]
    problem = prepare(scratch, world.options.cmake, world.options.jobs, targets_of(chosen), log)
    if problem:
        raise Failure(problem)
    sound = {}
    for n in world.turns(len(chosen)):

        def caught():
            outcome = plant(chosen[n], scratch, world.options.jobs, sound, log)
            if outcome != "caught":
                raise Failure(outcome)
            tally.add("caught")

        tally.trial(chosen[n][0], caught)
