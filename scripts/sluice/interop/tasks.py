"""One multiple-choice task on three roads: lm-eval with transformers on an export, lm-eval's local-completions on
`sluice serve`, and `sluice eval --tasks`."""

from __future__ import annotations

import contextlib
import json
import pathlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from .bench import Bench
from .exports import train
from .variants import gates

TASK = "sluice_questions"
QUESTIONS, TRAINED, CHOICES = 60, 200, 4
COLOURS = ["red", "green", "blue", "white", "black", "yellow"]
THINGS = ["box", "bag", "cup", "jar", "bowl", "chest"]
INSIDE = ["salt", "gold", "sand", "milk", "seven stones", "old iron nails", "the letters of a friend", "oil"]


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Of the arc_easy kind: a question, answers of different lengths, one of which follows from the question."""
    source = random.Random(seed)
    out = []
    for _ in range(count):
        colour, thing = source.randrange(len(COLOURS)), source.randrange(len(THINGS))
        right = INSIDE[(colour + thing) % len(INSIDE)]
        choices = source.sample([text for text in INSIDE if text != right], CHOICES - 1)
        answer = source.randrange(CHOICES)
        choices.insert(answer, right)
        question = f"Question: What does the {COLOURS[colour]} {THINGS[thing]} hold?\nAnswer:"
        out.append({"question": question, "choices": choices, "answer": answer})
    return out


def write_task(folder: pathlib.Path) -> None:
    """Files for lm-eval and for `sluice eval --tasks`."""
    asked = questions(QUESTIONS, seed=2)
    lines = [json.dumps(q) for q in asked]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    ours = [
        {"context": q["question"], "choices": [" " + c for c in q["choices"]], "answer": q["answer"]}
        for q in asked
    ]
    (folder / f"{TASK}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ours))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task, indent=1) + "\n")  # JSON is YAML


@contextlib.contextmanager
def serving(bench: Bench, path: pathlib.Path) -> Iterator[str]:
    """The address of a server of a model."""
    command = [bench.sluice, "serve", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            line = server.stdout.readline()
            if "http://" not in line:
                raise RuntimeError(f"sluice serve did not start: {line}")
            yield "http://" + line.strip().split("http://")[1]
        finally:
            server.terminate()


def harness(model: str, arguments: dict[str, Any], folder: pathlib.Path) -> tuple[list[float], list[float]]:
    """acc and acc_norm, and the log-likelihood of every choice of every question."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[TASK], log_samples=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), device="cpu",
    )  # fmt: skip
    figures = results["results"][TASK]
    samples = sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"])
    values = [float(response[0][0]) for sample in samples for response in sample["resps"]]
    return [figures["acc,none"], figures["acc_norm,none"]], values


def check_tasks(bench: Bench) -> None:
    folder = bench.folder / "tasks"
    folder.mkdir(exist_ok=True)
    write_task(folder)
    solved = (f"{q['question']} {q['choices'][q['answer']]}\n\n" for q in questions(TRAINED, seed=1))
    (folder / "solved.txt").write_text("".join(solved))
    for old in folder.glob("solved.bin*"):
        old.unlink()
    bench.run(
        "tokenize", str(folder / "solved.txt"), "-o", str(folder / "solved"), "--tokenizer", "byte", "--force"
    )
    data = f"[{{name: t, path: {folder / 'solved'}}}]"
    more = [f"data.train={data}", f"data.validation={data}", "train.max_steps=60", "optimizer.lr=0.01"]
    run = train(bench, "questions", None, [*more, gates("granularity: headwise")])
    export = bench.folder / "exports" / "questions"
    shutil.rmtree(export, ignore_errors=True)
    bench.run("export", str(run), "-o", str(export))

    about = {"pretrained": str(export), "trust_remote_code": True, "dtype": "float32", "max_length": 512}
    reference, likelihoods = harness("hf", about, folder)
    bench.report("lm-eval", "hf", True, f"acc {reference[0]:.4f}, acc_norm {reference[1]:.4f}")
    roads: dict[str, dict[str, Any]] = {
        "remote tokenizer, one by one": {"tokenizer_backend": "remote"},
        "local tokenizer, 8 in a request": {
            "tokenizer_backend": "huggingface", "tokenizer": str(export), "batch_size": 8, "num_concurrent": 4,
        },
    }  # fmt: skip
    for path, served in ((run, "run"), (export, "export")):
        with serving(bench, path) as url:
            for name, how in roads.items():
                arguments = {"model": "questions", "base_url": url, "max_length": 513, **how}
                figures, values = harness("local-completions", arguments, folder)
                difference = max(abs(a - b) for a, b in zip(values, likelihoods))
                good = figures == reference and len(values) == len(likelihoods) and bench.close(difference)
                text = f"acc {figures[0]:.4f}, acc_norm {figures[1]:.4f}, log-likelihoods {difference:.1e}"
                bench.report("lm-eval", f"{served}: {name}", good, text)
    out = json.loads(bench.run("eval", str(run), "--tasks", str(folder / f"{TASK}.jsonl"), "--json"))
    task = out["tasks"][TASK] if isinstance(out["tasks"], dict) else out["tasks"][0]
    ours = [task["accuracy"], task["accuracy_bytes"]]
    close = all(abs(a - b) < 1e-9 for a, b in zip(ours, reference))
    bench.report("lm-eval", "sluice eval --tasks", close, f"accuracy {ours[0]:.4f}, by bytes {ours[1]:.4f}")
