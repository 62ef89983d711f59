"""YAML files as trees. The program reads them (`sluice config json`), as strictly as configurations: no anchors, aliases, tags or
keys given twice, at most 32 levels, UTF-8 without control characters. Its errors name file, line and column."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any, NoReturn

from . import program

AT_ONCE = 200  # files of one call, so that the command line has room for their names


class Refused(Exception):
    """Something in a file; the message begins with file:line:column."""


class Node:
    """kind: "map" (entries: {key: Node}), "list" (items: [Node]), "scalar" (text, quoted), "null"."""

    def __init__(self, path: str, read: dict[str, Any]) -> None:
        self.path: str = path
        self.kind: str = read["kind"]
        self.line: int = read["line"]
        self.column: int = read["column"]
        self.text: str = read.get("text", "")
        self.quoted: bool = read.get("quoted", False)
        children = [Node(path, item) for item in read.get("items", [])]
        self.entries: dict[str, Node] = dict(zip(read["keys"], children)) if self.kind == "map" else {}
        self.items: list[Node] = children if self.kind == "list" else []

    def refuse(self, message: str) -> NoReturn:
        raise Refused(f"{self.path}:{self.line}:{self.column}: {message}")

    def flow(self) -> str:
        """On one line, as the program's command line takes it: plain scalars as they are written."""
        if self.kind == "map":
            return "{" + ", ".join(f"{k}: {v.flow()}" for k, v in self.entries.items()) + "}"
        if self.kind == "list":
            return "[" + ", ".join(item.flow() for item in self.items) + "]"
        if self.kind == "null":
            return "null"
        # Plain text may hold brackets and commas, which would be punctuation inside a list; no number or word of YAML has them.
        quoted = self.quoted or any(letter in ",[]{}#:'\"" for letter in self.text)
        return "'" + self.text.replace("'", "''") + "'" if quoted else self.text


def ask(paths: list[str], options: list[str], sluice: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sluice or program.find(), "config", "json", *options, "--", *paths],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
    )


def read(path: str, sluice: str | None = None) -> Node:
    """The root of a file. Raises Refused, OSError without the file, program.NoProgram."""
    with open(path, "rb"):
        pass
    done = ask([path], ["--places"], sluice)
    if done.returncode != 0:
        raise Refused(done.stderr.strip() or f"{path}:1:1: {sluice} ended with {done.returncode}")
    return Node(path, json.loads(done.stdout))


def get(tree: Any, path: str, default: Any = None) -> Any:
    """get(config, "model.moe.num_experts", 0)"""
    for part in path.split("."):
        if not isinstance(tree, dict) or tree.get(part) is None:
            return default
        tree = tree[part]
    return tree


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """{dotted key: value}; lists are values."""
    if not isinstance(tree, dict):
        return {path: tree}
    inside = path + "." if path else ""
    return {
        key: value for name, item in tree.items() for key, value in leaves(item, f"{inside}{name}").items()
    }


@functools.cache
def known() -> dict[str, Any]:
    """{text: value} of what was read: a report reads a run's configuration more than once."""
    return {}


def read_ahead(texts: dict[str, str]) -> None:
    """Reads {path: text} in few calls of the program, for read_plain; what is wrong is left to it."""
    paths = [path for path, text in texts.items() if text not in known()]
    for first in range(0, len(paths), AT_ONCE):
        some = paths[first : first + AT_ONCE]
        for path, line in zip(some, ask(some, [], None).stdout.splitlines()):
            if line != "null":
                known()[texts[path]] = json.loads(line)


def read_plain(path: str, text: str, sluice: str | None = None) -> Any:
    """The file at `path`, whose text this is, as Python values; an empty one is an empty map. Raises Refused, program.NoProgram."""
    if not text.strip():
        return {}
    if text not in known():
        done = ask([path], [], sluice)
        if done.returncode != 0:
            raise Refused(done.stderr.strip())
        known()[text] = json.loads(done.stdout)
    if not isinstance(known()[text], dict):
        raise Refused(f"{path}:1:1: a map is expected, lines of `key: value`")
    return known()[text]
