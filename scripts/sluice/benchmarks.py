"""Multiple-choice benchmarks to files for `sluice eval --tasks`.

SOURCE is a folder of JSONL files, or a .tar.zst of one; .zst files within are read, too (zstd and tar are needed for them).
A line is {"context", "choices", "label"}, whose choices stand behind a space, or {"contexts", "continuation", "label"}. Files
with other lines, such as those for generation, are left out, and named. A task is called as its file; where files of several
folders have one name, also as its folders: a/test.jsonl becomes a_test.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Refused(Exception):
    """A damaged file: its name, the line, and what is wrong."""


def texts(line: dict[str, Any], key: str) -> list[str]:
    """A list of texts of a line, each of which can be written as UTF-8."""
    values = line[key] if isinstance(line[key], list) else [line[key]]
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f'"{key}" must hold texts')
        value.encode()  # a half of a surrogate pair cannot be
    return values


def question(line: Any) -> dict[str, Any] | None:
    """What `sluice eval` reads of a line; None where it is no question, ValueError where it is a damaged one."""
    if not isinstance(line, dict):
        raise ValueError("a JSON object is expected")
    label = line.get("label")
    if not isinstance(label, int):
        return None
    if isinstance(line.get("choices"), list) and isinstance(line.get("context"), str):
        choices = [f" {choice.lstrip()}" for choice in texts(line, "choices")]
        out = {"context": texts(line, "context")[0], "choices": choices, "answer": label}
    elif isinstance(line.get("contexts"), list) and isinstance(line.get("continuation"), str):
        choices = texts(line, "contexts")
        continuation = f" {texts(line, 'continuation')[0].lstrip()}"
        out = {"contexts": choices, "continuation": continuation, "answer": label}
    else:
        return None
    if isinstance(label, bool) or not 0 <= label < len(choices):
        raise ValueError(f'"label" must be the number of one of {len(choices)} choices')
    return out


def text_of(path: Path) -> str:
    try:
        if path.suffix != ".zst":
            return path.read_bytes().decode()
        done = subprocess.run(["zstd", "-dc", str(path)], capture_output=True)
        if done.returncode != 0:
            raise Refused(f"{path}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise Refused(f"{path}:{line}: not UTF-8") from None
    except OSError as error:
        raise Refused(f"{error.filename or path}: {error.strerror}") from None


def base_name(path: Path) -> str:
    return path.name.removesuffix(".zst").removesuffix(".jsonl")


def task_names(paths: list[Path], source: Path) -> dict[Path, str]:
    """What the tasks are called: their files' names, with their folders' where files of several folders have one name. Refused where
    that does not tell them apart."""
    names = {path: base_name(path) for path in paths}
    shared = {name for name in names.values() if list(names.values()).count(name) > 1}
    for path, name in names.items():
        if name in shared:
            names[path] = "_".join([*path.relative_to(source).parts[:-1], name])
    first: dict[str, Path] = {}
    for path, name in names.items():
        if name in first:
            raise Refused(
                f"{path}: it and {first[name]} would both become {name}.jsonl; rename one of them, or give their folders one by one"
            )
        first[name] = path
    return names


def convert(path: Path, output: Path, name: str | None = None) -> int:
    """Writes the task of a file; returns the number of its questions, 0 where it holds others than such lines."""
    questions = []
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            parsed = question(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise Refused(f"{path}:{number}: {error}") from None
        if parsed is None:
            return 0
        questions.append(parsed)
    if questions:
        lines = "".join(json.dumps(q, ensure_ascii=False) + "\n" for q in questions)
        (output / f"{name or base_name(path)}.jsonl").write_text(lines, encoding="utf-8")
    return len(questions)


def unpack(path: Path, folder: str) -> None:
    try:
        done = subprocess.run(["tar", "-I", "zstd", "-xf", str(path), "-C", folder], capture_output=True)
    except OSError as error:
        raise Refused(f"{error.filename or path}: {error.strerror}") from None
    if done.returncode != 0:
        raise Refused(f"{path}: {done.stderr.decode(errors='replace').strip()}")


def convert_all(source: Path, output: Path) -> int:
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        if source.is_file():
            unpack(source, temporary)
            source = Path(temporary)
        paths = sorted(p for p in source.rglob("*") if p.name.endswith((".jsonl", ".jsonl.zst")))
        names, left_out = task_names(paths, source), []
        for path in paths:
            where = str(path.relative_to(source))
            count = convert(path, output, names[path])
            if count:
                print(
                    f"{where}: {count} questions"
                    + ("" if names[path] == base_name(path) else f", {names[path]}.jsonl")
                )
            else:
                left_out.append(where)
    if left_out:
        print(f"no multiple choice: {', '.join(left_out)}")
    return 0 if paths else 66


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a folder, or a .tar.zst")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the tasks")
    options = parser.parse_args(arguments)
    if not options.source.exists():
        print(f"error: {options.source}: no such file or folder", file=sys.stderr)
        return 66
    try:
        return convert_all(options.source, options.output)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 65
