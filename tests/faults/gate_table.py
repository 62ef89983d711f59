"""The promises of scripts/faults gates: each in one sentence, what checks it, how often a release asks for, and the share of time."""

import glob
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Callable

from . import (
    audit,
    damage,
    deaths,
    disk,
    drift,
    flips,
    hangs,
    healing,
    kills,
    layouts,
    mutants,
    power,
    routers,
    seen,
    signals,
    stragglers,
    sweeps,
)
from .harness import MPIRUN, SOURCE, Failure


class NotRun(Exception):
    """A check that cannot run here, and why."""


@dataclass(frozen=True)
class Part:
    """One check of a promise. It is run `release` times, or fewer where its share of the time ends before; `quick` times at least,
    and with --quick. `unit` is the figure that counts; "" are trials."""

    what: str
    run: Callable
    release: int
    quick: int
    minutes: float  # that `release` takes on two cores, about: its share of the time
    unit: str = ""
    needs: tuple[Callable, ...] = ()
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Gate:
    name: str
    promise: str
    parts: tuple[Part, ...]


def mpirun(options):
    if shutil.which("mpirun") is None:
        return "no mpirun"
    version = subprocess.run([options.binary, "--version"], capture_output=True, text=True).stdout
    return "the program is built without MPI" if re.search(r"^\s*MPI\s+off", version, re.M) else ""


def compiler(_options):
    return "" if power.compiler() else "no C++ compiler"


def strace(_options):
    return audit.reason()


def idle(_options):
    """Times mean something on an idle machine alone."""

    def ticks():
        with open("/proc/stat") as file:
            numbers = [int(n) for n in file.readline().split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]

    total, free = ticks()
    time.sleep(3)
    later, still = ticks()
    busy = 1 - (still - free) / max(1, later - total)
    return f"the machine is busy ({100 * busy:.0f} % of its cores)" if busy > 0.1 else ""


def test_program(options, name):
    return os.path.join(os.path.dirname(os.path.abspath(options.binary)), "tests", name)


def has_tests(options):
    return "" if os.path.exists(test_program(options, "test_core")) else "no test programs beside the program"


def builds(options):
    missing = [tool for tool in ("cmake", "ninja", "c++") if shutil.which(tool) is None]
    return f"no {missing[0]}" if missing else ""


def has_fuzz(_options):
    return "" if os.path.exists(os.path.join(SOURCE, "scripts", "fuzz")) else "no scripts/fuzz"


def clang(_options):
    return "" if shutil.which("clang++") or shutil.which("clang++-14") else "no clang++"


def newest_source():
    """Of the programs and their tests."""
    patterns = (f"{SOURCE}/{room}/**/*.{end}" for room in ("src", "tools", "tests") for end in ("h", "cpp"))
    return max((path for p in patterns for path in glob.glob(p, recursive=True)), key=os.path.getmtime)


def sanitizer(build, programs=()):
    """Needs programs that scripts/build makes from these sources: `sluice`, or tests."""

    def reason(_options):
        paths = [f"{build}/tests/{name}" for name in programs] or [f"{build}/sluice"]
        newest = newest_source()
        for path in paths:
            whole = os.path.join(SOURCE, path)
            if not os.path.exists(whole):
                return f"no {path}: scripts/test --sanitize builds it"
            if os.path.getmtime(whole) < os.path.getmtime(newest):
                source = os.path.relpath(newest, SOURCE)
                return f"{path} is older than {source}: scripts/test --sanitize builds it anew"
        return ""

    return reason


def run_tests(world, tally, command, environment=None):
    """A Catch2 program; its cases count as trials. A filter that matches nothing has shown nothing."""
    done = subprocess.run(
        command,
        cwd=SOURCE,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "SLUICE_BINARY": world.binary, **(environment or {})},
    )
    text = done.stdout
    passed = re.search(r"All tests passed \(([\d,]+) assertions? in (\d+) test cases?\)", text)
    if passed and done.returncode == 0:
        tally.trials += int(passed[2])
        tally.add("assertions", int(passed[1].replace(",", "")))
        return
    counted = re.search(r"test cases: +(\d+)", text)
    tally.trials += int(counted[1]) if counted else 1
    name = " ".join([os.path.basename(command[0]), *command[1:]])
    raise Failure(f"{name}: exit code {done.returncode}\n{text[-4000:]}{done.stderr[-2000:]}")


