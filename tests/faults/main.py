"""Kills, damages, stops and confuses trainings of several ranks, and checks what must survive.

  scripts/faults                              everything, as every night
  scripts/faults --quick                      a sample of everything in half a minute
  scripts/faults --only kills --count 1000    one kind
  scripts/faults --layout parallel.zero_stage=1 --layout "parallel.zero_stage=3 parallel.expert=2"
                                              every start takes one of these layouts
  scripts/faults mutants [--only NAME]        plants known bugs in a copy of the sources, one by one: each must be caught
  scripts/faults mutants --quick              only looks whether each could still be planted
  scripts/faults gates [--hours H] --folder F every promise, P1 to P23, before a release; the table is F/gates.md, and the same
                                              command goes on where it was stopped; --quick: in some minutes; --only P2

The program is SLUICE_BINARY, or build/sluice; it must have been built with MPI. Prints a table; the exit code is 1 when a
promise was broken. Figures of one seed repeat as far as the machine's timing does.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time

from . import (
    damage,
    deaths,
    disk,
    flips,
    gates,
    hangs,
    harness,
    healing,
    kills,
    layouts,
    mutants,
    power,
    routers,
    signals,
    sweeps,
)
from .harness import SOURCE


def samples(world, tally, _count):
    """A million sample ids over 50 interruptions, by the program's own data order."""
    program = os.path.join(os.path.dirname(world.binary), "tests", "test_train")
    if not os.path.exists(program):
        tally.figures["skipped"] = "no tests/test_train beside the program"
        return

    def run():
        done = subprocess.run([program, "[faults]"], cwd=SOURCE, capture_output=True, text=True)
        if done.returncode != 0:
            raise harness.Failure(done.stdout)

    tally.trial("a million samples", run)


# name: check, how many by night, how many with --quick
CHECKS = {
    "kills": (kills.check, 1000, 30),
    "disk": (disk.check, 0, 3),
    "power": (power.check, 3000, 20),
    "damage": (damage.check, 300, 12),
    "signals": (signals.check, 40, 3),
    "deaths": (deaths.check, 40, 2),
    "hangs": (hangs.check, 30, 1),
    "flips": (flips.check, 200, 2),
    "healing": (healing.check, 50, 1),
    "routers": (routers.check, 10, 1),
    "layouts": (layouts.check, 0, 1),
    "samples": (samples, 1, 1),
    "sweeps": (sweeps.check, 200, 2),
}


def main():
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["checks", "mutants", "gates"], default="checks")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help=f"one of {', '.join(CHECKS)}, a mutant, or a gate; repeatable",
    )
    parser.add_argument("--count", type=int, help="how many of each")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--slack",
        type=float,
        default=1.0,
        help="limits of time are this many times as long: for busy machines",
    )
    parser.add_argument(
        "--seed", type=int, help="default: 1; gates: another one every time, which the table states"
    )
    parser.add_argument("--model", choices=["dense", "moe"], default="dense")
    parser.add_argument(
        "--layout", action="append", default=[], help="keys that starts with ranks are given; repeatable"
    )
    parser.add_argument(
        "--ranks", default="2,3,4", help="numbers of them; a layout with parallel.expert=2 needs even ones"
    )
    parser.add_argument(
        "--binary", default=os.environ.get("SLUICE_BINARY") or os.path.join(SOURCE, "build", "sluice")
    )
    parser.add_argument("--folder", help="work folder, kept; default: a temporary one")
    parser.add_argument("--cmake", default="", help="mutants: more options for CMake")
    parser.add_argument("--jobs", type=int, default=2, help="mutants: of the build")
    parser.add_argument(
        "--hours", type=float, default=gates.HOURS, help=f"gates: time for all, {gates.HOURS:g}"
    )
    parser.add_argument(
        "--mutants", help="gates: folder in which mutants are built, kept; default: FOLDER/mutants"
    )
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int(time.time()) % 1_000_000 if options.what == "gates" else 1
    if options.what == "mutants":
        sys.exit(mutants.main(options))
    if not os.path.exists(options.binary):
        parser.error(f"no program {options.binary}; build it, or set SLUICE_BINARY")
    if options.what == "gates":
        sys.exit(gates.run(options))
    unknown = [name for name in options.only if name not in CHECKS]
    if unknown:
        parser.error(f"--only {unknown[0]}: one of {', '.join(CHECKS)}")
    if shutil.which("mpirun") is None:
        print("skipped: no mpirun")
        return

    temporary = (
        None
        if options.folder
        else tempfile.TemporaryDirectory(prefix="sluice-faults-", ignore_cleanup_errors=True)
    )
    options.folder = os.path.abspath(options.folder or temporary.name)
    tallies, cut_short = [], False
    for name in options.only or CHECKS:
        check, night, quick = CHECKS[name]
        count = options.count if options.count is not None else quick if options.quick else night
        # A world for each, so that one alone does what it does among all.
        world = harness.World(options)
        tally = harness.Tally(name)
        tallies.append(tally)
        tally.began = time.monotonic()
        try:
            check(world, tally, count)
        except harness.Failure as failure:
            tally.failures.append(str(failure))
            print(f"FAILED {name}: {failure}", file=sys.stderr)
        except KeyboardInterrupt:
            cut_short = True
        tally.seconds = time.monotonic() - tally.began
        print(tally.row() + ("  cut short" if cut_short else ""), flush=True)
        if cut_short:
            break
    if len(tallies) > 1:
        print(
            f"\n{'check':<9} {'trials':>6} {'failed':>7} {'time':>10}  figures (layouts: "
            f"{'; '.join(options.layout) or 'plain'}; {options.model}; seed {options.seed})"
        )
        for tally in tallies:
            print(tally.row())
    sys.exit(1 if any(t.failures for t in tallies) else 130 if cut_short else 0)
