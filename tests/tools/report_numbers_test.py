#!/usr/bin/env python3
"""The numbers of scripts/report on made-up runs whose right answers are known. Needs the program, which reads YAML.

tests/tools/report_numbers_test.py            # SLUICE_BINARY=build/sluice also checks every proxy configuration's row
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import types
import unittest

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
from sluice import yaml
from sluice.reporting import (
    comparing,
    curves,
    exports,
    files,
    groups,
    long_context,
    looks,
    paper,
    paper_tables,
    selection,
    shapes,
    sinks,
    study,
    tables,
    tensorboard,
    values,
)
from sluice.reporting.main import main, make_sections, read_runs
from sluice.sweeping import main as sweep_main
from sluice.sweeping import markdown
from sluice.sweeping import tables as sweep_tables

CONFIG = """# hash 0
name: {name}
run_dir: /r/{name}

model:
  hidden_size: 192
  num_hidden_layers: 4
  num_attention_heads: {heads}
  num_key_value_heads: 2
  head_dim: 24
  norm_placement: {norm}
  branch_clip: null
  attention:
    kind: {kind}
    gates: {gates}
    output_norm: none
  moe:
    num_experts: {experts}
    num_experts_per_tok: 4

data:
  seq_len: 256
  train:
    - {{name: one, path: "/d/one, two", weight: 1}}
  validation:
    - {{name: one, path: /d/one-heldout, weight: 1}}

train:
  global_batch_size: 8
  max_steps: 1000
  seed: {seed}

optimizer:
  lr: {lr}
  warmup_steps: 10
  rules: []
