"""Multiple-choice benchmarks to files for `sluice eval --tasks`.

SOURCE is a folder of JSONL files, or a .tar.zst of one; .zst files within are read, too (zstd and tar are needed for them).
A line is {"context", "choices", "label"}, whose choices stand behind a space, or {"contexts", "continuation", "label"}. Files
with other lines, such as those for generation, are left out, and named.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def question(line: dict[str, Any]) -> dict[str, Any] | None:
    """What `sluice eval` reads of a line; None where it is no question."""
    label = line.get("label")
    if not isinstance(label, int):
        return None
    if isinstance(line.get("choices"), list) and isinstance(line.get("context"), str):
        return {
            "context": line["context"],
            "choices": [f" {choice.lstrip()}" for choice in line["choices"]],
            "answer": label,
        }
    if isinstance(line.get("contexts"), list) and isinstance(line.get("continuation"), str):
        return {
            "contexts": line["contexts"],
            "continuation": f" {line['continuation'].lstrip()}",
            "answer": label,
        }
    return None


def text_of(path: Path) -> str:
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dc", str(path)], check=True, capture_output=True).stdout.decode()
    return path.read_text(encoding="utf-8")


def convert(path: Path, output: Path) -> int:
    """Writes the task of a file; returns the number of its questions, 0 where it holds others than such lines."""
    questions = []
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            parsed = question(json.loads(line))
        except (json.JSONDecodeError, AttributeError, TypeError) as error:
            raise SystemExit(f"{path}:{number}: {error}") from error
        if parsed is None:
            return 0
        questions.append(parsed)
    name = path.name.removesuffix(".zst").removesuffix(".jsonl")
    if questions:
        lines = "".join(json.dumps(q, ensure_ascii=False) + "\n" for q in questions)
        (output / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return len(questions)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a folder, or a .tar.zst")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the tasks")
    options = parser.parse_args()
    if not options.source.exists():
        print(f"error: {options.source}: no such file or folder", file=sys.stderr)
        return 66
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.source
        if folder.is_file():
            subprocess.run(["tar", "-I", "zstd", "-xf", str(folder), "-C", temporary], check=True)
            folder = Path(temporary)
        paths = sorted(p for p in folder.rglob("*") if p.name.endswith((".jsonl", ".jsonl.zst")))
        left_out = []
        for path in paths:
            count = convert(path, options.output)
            if count:
                print(f"{path.name}: {count} questions")
            else:
                left_out.append(path.name)
    if left_out:
        print(f"no multiple choice: {', '.join(left_out)}")
    return 0 if paths else 66
