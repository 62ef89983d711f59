"""Plants known bugs in a copy of the sources, one by one, builds what changed, and runs the check that must fail (P22)."""

import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from .harness import SOURCE
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
    return [os.path.join(build, "tests", words[0]), *words[1:]]


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
    build = os.path.join(scratch, "build-mutants")
    log = os.path.join(scratch, "mutants.log")
    copy_sources(scratch)
    if (
        run(
            [
                "cmake",
                "-S",
                scratch,
                "-B",
                build,
                "-G",
                "Ninja",
                "-DSLUICE_CUDA=off",
                *shlex.split(options.cmake),
            ],
            scratch,
            log,
        )
        != 0
    ):
        print(f"cmake failed: {log}", file=sys.stderr)
        return 1
    environment = {"SLUICE_BINARY": os.path.join(build, "sluice")}
    targets = sorted({m[4] for m in chosen} | {"sluice"})
    if run(["ninja", "-C", build, "-j", str(options.jobs), *targets], scratch, log) != 0:
        print(f"the sources as they are do not build: {log}", file=sys.stderr)
        return 1
    # A check that fails anyway catches nothing.
    sound = {}
    rows, bad = [], 0
    for name, file, old, new, target, check in chosen:
        began = time.monotonic()
        path = os.path.join(scratch, file)
        outcome = misfit(path, file, old)
        if not outcome:
            with open(path) as source:
                text = source.read()
            if check not in sound:
                sound[check] = run(check_command(check, scratch, build), scratch, log, environment) == 0
            if not sound[check]:
                outcome = "UNSOUND: the check fails without it"
            else:
                try:
                    with open(path, "w") as source:
                        source.write(text.replace(old, new))
                    if run(["ninja", "-C", build, "-j", str(options.jobs), target], scratch, log) != 0:
                        outcome = "DOES NOT BUILD"
                    elif run(check_command(check, scratch, build), scratch, log, environment) == 0:
                        outcome = "SURVIVED"
                    else:
                        outcome = "caught"
                finally:
                    with open(path, "w") as source:
                        source.write(text)
                    run(["ninja", "-C", build, "-j", str(options.jobs), target], scratch, log)
        bad += outcome != "caught"
        rows.append(f"{name:<45} {outcome:<10} {time.monotonic() - began:6.0f} s  {check}")
        print(rows[-1], flush=True)
    print(f"\n{len(rows) - bad} of {len(rows)} caught; log {log}")
    if not options.folder and not bad:
        shutil.rmtree(scratch)
    return 1 if bad else 0