def tests(*programs, cases):
    """Test programs with their filters: ("test_core", "[io]")."""

    def run(world, tally, _count):
        for name, pattern in programs:
            run_tests(world, tally, [test_program(world.options, name), pattern])

    what = "tests: " + "; ".join(f"{name} {pattern}" for name, pattern in programs)
    return Part(what, run, cases, 1, 1, needs=(has_tests,))


def sanitized(build, programs, environment):
    def run(world, tally, _count):
        for name, *pattern in programs:
            path = os.path.join(SOURCE, build, "tests", name)
            own = os.path.join(SOURCE, build, "sluice")
            variables = {**environment, **({"SLUICE_BINARY": own} if os.path.exists(own) else {})}
            run_tests(world, tally, [path, *pattern], variables)

    return Part(f"tests under {build}", run, 1, 1, 20, needs=(sanitizer(build, [name for name, *_ in programs]),))


REPORTS = re.compile(r"ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|runtime error:")


def sanitized_ranks(build, environment):
    """Trainings of one, two and four ranks by the sanitized program, each at another ZeRO stage. They are compared with one of
    the same program: sums of another program may be rounded otherwise."""

    def run(world, tally, count):
        world.binary = os.path.join(SOURCE, build, "sluice")
        os.environ.update(environment)  # of the training that the others are compared with, too
        for n in world.turns(count):
            ranks, stage = ((0, 0), (2, 1), (4, 3), (2, 2), (4, 1))[n % 5]

            def clean():
                keys = ["train.max_steps=12", f"parallel.zero_stage={stage}"]
                folder = world.run_folder("sanitized")
                start = world.start(folder, ranks, keys, environment=environment)
                if start.wait(600) != 0 or REPORTS.search(start.text()):
                    raise Failure(f"exit code {start.code()}\n{start.tail(60)}")
                world.require_equal(folder, ["train.max_steps=12"])

            tally.trial(f"{max(ranks, 1)} ranks, ZeRO {stage}", clean)

    what = f"trainings of 1, 2 and 4 ranks under {build}"
    return Part(what, run, 10, 3, 5, needs=(mpirun, sanitizer(build)))


def fuzz(world, tally, _count):
    """scripts/fuzz runs every target for so many seconds."""
    left = 600 if world.deadline is None else max(60, world.deadline - time.monotonic())
    programs = len(glob.glob(os.path.join(SOURCE, "tests", "fuzz", "*.cpp"))) or 1
    seconds = 5 if world.options.quick else max(10, int(0.8 * left * (os.cpu_count() or 1) / programs))
    command = [
        os.path.join(SOURCE, "scripts", "fuzz"),
        "--seconds",
        str(seconds),
        "--seed",
        str(world.options.seed),
    ]
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, errors="replace")
    tally.trials += 1
    tally.figures["seconds for each target"] = seconds
    total = re.findall(r"programs, ([\d,]+) executions", done.stdout)
    tally.figures["executions"] = int(total[-1].replace(",", "")) if total else 0
    if done.returncode != 0:
        raise Failure(f"scripts/fuzz: exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")


LIMITS = {  # of `sluice bench ranks`: rows by their beginnings, and what their fraction of time may be at most
    "asynchronous save": 0.02,
    "comparison of replicas": 0.005,
}
LEAST = {"without / with a watchdog": 0.995}  # ratios of step times


