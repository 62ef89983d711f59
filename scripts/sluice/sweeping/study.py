"""Variants of a sweep: what differs between them, and what is written of them for scripts/report."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from ..program import working_folder
from ..reporting.study import SUFFIX
from .sweep_file import OWN, START
from .text import table

if TYPE_CHECKING:
    from ..yaml import Node
    from .sweep_file import SweepFile, Trial, Variant

WIDEST = 100  # letters of a value that a terminal shows


def flat(tree: Any, path: str = "") -> dict[str, str]:
    """{dotted key: value as JSON} of a resolved configuration; lists are values."""
    if isinstance(tree, dict) and tree:
        out: dict[str, str] = {}
        for key, value in tree.items():
            out.update(flat(value, f"{path}.{key}" if path else str(key)))
        return out
    return {path: json.dumps(tree, ensure_ascii=False).replace('"', "")}


def resolved(program: str, trial: Trial) -> dict[str, str]:
    command = [program, "config", "show", trial.base, *trial.overrides(), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=working_folder()
    )
    # Trials that cannot be were refused before.
    return flat(json.loads(done.stdout)) if done.returncode == 0 else {}


def written(variant: Variant, key: str) -> str | None:
    """What the sweep file says of a key, or of places in it (gates[0].heads); None where it says nothing."""

    def about(name: str, node: Node) -> str | None:
        if name == key:
            return node.flow()
        return f"{name[len(key) :]}: {node.flow()}" if name.startswith((key + "[", key + ".")) else None

    said = [about(name, node) for name, node in variant.values.items()]
    return "; ".join(text for text in said if text is not None) or None


class Differences:
    """The keys in which the variants' resolved configurations differ, and their values: what the file says, or what is resolved."""

    def __init__(self, sweep: SweepFile, program: str) -> None:
        firsts: dict[str, Trial] = {}
        for trial in sweep.trials:
            firsts.setdefault(trial.compared_as, trial)
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
            trees = list(pool.map(lambda trial: resolved(program, trial), firsts.values()))
        every = list(dict.fromkeys(key for tree in trees for key in tree))
        # The weights that `after` names differ as the trials do that they come from; the sweep sets the others.
        known = (*OWN, START) if sweep.after else OWN
        self.keys = [key for key in every if key not in known and len({tree.get(key) for tree in trees}) > 1]
        self.rows = {
            name: [written(trial.variant, key) or tree.get(key, "-") for key in self.keys]
            for (name, trial), tree in zip(firsts.items(), trees)
        }

    def text(self, control: str | None) -> str:
        """For a terminal: a line for each variant."""
        shown = lambda value: value if len(value) <= WIDEST else value[: WIDEST - 1] + "…"
        rows = [
            (name + (" (control)" if name == control else ""), *map(shown, values))
            for name, values in self.rows.items()
        ]
        return table(("variant", *short(self.keys)), rows, left=1 + len(self.keys)) + "\n"


def short(keys: list[str]) -> list[str]:
    """The last parts of dotted keys, as many as tell them apart."""
    out = []
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            end = ".".join(parts[-count:])
            if sum(("." + other).endswith("." + end) for other in keys) == 1:
                break
        out.append(end)
    return out


def write(sweep: SweepFile, program: str, output: str) -> None:
    """OUTPUT/NAME.study.json, for a sweep with variants, or whose seeds start from different weights."""
    if not any(trial.place for trial in sweep.trials):
        return
    differences = Differences(sweep, program)
    study = {
        "name": sweep.name,
        "control": sweep.control,
        "keys": short(differences.keys),
        "variants": [{"name": name, "values": values} for name, values in differences.rows.items() if name],
        "trials": [
            {"hash": t.hash, "group": t.group, "variant": t.compared_as, "point": t.shared()}
            for t in sweep.trials
        ],
    }
    path = os.path.join(output, sweep.name + SUFFIX)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(study, file, indent=1)
        file.write("\n")
    os.replace(temporary, path)
