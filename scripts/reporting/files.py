"""Files of run folders and of analyses. Standard library alone, but for arrays, which only plots ask for."""
import json
import os
import sys


def read_lines(path):
    """Objects of a JSON-lines file; the last line may be torn when the run is going on or was killed."""
    records = []
    if not os.path.exists(path):
        return records
    with open(path, encoding="utf-8", errors="replace") as file:
        for i, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                print(f"report: {path}:{i}: not a whole JSON object, passed over", file=sys.stderr)
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def read_object(path, must=False):
    """A JSON object; {} where there is none, told when there must be."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError) as error:
        if must or not isinstance(error, FileNotFoundError):
            print(f"report: {error}", file=sys.stderr)
        return {}


def read_text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def is_run(folder):
    return any(os.path.exists(os.path.join(folder, name)) for name in ("run.json", "metrics.jsonl", "eval.jsonl"))


def find_runs(folder, depth=4):
    """The folder itself when it is a run, else the runs below it (a sweep's output), by name."""
    if is_run(folder) or depth == 0 or not os.path.isdir(folder):
        return [folder] if is_run(folder) else []
    found = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            found += find_runs(path, depth - 1)
    return found


def sweep_verdict(folder):
    """What the sweep that trained a run wrote of its end: its journal's last line on it, of those that are ends; {} else."""
    out = {}
    path = os.path.abspath(folder)
    for line in read_text(os.path.join(os.path.dirname(path), "sweep.jsonl")).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a death
        if isinstance(record, dict) and record.get("folder") == os.path.basename(path):
            out = {"retry": {}, "stopped": record, "diverged": record}.get(record.get("event"), out)
    return out


class Analysis:
    """analysis.json of one checkpoint, and its arrays."""

    def __init__(self, folder):
        self.folder = folder
        self.data = read_object(os.path.join(folder, "analysis.json"))
        self.layers = [layer for layer in self.data.get("layers") or [] if isinstance(layer, dict)]
        self.total = self.data.get("total") or {}

    def __bool__(self):
        return bool(self.layers)

    def array(self, name):
        """A NumPy array, or None where it was not written."""
        file = (self.data.get("arrays") or {}).get(name)
        if not file:
            return None
        import numpy  # only plots ask
        try:
            return numpy.load(os.path.join(self.folder, file), allow_pickle=False)
        except (OSError, ValueError) as error:
            print(f"report: {self.folder}/{file}: {error}", file=sys.stderr)
            return None
