"""Starts a training on several ranks, and starts it again after what a restart can mend.

  scripts/launch -n 4 build/sluice train configs/x.yaml run_dir=runs/x
  scripts/launch -n 2 --restarts 5 --mpirun "mpirun --hostfile hosts" build/sluice train configs/x.yaml

SIGTERM, SIGINT and SIGHUP become SIGUSR2 for the ranks: they finish the step, save and end with 75 (mpirun itself would give
them one second). Restarted are a lost or hanging rank (76, or death by a signal), at most --restarts times, and not when the
run dies at the same step three times. Everything else, and a finished or stopped training, ends with the program's own exit
code. --deadline: seconds from a signal until all is killed. --patience: seconds until an mpirun is killed that has lost its
ranks and does not end. Pauses before restarts grow from 1 s to 60 s while nothing is won.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

# A rank hung or was lost; besides deaths by signals. 1 is mpirun's own word for a rank that went without one, once ranks were
# there at all: the program never says it.
RETRYABLE = {1, 76}
PR_SET_PDEATHSIG = 1


def last_step(run_dir: str) -> int:
    """Newest complete checkpoint's step, or 0."""
    try:
        names = os.listdir(os.path.join(run_dir, "ckpt"))
    except OSError:
        return 0
    steps = [int(n[5:]) for n in names if n.startswith("step_") and n[5:].isdigit()]
    return max(steps, default=0)


# Options of `sluice train` that take a value; the value may be a separate argument.
VALUED = ("--run-dir", "--allow-change")


def overrides_of(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(configuration, [key=value...]) of the arguments of `sluice train`, --run-dir being run_dir=."""
    words, folder, waiting = [], None, None
    for word in arguments:
        name, equals, value = word.partition("=")
        if waiting:
            folder, waiting = (word if waiting == "--run-dir" else folder), None
        elif name in VALUED and equals:
            folder = value if name == "--run-dir" else folder
        elif name in VALUED:
            waiting = name
        elif not word.startswith("-"):
            words.append(word)
    return words[:1], words[1:] + (
        [f"run_dir={folder}"] if folder else []
    )  # the option wins, as in the program


def run_folder(command: list[str]) -> str:
    """Where the program keeps the run, by its own word."""
    configuration, overrides = overrides_of(command[2:])
    try:
        shown = subprocess.run(
            [command[0], "config", "show", *configuration, *overrides, "--json"],
            capture_output=True,
            text=True,
        )
    except OSError as error:
        sys.exit(f"launch: {command[0]}: {error.strerror}; give the program's path, as build/sluice")
    if shown.returncode == 0:
        return json.loads(shown.stdout)["run_dir"]
    sys.stderr.write(shown.stderr)
    sys.exit(shown.returncode)


def before_mpirun() -> None:
    """In the new process: a SIGUSR2 does not kill who cannot handle it yet, and is what comes should we be killed."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2)


def owner_since(run_dir: str) -> int:
    """Changes when a start has taken the run folder: from then on its ranks catch signals."""
    try:
        return os.stat(os.path.join(run_dir, "lock")).st_mtime_ns
    except OSError:
        return 0


def has_children(pid: int) -> bool:
    """Ranks of this machine, or what reaches those of others. Where that cannot be seen: yes."""
    if not os.path.isdir("/proc/self"):
        return True
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, parent = file.read().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state not in "ZX":
                return True
    return False


def status_of(returncode: int) -> int:
    """128 + number for a death by a signal, as shells say it."""
    return 128 - returncode if returncode < 0 else returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=120.0)
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds that a launcher without ranks may take to end"
    )
    parser.add_argument("--mpirun", default="mpirun --bind-to none", help="the launcher and its options")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="sluice train ...")
    options = parser.parse_args()
    if len(options.command) < 3 or options.command[1] != "train":
        parser.error("the command must be: SLUICE train CONFIG [key=value...]")
    run_dir = run_folder(options.command)

    environment = dict(os.environ)
    if options.ranks > (os.cpu_count() or 1):
        environment.update(OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_mpi_yield_when_idle="1")
    if os.geteuid() == 0:  # containers
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    state: dict[str, Any] = {"signals": 0, "signalled_at": None}

    def on_signal(number: int, _frame: object) -> None:
        state["signals"] += 1
        if state["signalled_at"] is None:
            state["signalled_at"] = time.monotonic()
            print(f"launch: {signal.Signals(number).name}: asking the ranks to save", file=sys.stderr)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)

    died_at, sent, pause = [], 0, 1.0
    for attempt in range(options.restarts + 1):
        # A separate process group, so that a terminal's Ctrl-C reaches only this script.
        before, began = owner_since(run_dir), time.monotonic()
        try:
            process = subprocess.Popen(
                [*shlex.split(options.mpirun), "-n", str(options.ranks), *options.command],
                env=environment,
                start_new_session=True,
                preexec_fn=before_mpirun,
            )
        except (OSError, IndexError) as error:
            sys.exit(
                f"launch: {options.mpirun}: {error}; install it (Debian: openmpi-bin), or name another launcher: --mpirun"
            )
        began_work = False
        had_children, childless_since, next_look = False, None, 0.0
        while process.poll() is None:
            time.sleep(0.05)
            # An mpirun whose ranks are gone and that does not end, for all that it should, would be waited for in vain.
            if time.monotonic() > next_look:
                next_look = time.monotonic() + 2
                if has_children(process.pid):
                    had_children, childless_since = True, None
                elif had_children:
                    childless_since = childless_since or time.monotonic()
            if childless_since and time.monotonic() - childless_since > options.patience:
                print(
                    f"launch: the launcher has had no ranks for {options.patience:g} s and does not end: killing it",
                    file=sys.stderr,
                )
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            # A signal before the ranks can catch it waits for them; 30 s are a folder whose lock cannot be seen from here.
            began_work = began_work or owner_since(run_dir) != before
            while sent < state["signals"] and (began_work or time.monotonic() - began > 30):
                process.send_signal(signal.SIGUSR2)
                sent += 1
            if (
                state["signalled_at"] is not None
                and time.monotonic() - state["signalled_at"] > options.deadline
            ):
                print(f"launch: not ended {options.deadline:g} s after the signal: killing", file=sys.stderr)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        code = status_of(process.returncode)
        began_work = began_work or owner_since(run_dir) != before
        if (
            state["signalled_at"] is not None
            or not (code in RETRYABLE or code > 128)
            or (code == 1 and not began_work)
        ):
            sys.exit(code)
        step = last_step(run_dir)
        died_at.append(step)
        if died_at[-3:] == [step] * 3:
            print(
                f"launch: exit status {code}; three times without a checkpoint beyond step {step}: not again",
                file=sys.stderr,
            )
            sys.exit(code)
        if attempt == options.restarts:
            print(f"launch: exit status {code}; {options.restarts} restarts are used up", file=sys.stderr)
            sys.exit(code)
        in_vain = len(died_at) >= 2 and died_at[-2] == step
        pause = min(2 * pause, 60.0) if in_vain else 1.0
        print(
            f"launch: exit status {code}, last checkpoint at step {step}; starting again in {pause:g} s",
            file=sys.stderr,
        )
        end = time.monotonic() + pause
        while time.monotonic() < end and state["signalled_at"] is None:
            time.sleep(0.05)
        if state["signalled_at"] is not None:  # no rank is running, so the last save is the state
            sys.exit(75)
