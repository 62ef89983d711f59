"""What a sweep file says, checked, and the list of trials it means."""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import yaml
from ..program import working_folder
from ..reporting.study import Place
from ..yaml import Refused  # noqa: F401
from .stop_rules import OPERATORS, StopRule, wrong_metric
from .text import unprintable

if TYPE_CHECKING:
    from ..yaml import Node

KEYS = (
    "name",
    "output",
    "record",
    "after",
    "base",
    "set_from",
    "set",
    "variants",
    "control",
    "grid",
    "paired",
    "seeds",
    "resources",
    "stop_if",
)
SEED = "train.seed"
START = "train.init_from"
# Sections and keys of a trial that are the sweep's own to say.
OWN = ("name", "run_dir", "train.threads")
PREFIX = 12  # letters of the hash in a folder's name
MOST_TRIALS = 10_000  # planning them takes about 8 ms each


class Resources:
    """Of one trial; slots: how many trials at once."""

    NUMBERS = {"slots": 1, "threads": 0, "procs": 1, "gpus": None, "nodes": 1}
    WORDS = ("time", "partition", "account", "qos", "constraint", "memory")

    slots: int
    threads: int
    procs: int
    gpus: int | None
    nodes: int
    time: str | None
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    memory: str | None

    def __init__(self) -> None:
        for name, default in self.NUMBERS.items():
            setattr(self, name, default)
        for name in self.WORDS:
            setattr(self, name, None)


def program_path(path: str) -> str:
    """A path for the program, which starts in the working folder: relative below that."""
    folder, path = working_folder(), os.path.abspath(path)
    return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path


class Variant:
    """A name and the keys that make it differ from the others."""

    def __init__(self, name: str, node: Node | None, values: dict[str, Node]) -> None:
        self.name, self.node, self.values = name, node, values


def layered(*layers: dict[str, Node]) -> dict[str, Node]:
    """All keys of the layers, of which later ones win and come last: an index into a list (gates[0].heads) refines what earlier
    layers say of the list, and what a later one says of the whole list replaces both."""
    out: dict[str, Node] = {}
    for layer in layers:
        for key, node in layer.items():
            out.pop(key, None)
            out[key] = node
    return out


class Trial:
    """One configuration and seed. What `sluice plan` says of it is added by plan.py."""

    def __init__(
        self, base: str, base_node: Node, variant: Variant, point: dict[str, Node], seed: Node | None
    ) -> None:
        self.base, self.base_node, self.seed = base, base_node, seed
        self.variant = variant
        self.point = point  # the keys that it shares with the same trial of every other variant
        self.values = layered(point, variant.values)
        self.name = self.hash = self.folder = ""
        self.group = ""  # what the trials of its configuration are called, whatever their seed
        self.compared_as = ""  # its variant, or its base where the sweep compares bases
        self.place: Place | None = None  # of a variant, as scripts/report finds it
        self.after: Trial | None = None  # the trial of an earlier sweep whose last weights it starts from
        self.plan: dict[str, Any] = {}

    def run_dir(self) -> str:
        """Its folder as the program is given it."""
        return program_path(self.folder)

    def own_folder(self, output: str) -> str:
        """Where it is trained unless it was trained under another name before."""
        return os.path.join(output, f"{self.name}-{self.hash[:PREFIX]}")

    def last_weights(self) -> str:
        """Its last checkpoint, for the trials that start from it: their hashes are of this text, so that it must be the same on
        every machine."""
        folder = program_path(self.own_folder(os.path.dirname(self.folder)))
        return os.path.join(folder, "ckpt", f"step_{self.plan['steps']:08d}")

    def overrides(self) -> list[str]:
        """key=value..., in the order in which later ones win."""
        return (
            [f"{key}={node.flow()}" for key, node in self.values.items()]
            + ([f"{START}={self.after.last_weights()}"] if self.after else [])
            + ([f"{SEED}={self.seed.text}"] if self.seed else [])
        )

    def shared(self) -> str:
        """What it has in common with the trials that it is compared with, whatever their seeds."""
        base = os.path.relpath(self.base, os.path.dirname(os.path.abspath(self.base_node.path)))
        compares_bases = self.compared_as and not self.variant.name
        return " ".join(
            [*([] if compares_bases else [base]), *(f"{key}={node.flow()}" for key, node in self.point.items())]
        )

    def configuration(self) -> tuple[str, ...]:
        """What its seeds have in common. Variants may differ in the weights alone that they start from."""
        return (
            self.base,
            self.variant.name,
            *(f"{key}={node.flow()}" for key, node in self.values.items()),
        )


