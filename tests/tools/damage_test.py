#!/usr/bin/env python3
"""Files that scripts/report and scripts/sweep read, damaged at random (the seed is fixed): each is reported with its file, nothing is a
traceback. Needs the program, which reads YAML (SLUICE_BINARY, or build/sluice); with matplotlib some of the damaged runs are also drawn.

  tests/tools/damage_test.py [COUNT]      mutations of each file (default: 150)
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import random
import shutil
import sys
import tempfile
import types
import unittest
from pathlib import Path

SYSTEM_PYTHON = "/usr/bin/python3"  # Debian's has matplotlib, a Python of the user's own may not
if (
    importlib.util.find_spec("matplotlib") is None
    and sys.executable != SYSTEM_PYTHON
    and os.access(SYSTEM_PYTHON, os.X_OK)
):
    os.execv(SYSTEM_PYTHON, [SYSTEM_PYTHON] + sys.argv)

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
from sluice import benchmarks, sink_words
from sluice.gpu_check import summary
from sluice.reporting import shapes
from sluice.reporting.main import main
from sluice.sweeping import records, state, sweep_file, tables

COUNT = int(sys.argv.pop()) if len(sys.argv) > 1 and sys.argv[-1].isdigit() else 150
BATCH = 25  # damaged runs in one report
HOSTILE = [
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"9" * 5000,
    b"1e308",
    b"-1e308",
    b"NaN",
    b'"x"',
    b'"\\ud800"',
    b"[]",
    b"{}",
    b"[[[[1]]]]",
    b'{"a": {}}',
    b"0",
    b"[" * 3000,
    b'"<script>alert(1)</script>"',
    b"\xff\xfe",
    b"\x00",
    b'"' + b"n" * 5000 + b'"',
    b"1.5",
    b'"$\\\\frac{"',
]

CONFIG = """name: one
model:
  hidden_size: 64
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 16
  norm_placement: pre
  branch_clip: null
  attention:
    kind: softmax
    gates:
      - {position: sdpa_output, granularity: elementwise, heads: specific, combine: multiply, activation: sigmoid, input: hidden}
    output_norm: none
    head_balance: {coefficient: 0}
  moe:
    num_experts: 0
    num_experts_per_tok: 4
data:
  seq_len: 256
  train: [{name: one, path: "/d/one", weight: 1}]
  validation:
    - {name: one, path: /d/one-heldout, weight: 1}
train: {global_batch_size: 8, max_steps: 1000, seed: 1}
optimizer: {type: adamw, lr: 4e-3, warmup_steps: 10, rules: []}
"""
SWEEP = """base: ["a.yaml", b.yaml]
set: {train.max_steps: 400, data: {seq_len: 64}}   # for all
variants:
  baseline: {}
  headwise: {model: {attention: {gates: [{position: sdpa_output, granularity: headwise}]}}}
  slow: {model.attention.gates: [{position: value}], optimizer.warmup_steps: 9}
control: baseline
grid:
  optimizer.lr: [1e-3, 2e-3]
  model.attention.kind:
    - softmax
    - 'sink'
paired: [{model.num_hidden_layers: 4, model.hidden_size: 192}, {model.num_hidden_layers: 8, model.hidden_size: 128}]
seeds: [1, 2]
resources: {slots: 2, threads: 1, time: "01:00:00"}
stop_if: {metric: loss, op: ">", value: 6, after_steps: 100}
name: lr
"""


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or replaced; half of the time a value that is well formed and of the wrong kind."""
    data = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(len(data) + 1) if data else 0
        kind = dice.randrange(8)
        if kind < 4:  # the value behind some colon or comma
            colons = [i for i, letter in enumerate(data) if letter in b":,["]
            if colons:
                at = dice.choice(colons) + 1
                end = min(
                    [i for i in (data.find(mark, at) for mark in (b",", b"}", b"]", b"\n")) if i >= 0],
                    default=len(data),
                )
                data[at:end] = b" " + dice.choice(HOSTILE)
        elif kind == 4:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif kind == 5:
            del data[at : at + dice.choice((1, 7, 100))]
        elif kind == 6:
            data[at:at] = data[at : at + dice.choice((1, 20, 200))]
        else:
            data[at:at] = dice.choice(HOSTILE)
    return bytes(data)


