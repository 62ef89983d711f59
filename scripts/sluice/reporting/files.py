"""Files of run folders and of analyses. Standard library alone, but for arrays, which only plots ask for."""

from __future__ import annotations

import json
import os
from typing import Any, TextIO

from . import shapes
from .shapes import Misfits, fit, warn


def parse(text: str) -> Any:
    """JSON, or a ValueError whatever is wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def open_file(path: str) -> TextIO:
    """As text; OSError for all that is no file, which might never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(None, "not a regular file", path)
    return open(path, encoding="utf-8", errors="replace")


def read_lines(path: str, shape: Any = shapes.METRICS) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file that have a step; the last line may be torn when the run is going on or was killed."""
    records, misfits = [], Misfits(path)
    try:
        with open_file(path) as file:
            for i, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = parse(line)
                except ValueError:
                    misfits.add(f"{i}: not a whole JSON object, passed over")
                    continue
                record = fit(record, shape, misfits.at(i)) if isinstance(record, dict) else {}
                if record.get("step") is not None:
                    records.append(record)
                else:
                    misfits.add(f"{i}: no record of a step, passed over")
    except FileNotFoundError:
        pass
    except OSError as error:
        warn(f"{path}: {error.strerror}")
    return records


def read_object(path: str, shape: Any, must: bool = False) -> dict[str, Any]:
    """A JSON object; {} if there is none, with a warning if it is required."""
    try:
        with open_file(path) as file:
            text = file.read()
        value = parse(text)
        if not isinstance(value, dict):
            warn(f"{path}:1: a JSON object is expected")
        return fit(value, shape, Misfits(path).of_text(text)) if isinstance(value, dict) else {}
    except json.JSONDecodeError as error:
        warn(f"{path}:{error.lineno}:{error.colno}: {error.msg}")
    except ValueError as error:
        warn(f"{path}:1: {error}")
    except OSError as error:
        if must or not isinstance(error, FileNotFoundError):
            warn(f"{path}: {error.strerror}")
    return {}


def read_text(path: str) -> str:
    try:
        with open_file(path) as file:
            return file.read()
    except OSError:
        return ""


def is_run(folder: str) -> bool:
    return any(
        os.path.exists(os.path.join(folder, name)) for name in ("run.json", "metrics.jsonl", "eval.jsonl")
    )


def find_runs(folder: str, depth: int = 4) -> list[str]:
    """The folder itself when it is a run, else the runs below it (a sweep's output), by name."""
    if is_run(folder) or depth == 0 or not os.path.isdir(folder):
        return [folder] if is_run(folder) else []
    found = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            found += find_runs(path, depth - 1)
    return found


def sweep_verdict(folder: str) -> dict[str, Any]:
    """What the sweep that trained a run wrote of its end: its journal's last line on it, of those that are ends; {} else."""
    out: dict[str, Any] = {}
    path = os.path.abspath(folder)
    journal = os.path.join(os.path.dirname(path), "sweep.jsonl")
    misfits = Misfits(journal)
    for i, line in enumerate(read_text(journal).splitlines(), 1):
        try:
            record = parse(line)
        except ValueError:
            continue  # torn by a death
        record = fit(record, shapes.JOURNAL, misfits.at(i)) if isinstance(record, dict) else {}
        if record.get("folder") == os.path.basename(path):
            out = {"retry": {}, "stopped": record, "diverged": record}.get(record.get("event"), out)
    return out


def ruler_summaries(folder: str) -> list[dict[str, Any]]:
    """What `sluice ruler` left: one summary per checkpoint and factor of YaRN."""
    path = os.path.join(folder, "ruler")
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    made = [read_object(os.path.join(path, n), shapes.RULER) for n in names if n.endswith(".json")]
    return [summary for summary in made if summary.get("cells")]


class Analysis:
    """analysis.json of one checkpoint, and its arrays."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.data = read_object(os.path.join(folder, "analysis.json"), shapes.ANALYSIS)
        self.layers = self.data.get("layers") or []
        self.total = self.data.get("total") or {}

    def __bool__(self) -> bool:
        return bool(self.layers)

    def array(self, name: str) -> Any:
        """A NumPy array of finite numbers, or None where it was not written."""
        file = (self.data.get("arrays") or {}).get(name)
        if not file:
            return None
        import numpy  # only plots ask

        path = os.path.join(self.folder, os.path.basename(file))
        try:
            array = numpy.load(path, mmap_mode="r", allow_pickle=False)
            if getattr(array, "dtype", None) is None or array.dtype.kind not in "fiu":
                raise ValueError("no array of numbers")
            return numpy.nan_to_num(numpy.array(array), posinf=0.0, neginf=0.0)
        except Exception as error:  # what NumPy raises for a damaged header is of many kinds
            warn(f"{path}: {error}; passed over")
            return None