class SweepFile:
    def __init__(self, path: str, sluice: str | None = None, before: Sequence[str] = ()) -> None:
        """before: the files that are known to come after this one."""
        self.path = path
        self.root = root = yaml.read(path, sluice)
        if root.kind != "map":
            root.refuse("a sweep file is a map: base, grid, seeds, ...")
        self.check_keys(root, KEYS, "")
        if unprintable(path):
            root.refuse(
                "the sweep file's own name or folder has a control character or is not UTF-8; rename it"
            )
        self.check_letters(root)
        self.name = self.text(root, "name", os.path.splitext(os.path.basename(path))[0])
        # A folder of this name is made in runs/sweeps/.
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", self.name) or not self.name.strip("."):
            (self.part("name") or root).refuse(
                f"the name {self.name!r}: a name has 1 to 100 letters, digits, . _ and - only, and not "
                "dots alone; set name"
            )
        self.output = self.text(root, "output", os.path.join("runs", "sweeps", self.name))
        record = self.text(root, "record")
        self.record = record and os.path.normpath(os.path.join(os.path.dirname(path), record))
        self.after = self.read_after([*before, os.path.realpath(path)], sluice)
        self.bases = self.read_bases()
        self.stems = self.name_bases()
        self.defaults = self.read_defaults(sluice)
        self.common = self.read_overrides(self.part("set"), "set")
        self.grid = self.read_grid()
        self.paired = self.read_paired()
        self.variants = self.read_variants()
        self.control = self.read_control()
        self.seeds = self.read_seeds()
        self.resources = self.read_resources()
        self.rules = self.read_rules()
        self.trials = self.expand()
        if self.after:
            self.follow(self.after)

    # ---- parts

    def part(self, key: str, parent: Node | None = None) -> Node | None:
        node = (parent or self.root).entries.get(key)
        return None if node is None or node.kind == "null" else node

    def check_keys(self, node: Node, known: Sequence[str], where: str) -> None:
        for key, value in node.entries.items():
            if key not in known:
                value.refuse(f"unknown key {where}{key}; there are: {', '.join(known)}")

    def check_letters(self, node: Node) -> None:
        """Values become folders, arguments and lines of a script: none may hold a line's end or another control character."""
        for key, value in node.entries.items():
            if unprintable(key):
                value.refuse("the key has a control character")
            self.check_letters(value)
        for item in node.items:
            self.check_letters(item)
        if unprintable(node.text):
            node.refuse(f"the value {node.text[:50]!r} has a control character")

    def text(self, parent: Node, key: str, default: Any = None) -> Any:
        node = self.part(key, parent)
        if node is None:
            return default
        if node.kind != "scalar" or not node.text:
            node.refuse(f"{key} is one word or number")
        return node.text

    def number(self, parent: Node, key: str, default: Any, least: int | None = None, kind: type = int) -> Any:
        node = self.part(key, parent)
        if node is None:
            return default
        try:
            value = kind(
                node.text if node.kind == "scalar" and not node.quoted and len(node.text) < 19 else ""
            )
        except ValueError:
            node.refuse(f"{key} is a{' whole' if kind is int else ''} number of at most 18 digits")
        if not math.isfinite(value):
            node.refuse(f"{key} is a finite number")
        if least is not None and value < least:
            node.refuse(f"{key} is at least {least}, got {node.text}")
        return value

    def read_bases(self) -> list[tuple[str, Node]]:
        node = self.part("base")
        if node is None:
            self.root.refuse("base is missing: the configuration, or a list of them, that the trials change")
        bases: list[tuple[str, Node]] = []
        for item in node.items if node.kind == "list" else [node]:
            if item.kind != "scalar":
                item.refuse("base is a file, or a list of files; * and ? match several")
            pattern = os.path.join(os.path.dirname(os.path.abspath(self.path)), item.text)
            found = sorted(glob.glob(pattern)) if re.search(r"[*?\[]", item.text) else [pattern]
            found = [os.path.normpath(path) for path in found if os.path.isfile(path)]
            if not found:
                item.refuse(f"no such file: {os.path.normpath(pattern)} (relative to the sweep file)")
            for path in found:
                if path in [b for b, _ in bases]:
                    item.refuse(f"{path} is given twice")
                bases.append((path, item))
        if not bases:
            node.refuse("base is an empty list")
        return bases

    def read_defaults(self, sluice: str | None) -> dict[str, Node]:
        """The keys of the file that several sweeps share; every other part of the sweep file may set them differently."""
        name, node = self.text(self.root, "set_from"), self.part("set_from")
        if node is None:
            return {}
        path = os.path.normpath(os.path.join(os.path.dirname(self.path), name))
        if not os.path.isfile(path):
            node.refuse(f"set_from: no such file: {path} (relative to the sweep file)")
        shared = yaml.read(path, sluice)
        self.check_letters(shared)
        return self.read_overrides(shared, "the file of set_from")

    def name_bases(self) -> dict[str, str]:
        """{path: the file's name without its ending, behind its folder's where several files have the same}"""
        name_of = lambda path: os.path.splitext(os.path.basename(path))[0]
        paths = [path for path, _ in self.bases]
        alike = len({name_of(path) for path in paths}) < len(paths)
        folder_of = lambda path: os.path.basename(os.path.dirname(path)) + "-" if alike else ""
        return {path: folder_of(path) + name_of(path) for path in paths}

    def read_after(self, later: list[str], sluice: str | None) -> SweepFile | None:
        """The sweep whose trials this one's start from."""
        name, node = self.text(self.root, "after"), self.part("after")
        if node is None:
            return None
        path = os.path.normpath(os.path.join(os.path.dirname(self.path), name))
        if os.path.realpath(path) in later:
            node.refuse(f"after: {path} comes after this sweep itself")
        if not os.path.isfile(path):
            node.refuse(f"after: no such file: {path} (relative to the sweep file)")
        return SweepFile(path, sluice, later)

    def follow(self, earlier: SweepFile) -> None:
        """Gives each trial the one of the earlier sweep that has its variant and its seed."""
        key = lambda trial: (trial.variant.name, trial.seed.text if trial.seed else "")
        of: dict[tuple[str, str], list[Trial]] = {}
        for trial in earlier.trials:
            of.setdefault(key(trial), []).append(trial)
        for trial in self.trials:
            found = of.get(key(trial), [])
            if len(found) != 1:
                node = self.part("after") or self.root
                node.refuse(
                    f"after: {earlier.path} has {len(found) or 'no'} trials of the variant and seed of "
                    f"{trial.name}; it needs exactly one, from whose weights to start"
                )
            trial.after = found[0]

    def check_override(self, key: str, node: Node) -> None:
        if key in OWN:
            node.refuse(
                f"{key} is the sweep's to set" + ("; see resources.threads" if key == "train.threads" else "")
            )
        if key == SEED:
            node.refuse(f"{SEED}: give the list `seeds` instead")
        if key == START and self.after:
            node.refuse(f"{START} follows from the key `after`")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.\[\]]*", key):
            node.refuse(f"{key!r} is no configuration key")

    def read_overrides(self, node: Node | None, where: str) -> dict[str, Node]:
        if node is None:
            return {}
        if node.kind != "map":
            node.refuse(f"{where} holds `key: value` pairs")
        flat: dict[str, Node] = {}
        for key, value in node.entries.items():
            self.flatten(key, value, flat)
        return flat

    def flatten(self, key: str, node: Node, flat: dict[str, Node]) -> None:
        """Adds the dotted keys of a section: {train: {max_steps: 5}} is {train.max_steps: 5}."""
        self.check_override(key, node)
        if node.kind == "map" and node.entries:
            for name, value in node.entries.items():
                self.flatten(f"{key}.{name}", value, flat)
            return
        if key in flat:
            node.refuse(f"{key} is given twice")
        flat[key] = node

    def taken(self, key: str, node: Node, *others: tuple[str, dict[str, Node]]) -> None:
        for where, keys in others:
            if key in keys:
                node.refuse(f"{key} stands in {where}, too; which one holds?")

    def read_grid(self) -> dict[str, Node]:
        node = self.part("grid")
        grid = self.read_overrides(node, "grid")
        for key, values in grid.items():
            if values.kind != "list" or not values.items:
                values.refuse(f"grid.{key} needs a list of values")
            flows = set()
            for item in values.items:
                if item.flow() in flows:
                    item.refuse(f"grid.{key} has {item.flow()} twice")
                flows.add(item.flow())
            self.taken(key, values, ("set", self.common))
        return grid

    def read_paired(self) -> list[dict[str, Node]]:
        node = self.part("paired")
        if node is None:
            return [{}]
        if node.kind != "list" or not node.items:
            node.refuse("paired is a list of { key: value, ... }")
        rows = [self.read_overrides(item, "each item of paired") for item in node.items]
        for item, row in zip(node.items, rows):
            if set(row) != set(rows[0]):
                item.refuse(
                    "every item of paired gives the same keys as the first one: " + ", ".join(rows[0])
                )
            for key, value in row.items():
                self.taken(key, value, ("grid", self.grid), ("set", self.common))
        return rows

    def read_variants(self) -> list[Variant]:
        node = self.part("variants")
        if node is None:
            return [Variant("", None, {})]
        if node.kind != "map" or not node.entries:
            node.refuse(
                "variants is a map of names, each with the keys that it changes: { NAME: {key: value} }"
            )
        seen: dict[str, str] = {}
        variants = []
        for name, item in node.entries.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,59}", name):
                item.refuse(
                    f"the name {name!r} of a variant: it begins with a letter or digit and has at most 60 letters, "
                    "digits, . _ + and -, since folders are named after it"
                )
            if name.lower() in seen:
                item.refuse(
                    f"the variants {seen[name.lower()]} and {name} differ in upper and lower case alone"
                )
            seen[name.lower()] = name
            values = {} if item.kind == "null" else self.read_overrides(item, f"the variant {name}")
            for key, value in values.items():
                self.taken(
                    key,
                    value,
                    ("grid", self.grid),
                    ("set", self.common),
                    ("paired", self.paired[0]),
                )
            variants.append(Variant(name, item, values))
        return variants

    def read_control(self) -> str | None:
        """The variant, or of several bases the one, that the others are compared with."""
        name, node = self.text(self.root, "control"), self.part("control")
        if node is None:
            return None
        variants = [variant.name for variant in self.variants if variant.name]
        known = variants or (list(self.stems.values()) if len(self.bases) > 1 else [])
        if not known:
            node.refuse("control is the name of a variant or of one of several bases; the file has neither")
        if name not in known:
            kind = "variant" if variants else "base"
            node.refuse(f"control: there is no {kind} {name}; there are: {', '.join(known)}")
        return name

    def read_seeds(self) -> list[Node | None]:
        node = self.part("seeds")
        if node is None:
            return [None]
        if node.kind != "list" or not node.items:
            node.refuse("seeds is a list of numbers")
        seen = set()
        for item in node.items:
            if item.kind != "scalar" or not re.fullmatch(r"0|[1-9][0-9]{0,18}", item.text):
                item.refuse("a seed is a whole number from 0")
            if item.text in seen:
                item.refuse(f"the seed {item.text} is given twice")
            seen.add(item.text)
        return [*node.items]

    def read_resources(self) -> Resources:
        resources, node = Resources(), self.part("resources")
        if node is None:
            return resources
        if node.kind != "map":
            node.refuse("resources holds `key: value` pairs")
        self.check_keys(node, (*Resources.NUMBERS, *Resources.WORDS), "resources.")
        for name, default in Resources.NUMBERS.items():
            setattr(
                resources,
                name,
                self.number(node, name, default, least=0 if name in ("gpus", "threads") else 1),
            )
        for name in Resources.WORDS:
            word = self.text(node, name)
            if word is not None and not re.fullmatch(r"[A-Za-z0-9:._,+&|@*()\[\]-]+", word):
                node.entries[name].refuse(f"resources.{name} is no word for Slurm")
            setattr(resources, name, word)
        if resources.procs % resources.nodes:
            node.refuse(
                f"resources.procs ({resources.procs}) is a multiple of resources.nodes ({resources.nodes})"
            )
        return resources

    def read_rules(self) -> list[StopRule]:
        node, rules = self.part("stop_if"), []
        for item in [] if node is None else node.items if node.kind == "list" else [node]:
            if item.kind != "map":
                item.refuse("stop_if is {metric, op, value, after_steps}, or a list of them")
            self.check_keys(item, ("metric", "op", "value", "after_steps"), "stop_if.")
            metric, op = self.text(item, "metric"), self.text(item, "op")
            if metric is None or op is None:
                item.refuse("stop_if needs metric and op")
            if wrong := wrong_metric(metric):
                item.entries["metric"].refuse(f"stop_if.metric: {wrong}")
            if op not in (*OPERATORS, "nonfinite"):
                item.entries["op"].refuse(f"stop_if.op is one of {' '.join(OPERATORS)} nonfinite")
            if (self.part("value", item) is None) != (op == "nonfinite"):
                item.refuse("stop_if.value goes with > >= < <=, and with them only")
            rules.append(
                StopRule(
                    metric,
                    op,
                    self.number(item, "value", None, kind=float),
                    self.number(item, "after_steps", 0, least=0),
                )
            )
        return rules

    # ---- trials

    def expand(self) -> list[Trial]:
        """Bases x variants x paired x grid, the first seeds of all before the second ones."""
        number = math.prod(
            [
                len(self.seeds),
                len(self.bases),
                len(self.variants),
                len(self.paired),
                *(len(g.items) for g in self.grid.values()),
            ]
        )
        if number > MOST_TRIALS:
            (self.part("grid") or self.root).refuse(
                f"{number:,} trials; a sweep has at most {MOST_TRIALS:,}: split it"
            )
        trials = []
        points = [
            dict(zip(self.grid, values))
            for values in itertools.product(*(g.items for g in self.grid.values()))
        ]
        for seed in self.seeds:
            for (base, node), variant, row, point in itertools.product(
                self.bases, self.variants, self.paired, points
            ):
                trials.append(Trial(base, node, variant, layered(self.defaults, self.common, row, point), seed))
        labels = {key: self.labels(key, values.items) for key, values in self.grid.items()}
        for key in self.paired[0]:
            labels[key] = self.labels(key, [row[key] for row in self.paired])
        for trial in trials:
            named = trial.variant.name or any(labels.values())
            parts = [self.stems[trial.base]] if len(self.bases) > 1 or not named else []
            parts += [trial.variant.name] if trial.variant.name else []
            parts += [labels[key][node.flow()] for key, node in trial.values.items() if labels.get(key)]
            trial.group = "-".join(parts)[:90].rstrip("-.") or self.stems[trial.base]
            trial.name = trial.group + (f"-s{trial.seed.text}" if trial.seed else "")
            trial.compared_as = trial.variant.name or (self.stems[trial.base] if self.control else "")
        order = {group: i for i, group in enumerate(dict.fromkeys(trial.group for trial in trials))}
        for trial in trials:
            if trial.compared_as or self.after:
                trial.place = Place(
                    self.name,
                    trial.group,
                    trial.compared_as,
                    trial.shared(),
                    self.control,
                    order[trial.group],
                )
        return trials

    def labels(self, key: str, nodes: list[Node]) -> dict[str, str]:
        """{value: short text}, file-name safe; {} for a key that has one value only."""
        flows = list(dict.fromkeys(node.flow() for node in nodes))
        if len(flows) < 2:
            return {}
        keys = [*self.grid, *self.paired[0]]
        parts = key.split(".")
        short = parts[-1] if sum(k.split(".")[-1] == parts[-1] for k in keys) == 1 else ".".join(parts[-2:])
        texts = [re.sub(r"[^A-Za-z0-9.+-]+", "_", flow).strip("_-") for flow in flows]
        plain = all(node.kind != "list" and node.kind != "map" for node in nodes)
        if not plain or len(set(texts)) < len(texts) or max(map(len, texts)) > 24 or not all(texts):
            texts = [str(i + 1) for i in range(len(flows))]  # lists and long values go by their place
        return {
            flow: re.sub(r"[^A-Za-z0-9._+-]+", "_", short) + "_" + text for flow, text in zip(flows, texts)
        }
