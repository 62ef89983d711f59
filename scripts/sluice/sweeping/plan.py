"""What the program says of every trial before it is run: its hash, its folder, its cost."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from ..program import working_folder
from .sweep_file import PREFIX

if TYPE_CHECKING:
    from ..yaml import Node
    from .sweep_file import SweepFile, Trial

class Mistake(Exception):
    """The user's, or the world's: one message and an exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def asked(program: str, trial: Trial, ranks: int) -> tuple[int, Any]:
    command = [program, "plan", trial.base, *trial.overrides(), "--ranks", str(ranks), "--json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=working_folder()
        )
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise Mistake(
                64, f"{trial.base_node.path}: the values of {trial.name} are too long for a command line"
            ) from None
        raise Mistake(
            66,
            f"{program}: {error.strerror}; build it, or say where it is: --sluice, or SLUICE in the environment",
        ) from None
    if done.returncode != 0:
        return done.returncode, done.stderr.strip()
    return 0, json.loads(done.stdout)


def place(trial: Trial, message: str) -> Node:
    """Where in the sweep file the mistake stands that the program found: at the key that it names."""
    for key, node in trial.values.items():
        if key in message:
            return node
    return trial.base_node


def output_of(sweep: SweepFile, given: str | None = None) -> str:
    """The folder of its runs: `given` by the user, or the file's, relative to where the user stands where it is below."""
    output = os.path.relpath(given or os.path.join(working_folder(), sweep.output))
    return os.path.abspath(output) if output.startswith(os.pardir) else output


def add_plans(sweep: SweepFile, program: str, output: str) -> list[tuple[Trial, Trial]]:
    """Asks the program about every trial. Trials that are one and the same training become one; their number is returned."""
    if sweep.after:  # whose folders the trials name
        add_plans(sweep.after, program, output_of(sweep.after))
    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
        answers = list(pool.map(lambda trial: asked(program, trial, sweep.resources.procs), sweep.trials))
    for trial, (code, answer) in zip(sweep.trials, answers):
        if code != 0:
            node = place(trial, answer)
            raise Mistake(
                code, f"{node.path}:{node.line}:{node.column}: the trial {trial.name} cannot be:\n{answer}"
            )
        trial.plan, trial.hash = answer, answer["config_hash"]
        if answer["steps"] <= 0:
            raise Mistake(
                64,
                f"{trial.base_node.path}:{trial.base_node.line}: {trial.name} has no length: set train.max_steps or train.max_tokens",
            )
    # Folders are found by their hash: names may change with the sweep file.
    existing: dict[str, list[str]] = {}
    for entry in sorted(os.listdir(output)) if os.path.isdir(output) else []:
        if os.path.isdir(os.path.join(output, entry)) and "-" in entry:
            existing.setdefault(entry.rsplit("-", 1)[1], []).append(entry)
    first: dict[str, Trial] = {}
    merged: list[tuple[Trial, Trial]] = []
    for trial in sweep.trials:
        found = existing.get(trial.hash[:PREFIX], [])
        if len(found) > 1:
            raise Mistake(
                73, f"{output} holds {' and '.join(found)}, which are one configuration; keep one of them"
            )
        trial.folder = os.path.join(output, found[0]) if found else trial.own_folder(output)
        twin = first.get(trial.hash)
        if twin and twin.variant is not trial.variant:
            node = trial.variant.node or trial.base_node
            raise Mistake(
                64,
                f"{node.path}:{node.line}:{node.column}: the variant {trial.variant.name} is the same training as "
                f"{twin.variant.name} ({trial.name} and {twin.name} have one configuration)",
            )
        if twin:
            merged.append((trial, twin))
        else:
            first[trial.hash] = trial
    sweep.trials = list(first.values())
    return merged


def flops(trial: Trial) -> float:
    return trial.plan["flops_per_token"] * trial.plan["tokens"]