def cost(world, tally, _count):
    report = os.path.join(world.folder, "bench.json")
    done = subprocess.run(
        [world.binary, "bench", "ranks", "--json", report], capture_output=True, text=True, timeout=3600
    )
    if done.returncode != 0:
        raise Failure(f"sluice bench ranks: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    rows = re.findall(r"^\s*(.*?)\s{2,}(-?\d+\.\d+)", done.stdout, re.M)
    for limits, exceeds in ((LIMITS, lambda a, b: a > b), (LEAST, lambda a, b: a < b)):
        for begin, limit in limits.items():

            def within():
                found = [(name, float(value)) for name, value in rows if name.startswith(begin)]
                if not found:
                    raise Failure(f"no row of it\n{done.stdout}")
                for name, value in found:
                    tally.figures[name] = value
                    if exceeds(value, limit):
                        raise Failure(f"{value}, and {limit} is the limit")

            tally.trial(begin, within)


def pieces(world, tally, count):
    """All operations of MPI with messages in pieces of 7 bytes; in real trainings a piece has 2^30."""
    program = test_program(world.options, "mpi_ranks")
    for n in world.turns(count):

        def complete():
            done = subprocess.run(
                [MPIRUN, str(n + 1), program, str(n + 1)],
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "SLUICE_MPI_MAX_COUNT": "7"},
            )
            if done.returncode != 0:
                raise Failure(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")

        tally.trial(f"{n + 1} ranks", complete)


def samples(world, tally, _count):
    run_tests(world, tally, [test_program(world.options, "test_train"), "[faults]"])


def crashes(world, tally, count):
    disk.check(world, tally, count, kinds=("crash",))


def errors(world, tally, count):
    disk.check(world, tally, count, kinds=("error",))


def mutants_fit(world, tally, _count):
    """Whether each bug can still be planted; nothing is built."""
    for mutant in mutants.MUTANTS:

        def fits():
            problem = mutants.misfit(os.path.join(SOURCE, mutant[1]), mutant[1], mutant[2])
            if problem:
                raise Failure(problem)

        tally.trial(mutant[0], fits)


def mutants_caught(world, tally, count):
    built = os.path.exists(os.path.join(world.options.mutants, "build-test", "build.ninja"))
    if world.options.quick or not built and world.deadline - time.monotonic() < 30 * 60:
        raise NotRun("building everything takes half an hour, and the time for this is less")
    mutants.check(world, tally, count)


ALL = sys.maxsize
ANY_RANKS = (mpirun,)
# Leaks at exit inside OpenMP's and oneDNN's pools are theirs; SIGBUS is the program's to handle.
ADDRESS_SANITIZER = {"ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0"}
# Two ranks share every sequence.
SEQUENCES = {"layout": ["parallel.context=2"], "ranks": "2,4"}

GATES = (
    Gate(
        "P1",
        "kill -9 at any moment, also during a save: a run resumes with the bits of one that was never killed, on any number of ranks, "
        "and loses at most the steps since the newest checkpoint that was reported as saved; with asynchronous saves those are at "
        "most two intervals, for a save may still be under way when the next is due.",
        (
            Part("kills at random moments", kills.check, 700, 12, 40, "kills", ANY_RANKS),
            Part(
                "the same of a mixture of experts",
                kills.check,
                300,
                12,
                17,
                "kills",
                ANY_RANKS,
                {"model": "moe"},
            ),
            Part(
                "the same with sequences on two ranks", kills.check, 100, 6, 8, "kills", ANY_RANKS, SEQUENCES
            ),
            Part(
                "crash before, or in the middle of, every I/O call", crashes, ALL, 3, 10, "crashes", ANY_RANKS
            ),
        ),
    ),
    Gate(
        "P2",
        "Power loss: whatever a crash of the machine leaves on the disk, the run resumes with equal bits, from a checkpoint at least "
        "as new as the last one that was reported as saved.",
        (Part("states after a crash", power.check, 100_000, 150, 30, "states", (mpirun, compiler)),),
    ),
    Gate(
        "P3",
        "A damaged checkpoint is always detected: an older sound one is taken with a warning, or the start is refused; never a fresh "
        "start, never a crash.",
        (
            Part("damage, then a start", damage.check, 700, 12, 15, "", ANY_RANKS),
            Part("damage, then `checkpoint verify`", damage.check_many, 10_000, 100, 8, ""),
            tests(("test_checkpoint", "[corruption]"), cases=4),
        ),
    ),
    Gate(
        "P4",
        "A full or failing disk at any I/O call: training goes on, says so, and keeps its older checkpoints; only a last checkpoint "
        "that cannot be written is an error.",
        (Part("every I/O call, six errors each", errors, ALL, 3, 25, "errors", ANY_RANKS),),
    ),
    Gate(
        "P5",
        "A stop signal in any phase, to one rank, all, or the launcher: a checkpoint of the step under way, exit code 75, and the "
        "same command continues with equal bits.",
        (Part("signals", signals.check, 100, 3, 8, "", ANY_RANKS),),
    ),
    Gate(
        "P6",
        "A rank that dies: all processes are gone within two seconds, the rank is named, the exit code is not 0.",
        (
            Part("deaths", deaths.check, 200, 6, 12, "", ANY_RANKS),
            Part("with sequences on two ranks", deaths.check, 40, 2, 3, "", ANY_RANKS, SEQUENCES),
        ),
    ),
    Gate(
        "P7",
        "A rank that hangs: all processes are gone a second after the time limit, with exit code 76 and the rank's name; ranks that "
        "pause for less are waited for.",
        (
            Part("hangs", hangs.check, 100, 4, 15, "", ANY_RANKS, {"quick": True}),
            Part(
                "with sequences on two ranks", hangs.check, 20, 2, 4, "", ANY_RANKS, {"quick": True, **SEQUENCES}
            ),
            Part("pauses without alarm", hangs.check_pauses, 100_000, 1, 10, "steps among pauses", ANY_RANKS),
        ),
    ),
    Gate(
        "P8",
        "Exact training has the same bits in every one of 200 steps on any number of ranks, at any ZeRO stage, wherever experts lie, "
        "however many ranks share a sequence, with any number of threads: dense, gated and with experts.",
        (Part("layouts", layouts.check_layouts, ALL, 2, 16, "layouts", ANY_RANKS),),
    ),
    Gate(
        "P9",
        "A checkpoint saved with one layout continues with any other, with equal bits.",
        (Part("layouts that change", layouts.check_changes, 60, 2, 8, "", ANY_RANKS),),
    ),
    Gate(
        "P10",
        "Every sample is seen once in each epoch, in one order, whatever the interruptions and the ranks.",
        (
            Part(
                "a million samples, 50 interruptions, as 1 to 8 ranks read them",
                samples,
                1,
                1,
                1,
                "",
                (has_tests,),
            ),
            Part("samples told apart by their losses", seen.check, 200, 20, 6, "interruptions", ANY_RANKS),
        ),
    ),
    Gate(
        "P11",
        "What is not finite is judged alike by all ranks, changes nothing, ends a run that keeps producing it, and is never saved.",
        (
            tests(
                ("test_train", "[spike],[trainer],a gradient that is not finite on one rank*"),
                ("test_checkpoint", "non-finite values are not saved"),
                ("test_tools", "a run that diverges to non-finite*"),
                cases=3,
            ),
            Part("weights that become huge", flips.check_nonfinite, 100, 4, 3, "", ANY_RANKS),
        ),
    ),
    Gate(
        "P12",
        "A changed bit in a weight or moment is found, at the next comparison at the latest, with the rank and the tensor, at any ZeRO "
        "stage and on one rank alone; nothing is reported where nothing changed.",
        (
            Part("flips at a comparison, ZeRO 0 to 3", flips.check, 200, 8, 6, "", ANY_RANKS),
            Part("flips at any step, ZeRO 0 to 3", flips.check_anywhen, 200, 8, 6, "", ANY_RANKS),
            Part("steps without alarm", flips.check_alarms, 100_000, 2000, 6, "steps compared", ANY_RANKS),
        ),
    ),
    Gate(
        "P13",
        "A configuration key that changes between save and resumption is refused by name unless it cannot change the bits; a "
        "misspelt key is refused with the right one.",
        (
            Part("every key", drift.check, ALL, 10, 3),
            tests(("test_config", "every changed key is found and classified"), cases=1),
        ),
    ),
    Gate(
        "P14",
        "No file from elsewhere makes the program crash, hang or take memory without bound.",
        (
            Part("fuzz targets", fuzz, 1_000_000_000, 1, 30, "executions", (has_fuzz, clang)),
            tests(
                ("test_config", "[hostile]"),
                ("test_checkpoint", "[safetensors]"),
                ("test_data", "damaged indexes*,mutated indexes*,damaged normalisation maps*"),
                cases=10,
            ),
        ),
    ),
    Gate(
        "P15",
        "Nothing is written outside the run's folder, and no link in a checkpoint is followed.",
        (
            Part("system calls of a training", audit.check, 3, 1, 1, "", (strace,)),
            tests(
                ("test_checkpoint", "a manifest with a valid checksum*,only what saves leave behind*"),
                ("test_core", "removing a tree does not follow links*"),
                ("test_tools", "a pipe in place of a run's file*"),
                cases=4,
            ),
        ),
    ),
    Gate(
        "P16",
        "Tokens, samples, offsets and messages beyond 2^31 and 2^32 are exact.",
        (
            tests(
                ("test_core", "writes and reads go past 2^31*,a sparse file past 2^32*,permute_index*"),
                ("test_data", "token files beyond 2^32*"),
                cases=8,
            ),
            Part("messages in pieces, 1 to 4 ranks", pieces, 4, 2, 0.2, "", (mpirun, has_tests)),
        ),
    ),
    Gate(
        "P17",
        "A rank that computes 30 % longer is named within 50 steps, no other is, and no bit changes; equal ranks are never named.",
        (
            Part("slow ranks", stragglers.check, 20, 2, 3, "", ANY_RANKS),
            Part("equal ranks", stragglers.check_quiet, 10_000, 100, 12, "steps of equal ranks", ANY_RANKS),
        ),
    ),
    Gate(
        "P18",
        "A router that sends all tokens to one expert is reported within 20 steps, costs no more memory, and resumes with equal bits.",
        (Part("collapsed routers", routers.check, 20, 1, 2, "", ANY_RANKS),),
    ),
    Gate(
        "P19",
        "kill -9 of a sweep, of its trials, of both, at any moment: each trial is trained exactly once, and none is overwritten.",
        (Part("kills", sweeps.check, 200, 2, 12, "kills"),),
    ),
    Gate(
        "P20",
        "The program's own code is clean under the address, undefined-behaviour and thread sanitizers, with ranks.",
        (
            sanitized(
                "build-asan",
                [(f"test_{room}",) for room in ("core", "config", "comm", "data", "checkpoint", "run")]
                + [("test_train", "[ranks],[trainer],[spike]"), ("test_tools", "[ranks]")],
                ADDRESS_SANITIZER,
            ),
            sanitized_ranks("build-asan", ADDRESS_SANITIZER),
            sanitized(
                "build-tsan",
                [
                    ("test_comm",),
                    ("test_train", "[ranks]"),
                    ("test_checkpoint", "[checkpoint],[sharded],[corruption]"),
                    ("test_run", "[watchdog],[stragglers]"),
                ],
                {
                    "OMP_THREAD_LIMIT": "1",
                    "TSAN_OPTIONS": f"suppressions={SOURCE}/tests/support/thread_sanitizer.supp",
                },
            ),
        ),
    ),
    Gate(
        "P21",
        "Asynchronous saves cost at most 2 % of the time with one in 50 steps, the watchdog and the comparison of replicas at most "
        "0.5 % each.",
        (Part("`sluice bench ranks`", cost, 3, 1, 5, "", (idle,)),),
    ),
    Gate(
        "P22",
        "The checks work: bugs like those of other programs, planted one by one, are each caught.",
        (
            Part("bugs that still fit the sources", mutants_fit, len(mutants.MUTANTS), 1, 0.1),
            Part("bugs that are caught", mutants_caught, len(mutants.MUTANTS), 1, 90, "", (mpirun, builds)),
        ),
    ),
    Gate(
        "P23",
        "One run under scripts/launch with fault after fault finishes by itself with equal bits; one that dies at the same step again "
        "and again is not restarted for ever.",
        (Part("faults in one run", healing.check, 50, 1, 4, "faults", ANY_RANKS),),
    ),
)