class Damage(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.root = self.temporary.name
        self.run_folder = os.path.join(self.root, "runs", "one-0123456789ab")
        os.makedirs(os.path.join(self.run_folder, "analysis"))
        self.write_run()
        os.makedirs(os.path.join(self.root, "runs", "two"))
        for name in ("config.yaml", "metrics.jsonl", "eval.jsonl", "run.json"):
            shutil.copy(os.path.join(self.run_folder, name), os.path.join(self.root, "runs", "two", name))
        self.dice = random.Random(1)
        shapes.WARNED.clear()

    def tearDown(self):
        self.temporary.cleanup()

    def path(self, name):
        of_sweep = name in ("sweep.jsonl", "s.study.json")
        return os.path.join(os.path.join(self.root, "runs") if of_sweep else self.run_folder, name)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)

    def write_run(self, points=7):
        """A short metrics.jsonl is damaged in more kinds of places."""
        lines = lambda records: "".join(json.dumps(r) + "\n" for r in records).encode()
        self.write("config.yaml", CONFIG.encode())
        self.write(
            "run.json",
            json.dumps(
                {"name": "one", "parameters": 1000, "max_steps": 1000, "config_hash": "0123456789abcdef"},
                indent=1,
            ).encode(),
        )
        self.write(
            "status.json",
            json.dumps({"state": "done", "step": 1000, "max_steps": 1000, "exit_code": 0}).encode(),
        )
        self.write(
            "metrics.jsonl",
            lines(
                {
                    "step": 10 * i,
                    "tokens": 2560 * i,
                    "loss": 3 + 2 / i,
                    "grad_norm": 0.5,
                    "lr": 1e-3,
                    "tokens_per_second": 1000,
                    "spikes": i // 50,
                    "skipped": 0,
                    "heads": {"imbalance": 0.1},
                    "router": {"max_over_mean": 1.2, "layers": [{"layer": 0, "entropy": 0.9}]},
                }
                for i in range(1, points + 1)
            ),
        )
        by_head = {
            "first_token_attention_without_first_query": [0.3, 0.1, 0.2, 0.4],
            "first_token_attention_by_class": {n: [0.3, 0.1, 0.2, 0.4] for n in ("trigger", "other")},
            "sink_share": [0.3] * 4,
            "sink_share_leading": [0.3] * 4,
        }
        sinks = {
            "threshold": 0.3,
            "length": 64,
            "share": 0.2,
            "share_leading": 0.1,
            "heads": 2,
            "of": 8,
            "strongest": {
                "layer": 0,
                "head": 3,
                "first_token_attention": 0.4,
                "by_class": {"trigger": 0.1, "other": 0.5},
            },
        }
        health = {
            "below_0.05": 0.1,
            "above_0.95": 0.1,
            "shut_heads": 0.25,
            "heads": {n: [0.1] * 4 for n in ("below_0.05", "above_0.95", "shut_tokens", "row_norm")},
        }
        layer = {
            "first_token_attention": 0.2,
            "gate_scores": [0.1],
            "attention_residual_max": 3,
            "ffn_residual_max": 4,
            "value_norm_first": 0.1,
            "value_norm_rest": 1.0,
            "residual_max_first": 5,
            "residual_max_rest": 4,
            "heads": by_head,
            "gates": [health],
        }
        self.write(
            "eval.jsonl",
            lines(
                {
                    "step": step,
                    "tokens": 256 * step,
                    "sets": {
                        n: {
                            "loss": math.log(p),
                            "perplexity": p,
                            "bits_per_byte": 1.0,
                            "tokens": 77,
                            "classes": {
                                c: {"loss": 1.0, "share_likely": 0.5, "tokens": 7} for c in ("trigger", "other")
                            },
                            "by_position": [
                                {"from": 2**i, "to": 2 ** (i + 1), "loss": 2.0, "tokens": 9} for i in range(3)
                            ],
                        }
                        for n, p in (("x", 5.0), ("y", 7.0))
                    },
                    "ruler": [
                        {"task": "vt", "length": 512, "samples": 4, "accuracy": 0.5, "loss": 1.0},
                    ],
                    "analysis": {
                        "layers": [layer, layer],
                        "first_token_attention": 0.2,
                        "mean_gate_score": 0.1,
                        "largest_residual": 4,
                        "sinks": sinks,
                    },
                }
                for step in (0, 500, 1000)
            ),
        )
        gate = {
            "position": "sdpa_output",
            "mean": 0.2,
            "std": 0.1,
            "min": 0,
            "max": 0.9,
            "edges_min": 0,
            "edges_max": 1,
            "histogram_50": [0.02] * 50,
        }
        deep = {
            "first_token_attention": 0.3,
            "heads": {"first_token_attention": [0.3] * 4, "importance": [0.5] * 4},
            "gates": [gate],
            "attention_output": {
                "mean_abs_before": 0.7,
                "mean_abs_after": 0.2,
                "below_1e-2_before": 0.1,
                "below_1e-3_before": 0.1,
            },
            "max": {"attention_output": 2, "attention_residual": 3, "ffn_output": 40, "ffn_residual": 50},
        }
        self.write(
            "analysis/analysis.json",
            json.dumps(
                {
                    "step": 1000,
                    "layers": [deep, deep],
                    "maps": {"tokens": 4},
                    "total": {"first_token_attention": 0.3, "imbalance": 0.1},
                    "arrays": {"attention_mean": "attention_mean.npy"},
                    "sets": [{"name": n, "importance": [[0.5] * 4] * 2} for n in "xy"],
                }
            ).encode(),
        )
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4, 4), }".ljust(117) + b"\n"
        self.write(
            "analysis/attention_mean.npy",
            b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(128),
        )
        cell = {"task": "vt", "length": 512, "samples": 4, "score": 50.0}
        os.makedirs(os.path.join(self.run_folder, "ruler"), exist_ok=True)
        self.write(
            "ruler/step_1000.json",
            json.dumps(
                {
                    "step": 1000,
                    "yarn": 1.0,
                    "cells": [cell, {**cell, "length": 1024}],
                    "average": {"512": 50.0, "1024": 50.0},
                    "depths": [{**cell, "depth": d} for d in (0, 0.5)],
                }
            ).encode(),
        )
        self.write(
            "s.study.json",
            json.dumps(
                {
                    "name": "s",
                    "control": "plain",
                    "keys": ["gates", "lr"],
                    "variants": [{"name": n, "values": ["[]", "1e-3"]} for n in ("plain", "one")],
                    "trials": [{"hash": "0123456789abcdef", "group": "one", "variant": "one", "point": "a"}],
                },
                indent=1,
            ).encode(),
        )
        self.write(
            "sweep.jsonl",
            lines(
                {
                    "time": "t",
                    "event": e,
                    "trial": "0123456789abcdef",
                    "folder": os.path.basename(self.run_folder),
                    "reason": "r",
                    "slot": 0,
                    "host": state.HOST,
                    "code": 1,
                    "saved": 0,
                }
                for e in ("started", "lost", "started", "failed", "retry", "started", "stopped")
            ),
        )

    def report(self, pictures=False):
        """What was said; main ends by itself or with an exit code of its own."""
        out = os.path.join(self.root, "out")
        sys.argv = ["report", os.path.join(self.root, "runs"), "-o", out] + (
            [] if pictures else ["--tables-only"]
        )
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                main("")
            except SystemExit as end:
                self.assertIn(end.code, (64, 65, 66))
        return said.getvalue()

    def sweep_table(self):
        """The sweep's own reading of the same run: state, status, results."""
        trial = types.SimpleNamespace(
            folder=self.run_folder,
            group="one",
            name="one",
            hash="0123456789abcdef",
            seed=None,
            base="a.yaml",
            place=None,
            configuration=lambda: ("a",),
            values={},
            plan={"steps": 1000, "tokens": 256000, "parameters": 1000, "flops_per_token": 1.0},
        )
        sweep = types.SimpleNamespace(trials=[trial], rules=[], resources=types.SimpleNamespace(slots=1))
        with contextlib.redirect_stderr(io.StringIO()):
            looks = state.looks([trial], os.path.join(self.root, "runs"))
            look = looks[trial.hash]
            tables.plan_text(sweep, looks, [])
            tables.status_text(sweep, looks)
            look.foreign(), look.lost_in_vain(), look.slot(), int(look.verdict.get("code") or 70)
            result = [tables.Result(look)]
            tables.csv_text(sweep, result)
            tables.results_text(sweep, result)

    def test_damaged_runs_are_reported_without_a_traceback(self):
        """A report of many damaged runs at once, of which each is also read as a sweep's trial."""
        runs, whole_run = os.path.join(self.root, "runs"), os.path.join(self.root, "whole")
        shutil.move(self.run_folder, whole_run)
        for name in (
            "metrics.jsonl",
            "eval.jsonl",
            "run.json",
            "status.json",
            "config.yaml",
            "analysis/analysis.json",
            "ruler/step_1000.json",
        ):
            with open(os.path.join(whole_run, name), "rb") as file:
                whole = file.read()
            for first in range(0, COUNT, BATCH):
                for i in range(first, min(first + BATCH, COUNT)):
                    self.run_folder = os.path.join(runs, f"run{i}-0123456789ab")
                    shutil.copytree(whole_run, self.run_folder)
                    self.write(name, mutate(whole, self.dice))
                    self.told_with(self.sweep_table, name)
                self.told_with(self.report, f"of runs {first} to {i}: {name}")
                shutil.rmtree(runs)

    def test_a_damaged_study_is_read_without_a_traceback(self):
        with open(self.path("s.study.json"), "rb") as file:
            whole = file.read()
        self.assertIn("What differs between the variants of s", self.page_of(whole))
        for _ in range(COUNT // 5):
            damaged = mutate(whole, self.dice)
            self.told_with(lambda damaged=damaged: self.page_of(damaged), "s.study.json")

    def page_of(self, study):
        shapes.WARNED.clear()
        self.write("s.study.json", study)
        self.report()
        with open(os.path.join(self.root, "out", "report.md"), encoding="utf-8") as file:
            return file.read()

    def test_a_damaged_analysis_is_made_again(self):
        from sluice.sweeping import analyzing

        with open(self.path("analysis/analysis.json"), "rb") as file:
            whole = file.read()
        step = json.loads(whole)["step"]
        trial = types.SimpleNamespace(folder=self.run_folder, plan={"steps": step})
        self.assertTrue(analyzing.is_analyzed(trial))
        self.assertFalse(analyzing.is_analyzed(types.SimpleNamespace(folder=self.run_folder, plan={"steps": step + 1})))
        for text in (whole[: len(whole) // 2], b"", b"[]", b'{"layers": 5}'):
            shapes.WARNED.clear()
            self.write("analysis/analysis.json", text)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertFalse(analyzing.is_analyzed(trial))
            self.assertIn("analysis.json:1", said.getvalue())

    def test_a_damaged_evaluation_still_gives_the_quickstart_its_words(self):
        with open(self.path("eval.jsonl"), "rb") as file:
            whole = file.read()
        self.assertIn("an attention sink", " ".join(sink_words.words(self.run_folder, self.run_folder)))
        for _ in range(2 * COUNT):
            self.write("eval.jsonl", mutate(whole, self.dice))
            with contextlib.redirect_stderr(io.StringIO()):
                self.told_with(lambda: sink_words.words(self.run_folder, self.run_folder), "eval.jsonl")
        shapes.WARNED.clear()
        self.write("eval.jsonl", whole + b'{"step": 2000, "analysis": {"sinks": {"threshold": "x"}}}\n{"st')
        with contextlib.redirect_stderr(io.StringIO()) as said:
            sink_words.words(self.run_folder, self.run_folder)
        self.assertIn("eval.jsonl:4: threshold: a number is expected", said.getvalue())
        self.assertIn("eval.jsonl:5: not a whole JSON object", said.getvalue())

    def test_damaged_results_of_a_gpu_check_are_a_failed_step(self):
        """The list of steps and the benchmarks' figures, from which the last table is made."""
        rows = [{"name": "copy", "tb_per_second": 3.0, "percent_of_copy": 90.0}]
        attention = {"name": "forward", "tokens": 4096, "heads": "16/4", "gate": "none", "kernel": "own"}
        sparse = {"name": "forward", "tokens": 8192, "kernel": "sparse", "neighbours": "alike", "us": 61500.0}
        step = {"model": "small", "ms": 5.0, "tokens_per_second": 9, "percent_of_peak": 40.0, "peak": "bf16"}
        files = {
            "steps.tsv": b"".join(
                f"bench-{part}\tpassed\t3\tdone\n".encode() for part in ("kernels", "attention", "sparse", "step")
            )
        }
        for part, content in (
            ("kernels", {"kernels": rows}),
            ("attention", {"attention": [{**attention, "tflops": 500.0, "of_cudnn": 1.1}]}),
            ("sparse", {"sparse": [{**sparse, "of_dense": 0.27}]}),
            ("step", {"steps": [step]}),
        ):
            files[f"bench-{part}.json"] = json.dumps(content).encode()
        folder = os.path.join(self.root, "gpu_check")
        os.makedirs(folder)

        def summed_up():
            sys.argv = ["summary.py", os.path.join(folder, "steps.tsv"), folder, "0"]
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = summary.main()
            return code, said.getvalue()

        for name, content in files.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)
        code, said = summed_up()
        self.assertEqual(code, 0)
        for figure in ("3.000", "500.0", "1.10", "61.50", "0.27", "40.0 %"):
            self.assertIn(figure, said)
        for name, content in files.items():
            for _ in range(COUNT):
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(mutate(content, self.dice))
                self.told_with(summed_up, name)
            with open(os.path.join(folder, name), "wb") as file:
                file.write(b"[]")
            shapes.WARNED.clear()
            code, said = summed_up()
            self.assertEqual(code, 1, said)
            self.assertIn(f"{name}:1: ", said)
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)

    def test_damaged_benchmarks_are_refused_by_line(self):
        lines = [
            {"context": "a b", "choices": ["c", "d"], "label": 1},
            {"contexts": ["a", "b"], "continuation": "c", "label": 0},
        ]
        whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
        path, output = Path(self.root, "task.jsonl"), Path(self.root, "tasks")
        output.mkdir()
        path.write_bytes(whole)
        self.assertEqual(benchmarks.convert(path, output), 2)
        refused = 0
        for i in range(2 * COUNT):
            damaged = mutate(whole, self.dice)
            path.write_bytes(damaged)
            try:
                benchmarks.convert(path, output)
            except benchmarks.Refused as error:
                refused += 1
                self.assertRegex(str(error), r"task\.jsonl:\d+: ")
            except Exception:
                print(f"mutation {i}: {damaged!r}", file=sys.stderr)
                raise
        self.assertGreater(refused, COUNT // 4)
        for name in ("task.jsonl.zst", "tasks.tar.zst"):
            Path(self.root, name).write_bytes(b"no archive")
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(benchmarks.main([str(Path(self.root, name)), "-o", str(output)]), 65)
            self.assertIn(name, said.getvalue())

    def test_a_damaged_journal_is_read_without_a_traceback(self):
        with open(self.path("sweep.jsonl"), "rb") as file:
            whole = file.read()
        for i in range(COUNT):
            self.write("sweep.jsonl", mutate(whole, self.dice))
            self.told_with(self.sweep_table, "sweep.jsonl")
            if i % BATCH == 0:
                self.told_with(self.report, "sweep.jsonl")

    def test_a_damaged_record_is_read_without_a_traceback(self):
        hash = "0123456789abcdef"
        trial = types.SimpleNamespace(
            folder=self.run_folder, name="one", hash=hash, base="a.yaml", overrides=list, plan={"steps": 1000}
        )
        with open(self.path("run.json"), encoding="utf-8") as file:
            run = json.load(file)
        made, path = os.path.join(self.root, "runs", f"one-{hash}"), os.path.join(self.root, "s.jsonl")
        whole = records.Records(path)
        whole.lines[hash] = records.of_run(trial)
        whole.unread = ["of a later version"]
        whole.write([hash])
        with open(path, encoding="utf-8") as file:
            self.assertEqual(file.read().splitlines()[1], "of a later version")
        whole.unread = []
        whole.write([hash])
        self.assertEqual(whole.lines[hash]["run"]["parameters"], run["parameters"])
        with open(path, "rb") as file:
            line = file.read()
        self.run_folder = trial.folder = made

        def read():
            with contextlib.redirect_stderr(io.StringIO()):
                recorded = records.Records(path)
                look = state.Look(trial, [], self.root, recorded.lines.get(hash))
                recorded.make_folders({hash: look}, shutil.which("true"))
            count = os.path.isdir(made)
            if count:
                self.sweep_table()
                shutil.rmtree(made)
            return count

        self.assertTrue(read())
        read_whole = 0
        for _ in range(COUNT):
            with open(path, "wb") as file:
                file.write(mutate(line, self.dice))
            read_whole += read()
        self.assertLess(read_whole, COUNT)

    def told_with(self, what, name):
        """Shows the damaged file when it is a traceback."""
        try:
            what()
        except Exception:
            if os.path.exists(self.path(name)):
                with open(self.path(name), "rb") as file:
                    print(f"{name}: {file.read()[:3000]!r}", file=sys.stderr)
            raise

    @unittest.skipIf(
        importlib.util.find_spec("matplotlib") is None or importlib.util.find_spec("numpy") is None,
        "no matplotlib",
    )
    def test_damaged_runs_are_drawn_without_a_traceback(self):
        """Few: drawing takes long. Reading the arrays is what has parsers of its own."""
        import matplotlib
        from sluice.reporting.files import Analysis

        matplotlib.rcParams["savefig.dpi"] = 15
        with open(self.path("analysis/attention_mean.npy"), "rb") as file:
            whole = file.read()
        for i in range(COUNT):
            self.write("analysis/attention_mean.npy", mutate(whole, self.dice))
            with contextlib.redirect_stderr(io.StringIO()):
                Analysis(os.path.join(self.run_folder, "analysis")).array("attention_mean")
        self.write_run(points=100)
        for name, old, new in (
            ("run.json", b'"one"', b'"' + b"n" * 5000 + b'"'),
            ("analysis/analysis.json", b'"mean": 0.2', b'"mean": "x"'),
        ):
            with open(self.path(name), "rb") as file:
                whole = file.read()
            self.assertIn(old, whole)
            self.write(name, whole.replace(old, new))
        said = self.report(pictures=True)
        self.assertIn("analysis.json:1: mean: a number is expected; passed over", said)
        self.assertTrue(os.path.exists(os.path.join(self.root, "out", "train_loss.png")))
        self.assertNotIn("cannot be drawn", said)

    def test_damage_is_told_by_file_and_line(self):
        for name, text, message in (
            (
                "metrics.jsonl",
                b'{"step": 1, "loss": 2}\n{"step": 2, "loss": "x"}\n{"st',
                "metrics.jsonl:2: loss: a number is expected",
            ),
            ("metrics.jsonl", b'{"step": 1, "loss": 2}\n{"st', "metrics.jsonl:2: not a whole JSON object"),
            ("eval.jsonl", b'\n{"step": 1, "sets": []}\n', "eval.jsonl:2: sets: a map is expected"),
            (
                "run.json",
                b'{\n "name": "x",\n "parameters": []\n}',
                "run.json:3: parameters: a number is expected",
            ),
            ("run.json", b'{\n "name": "x"\n "parameters": 1}', "run.json:3:2: Expecting"),
            ("status.json", b"[]", "status.json:1: a JSON object is expected"),
            ("status.json", b"[" * 100000, "status.json:1: nested too deeply"),
            (
                "config.yaml",
                b"model:\n  hidden_size: wide\n",
                "config.yaml:2: hidden_size: a whole number is expected",
            ),
            (
                "config.yaml",
                b"model:\n  a: [1\n",
                "config.yaml:3:1: not valid YAML: end of sequence flow not found",
            ),
        ):
            with self.subTest(message):
                shapes.WARNED.clear()
                self.write_run()
                self.write(name, text)
                self.assertIn(message, self.report())
        os.remove(self.path("status.json"))
        os.mkfifo(self.path("status.json"))  # would be waited for without end
        self.assertIn("status.json: not a regular file", self.report())

    def test_a_name_stays_text(self):
        self.write(
            "run.json",
            json.dumps(
                {"name": "<script>alert(1)</script> [x](http://y) \ud800\n| $\\frac{", "parameters": 1}
            ).encode(),
        )
        self.report()
        for page in ("report.md", "report.html"):
            with open(os.path.join(self.root, "out", page), encoding="utf-8") as file:
                text = file.read()
            self.assertNotIn("<script", text)
            self.assertIn("&lt;script&gt;", text)
            self.assertNotIn("](http", text) if page == "report.md" else None
        with open(os.path.join(self.root, "out", "tables", "overview.tex"), encoding="utf-8") as file:
            text = file.read()
        self.assertIn(r"\textless{}script\textgreater{}", text)
        self.assertIn(r"\textbar{} \$\textbackslash{}frac\{", text)

    def test_damaged_sweep_files_are_refused_by_line(self):
        for name in ("a.yaml", "b.yaml"):
            with open(os.path.join(self.root, name), "w", encoding="utf-8") as file:
                file.write("model: {}\n")
        path, refused = os.path.join(self.root, "s.yaml"), 0
        for i in range(2 * COUNT):
            damaged = mutate(SWEEP.encode(), self.dice)
            with open(path, "wb") as file:
                file.write(damaged)
            try:
                sweep_file.SweepFile(path)
            except sweep_file.Refused as error:
                refused += 1
                self.assertRegex(str(error), r"s\.yaml:\d+:\d+: ")
            except Exception:
                print(f"mutation {i}: {damaged!r}", file=sys.stderr)
                raise
        self.assertGreater(refused, COUNT)

    def test_what_is_whole_is_not_complained_about(self):
        self.assertNotIn("expected", self.report())


if __name__ == "__main__":
    unittest.main()
