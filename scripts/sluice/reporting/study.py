"""What a sweep wrote of its variants beside its runs (OUTPUT/NAME.study.json): how the trials are called, and which variant is the
control. Standard library alone."""

from __future__ import annotations

import os
from typing import Any

from .files import read_object
from .shapes import TEXT, clean
from .tables import Table

SUFFIX = ".study.json"
SHAPE = {
    "name": TEXT,
    "control": TEXT,
    "keys": [TEXT],
    "variants": [{"name": TEXT, "values": [TEXT]}],
    "trials": [{"hash": TEXT, "group": TEXT, "variant": TEXT, "point": TEXT}],
}


class Place:
    """Where a group stands in a study. point: what it shares with the groups of other variants; file: the study's, where it is of one."""

    def __init__(
        self,
        study: str,
        group: str,
        variant: str,
        point: str,
        control: str | None,
        order: int,
        file: str = "",
    ) -> None:
        self.study, self.group, self.variant, self.point = study, group, variant, point
        self.control, self.order, self.file = control, order, file

    def key(self) -> tuple[str, ...]:
        """Of the trials that differ in their seeds alone."""
        return self.file, self.group, self.variant, self.point


class Study:
    def __init__(self, path: str) -> None:
        data = read_object(path, SHAPE, must=True)
        self.path = path
        self.name: str = data.get("name") or os.path.basename(path).removesuffix(SUFFIX)
        self.control: str | None = data.get("control")
        self.keys: list[str] = [key or "-" for key in data.get("keys") or []]
        self.variants = [v for v in data.get("variants") or [] if v.get("name")]
        self.trials = [
            t
            for t in data.get("trials") or []
            if t.get("hash") and t.get("group") and t.get("variant") is not None
        ]

    def places(self) -> dict[str, Place]:
        """{hash of a configuration: its place}"""
        order = {group: i for i, group in enumerate(dict.fromkeys(t["group"] for t in self.trials))}
        return {
            t["hash"]: Place(
                clean(self.name),
                clean(t["group"]),
                t["variant"],
                t.get("point") or "",
                self.control,
                order[t["group"]],
                self.path,
            )
            for t in self.trials
        }

    def table(self) -> Table | None:
        """What differs between the variants."""
        if not self.keys or len(self.variants) < 2:
            return None
        rows = []
        for variant in self.variants:
            values = [value or "-" for value in variant.get("values") or []]
            rows.append(
                [variant["name"] + (" (control)" if variant["name"] == self.control else "")]
                + (values + ["-"] * len(self.keys))[: len(self.keys)]
            )
        return Table(
            f"What differs between the variants of {self.name}",
            [("", ["variant"]), ("", self.keys)],
            rows,
            ["Keys of the resolved configurations that the variants do not all share."],
        )


def studies_of(folders: list[str]) -> list[Study]:
    """Of the folders that hold the runs, each once, by name."""
    found = []
    for parent in dict.fromkeys(os.path.dirname(os.path.abspath(folder)) for folder in folders):
        try:
            names = sorted(os.listdir(parent))
        except OSError:
            continue
        found += [Study(os.path.join(parent, name)) for name in names if name.endswith(SUFFIX)]
    return found


def places_of(studies: list[Study]) -> dict[str, list[Place]]:
    """Of every configuration, in the order of the studies: several may have one training in common, such as their control."""
    places: dict[str, list[Place]] = {}
    for study in studies:
        for key, place in study.places().items():
            places.setdefault(key, []).append(place)
    return places