"""
GATE = "\n      - {{position: {0}, granularity: {1}, heads: {2}, combine: multiply, activation: {3}, input: {4}}}"


def gate(
    position="sdpa_output", granularity="elementwise", heads="specific", activation="sigmoid", source="hidden"
):
    return GATE.format(position, granularity, heads, activation, source)


def write_text(folder, name, text):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(text)


class Folder(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.root = self.temporary.name

    def tearDown(self):
        self.temporary.cleanup()

    def run_of(
        self,
        name,
        ppl,
        gates="[]",
        seed=1,
        lr=0.004,
        losses=None,
        state="done",
        step=1000,
        parameters=1000,
        origin="",
        kind="softmax",
        experts=16,
        heads=8,
        norm="pre",
    ):
        """A run whose two sets have perplexities ppl - 1 and ppl + 1."""
        folder = os.path.join(self.root, f"{name}-{seed}")
        os.makedirs(folder)
        write = lambda file, text: write_text(folder, file, text)
        write("config.yaml", CONFIG.format(**locals()))
        write("config.input.yaml", origin)
        identity = {"name": name, "parameters": parameters, "config_hash": f"{name}-{seed}"}
        write("run.json", json.dumps({**identity, "max_steps": 1000}))
        write("status.json", json.dumps({"state": state, "step": step, "max_steps": 1000}))
        losses = losses or [3.0 + 2.0 / (i + 1) for i in range(100)]
        records = [
            {"step": 10 * i + 10, "tokens": 2048 * (10 * i + 10), "loss": v, "skipped": 0}
            for i, v in enumerate(losses)
        ]
        write("metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        sets = {n: {"loss": math.log(p), "bits_per_byte": 1.0} for n, p in (("x", ppl - 1), ("y", ppl + 1))}
        summary = {
            "first_token_attention": 0.25,
            "mean_gate_score": None,
            "layers": [{"ffn_residual_max": 3}, {"ffn_residual_max": 5}],
        }
        write(
            "eval.jsonl",
            json.dumps({"step": step, "tokens": 2048 * step, "sets": sets, "analysis": summary}) + "\n",
        )
        return folder

    def small_starts(self, folder):
        text = files.read_text(os.path.join(folder, "config.yaml"))
        write_text(folder, "config.yaml", text.replace("model:\n", "model:\n  scaled_residual_init: true\n"))

    def grouped(self):
        runs = read_runs([self.root])
        return runs, groups.group_runs(runs, paper.load())


class Numbers(unittest.TestCase):
    def test_rank_correlation(self):
        self.assertEqual(values.ranks([3, 1, 3, 2]), [3.5, 1, 3.5, 2])
        self.assertEqual(values.spearman([(i, -i * i) for i in range(1, 6)]), (-1.0, 5))
        rho, n = values.spearman([(1, 1), (2, 2), (2, 3), (3, 4), (None, 5)])
        self.assertAlmostEqual(rho, 4.5 / math.sqrt(4.5 * 5))  # by hand, with a tie
        self.assertEqual(n, 4)
        self.assertEqual(values.spearman([(1, 2), (2, 1)]), (None, 2))
        self.assertEqual(values.spearman([(1, 2), (1, 3), (1, 4)]), (None, 3))

    def test_spikes_are_counted_against_the_losses_before(self):
        noise = random.Random(1)
        falling = [2.0 + 3.0 * math.exp(-i / 100) + 0.005 * noise.gauss(0, 1) for i in range(400)]
        falling[5] += 9.0  # too early to look at
        falling[200], falling[250], falling[300] = falling[200] + 0.15, falling[250] + 0.3, falling[300] + 0.6
        self.assertEqual(values.count_spikes(falling), ([3, 2, 1], 360))
        self.assertEqual(values.count_spikes(falling, skip=220), ([2, 2, 1], 180))
        # A level that shifts is a spike only until the line follows; noise of one tenth is none.
        self.assertLess(values.count_spikes([2.0] * 300 + [3.0] * 300, (0.5,))[0][0], values.WINDOW)
        self.assertEqual(
            values.count_spikes([3.0 + 0.1 * noise.gauss(0, 1) for _ in range(600)])[0][1:], [0, 0]
        )
        self.assertEqual(values.count_spikes(falling[:79]), ([None] * 3, 39))
        # By hand: 0 1 ... 39 leads to 40, whatever one outlier does.
        line = [float(i) for i in range(40)]
        self.assertEqual(values.expectation(line), (40.0, 0.0))
        line[17] = 500.0
        self.assertAlmostEqual(values.expectation(line)[0], 40.0)

    def test_intervals_are_students(self):
        # From the tables of the t distribution, 95 % two-sided.
        for freedom, quantile in {
            1: 12.7062,
            2: 4.30265,
            3: 3.18245,
            4: 2.77645,
            5: 2.57058,
            9: 2.26216,
            30: 2.04227,
            99: 1.98422,
        }.items():
            self.assertAlmostEqual(comparing.t_quantile(freedom), quantile, places=4)
        delta = comparing.paired({1: 1.0, 2: 2.0, 3: 3.0, 9: 7.0}, {1: 1.5, 2: 2.6, 3: 3.7, 4: 0.0})
        self.assertEqual(delta.n, 3)
        self.assertAlmostEqual(delta.mean, -0.6)
        self.assertAlmostEqual(delta.high, -0.6 + 4.30265 * 0.1 / math.sqrt(3), places=5)
        self.assertTrue(delta.better(-1))
        self.assertFalse(delta.better(+1) or delta.better(0))
        one = comparing.paired({1: 1.0}, {1: 2.0, 2: 2.0})
        self.assertEqual(
            (one.low, one.p, one.better(-1), one.text("{:+.1f}".format)), (None, None, False, "-1.0 (n < 3)")
        )
        two = comparing.paired({1: 1.0, 2: 1.0}, {1: 2.0, 2: 2.1})
        self.assertEqual((two.p, two.better(-1), two.text("{:+.2f}".format)), (None, False, "-1.05 (n < 3)"))
        self.assertIsNone(comparing.paired({1: 1.0, None: 2.0}, {2: 1.0, None: 2.0}))

    def test_p_is_that_of_the_paired_t_test(self):
        # With one and with two degrees of freedom the distribution has a closed form.
        for t in (0.1, 1.0, 3.5, 40.0):
            self.assertAlmostEqual(comparing.p_value(t, 1), 1 - 2 / math.pi * math.atan(t), places=12)
            self.assertAlmostEqual(comparing.p_value(-t, 2), 1 - t / math.sqrt(2 + t * t), places=12)
        # From the tables of the t distribution.
        for t, freedom, p in (
            (2.77645, 4, 0.05),
            (4.60409, 4, 0.01),
            (8.61030, 4, 0.001),
            (2.26216, 9, 0.05),
            (4.78091, 9, 0.001),
        ):
            self.assertAlmostEqual(comparing.p_value(t, freedom), p, places=6)
        mine, base = (1, 2, 3.5, 4, 6), (1.5, 2.6, 3.7, 4.9, 6.3)
        delta = comparing.paired(dict(enumerate(mine)), dict(enumerate(base)))
        self.assertAlmostEqual(delta.p, 0.015067698562847, places=12)  # by SciPy 1.10
        self.assertEqual(delta.text("{:+.1f}".format), "-0.5 [-0.8, -0.2] p=0.015 n=5")
        same = comparing.paired({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.0, 2: 2.0, 3: 3.0})
        self.assertEqual((same.mean, same.p), (0.0, 1.0))
        shifted = comparing.paired({1: 1.0, 2: 2.0, 3: 3.0}, {1: 2.0, 2: 3.0, 3: 4.0})
        self.assertEqual((shifted.p, shifted.better(-1)), (0.0, True))
        self.assertIn("p<0.0001", shifted.text("{:+.1f}".format))

    @unittest.skipIf(importlib.util.find_spec("scipy") is None, "no SciPy")
    def test_p_is_scipys(self):
        from scipy import stats

        dice = random.Random(7)
        for n in (3, 4, 5, 8, 30, 101):
            mine = [dice.gauss(0.3, 1) for _ in range(n)]
            base = [dice.gauss(0, 1) for _ in range(n)]
            delta = comparing.paired(dict(enumerate(mine)), dict(enumerate(base)))
            theirs = stats.ttest_rel(mine, base)
            self.assertAlmostEqual(delta.p, theirs.pvalue, places=10)
            low, high = theirs.confidence_interval(0.95)
            self.assertAlmostEqual(delta.low, low, places=8)
            self.assertAlmostEqual(delta.high, high, places=8)

    def test_smoothing(self):
        self.assertEqual([round(v, 6) for v in values.ema([1.0, 2.0, 0.0])], [1.0, 1.1, 0.99])

    @staticmethod
    def read(text):
        with tempfile.TemporaryDirectory() as folder:
            write_text(folder, "config.yaml", text)
            return yaml.read_plain(os.path.join(folder, "config.yaml"), text)

    def test_a_runs_configuration_is_read(self):
        text = CONFIG.format(
            name="n", heads=8, norm="pre", kind="sink", gates=gate(), experts=0, seed=7, lr="3e-4"
        )
        tree = self.read(text)
        self.assertEqual(yaml.get(tree, "optimizer.lr"), 3e-4)
        self.assertEqual(yaml.get(tree, "data.train")[0], {"name": "one", "path": "/d/one, two", "weight": 1})
        self.assertEqual(yaml.get(tree, "optimizer.rules"), [])
        self.assertEqual(yaml.get(tree, "model.branch_clip", 5), 5)
        self.assertEqual(paper.variant(tree), "sink + sdpa_output elementwise")
        gates = [
            {"granularity": "headwise", "activation": "two_sigmoid", "input_channels": 12, "init": "zero"},
            {"position": "value", "input": "self", "bias": 2.0},
            {"input": "hidden", "input_channels": 0, "init": "matrix", "bias": None},
        ]
        tree = {"model": {"attention": {"gates": gates, "exclusive": "full"}, "gated_norm": {"rank": 8}}}
        self.assertEqual(
            paper.variant(tree),
            "sdpa_output headwise two_sigmoid of 12 channels zero_start + value elementwise self bias 2 + "
            "sdpa_output elementwise + exclusive full + gated_norm 8",
        )
        for bad in ("a: [1", "a: {b 1}", "a:\n    b: 1\n  c: 2", "word"):
            with self.assertRaises(yaml.Refused):
                self.read(bad)

    def test_the_papers_rows_are_whole(self):
        tables_ = {t["id"]: t for t in paper.load()["tables"]}
        self.assertEqual(
            {k: len(t["rows"]) for k, t in tables_.items()},
            {
                "gated_1": 15,
                "gated_2": 14,
                "gated_3": 7,
                "gated_4": 7,
                "gated_6": 6,
                "gated_clip": 2,
                "sink_1": 18,
            },
        )
        first = tables_["gated_1"]
        self.assertAlmostEqual(paper.paper_delta(first, first["rows"][4], "ppl"), 5.761 - 6.026)
        self.assertIsNone(
            paper.paper_delta(tables_["gated_2"], tables_["gated_2"]["rows"][13], "ppl")
        )  # its baseline diverged
        for table in tables_.values():
            self.assertEqual([r["row"] for r in table["rows"]], list(range(1, len(table["rows"]) + 1)))
            self.assertTrue(
                {r["baseline"] for r in table["rows"] if r.get("baseline")}
                <= {r["id"] for r in table["rows"]}
            )


class Rows(Folder):
    def grid(self):
        for seed, base, gated in ((1, 6.0, 5.7), (2, 6.2, 5.8)):
            self.run_of("base", base, seed=seed)
            self.run_of("elementwise", gated, gate(), seed=seed, parameters=1500)
        self.run_of("headwise", 5.8, gate(granularity="headwise"))
        self.run_of("value", 5.9, gate("value"))
        self.run_of("query", 6.1, gate("query"))
        self.run_of("key", 5.0, gate("key"), state="failed", step=600)
        self.run_of(
            "silu", 7.0, gate(activation="silu"), losses=[5.0 - 0.04 * i for i in range(80)] + [4.5] * 20
        )

    def cells(self, made, row):
        line = next(r for r in made.rows if r[0] == str(row))
        out = {}
        for heading, cell in zip([(who, h) for who, hs in made.spans for h in hs], line):
            out[(heading[0] + ": " if heading[0] else "") + heading[1]] = cell
        return out

    def test_seeds_are_one_group_and_rows_stand_beside_the_papers(self):
        self.grid()
        runs, made = self.grouped()
        self.assertEqual(
            [(g.count(), g.rows[0]) for g in made],
            [
                (2, "T1-01"),
                (2, "T1-05"),
                (1, "T1-06"),
                (1, "T1-07"),
                (1, "T1-08"),
                (1, "T1-10"),
                (1, "T1-15"),
            ],
        )
        by_id = paper_tables.paper_tables(made, paper.load())
        self.assertEqual([t.title.split(",")[0] for t in by_id], ["Table 1", "Table 3", "Table 4"])
        first = by_id[0]
        self.assertEqual(len(first.rows), 15)
        base, gated = self.cells(first, 1), self.cells(first, 5)
        self.assertEqual(base["ours: PPL"], "6.100 ± 0.141")
        self.assertEqual(base["ours: state"], "done, n=2")
        self.assertEqual(gated["ours: Δ PPL"], "-0.350 (n < 3)")  # 5.7 - 6.0 and 5.8 - 6.2
        self.assertEqual(gated["ours: added parameters"], "+500")
        self.assertEqual((gated["the paper's: PPL"], gated["the paper's: Δ PPL"]), ("5.761", "-0.265"))
        self.assertEqual(gated["ours: M-Act"].split()[0], "4")
        self.assertEqual(self.cells(first, 10)["ours: Δ PPL"], "-0.200 (n < 3)")  # that both have
        self.assertEqual(self.cells(first, 2)["ours: state"], "no run")
        self.assertIn("stopped at step 600 of 1,000", self.cells(first, 7)["ours: state"])
        self.assertEqual(self.cells(first, 7)["ours: Δ PPL"], "-")  # after fewer tokens
        diverged = self.cells(first, 15)
        self.assertTrue(diverged["ours: state"].startswith("diverged: loss 4.50 after 1.9"), diverged)
        self.assertEqual(diverged["ours: val. loss"], "diverged")
        self.assertEqual(diverged["ours: PPL"], "-")
        # Ours: -.35 -.1 +.1 -.2 of rows 5 6 8 10; theirs: -.265 -.206 -.045 -.234. Neither the stopped row nor the diverged.
        self.assertIn("left out: +1.00, n = 4 rows", first.notes[1])
        self.assertIn("PPL from 6 to 6.2", first.notes[2])
        self.assertEqual(
            [(name, f"{a:.2f}", f"{b:.3f}") for name, a, b in first.deltas if a is not None],
            [
                ("SDPA elementwise", "-0.35", "-0.265"),
                ("v elementwise", "-0.10", "-0.206"),
                ("q elementwise", "0.10", "-0.045"),
                ("SDPA headwise", "-0.20", "-0.234"),
            ],
        )
        self.assertAlmostEqual(first.chance, 0.2 / math.sqrt(2))
        self.assertIn("not computed, n = 2 rows", by_id[1].notes[1])

    def test_a_set_without_tokens_is_no_perfect_result(self):
        whole, empty = self.run_of("whole", 6.5), self.run_of("empty", 6.5)
        path = os.path.join(empty, "eval.jsonl")
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        record["sets"]["x"] = {"loss": None, "perplexity": None, "bits_per_byte": None, "tokens": 0}
        write_text(empty, "eval.jsonl", json.dumps(record) + "\n")
        by_name = {run.name: run for run in read_runs([whole, empty])}
        self.assertAlmostEqual(by_name["whole"].measures["ppl"], 6.5)
        for key in ("loss", "ppl", "bpb"):
            self.assertIsNone(by_name["empty"].measures[key], key)  # not the mean of the other set, and not 0

    def test_the_same_seed_twice_is_one_sample(self):
        self.run_of("again", 6.5, state="preempted", step=500)
        self.run_of("base", 6.0)
        runs, made = self.grouped()
        self.assertEqual([(g.count(), g.first.name, len(g.twins)) for g in made], [(1, "base", 1)])
        self.assertEqual({r.group for r in runs}, set(made))

    def test_a_sweep_tells_how_its_trials_ended(self):
        names = [
            os.path.basename(self.run_of(n, 6.0, state="preempted", step=400, lr=lr))
            for n, lr in (("a", 0.001), ("b", 0.002), ("c", 0.003))
        ]
        lines = [
            (0, "started", ""),
            (0, "stopped", "loss > 6 after step 100"),
            (1, "diverged", "not finite"),
            (2, "diverged", ""),
            (2, "retry", ""),
        ]
        write_text(
            self.root,
            "sweep.jsonl",
            "".join(json.dumps({"folder": names[i], "event": e, "reason": r}) + "\n" for i, e, r in lines)
            + '{"fol',
        )
        runs, _ = self.grouped()
        self.assertEqual(
            [r.outcome for r in runs],
            [
                ("stopped", "stopped at step 400 of 1,000 (loss > 6 after step 100)"),
                ("diverged", "diverged at step 400 of 1,000 (not finite)"),
                ("stopped", "stopped at step 400 of 1,000"),
            ],
        )

    def three_seeds(self):
        """A gate that is better beyond the spread of the seeds, and one that is not."""
        for seed, base, better, same in ((1, 6.0, 5.7, 6.3), (2, 6.2, 5.88, 5.9), (3, 6.1, 5.79, 6.05)):
            self.run_of("base", base, seed=seed)
            self.run_of("better", better, gate(), seed=seed)
            self.run_of("same", same, gate("value"), seed=seed)

    def test_bold_is_what_lies_beyond_the_spread_of_the_seeds(self):
        self.three_seeds()
        self.run_of("lucky", 3.0, gate("query"))
        _, made = self.grouped()
        base = comparing.choose_baselines(made)
        self.assertEqual({g.variant for g in base.values()}, {"plain"})
        table = tables.difference_table(made, base)
        bold = {(table.rows[y][0], table.headings[x]) for y, x in table.bold}
        better, column = next(g for g in made if g.variant == "sdpa_output elementwise"), "Δ perplexity"
        self.assertIn((better.label, column), bold)
        self.assertEqual(
            {row for row, heading in bold if heading == column}, {better.label}
        )  # not the one lucky seed
        self.assertEqual(
            {row[0]: row[table.headings.index(column)] for row in table.rows}[better.label],
            "-0.310 [-0.335, -0.285] p=0.00035 n=3",  # -.30 -.32 -.31: t = .31 sqrt(3) / .01 with two degrees of freedom
        )
        overview = tables.overview(made, base)
        self.assertEqual({overview.rows[y][0] for y, x in overview.bold}, {better.label})
        # Compared with another baseline, named.
        named = comparing.choose_baselines(made, better.label)
        self.assertEqual(tables.difference_table(made, named).bold & {(i, 3) for i in range(9)}, set())
        self.assertRaises(comparing.NoBaseline, comparing.choose_baselines, made, "none")

    def test_a_sweeps_table_has_the_figures_of_the_report(self):
        self.three_seeds()
        runs, made = self.grouped()
        results = []
        for run in runs:
            trial = types.SimpleNamespace(
                folder=run.folder,
                group=run.title,
                place=None,
                configuration=lambda run=run: (run.title,),
            )
            look = types.SimpleNamespace(trial=trial, state="done", progress=lambda: {})
            results.append(sweep_tables.Result(look))
        looks.label_runs(runs, made)
        name = next(g.label for g in made if g.variant == "plain")
        text = sweep_tables.results_text(None, results, "base")
        base = comparing.choose_baselines(made, name)
        overview, deltas = tables.overview(made, base), tables.difference_table(made, base)
        for group, title in ((g, g.first.title) for g in made):
            line = next(row for row in text.splitlines() if row.startswith(title + " "))
            shown = next(r for r in overview.rows if r[0] == group.label)
            for heading in ("validation loss", "perplexity", "first-token attention", "loss spikes"):
                self.assertIn(shown[overview.headings.index(heading)], line)
            if group is not base[group]:
                row = next(r for r in deltas.rows if r[0] == group.label)
                self.assertIn(row[deltas.headings.index("Δ validation loss")], line)
                place = (deltas.rows.index(row), deltas.headings.index("Δ validation loss"))
                self.assertEqual("*" in line, place in deltas.bold)

    def test_seeds_share_a_name_and_a_folder_for_tensorboard(self):
        for seed in (1, 2):
            for name, gates in (("base", "[]"), ("gated", gate("query", activation="silu"))):
                os.makedirs(os.path.join(self.run_of(f"{name}-s{seed}", 6.0, gates, seed=seed), "tb"))
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        self.assertIn("gated", [g.label for g in made])
        out = os.path.join(self.root, "out")
        self.assertEqual([tensorboard.link_runs(made, out) for _ in range(2)], [4, 4])
        folder = os.path.join(out, "tensorboard", "gated")
        self.assertEqual(sorted(os.listdir(folder)), ["seed_1", "seed_2"])
        self.assertEqual(
            os.path.realpath(os.path.join(folder, "seed_2")),
            os.path.join(os.path.realpath(self.root), "gated-s2-2", "tb"),
        )

    def write_study(self, text=None):
        """Of a sweep of three variants at two learning rates; only one rate of the control was trained."""
        trials = [
            {"hash": f"{name}{lr}-{seed}", "group": f"{name}-lr_{lr}", "variant": name, "point": f"lr={lr}"}
            for lr in (0.001, 0.002)
            for name in ("open", "closed", "base")
            for seed in (1, 2, 3)
        ]
        variants = [{"name": "base", "values": ["[]"]}, {"name": "closed", "values": ["[{position: value}]"]}]
        data = {
            "name": "s",
            "control": "base",
            "keys": ["gates"],
            "variants": variants,
            "trials": trials,
        }
        write_text(self.root, "s.study.json", text or json.dumps(data))
        return study.studies_of([os.path.join(self.root, "any")])

    def test_variants_of_a_sweep_keep_their_names_and_their_control(self):
        for seed, base, closed in ((1, 6.0, 5.7), (2, 6.2, 5.88), (3, 6.1, 5.79)):
            self.run_of("base0.001", base, seed=seed, lr=0.001)
            self.run_of("closed0.001", closed, gate(), seed=seed, lr=0.001)
            self.run_of("closed0.002", closed + 1, gate(), seed=seed, lr=0.002)
        self.run_of("stranger", 4.0, gate("query"))
        studies = self.write_study()
        runs = read_runs([self.root])
        made = groups.group_runs(runs, paper.load(), study.places_of(studies))
        looks.label_runs(runs, made)
        # In the sweep's order, by the sweep's names though the first are rows of a paper; what is of no sweep comes last.
        self.assertEqual(
            [g.label for g in made], ["closed-lr_0.001", "base-lr_0.001", "closed-lr_0.002", "q elementwise"]
        )
        self.assertEqual(made[0].first.label, "closed-lr_0.001 (3 seeds)")
        controls = comparing.choose_baselines(made)
        # The control's trial of the same rate; without one, none.
        self.assertEqual(controls[made[0]].label, "base-lr_0.001")
        self.assertIsNone(controls[made[2]])
        table = tables.difference_table(made[:3], {g: controls[g] for g in made[:3]})
        self.assertEqual(
            [(row[0], row[1], row[3]) for row in table.rows],
            [("closed-lr_0.001", "base-lr_0.001", "-0.310 [-0.335, -0.285] p=0.00035 n=3")],
        )
        named = comparing.choose_baselines(made, "closed")
        self.assertEqual(named[made[1]].label, "closed-lr_0.001")
        self.assertRaises(comparing.NoBaseline, comparing.choose_baselines, made, "open")
        differs = make_sections(made, controls, [], studies)[0][1][0]
        self.assertEqual(differs.rows, [["base (control)", "[]"], ["closed", "[{position: value}]"]])

    def test_a_damaged_study_is_reported_by_file_and_line(self):
        self.run_of("base0.001", 6.0)
        for text, message in (
            ('{"name": "s",\n "trials": 5}', "s.study.json:2: trials: a list is expected"),
            (
                '{"trials": [{"hash": {}, "group": "g", "variant": "v"}]}',
                "s.study.json:1: hash: text is expected",
            ),
            ("[]", "s.study.json:1: a JSON object is expected"),
            ('{"name": ', "s.study.json:1:10: Expecting value"),
        ):
            with self.subTest(message), contextlib.redirect_stderr(io.StringIO()) as said:
                shapes.WARNED.clear()
                studies = self.write_study(text)
                made = groups.group_runs(read_runs([self.root]), paper.load(), study.places_of(studies))
                self.assertIn(message, said.getvalue())
                self.assertEqual([g.place for g in made], [None])
                self.assertEqual([s.table() for s in studies], [None])

    def test_a_table_is_also_latex_and_csv(self):
        names = ["a_b & 50% #1 $x$ {y} \\input{z}", "[2] ~^<>|\"'` *", "é 中 \u202e", "=1+1", "-x--y"]
        table = tables.Table(
            "A title\nwith \\end{tabular}",
            [("", ["variant"]), ("ours", ["Δ loss", "PPL"])],
            [[name, "-0.310 ± 0.010", "-"] for name in names],
            ["n < 3 & more"],
            bold={(0, 1)},
        )
        text = exports.tabular(table)
        body = [line for line in text.splitlines() if not line.startswith("%")]
        self.assertEqual(body[0], r"\begin{tabular}{@{}lrr@{}}")
        self.assertEqual(body[2:5], [
            r"\multicolumn{1}{c}{} & \multicolumn{2}{c}{ours} \\",
            r"\cmidrule(lr){2-3}",
            r"variant & $\Delta$ loss & PPL \\",
        ])  # fmt: skip
        self.assertEqual(
            body[6],
            r"a\_b \& 50\% \#1 \$x\$ \{y\} \textbackslash{}input\{z\} & \textbf{$-$0.310 $\pm$ 0.010} & -- \\",
        )
        self.assertEqual(
            body[7].split(" & ")[0],
            r"{[}2{]} \textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}{\char34}"
            r"\textquotesingle{}\textasciigrave{} {*}",
        )
        self.assertEqual(body[8].split(" & ")[0], r"é \texttt{U+4E2D} \texttt{U+202E}")
        self.assertEqual(body[10].split(" & ")[0], r"-x-{}-y")
        for line in body:  # nothing is left open, and every row has three cells
            bare = re.sub(r"\\[\\{}&$]", "", line)
            self.assertEqual(bare.count("{"), bare.count("}"), line)
            self.assertEqual(bare.count("$") % 2, 0, line)
        self.assertEqual({re.sub(r"\\&", "", line).count("&") for line in body[6:11]}, {2})
        self.assertEqual(text.count("\n% "), 1)  # the note; the title stays on its line
        csv_rows = exports.csv_text(*exports.shown_cells(table)).splitlines()
        self.assertEqual(csv_rows[0], "variant,ours: Δ loss,ours: PPL")
        self.assertEqual(csv_rows[4], "'=1+1,-0.310 ± 0.010,-")  # no formula

    def test_numbers_of_a_csv_are_not_rounded(self):
        self.three_seeds()
        _, made = self.grouped()
        headings, rows = exports.overview_numbers(made)
        base = dict(zip(headings, next(r for g, r in zip(made, rows) if g.variant == "plain")))
        self.assertEqual((base["n"], base["ppl"], base["ppl_std"]), ("3", "6.1", "0.1"))
        self.assertEqual(base["gate_score"], "")
        headings, rows = exports.difference_numbers(made, comparing.choose_baselines(made))
        found = [dict(zip(headings, row)) for row in rows]
        ppl = next(r for r in found if r["measure"] == "ppl" and float(r["mean_difference"]) < -0.3)
        self.assertAlmostEqual(float(ppl["mean_difference"]), -0.31)
        self.assertAlmostEqual(float(ppl["p"]), 1 - 0.31 * math.sqrt(3) / 0.01 / math.sqrt(2 + 3 * 31**2))
        self.assertEqual((ppl["pairs"], float(ppl["low_95"]) < -0.33), ("3", True))
        self.assertEqual(len(exports.run_numbers(made)[1]), 9)

    def test_seeds_are_one_curve_with_a_band(self):
        falling = lambda end: [5.0 - (5.0 - end) * i / 99 for i in range(100)]
        for seed, end in ((1, 2.0), (2, 2.5), (3, 3.0)):
            self.run_of("base", 6.0, seed=seed, losses=falling(end))
        self.run_of("base", 9.0, seed=4, losses=falling(3.0)[:60] + [None])  # diverged
        self.run_of("gate", 5.5, gate(), losses=falling(1.0))
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        found = curves.curves_of(runs, lambda run: run.series("loss"))
        self.assertEqual(
            [(c.label, c.aside, bool(c.spread)) for c in found],
            [
                ("baseline (3 of 4 seeds)", False, True),
                ("_seed", True, False),
                ("SDPA elementwise", False, False),
            ],
        )
        self.assertAlmostEqual(found[0].y[-1], 2.5)
        self.assertAlmostEqual(found[0].spread[-1], 0.5)
        self.assertEqual([round(edge[-1], 9) for edge in found[0].edges()], [2.0, 3.0])

    def test_a_seed_in_a_name_is_one_with_a_separator(self):
        named = lambda *names: groups.common_name(
            [
                types.SimpleNamespace(title=n, base=n, name=n, seed=lambda s=s: s)
                for s, n in enumerate(names, 1)
            ]
        )
        self.assertEqual(
            [
                named("a-s1", "a-s2"),
                named("a_seed_1", "a_seed_2"),
                named("a-1-0123456789ab", "a-2-ba9876543210"),
                named("same", "same"),
                named("lr11", "lr12"),
                named("a-1"),
            ],
            ["a", "a", "a", "same", "lr11", "a-1"],
        )

    def test_finished_seeds_count_where_there_are_some(self):
        self.run_of("base", 6.0, seed=1)
        self.run_of("base", 8.0, seed=2, state="running", step=500)
        _, made = self.grouped()
        self.assertAlmostEqual(made[0].value("ppl"), 6.0)
        self.assertEqual(made[0].state(), "1 of 2 running")

    def test_few_losses_are_said_to_be_few(self):
        self.run_of("base", 6.0, losses=[3.0] * 70)
        _, made = self.grouped()
        row = tables.spike_table(made).rows[0]
        self.assertEqual(row[2:6], ["too few losses"] * 3 + ["30"])

    def test_half_of_the_seeds_diverged(self):
        self.run_of("base", 6.0, seed=1)
        self.run_of("base", 9.0, seed=2, losses=[3.0] * 40 + [None])
        self.run_of("gate", 5.5, gate(), seed=1)
        _, made = self.grouped()
        self.assertEqual(made[0].state(), "1 of 2 diverged")
        self.assertAlmostEqual(made[0].value("ppl"), 6.0)
        self.assertAlmostEqual(groups.difference(made[1], made[0], "ppl").mean, -0.5)

    def test_learning_rates(self):
        bad = [3.0] * 50 + [8.0] * 50
        for lr, base, sandwich in ((0.001, 6.0, 6.1), (0.004, 5.9, 5.8), (0.008, None, 5.7)):
            origin = "extends: table2_05_48l_baseline.yaml"
            self.run_of(f"b{lr}", base or 9, lr=lr, experts=0, losses=None if base else bad, origin=origin)
            self.run_of(f"s{lr}", sandwich, lr=lr, experts=0, norm="sandwich", origin=origin)
        self.run_of("alone", 5.0, gate(), experts=0)
        _, made = self.grouped()
        rows = tables.lr_table(made).rows
        self.assertEqual(
            [r[:2] for r in rows],
            [[v, lr] for v in ("baseline", "baseline, sandwich norm") for lr in ("0.001", "0.004", "0.008")],
        )
        self.assertEqual([r[3] == "diverged" for r in rows], [False, False, True, False, False, False])
        self.assertEqual(
            sorted(r for g in made for r in g.rows), ["T2-05", "T2-06", "T2-07"]
        )  # not the rows of 1T tokens
        second = next(
            t for t in paper_tables.paper_tables(made, paper.load()) if t.title.startswith("Table 2")
        )
        self.assertEqual(self.cells(second, 6)["ours: val. loss"], "diverged")
        self.assertEqual(self.cells(second, 7)["ours: Δ PPL"], "-")  # its baseline diverged
        self.assertEqual(self.cells(second, 12)["the paper's: PPL"], "diverged")

    def test_a_model_that_forms_sinks_stands_beside_the_table_about_sinks(self):
        origin = "extends: ../sinks/base.yaml"
        for seed in (1, 2, 3):
            self.run_of("base", 6.0, experts=0, seed=seed, origin=origin)
            self.run_of("gate", 5.5, gate(), experts=0, seed=seed, origin=origin)
        self.run_of("small", 6.0, experts=0, lr=0.001)  # of no row: a dense model of another size
        _, made = self.grouped()
        self.assertEqual([g.rows for g in made], [["T4-01"], ["T4-02"], []])
        table, *more = paper_tables.paper_tables(made, paper.load())
        self.assertEqual(more, [])
        self.assertTrue(table.title.startswith("Table 4, "))
        self.assertEqual(self.cells(table, 2)["ours: F-Attn"], "0.250 ± 0.000")
        self.assertEqual(self.cells(table, 2)["the paper's: F-Attn"], "0.048")

    def test_many_groups_have_ten_colours(self):
        for i in range(13):
            self.run_of(f"r{i}", 6.0, lr=0.001 + 0.001 * i)
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        self.assertEqual(sum(not r.grey for r in runs), 10)
        self.assertEqual(len({r.colour for r in runs}), 11)
        self.assertEqual(sorted(r.label for r in runs if r.grey), ["_other", "_other", "others (3)"])

    def test_a_page_without_pictures_says_what_is_not_there(self):
        self.grid()
        out = os.path.join(self.root, "page")
        sys.argv = ["report", self.root, "-o", out, "--tables-only"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            main("")
        self.assertIn("diverged", said.getvalue())
        self.assertEqual(sorted(os.listdir(out)), ["report.html", "report.md", "tables"])
        text = files.read_text(os.path.join(out, "report.md"))
        self.assertIn(
            "no analysis of this run, so it is in no figure of layers and heads; sluice analyze", text
        )
        self.assertIn("| 15 | SDPA elementwise SiLU | diverged: loss 4.50", text)
        self.assertIn("ours: Δ PPL | ", text)
        widths = [line.count("|") for line in text.splitlines() if line.startswith("|")]
        self.assertTrue(all(w > 2 for w in widths))
        html = files.read_text(os.path.join(out, "report.html"))
        self.assertIn("<b>diverged</b>", html)
        self.assertNotIn('src="http', html)


def row_named(file):
    """T1-05 of table1_05_sdpa_elementwise.yaml, A5-300 of a5_01_clip_300.yaml."""
    name = paper.NAMED_ROW.match(file)
    clip = re.match(r"a5_\d\d_clip_(\d+)", file)
    return f"T{name.group(1)}-{name.group(2)}" if name else (f"A5-{clip.group(1)}" if clip else None)


def write_evaluations(folder, more=0.0, gated=True):
    """Three evaluations of two layers of two heads; layer 1, head 0 becomes a sink, for queries of other tokens alone."""
    lines = []
    for i, strength in enumerate((0.1, 0.5, 0.8 + more)):
        heads = [
            {
                "first_token_attention_without_first_query": [0.125, 0.0625],
                "first_token_attention_by_class": {"trigger": [0.1, 0.1], "other": [0.15, 0.05]},
                "sink_share": [0.0, 0.0],
            },
            {
                "first_token_attention_without_first_query": [strength, 0.25],
                "first_token_attention_by_class": {"trigger": [0.02, 0.25], "other": [strength + 0.1, None]},
                "sink_share": [1.0, 0.0],
            },
        ]
        health = {
            "below_0.05": 0.25,
            "above_0.95": 0.125,
            "shut_heads": 0.5,
            "heads": {"below_0.05": [0.5, 0.0], "row_norm": [1.5, 2.5]},
        }
        layers = [
            {
                "heads": of_layer,
                "value_norm_first": 1.0 - i / 4,
                "value_norm_rest": 2.0,
                "residual_max_first": 10.0 + 40 * i,
                "residual_max_rest": 8.0,
                "gates": [health] if gated else [],
            }
            for of_layer in heads
        ]
        layers[0]["gates"] = [{**health, "below_0.05": 0.75}] if gated else []
        strongest = {
            "layer": 1,
            "head": 0,
            "first_token_attention": strength,
            "by_class": {"trigger": 0.02, "other": strength + 0.1},
        }
        classes = {
            "trigger": {"loss": 0.25 / (i + 1), "share_likely": 0.9, "tokens": 40},
            "other": {"loss": 1.5, "share_likely": 0.5, "tokens": 60},
        }
        lines.append(
            {
                "step": 250 * (i + 1) + 250,
                "tokens": 2048 * (250 * (i + 1) + 250),
                "sets": {
                    "x": {"loss": 1.0, "bits_per_byte": 1.0, "classes": classes},
                    "y": {"loss": 1.5, "bits_per_byte": 1.0},
                },
                "analysis": {
                    "first_token_attention": 0.25,
                    "layers": layers,
                    "sinks": {
                        "threshold": 0.3,
                        "length": 64,
                        "share": 0.25 + more,
                        "share_leading": 0.5,
                        "heads": 1,
                        "of": 4,
                        "strongest": strongest,
                    },
                },
            }
        )
    write_text(folder, "eval.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def change_json(path, change):
    """Applies `change` to the object in a file."""
    with open(path, encoding="utf-8") as file:
        value = json.load(file)
    change(value)
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


class SameTokens(Folder):
    """Numbers of different tokens have neither a mean nor a difference."""

    def plain_and_gated(self, *seeds):
        """{(name, seed): folder}; first-token attention 0.25 in every evaluation."""
        return {
            (name, seed): self.run_of(name, ppl + seed / 10, gates, seed=seed)
            for seed in seeds or (1, 2, 3)
            for name, ppl, gates in (("base", 6.0, "[]"), ("gate", 5.5, gate()))
        }

    @staticmethod
    def analyse(folder, value, tokens=16384, sequences=64):
        os.makedirs(os.path.join(folder, "analysis"), exist_ok=True)
        total = {
            "first_token_attention": value,
            "mean_gate_score": 0.5,
            "m_act_mean": 77.0,
            "imbalance": 0.125,
        }
        sets = [{"name": "x", "tokens": tokens, "importance": [[1.0]]}]
        data = {"step": 1000, "sequences": sequences, "sets": sets, "total": total, "layers": [{"max": {}}]}
        write_text(os.path.join(folder, "analysis"), "analysis.json", json.dumps(data))

    def results(self, runs):
        """Of a sweep whose trials these runs are."""
        found, trials = {}, []
        for run in runs:
            plan = {"steps": 1000, "parameters": 1, "flops_per_token": 1, "tokens": 1}
            trial = types.SimpleNamespace(
                folder=run, group=os.path.basename(run).rpartition("-")[0], place=None, hash=run, plan=plan,
                values={}, seed=None, base="b", name=run,
            )  # fmt: skip
            trial.configuration = lambda trial=trial: (trial.group,)
            found[run] = types.SimpleNamespace(
                trial=trial, state="done", progress=lambda: {}, verdict={}, run={}, recorded=lambda: False
            )
            trials.append(trial)
        sweep = types.SimpleNamespace(trials=trials)
        return sweep, sweep_tables.results_of(sweep, found)

    def first_token(self, made):
        return {g.first.title: g.value("first_token_attention") for g in made}

    def test_an_analysis_counts_only_where_all_runs_have_one_of_the_same_tokens(self):
        runs = self.plain_and_gated()
        for n, folder in enumerate(runs.values()):
            made = self.grouped()[1]
            self.assertEqual(self.first_token(made), {"base": 0.25, "gate": 0.25})
            if n:
                self.assertIn(
                    f"{n} of 6 runs have an analysis", tables.overview(made, {g: None for g in made}).notes[0]
                )
            self.analyse(folder, 0.125)
        # All have one.
        made = self.grouped()[1]
        self.assertEqual(self.first_token(made), {"base": 0.125, "gate": 0.125})
        self.assertEqual([made[0].value(k) for k in ("gate_score", "m_act", "imbalance")], [0.5, 77.0, 0.125])
        self.assertIn("are of the analyses.", tables.overview(made, {g: None for g in made}).notes[0])
        sweep, results = self.results(list(runs.values()))
        self.assertEqual({r.value("first_token_attention") for r in results}, {0.125})
        # One of shorter sequences, or of fewer tokens.
        for changed in ({"sequences": 1024}, {"tokens": 8192}):
            self.analyse(runs["gate", 2], 0.0625, **changed)
            made = self.grouped()[1]
            self.assertEqual(self.first_token(made), {"base": 0.25, "gate": 0.25}, changed)
            self.assertIn(
                "the analysis is of other tokens",
                " ".join(tables.missing_pieces([r for g in made for r in g.runs])),
            )
            sweep, results = self.results(list(runs.values()))
            self.assertEqual({r.value("first_token_attention") for r in results}, {0.25})
            self.assertNotIn("0.125", sweep_tables.csv_text(sweep, results))
            self.assertIn("0.250 ± 0.000", sweep_tables.results_text(sweep, results))

    def test_a_variant_that_changes_how_it_is_computed_is_a_variant(self):
        """With a study beside the runs and without one."""
        for name, ppl, more in (
            ("plain", 6.0, ""),
            ("recomputed", 6.1, "recompute: mlp"),
            ("small", 6.2, "micro_batch_size: 4"),
        ):
            for seed in (1, 2, 3):
                folder = self.run_of(name, ppl + seed / 10, seed=seed)
                path = os.path.join(folder, "config.yaml")
                text = files.read_text(path).replace("  max_steps: 1000\n", f"  max_steps: 1000\n  {more}\n")
                write_text(folder, "config.yaml", text)
        trials = [
            {"hash": f"{name}-{seed}", "group": name, "variant": name, "point": "b"}
            for name in ("plain", "recomputed", "small")
            for seed in (1, 2, 3)
        ]
        for places in (False, True):
            if places:
                write_text(
                    self.root, "s.study.json", json.dumps({"name": "s", "control": "plain", "trials": trials})
                )
            runs = read_runs([self.root])
            found = study.places_of(study.studies_of([run.folder for run in runs]))
            made = groups.group_runs(runs, paper.load(), found)
            self.assertEqual([(g.count(), len(g.twins)) for g in made], [(3, 0)] * 3)
            controls = comparing.choose_baselines(made, "plain")
            self.assertEqual(len(tables.difference_table(made, controls).rows), 2)

    def test_trials_that_a_study_takes_for_one_are_one_whatever_program_wrote_them(self):
        """A later program writes a key that the earlier one did not have; the hash is the same but for the seed."""
        for seed in (1, 2):
            folder = self.run_of("base", 6.0, seed=seed)
            if seed == 2:
                text = files.read_text(os.path.join(folder, "config.yaml"))
                write_text(folder, "config.yaml", text.replace("model:\n", "model:\n  later_key: false\n"))
        self.assertEqual([g.count() for g in self.grouped()[1]], [1, 1])
        trials = [{"hash": f"base-{s}", "group": "base", "variant": "base", "point": "b"} for s in (1, 2)]
        write_text(self.root, "s.study.json", json.dumps({"name": "s", "trials": trials}))
        runs = read_runs([self.root])
        made = groups.group_runs(
            runs, paper.load(), study.places_of(study.studies_of([r.folder for r in runs]))
        )
        self.assertEqual([g.count() for g in made], [2])

    def fingerprint(self, folder, x, y="b"):
        change_json(
            os.path.join(folder, "run.json"), lambda run: run.update(validation_fingerprints={"x": x, "y": y})
        )

    def test_losses_on_text_that_was_replaced_are_not_compared(self):
        runs = self.plain_and_gated()
        self.assertIsNotNone(groups.difference(*self.grouped()[1], "loss"))  # none knows what it read
        for (name, _), folder in runs.items():
            if name == "base":
                self.fingerprint(folder, "a")
        self.assertIsNotNone(groups.difference(*self.grouped()[1], "loss"))  # unknown beside known
        for (name, _), folder in runs.items():
            self.fingerprint(folder, "a")
        self.assertIsNotNone(groups.difference(*self.grouped()[1], "loss"))
        for (name, _), folder in runs.items():
            self.fingerprint(folder, "a" if name == "base" else "c")
        made = self.grouped()[1]
        self.assertIsNone(groups.difference(*made, "loss"))
        self.assertIsNotNone(made[0].value("loss"))
        self.fingerprint(runs["base", 2], "c")
        made = self.grouped()[1]
        base = next(g for g in made if g.first.title == "base")
        self.assertEqual(
            (base.value("loss"), base.spread("loss"), base.value("parameters")), (None, None, 1000)
        )
        self.assertIn("evaluated on validation sets of different contents", base.state())

    def test_seeds_of_replaced_training_data_or_first_weights_have_no_mean(self):
        runs = self.plain_and_gated()
        for folder in runs.values():
            text = files.read_text(os.path.join(folder, "config.yaml"))
            write_text(
                folder, "config.yaml", text.replace("  max_steps: 1000\n", "  max_steps: 1000\n  init_from: w\n")
            )
        for what, found in (
            ("data", lambda text: {"data_fingerprint": text}),
            ("first weights", lambda text: {"init_from": {"path": "w", "fingerprint": text}}),
        ):
            for folder in runs.values():
                change_json(os.path.join(folder, "run.json"), lambda run, f=found: run.update(f("a")))
            self.assertIsNotNone(groups.difference(*self.grouped()[1], "loss"))
            change_json(os.path.join(runs["base", 2], "run.json"), lambda run, f=found: run.update(f("b")))
            made = self.grouped()[1]
            base = next(g for g in made if g.first.title == "base")
            self.assertIsNone(groups.difference(*made, "loss"))
            self.assertEqual((base.value("loss"), base.value("parameters")), (None, 1000))
            self.assertIn(f"trained with {what} of one name and different contents", base.state())
            for folder in runs.values():
                change_json(os.path.join(folder, "run.json"), lambda run: run.update(data_fingerprint="", init_from=None))

    def test_seeds_of_which_some_were_changed_on_the_way_have_no_mean(self):
        runs = self.plain_and_gated()
        change = {"step": 500, "key": "optimizer.lr", "before": "1e-3", "after": "1e-4"}
        for folder in runs.values():
            change_json(os.path.join(folder, "run.json"), lambda run: run.update(changes=[change]))
        self.assertIsNotNone(groups.difference(*self.grouped()[1], "loss"))
        for others in ([], [dict(change, step=600)]):
            change_json(os.path.join(runs["base", 2], "run.json"), lambda run, o=others: run.update(changes=o))
            made = self.grouped()[1]
            base = next(g for g in made if g.first.title == "base")
            self.assertIsNone(groups.difference(*made, "loss"))
            self.assertIsNone(base.value("loss"))
            self.assertIn("trained with changes on the way (optimizer.lr) in some runs only", base.state())

    def test_seeds_that_were_evaluated_on_other_tokens_have_no_mean(self):
        runs = self.plain_and_gated()

        def with_tokens(count):
            def change(record):
                for values_ in record["sets"].values():
                    values_["tokens"] = count

            return change

        for (name, seed), folder in runs.items():
            change_json(
                os.path.join(folder, "eval.jsonl"),
                with_tokens(1024 if (name, seed) == ("base", 1) else 60114),
            )
        _, made = self.grouped()
        base, gated = sorted(made, key=lambda g: g.first.title)
        self.assertEqual([base.value(k) for k in ("loss", "ppl", "first_token_attention")], [None] * 3)
        self.assertEqual(base.state(), "done, n=3; evaluated on different tokens")
        self.assertIsNotNone(gated.value("loss"))
        overview = tables.overview(made, {g: None for g in made})
        self.assertIn(
            "no means of evaluations, since its seeds were evaluated on different tokens", overview.notes[0]
        )
        column = overview.headings.index("validation loss")
        self.assertEqual([r[column] for r in overview.rows if r[0] == base.label], ["-"])
        sweep, results = self.results(list(runs.values()))
        text = sweep_tables.results_text(sweep, results)
        (line,) = [line for line in text.splitlines() if line.startswith("base ")]
        self.assertIn("evaluated on different tokens", line)
        self.assertNotIn("±", line.split("control")[0])
        self.assertIn("lowest validation loss:", text)
        self.assertIn("gate (3 seeds)", text)

    def test_no_lowest_loss_is_named_among_losses_on_different_data(self):
        runs = self.plain_and_gated()
        for folder in runs.values():
            self.fingerprint(folder, "a", "b")
        named = lambda: [
            line.split(":")[0]
            for line in sweep_tables.results_text(*self.results(list(runs.values()))).splitlines()
            if "lowest" in line
        ]
        every = ["validation loss", "loss on x", "loss on y"]
        self.assertEqual(named(), [f"lowest {name}" for name in every])
        for (name, _), folder in runs.items():
            if name == "gate":
                self.fingerprint(folder, "a", "c")
        self.assertEqual(named(), ["no lowest validation loss", "lowest loss on x", "no lowest loss on y"])
        for (name, _), folder in runs.items():
            self.fingerprint(folder, "a", "b")
            change = lambda line, n=name: line["sets"]["x"].update(tokens=1024 if n == "gate" else 2048)
            change_json(os.path.join(folder, "eval.jsonl"), change)
        self.assertEqual(named(), ["no lowest validation loss", "no lowest loss on x", "lowest loss on y"])

    def with_sinks(self, line, share):
        """An evaluation with measures of sinks and of two gates."""
        analysis = line.setdefault("analysis", {})
        analysis["sinks"] = {"share": share, "strongest": {"first_token_attention": share + 0.5}}
        layers = analysis.setdefault("layers", [{}])
        layers[0]["gates"] = [{"below_0.05": low, "above_0.95": low / 2} for low in (0.2, 0.3)]
        for layer in layers[1:]:
            layer["gates"] = []
        return line

    def test_a_sweeps_markdown_table_has_means_and_differences_paired_by_seed(self):
        runs = self.plain_and_gated()
        for n, folder in enumerate(runs[key] for key in sorted(runs) if key[0] == "gate"):
            change_json(os.path.join(folder, "eval.jsonl"), lambda line, n=n: self.with_sinks(line, 0.1 * n))
        runs["base", 4] = self.run_of("base", 7.0, seed=4, losses=[3.0] * 60 + [9.0] * 40)
        sweep, results = self.results(list(runs.values()))
        measures = ["loss", "first_token_attention", "sink_share", "gates_low", "gates_high", "strongest_sink"]
        text = markdown.markdown(results, measures, "base")
        lines = [[c.strip() for c in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
        self.assertEqual([len(line) for line in lines], [12] * 4)
        self.assertIn("Control: `base`.", text)
        self.assertIn("`base`: 1 diverged (loss at end), in no mean.", text)
        self.assertEqual(lines[0][:5], ["configuration", "seeds", "validation loss", "less the control",
                                        "first-token attention"])  # fmt: skip
        base, gate = lines[2:]
        self.assertEqual((base[0], base[1], base[3]), ("`base`", "3", ""))
        self.assertEqual((gate[0], gate[1], gate[4]), ("`gate`", "3", "0.250 ± 0.000"))
        groups = {g.label: g for g in (group for group, _ in sweep_tables.groups_of(results)) if g}
        of = comparing.paired(groups["gate"].by_seed("loss"), groups["base"].by_seed("loss"))
        self.assertEqual(gate[3], f"{of.mean:+.4f} ({of.low:+.4f} to {of.high:+.4f})")
        self.assertNotEqual(of.mean, 0)
        self.assertEqual(
            gate[6:],
            ["0.100 ± 0.100", "-", "0.250 ± 0.000", "0.125 ± 0.000", "0.600 ± 0.100", "-"],
        )
        self.assertEqual(base[6:], ["-", "", "-", "-", "-", ""])  # not in its evaluations
        for few in ([0.375], [0.5, 0.25]):
            self.assertEqual(markdown.interval(comparing.Difference(few), "{:.2f}".format), "0.38 (n < 3)")
        self.assertRaises(comparing.NoBaseline, markdown.markdown, results, measures, "none")
        with contextlib.redirect_stderr(io.StringIO()) as told, self.assertRaises(SystemExit):
            sweep_main.options_of(["table", "x.yaml", "--markdown", "loss,los"])
        self.assertIn("--markdown: no measure los; known are loss, ppl,", told.getvalue())

    def test_how_seeds_were_evaluated_makes_no_other_variant(self):
        """As in a sweep: the hash leaves eval.* out."""
        for seed in (1, 2):
            folder = self.run_of("base", 6.0, seed=seed)
            text = files.read_text(os.path.join(folder, "config.yaml"))
            write_text(folder, "config.yaml", text + f"\neval:\n  max_tokens: {1024 * seed}\n")
        self.assertEqual([g.count() for g in self.grouped()[1]], [2])

    def test_a_trial_that_trained_to_its_end_and_diverged_is_not_counted_as_a_seed(self):
        runs = self.plain_and_gated()
        runs["base", 4] = self.run_of("base", 7.0, seed=4, losses=[3.0] * 60 + [9.0] * 40)
        sweep, results = self.results(list(runs.values()))
        (line,) = [
            line
            for line in sweep_tables.results_text(sweep, results).splitlines()
            if line.startswith("base ")
        ]
        self.assertIn(" 3/4 ", line)
        self.assertIn("1 diverged (loss at end)", line)

    def test_the_n_of_a_mean_is_shown_where_a_seed_has_no_value(self):
        runs = self.plain_and_gated()
        metrics = os.path.join(runs["gate", 1], "metrics.jsonl")
        lines = [
            {**json.loads(line), "tokens_per_second": 1000} for line in files.read_text(metrics).splitlines()
        ]
        write_text(runs["gate", 1], "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        _, made = self.grouped()
        overview = tables.overview(made, {g: None for g in made})
        row = next(
            dict(zip(overview.headings, r)) for r, g in zip(overview.rows, made) if g.first.title == "gate"
        )
        self.assertEqual((row["n"], row["tokens/s"]), ("3", "1k (n=1)"))
        self.assertNotIn("(n=", row["validation loss"])
        headings, rows = exports.overview_numbers(made)
        exact = next(dict(zip(headings, r)) for r, g in zip(rows, made) if g.first.title == "gate")
        self.assertEqual((exact["speed_n"], exact["loss_n"]), ("1", "3"))

    def test_a_row_is_compared_with_a_baseline_of_the_same_model(self):
        for seed in (1, 2, 3):
            self.run_of("base", 6.0 + seed / 10, seed=seed)
            self.run_of("gate", 5.6 + seed / 10, gate(), seed=seed)
            self.small_starts(self.run_of("base_small", 5.7 + seed / 10, seed=seed))
            self.small_starts(self.run_of("gate_small", 5.6 + seed / 10, gate(), seed=seed))
        _, made = self.grouped()
        (table,) = [t for t in paper_tables.paper_tables(made, paper.load()) if t.id == "gated_1"]
        found = sorted(row[table.headings.index("Δ PPL")].split()[0] for row in table.rows if row[0] == "5")
        self.assertEqual(found, ["-0.100", "-0.400"])
        # Without a baseline of that model there is no difference.
        shown = [g for g in made if g.first.title != "base_small"]
        (table,) = [t for t in paper_tables.paper_tables(shown, paper.load()) if t.id == "gated_1"]
        found = sorted(row[table.headings.index("Δ PPL")].split()[0] for row in table.rows if row[0] == "5")
        self.assertEqual(found, ["-", "-0.400"])

    def test_a_row_with_two_starts_is_one_row_of_a_rank_correlation(self):
        for order, start in enumerate(("usual", "small")):
            rows = (("base", "[]", 0.4), ("gate", gate(), 0.1), ("heads", gate(granularity="headwise"), 0.2))
            for name, gates, first_token in (*rows, ("value", gate("value"), 0.3)):
                folder = self.run_of(f"{order}_{name}_{start}", 6.0 + first_token, gates)
                # With the usual start in the paper's order, with the smaller one in the opposite.
                value = first_token if start == "usual" else 1 - first_token
                change_json(
                    os.path.join(folder, "eval.jsonl"),
                    lambda line, v=value: line["analysis"].update(first_token_attention=v),
                )
                if start == "small":
                    self.small_starts(folder)
        _, made = self.grouped()
        (table,) = [t for t in paper_tables.paper_tables(made, paper.load()) if t.id == "gated_4"]
        self.assertEqual(sum(row[0] == "2" for row in table.rows), 2)
        text = " ".join(table.notes)
        self.assertIn("F-Attn with the paper's: +1.00, n = 4 rows.", text)
        self.assertIn("baselines left out: +1.00, n = 3 rows.", text)
        self.assertIn("Of a row that has several lines the first alone is in the rank correlations.", text)
        usual = [g for g in made if g.first.title.endswith("usual")]
        (table,) = [t for t in paper_tables.paper_tables(usual, paper.load()) if t.id == "gated_4"]
        self.assertNotIn("several lines", " ".join(table.notes))

    def test_a_ladder_of_learning_rates_is_of_one_model(self):
        for lr in (0.001, 0.002):
            self.run_of(f"base{lr}", 6.0, lr=lr)
            self.small_starts(self.run_of(f"small{lr}", 5.0, lr=lr))
        ladders = tables.lr_points(self.grouped()[1])
        self.assertEqual([len(points) for _, points in ladders], [2, 2])
        self.assertEqual(len({name for name, _ in ladders}), 2)


class Sinks(Folder):
    def test_the_strongest_head_over_training_by_class(self):
        write_evaluations(self.run_of("base", 6.0))
        (run,), _ = self.grouped()
        self.assertEqual(sinks.strongest(run.analysis["layers"]), (1, 0))
        self.assertEqual(sinks.by_head(run.analysis["layers"])[(1, 1)], 0.25)
        self.assertEqual(
            sinks.head_series(run, (1, 0)), ([2048.0 * 500, 2048.0 * 750, 2048.0 * 1000], [0.1, 0.5, 0.8])
        )
        self.assertEqual(sinks.head_series(run, (1, 0), "trigger")[1], [0.02] * 3)
        self.assertEqual(sinks.head_series(run, (1, 1), "other")[1], [])  # not counted
        self.assertEqual(sinks.head_series(run, (5, 7))[1], [])
        self.assertEqual(sinks.query_classes([run]), ["trigger", "other"])

    def test_tables_of_sinks_classes_and_gates_are_means_over_seeds(self):
        for seed, more in ((1, 0.0), (2, 0.1)):
            write_evaluations(self.run_of("base", 6.0, gate(), seed=seed), more)
        self.run_of("old", 6.0, lr=0.008)  # of a program that did not measure them
        _, made = self.grouped()
        table = sinks.sinks_table(made)
        self.assertEqual(len(table.rows), 1)
        row = dict(zip(table.headings, table.rows[0]))
        self.assertEqual(row["Sink^0.3"], "30.0 % ± 7.1 %")
        self.assertEqual(row["first 64 queries"], "50.0 % ± 0.0 %")
        self.assertEqual(row["heads above 0.3"], "1 ± 0")
        self.assertEqual(row["strongest head"], "85.0 % ± 7.1 %")
        self.assertEqual(row["on trigger"], "2.0 % ± 0.0 %")
        self.assertEqual(row["on other"], "95.0 % ± 7.1 %")
        self.assertEqual(row["|v| first / others"], "0.250 ± 0.000")
        self.assertEqual(row["largest residual, first"], "90 ± 0")
        self.assertEqual(row["largest residual, others"], "8 ± 0")
        table = sinks.classes_table(made)
        self.assertEqual([r[:2] for r in table.rows], [["x", "trigger"], ["x", "other"]])
        self.assertEqual(table.rows[0][3:5], ["0.0833 ± 0.0000", "90.0 % ± 0.0 %"])
        table = sinks.gate_health_table(made)
        self.assertEqual(
            table.rows[0][1:],
            [
                "sdpa_output elementwise",
                "50.0 %",
                "75.0 %",
                "12.5 %",
                "12.5 %",
                "2 of 4",
                "1.5",
                "2",
                "2.5",
            ],
        )

    def test_runs_without_these_measures_have_no_such_tables(self):
        self.run_of("old", 6.0, gate())
        _, made = self.grouped()
        self.assertIsNone(sinks.sinks_table(made))
        self.assertIsNone(sinks.classes_table(made))
        self.assertIsNone(sinks.gate_health_table(made))


class SelectedKeys(Folder):
    @staticmethod
    def write(folder, more=0.0):
        def layer(mass, **others):
            shared = {"keys_least": 1, "keys_most": 512, "union_of_8_over_keys": 2.0, "kl": 0.5}
            return {"selection": {"mass_recall": mass, "top_recall": 0.5, "keys": 400, **shared, **others}}

        lines = [
            {
                "step": step,
                "tokens": 2048 * step,
                "sets": {"x": {"loss": 1.0, "bits_per_byte": 1.0}},
                "analysis": {
                    "layers": [
                        layer(mass + more, overlap_with_layer_before=None),
                        layer(mass - 0.2 + more, overlap_with_layer_before=0.25, keys_most=500),
                    ]
                },
            }
            for step, mass in ((500, 0.6), (1000, 0.8))
        ]
        write_text(folder, "eval.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def test_the_table_is_of_the_last_evaluation_and_of_runs_that_select_keys(self):
        for seed, more in ((1, 0.0), (2, 0.1)):
            self.write(self.run_of("sparse", 6.0, seed=seed, kind="sparse"), more)
        self.run_of("dense", 6.0)
        runs, made = self.grouped()
        table = selection.selection_table(made)
        self.assertEqual(len(table.rows), 1)
        row = table.rows[0][1:]
        self.assertEqual(row[:3], ["400 ± 0", "1 ± 0", "512 ± 0"])
        self.assertEqual(row[3:5], ["75.0 % ± 7.1 %", "65.0 % ± 7.1 %"])
        self.assertEqual(row[5:7], ["50.0 % ± 0.0 %", "50.0 % ± 0.0 %"])
        self.assertEqual(row[7:], ["0.500 ± 0.000", "2.00 ± 0.00", "25.0 % ± 0.0 %"])
        first = next(run for run in runs if run.folder.endswith("sparse-1"))
        for got, expected in (
            (selection.series(first, "mass_recall"), ([2048.0 * 500, 2048.0 * 1000], [0.5, 0.7])),
            (selection.by_layer(first, "mass_recall"), ([0, 1], [0.8, 0.6])),
        ):
            self.assertEqual(got[0], expected[0])
            for a, b in zip(got[1], expected[1]):
                self.assertAlmostEqual(a, b)

    def test_runs_without_sparse_attention_have_no_such_table(self):
        self.run_of("dense", 6.0)
        self.assertIsNone(selection.selection_table(self.grouped()[1]))


class LongContexts(Folder):
    @staticmethod
    def answer(folder, score, step=1000, samples=50, given=False, texts="t", task="vt"):
        os.makedirs(os.path.join(folder, "ruler"), exist_ok=True)
        data = {"step": step, "yarn": 1.0, "seed": 42, "texts": texts, "prompts": "f00" if given else ""}
        data["cells"] = [{"task": task, "length": 4096, "samples": samples, "score": score}]
        name = f"step_{step:08}" + ("_given" if given else "") + ".json"
        write_text(os.path.join(folder, "ruler"), name, json.dumps({**data, "average": {"4096": score}}))

    def rows(self):
        table = long_context.ruler_table(self.grouped()[1])
        return [row[1:] for row in table.rows if row[3] != "average"]

    def test_answers_to_other_prompts_or_of_other_steps_have_rows_of_their_own(self):
        folders = [self.run_of("base", 6.0, seed=seed) for seed in (1, 2)]
        self.answer(folders[0], 10.0)
        self.answer(folders[0], 5.0, step=500)  # an earlier checkpoint of the same run
        self.answer(folders[1], 20.0)
        mean = ["step 1,000, seed 42, 50 samples", "2", "vt", "15.0 ± 7.1"]
        self.assertEqual(self.rows(), [mean])
        # Prompts in files stand beside those made here, and do not replace them.
        self.answer(folders[0], 90.0, given=True)
        self.assertEqual(self.rows(), [mean, ["step 1,000, given prompts, 50 samples", "1", "vt", "90.0"]])
        os.remove(os.path.join(folders[0], "ruler", "step_00001000_given.json"))
        one, other = (["step 1,000, seed 42, 50 samples", "1", "vt", f"{v}.0"] for v in (10, 20))
        for changed, first, second in (
            ({"samples": 7}, ["step 1,000, seed 42, 7 samples", *other[1:]], one),  # broken off
            ({"texts": "u"}, [f"{one[0].split(', 5')[0]}, texts t, 50 samples", *one[1:]], None),
            ({"task": "cwe"}, ["step 1,000, seed 42, 50 samples", "1", "cwe", "20.0"], one),
        ):
            self.answer(folders[1], 20.0, **changed)
            rows = self.rows()
            self.assertEqual(len(rows), 2, changed)
            self.assertIn(first, rows)
            if second:
                self.assertIn(second, rows)
        self.answer(folders[1], 20.0)
        os.remove(os.path.join(folders[1], "ruler", "step_00001000.json"))
        self.answer(folders[1], 20.0, step=900)
        self.assertEqual(self.rows(), [["step 900, seed 42, 50 samples", *other[1:]], one])


@unittest.skipIf("SLUICE_BINARY" not in os.environ, "SLUICE_BINARY is not set")
class Configurations(Folder):
    def shown(self, path, name, origin):
        """A run that has not begun, of the configuration at path."""
        shown = subprocess.run(
            [os.environ["SLUICE_BINARY"], "config", "show", path], capture_output=True, text=True
        )
        self.assertEqual(shown.returncode, 0, shown.stderr)
        run = os.path.join(self.root, name.removesuffix(".yaml"))
        os.makedirs(run)
        for file, text in (("config.yaml", shown.stdout), ("config.input.yaml", origin), ("run.json", "{}")):
            write_text(run, file, text)

    @staticmethod
    def lonely(made):
        """Rows without a baseline that differs in nothing but what the row sets."""
        rows = {row["id"]: row for table in paper.load()["tables"] for row in table["rows"]}
        return [
            row
            for group in made
            for row in group.rows
            if rows[row].get("baseline")
            and not any(
                rows[row]["baseline"] in base.rows
                and paper.same_but_for_the_row(group.first, base.first, rows[row])
                for base in made
            )
        ]

    def test_every_proxy_configuration_is_the_row_that_it_is_named_after(self):
        folder, wrong, seen = os.path.join(ROOT, "configs/gated_attention/proxy"), [], set()
        for file in sorted(f for f in os.listdir(folder) if row_named(f)):
            self.shown(os.path.join(folder, file), file, f"# {file}\n")
        runs, made = self.grouped()
        for run in runs:
            seen.add(row_named(run.base))
            if row_named(run.base) not in run.group.rows:
                wrong.append(f"{run.base}: {run.group.rows}, {run.group.variant}")
        self.assertEqual(wrong, [])
        self.assertEqual(self.lonely(made), [])
        rows = {r["id"] for t in paper.load()["tables"] if t["paper"] == "gated_attention" for r in t["rows"]}
        self.assertEqual(rows - seen, set())

    def test_a_preset_of_the_sink_aware_rows_is_one_table(self):
        """Its sizes have learning rates of their own, and the sinks a rule; the two presets are not mixed."""
        for preset in ("adamw", "nanochat"):
            folder = os.path.join(ROOT, "configs/sink_aware/proxy", preset)
            for file in sorted(os.listdir(folder)):
                self.shown(
                    os.path.join(folder, file),
                    f"{preset}-{file}",
                    f"# configs/sink_aware/proxy/{preset}/{file}\n",
                )
        _, made = self.grouped()
        self.assertEqual(self.lonely(made), [])
        made = [t for t in paper_tables.paper_tables(made, paper.load()) if t.id == "sink_1"]
        self.assertEqual([len(t.rows) for t in made], [18, 18])
        self.assertEqual([row for t in made for row in t.rows if row[2] == "no run"], [])
        self.assertEqual(sorted("muon" in t.notes[0] for t in made), [False, True])


@unittest.skipIf(
    importlib.util.find_spec("matplotlib") is None or importlib.util.find_spec("numpy") is None,
    "no matplotlib",
)
class Pictures(Folder):
    def analyse(self, folder, gated, more=0.0):
        import numpy

        layers, heads, tokens, maps = 2, 4, 12, 8
        os.makedirs(os.path.join(folder, "analysis"))
        gates = (
            [
                {
                    "position": gated if isinstance(gated, str) else "sdpa_output",
                    "mean": 0.2 + more,
                    "std": 0.1,
                    "min": 0.0,
                    "max": 0.9,
                    "edges_min": 0.0,
                    "edges_max": 1.0,
                    "histogram_50": [0.02] * 50,
                }
            ]
            if gated
            else []
        )
        output = {
            f"below_{t}_{k}": None if "times" in k and not gated else 0.1
            for t in ("1e-2", "1e-3")
            for k in ("before", "after", "before_times_mean_gate")
        } | {"mean_abs_before": 0.7, "mean_abs_after": 0.2}
        layer = {
            "first_token_attention": 0.3 + more,
            "heads": {
                "first_token_attention": [0.3] * heads,
                "first_token_attention_without_first_query": [0.2, 0.9, 0.1, 0.1],
                "importance": [0.5] * heads,
            },
            "gates": gates,
            "attention_output": output,
            "imbalance": 0.1,
            "max": {"attention_output": 2, "attention_residual": 3, "ffn_output": 40, "ffn_residual": 50},
        }
        arrays = {
            "attention_mean": (layers, maps, maps),
            "attention_heads": (layers, heads, maps, maps),
            "value_norms": (layers, 2, tokens),
            "query_pca": (layers, heads, 2 * maps, 2),
            "key_pca": (layers, 2, 2 * maps, 2),
        }
        for name, shape in arrays.items():
            numpy.save(os.path.join(folder, "analysis", name + ".npy"), numpy.full(shape, 0.5, numpy.float32))
        write_text(
            os.path.join(folder, "analysis"),
            "analysis.json",
            json.dumps(
                {
                    "step": 1000,
                    "layers": [layer] * layers,
                    "maps": {"tokens": maps},
                    "arrays": {n: n + ".npy" for n in arrays},
                    "sets": [{"name": n, "importance": [[0.5] * heads] * layers} for n in "xy"],
                    "total": {
                        "first_token_attention": 0.125,
                        "mean_gate_score": 0.2,
                        "m_act_mean": 77.0,
                        "imbalance": 0.1,
                    },
                }
            ),
        )

    def test_figures_show_means_over_seeds(self):
        import matplotlib.pyplot as plt
        from sluice.reporting import plots_layers, plots_paper

        for seed, more in ((1, 0.0), (2, 0.1), (3, 0.2)):
            self.analyse(self.run_of("value", 6.0, gate("value"), seed=seed), "value", more)
        _, made = self.grouped()
        looks.label_runs([r for g in made for r in g.runs], made)
        pick = plots_paper.picks(made, ["value elementwise"])[0]
        self.assertEqual([round(v, 9) for v in pick.values("first_token_attention")[1]], [0.4, 0.4])
        self.assertAlmostEqual(pick.seeds.spreads[0]["first_token_attention"], 0.1)
        self.assertAlmostEqual(pick.layers[1]["gates"][0]["mean"], 0.3)
        self.assertTrue(pick.name.endswith("(3 seeds)"))
        figure = plots_paper.plot_first_token(made)
        self.assertEqual(len(figure.axes[0].collections), 1)  # the band
        plt.close(figure)
        # A gate on the values: attention's output has no before and no after.
        for draw in (plots_layers.plot_mean_abs, plots_layers.plot_shares):
            figure = draw(made)
            for axis in figure.axes:
                self.assertEqual(len(axis.lines), 1)
                self.assertIn("gate on value only", axis.lines[0].get_label())
            plt.close(figure)

    def test_the_strongest_heads_of_seeds_are_one_line_with_a_band(self):
        import matplotlib.pyplot as plt
        from sluice.reporting import plots_sinks

        for seed, more in ((1, 0.0), (2, 0.1)):
            write_evaluations(self.run_of("base", 6.0, gate(), seed=seed), more)
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        figure = plots_sinks.plot_heads(made)
        (axis,) = figure.axes
        thick = [line for line in axis.lines if line.get_linewidth() == 2.4]
        self.assertEqual(len(thick), 1)
        self.assertAlmostEqual(thick[0].get_ydata()[-1], 0.85)
        self.assertEqual(len(axis.collections), 1)  # the band, of all queries
        self.assertIn("strongest of each of 2 seeds", axis.get_title())
        plt.close(figure)

    def test_sink_measures_are_a_dot_per_seed_and_a_stroke_at_the_mean(self):
        import matplotlib.pyplot as plt
        from sluice.reporting import plots_grid

        for name, gates in (("base", "[]"), ("gate", gate())):
            for seed, more in ((1, 0.0), (2, 0.1)):
                write_evaluations(self.run_of(name, 6.0, gates, seed=seed), more + (0.05 if name == "gate" else 0))
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        controls = comparing.choose_baselines(made)
        self.assertIsNone(plots_grid.plot_sink_measures(made[:1], controls))
        figure = plots_grid.plot_sink_measures(made, controls)
        panels = {axis.get_title(): axis for axis in figure.axes}
        # Without the largest residual, which these runs do not have.
        self.assertEqual(
            list(panels), ["loss, less the control's", "first-token attention", "of the strongest head"]
        )
        self.assertEqual(list(panels["loss, less the control's"].lines[2].get_xdata()), [0.0, 0.0])
        drawn = [list(line.get_xdata()) for line in panels["of the strongest head"].lines]
        for found, expected in zip(drawn, ([0.8, 0.9], [0.85], [0.85, 0.95], [0.9], [0.85, 0.85]), strict=True):
            for x, y in zip(found, expected, strict=True):
                self.assertAlmostEqual(x, y)  # dots and stroke; dots and stroke; the dashed line of the control
        plt.close(figure)

    def two_starts(self):
        """A baseline and a gate with two starts, which a sweep compares at the same start; the gate comes first in the sweep."""
        for start, more in (("usual", 1.0), ("small", 0.0)):
            for seed in (1, 2, 3):
                for name, ppl, gates in (("base", 6.0, "[]"), ("gate", 5.9, gate())):
                    losses = [3.0 + more + (0.25 if name == "base" else 0.0)] * 100
                    folder = self.run_of(f"{name}_{start}", ppl + more + seed / 10, gates, seed=seed, losses=losses)
                    write_evaluations(folder)
                    if start == "small":
                        self.small_starts(folder)
        trials = [
            {"hash": f"{v}_{s}-{n}", "group": f"{v}-{s}", "variant": v, "point": s}
            for s in ("usual", "small")
            for v in ("gate", "base")
            for n in (1, 2, 3)
        ]
        write_text(self.root, "s.study.json", json.dumps({"name": "s", "control": "base", "trials": trials}))
        runs = read_runs([self.root])
        found = study.places_of(study.studies_of([run.folder for run in runs]))
        made = groups.group_runs(runs, paper.load(), found)
        looks.label_runs(runs, made)
        return runs, made

    def test_a_figures_losses_are_less_the_control_of_the_table(self):
        import matplotlib.pyplot as plt
        from sluice.reporting import plots_grid, plots_paper

        runs, made = self.two_starts()
        controls = comparing.choose_baselines(made)
        figure = plots_grid.plot_sink_measures(made, controls)
        axis = figure.axes[0]
        names = [text.get_text() for text in axis.get_yticklabels()]
        self.assertEqual(names, ["gate-usual", "base-usual", "gate-small", "base-small"])
        strokes = {names[int(line.get_ydata()[0])]: line.get_xdata()[0] for line in axis.lines[1:8:2]}
        for group in made:
            found = groups.difference(group, controls[group], "loss")
            self.assertAlmostEqual(strokes[group.label], found.mean if found else 0.0)
            self.assertEqual(found is None, group.label.startswith("base"))
        self.assertEqual(list(axis.lines[8].get_xdata()), [0.0, 0.0])  # dashed: the first control
        plt.close(figure)
        # A line whose control was not trained has no dots there.
        figure = plots_grid.plot_sink_measures(made, {**controls, made[0]: None})
        self.assertEqual(len(figure.axes[0].lines), 7)
        plt.close(figure)
        # The paper's figure, too.
        self.assertEqual(
            {g.label: b.label for g, b in plots_paper.baselines_of(made).items()},
            {"gate-usual": "base-usual", "gate-small": "base-small"},
        )
        figure = plots_paper.plot_losses(made, runs)
        for line in figure.axes[1].lines[:2]:
            self.assertAlmostEqual(line.get_ydata()[-1], -0.25)
        plt.close(figure)

    def test_the_recall_of_selected_keys_is_drawn_over_training_and_by_layer(self):
        import matplotlib.pyplot as plt
        from sluice.reporting import plots_selection

        for seed, more in ((1, 0.0), (2, 0.1)):
            SelectedKeys.write(self.run_of("sparse", 6.0, seed=seed, kind="sparse"), more)
        self.run_of("dense", 6.0)
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        figure = plots_selection.plot_recall(made)
        training, by_layer, largest = figure.axes
        for axis, expected in ((training, [0.55, 0.75]), (by_layer, [0.85, 0.65]), (largest, [0.5, 0.5])):
            (line,) = axis.lines
            for a, b in zip(line.get_ydata(), expected, strict=True):
                self.assertAlmostEqual(a, b)
        plt.close(figure)

    def test_a_histogram_of_seeds_is_on_common_edges(self):
        from sluice.reporting import plots_layers

        def of(low, high, counts):
            return {"edges_min": low, "edges_max": high, "histogram_50": counts}

        same = plots_layers.histogram([[of(0.0, 1.0, [3, 1])], [of(0.0, 1.0, [1, 3])]])
        self.assertEqual(same, ([0.0, 0.5, 1.0], [0.5, 0.5]))
        # Scores without bounds: all of the first seed's lie in [0, 1], of the second's in [0, 4].
        edges, shares = plots_layers.histogram([[of(0.0, 1.0, [2, 2, 2, 2])], [of(0.0, 4.0, [1, 1, 1, 1])]])
        self.assertEqual(edges, [0.0, 1.0, 2.0, 3.0, 4.0])
        for a, b in zip(shares, [(1 + 0.25) / 2, 0.125, 0.125, 0.125], strict=True):
            self.assertAlmostEqual(a, b)
        # Layers of one seed, and edges that cut bins.
        edges, shares = plots_layers.histogram([[of(-1.0, 1.0, [4, 4]), of(0.0, 2.0, [8, 0])]])
        self.assertEqual(edges, [-1.0, 0.5, 2.0])
        for a, b in zip(shares, [(4 + 2 + 4) / 16, (2 + 4) / 16], strict=True):
            self.assertAlmostEqual(a, b)
        self.assertIsNone(plots_layers.histogram([[of(0.0, 1.0, [])]]))
        self.assertIsNone(plots_layers.histogram([[]]))

    def test_figures_of_layers_take_seeds_of_the_same_tokens(self):
        from sluice.reporting import plots_paper

        for seed, sequences in ((1, 64), (2, 1024), (3, 64)):
            folder = self.run_of("base", 6.0, seed=seed)
            self.analyse(folder, False, seed / 10)
            change_json(
                os.path.join(folder, "analysis", "analysis.json"),
                lambda a, n=sequences: a.update(sequences=n),
            )
        _, made = self.grouped()
        pick = plots_paper.picks(made, ["plain"])[0]
        self.assertEqual([r.seed() for r in pick.seeds.runs], [1, 3])
        self.assertTrue(pick.name.endswith("(2 seeds)"))

    def test_seeds_without_a_common_place_are_drawn_by_themselves(self):
        """As where seeds were logged or evaluated at other steps."""
        import matplotlib.pyplot as plt
        from sluice.reporting import plots_paper, plots_selection, plots_sinks

        for seed in (1, 2):
            folder = self.run_of("base", 6.0, gate(), seed=seed)
            for file in ("metrics.jsonl", "eval.jsonl"):
                if file == "eval.jsonl":
                    write_evaluations(folder)
                lines = [
                    json.loads(line) for line in files.read_text(os.path.join(folder, file)).splitlines()
                ]
                for line in lines:
                    line["tokens"] += seed
                write_text(folder, file, "".join(json.dumps(line) + "\n" for line in lines))
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        figure = plots_paper.plot_losses(made, runs)
        self.assertEqual(sorted(len(line.get_xdata()) for line in figure.axes[0].lines), [100, 100])
        plt.close(figure)
        figure = plots_sinks.plot_heads(made)
        thick = [line for line in figure.axes[0].lines if line.get_linewidth() == 2.4]
        self.assertEqual([len(line.get_xdata()) for line in thick], [3, 3])
        plt.close(figure)
        for seed in (1, 2):
            folder = self.run_of("sparse", 6.0, seed=seed, kind="sparse")
            SelectedKeys.write(folder)
            lines = [
                json.loads(line) for line in files.read_text(os.path.join(folder, "eval.jsonl")).splitlines()
            ]
            for line in lines:
                line["tokens"] += seed
            write_text(folder, "eval.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        figure = plots_selection.plot_recall(made)
        self.assertEqual([len(line.get_xdata()) for line in figure.axes[0].lines], [2, 2])
        plt.close(figure)

    def test_heads_that_share_a_gate_have_no_importance(self):
        from sluice.reporting import plots_heads

        layers = [{"heads": {"importance": row}} for row in ([0.5, 0.25], [0.75, 1.0])]
        self.assertEqual(plots_heads.importance(layers), [[0.5, 0.25], [0.75, 1.0]])
        layers[1]["heads"]["importance"] = [None, None]
        self.assertIsNone(plots_heads.importance(layers))

    def test_every_picture_is_drawn(self):
        import matplotlib.pyplot as plt
        from sluice.reporting import figures

        for lr in (0.004, 0.008):
            folder = self.run_of(f"base{lr}", 6.0, lr=lr)
            self.analyse(folder, False)
            self.run_of(
                f"gate{lr}", 5.9, gate(), lr=lr, losses=[3.0] * 60 + [9.0] * 40 if lr > 0.004 else None
            )
        folder = self.run_of("gate", 5.8, gate(), seed=2)
        self.analyse(folder, True)
        write_evaluations(folder)
        runs, made = self.grouped()
        looks.label_runs(runs, made)
        # Only some of the runs have an analysis, so the tables are of the evaluations.
        self.assertEqual(made[0].value("first_token_attention"), 0.25)
        names = []
        # The last are of training: tests/tools/report_test.cpp draws those.
        controls, beside = comparing.choose_baselines(made), paper_tables.paper_tables(made, paper.load())
        for _, shown in figures.all_figures(runs, made, controls, beside)[:-1]:
            for name, draw, _ in shown:
                figure = draw()
                if figure is None:
                    continue
                self.assertIsNone(figure._suptitle, name)  # captions stand in the page
                title = (
                    figure.axes[0].get_title().replace("\n", " ")
                )  # one panel alone has none, or the variant's name
                self.assertTrue(
                    len(figure.axes) > 1 or not title or any(title.startswith(g.label) for g in made), name
                )
                if name == "figure2_maps":  # writing takes longer than drawing: one must do
                    picture = io.BytesIO()
                    figure.savefig(picture, dpi=20)
                    self.assertEqual(picture.getvalue()[:8], b"\x89PNG\r\n\x1a\n")
                plt.close(figure)
                names.append(name)
        expected = [
            "figure1_loss",
            "figure2_first_token",
            "figure2_maps",
            "figure3_gate_scores",
            "figure4_mean_abs",
            "figure5_shares",
            "figure6_maxima",
            "figure7_gate_layers",
            "sink_heads",
            "sink_map",
            "heads_importance",
            "heads_importance_by_set",
            "value_norms",
            "query_key_pca",
            "perplexity_domains",
            "sink_measures",
            "lr_tolerance",
            "spikes",
        ]
        self.assertEqual(names, expected)


if __name__ == "__main__":
    unittest.main()
