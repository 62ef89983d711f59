#!/usr/bin/env python3
"""scripts/quickstart, scripts/split_text, scripts/launch, scripts/sweep, scripts/benchmarks and scripts/bench_pytorch given what is hostile or unusual: texts of equal names,
names with spaces and newlines, options that take values, sweep files that would write commands into a script; and paths, which are
relative to where the user stands. Standard library alone; MPI, and where nothing is read or trained the program, are played by
small shell scripts.
"""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
import unittest

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPTS = os.path.join(ROOT, "scripts")
sys.path.insert(0, SCRIPTS)
from sluice import benchmarks, sink_words
from sluice import launching as launch
from sluice import program as sluice_program
from sluice import split_text as split
from sluice.sweeping import records, runner, slurm, stop_rules, sweep_file
from sluice.sweeping.plan import Mistake

# Stands in for the program. tokenize copies the text; synthesize names the text that it was given; train keeps a file of the run folder; config show --json prints run_dir.
PROGRAM = r"""#!/bin/bash
for a; do case $a in run_dir=*) run=${a#*=} ;; data.train=*) text=$a ;; esac; done
case $1 in
  tokenize) cp "$2" "$4.bin"; echo >"$4.idx" ;;
  synthesize)
    while [ $# -gt 0 ]; do case $1 in -o) out=$2 ;; --text) of=$2 ;; esac; shift; done
    echo '{"synthetic": {"parameters": {"triggers": [97, 98, 99]}}}' >"$out.json"; cp "$of" "$out.bin"; echo >"$out.idx" ;;
  train) mkdir -p "$run"; echo "$text" >"$run/text"; echo "$@" >"$run/arguments" ;;
  config) shift 2
    for a in "${@:2}"; do [[ $a == *=* || $a == --json ]] || { echo "$a is not key=value" >&2; exit 64; }; done
    echo "{\"run_dir\": \"${run:-runs/default}\"}" ;;
esac
"""


class Folder(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.root = self.temporary.name

    def tearDown(self):
        self.temporary.cleanup()

    def path(self, *parts):
        return os.path.join(self.root, *parts)

    def write(self, name, text, executable=False):
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        if executable:
            os.chmod(path, 0o755)
        return path

    def read(self, *parts):
        with open(self.path(*parts), "rb") as file:
            return file.read()


class Texts(Folder):
    def test_a_name_is_readable_safe_and_of_the_contents(self):
        names = [
            "a/book.txt",
            "dir.d/README",
            "odd na\nme;$(id).txt",
            "Библия.txt",
            "-x.txt",
            "x" * 200 + ".txt",
            "...",
        ]
        found = [split.name_of(self.write(name, "same text")) for name in names]
        stems = [name[:-13] for name in found]
        self.assertEqual(stems, ["book", "README", "odd_na_me_id", "text", "x", "x" * 40, "text"])
        self.assertEqual(len({name[-12:] for name in found}), 1)
        self.assertNotEqual(split.name_of(self.write("b/book.txt", "another text")), found[0])

    def test_no_byte_is_in_both_parts(self):
        texts = {
            "lines": b"".join(b"line %d of the text\n" % i for i in range(5000)),
            "one line": b"word " * 9000,
            "no space": "Ж".encode() * 15000,
            "bytes": bytes(range(128, 256)) * 400,
            "a short line, then a long one": b"x\n" + b"y" * 30000,
            "least": b"z" * split.LEAST,
        }
        for name, text in texts.items():
            with self.subTest(name):
                split.split(self.write("text", text), self.path("out"))
                train, held_out = self.read("out", "train.txt"), self.read("out", "validation.txt")
                self.assertEqual(sorted(train + held_out), sorted(text))
                self.assertGreater(len(held_out), 257)
                self.assertLess(len(held_out), len(text) / 8)
                if name == "lines":
                    self.assertFalse(set(train.splitlines()) & set(held_out.splitlines()))
                if name == "no space":
                    self.assertEqual(len(train.decode() + held_out.decode()), 15000)

    def test_a_short_text_is_refused_with_the_size_needed(self):
        said = subprocess.run(
            [os.path.join(SCRIPTS, "split_text"), self.write("short.txt", "one line\n"), self.path("out")],
            capture_output=True,
            text=True,
        )
        self.assertEqual(said.returncode, 65)
        self.assertIn("short.txt has 9 bytes, and at least 20,000 are needed", said.stderr)
        self.assertFalse(os.path.exists(self.path("out")))


class Quickstart(Folder):
    def setUp(self):
        super().setUp()
        for script in ("quickstart", "split_text"):
            os.makedirs(self.path("scripts"), exist_ok=True)
            shutil.copy(os.path.join(SCRIPTS, script), self.path("scripts", script))
        shutil.copytree(os.path.join(SCRIPTS, "sluice"), self.path("scripts", "sluice"))
        for name in ("setup", "report"):
            self.write(f"scripts/{name}", "#!/bin/sh\n", executable=True)
        self.write(
            "scripts/fetch_text",
            '#!/bin/sh\necho verses >"$1/train.txt"\necho verse >"$1/validation.txt"\n',
            executable=True,
        )
        self.write("build/sluice", PROGRAM, executable=True)

    def quickstart(self, *arguments):
        done = subprocess.run(
            [self.path("scripts", "quickstart"), *arguments], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return next(line.split("data/")[1] for line in done.stdout.splitlines() if "Text: data/" in line)

    def text_of(self, name, model="gated"):
        """The training text of a run, by what the run was given."""
        given = self.read("runs", f"quickstart-{name}", model, "text").decode()
        return self.read(given.split("path: ")[1].split("}")[0] + ".txt")

    def test_results_are_those_of_the_text_given(self):
        a, b = (
            self.write("a/book.txt", "one text here\n" * 2000),
            self.write("b/book.txt", "another text\n" * 2000),
        )
        first, second = self.quickstart(a), self.quickstart(b)
        self.assertNotEqual(first, second)
        self.assertIn(b"one text", self.text_of(first))
        self.assertIn(b"another text", self.text_of(second))
        self.write("a/book.txt", "an edited text\n" * 2000)
        edited = self.quickstart(a)
        self.assertIn(b"edited", self.text_of(edited))
        self.assertIn(b"one text", self.text_of(first))

    def test_a_text_called_kjv_is_not_the_default_text(self):
        self.quickstart(self.write("kjv.txt", "zebra quagga\n" * 2000))
        self.assertEqual(self.quickstart(), "kjv")
        self.assertEqual(self.text_of("kjv"), b"verses\n")

    def test_odd_names(self):
        for name in ("odd na\nme'\";touch PWNED.txt", "Библия.txt", "dir.d/README", "ends in newline\n"):
            with self.subTest(name):
                made = self.quickstart(self.write(name, name + "\n" + "words of it\n" * 2000))
                self.assertRegex(made, r"^[A-Za-z0-9._-]+$")
                self.assertTrue(os.path.isfile(self.path("data", made, "train.idx")))
        self.assertFalse(os.path.exists(self.path("PWNED")))

    def test_what_was_begun_is_not_taken_for_the_whole(self):
        text = self.write("a.txt", "some words\n" * 3000)
        self.write(
            "build/sluice",
            PROGRAM.replace("tokenize)", "tokenize) [[ $2 == *validation* ]] || exit 74;"),
            executable=True,
        )
        failed = subprocess.run([self.path("scripts", "quickstart"), text], capture_output=True)
        self.assertEqual(failed.returncode, 74)
        self.write("build/sluice", PROGRAM, executable=True)
        made = self.quickstart(text)
        self.assertEqual(
            sorted(os.listdir(self.path("data", made))),
            sorted(
                [f"{split}.{end}" for split in ("train", "validation") for end in ("bin", "idx", "txt")]
                + [f"task.{end}" for end in ("bin", "idx", "json", "log")]
            ),
        )

    def test_the_task_is_made_of_the_text_and_its_triggers_are_measured(self):
        text = self.write("a.txt", "zebra quagga\n" * 2000)
        made = self.quickstart(text)
        self.assertIn(b"zebra", self.read("data", made, "task.bin"))
        for model, configuration in (("baseline", "base"), ("gated", "gated")):
            given = self.read("runs", f"quickstart-{made}", "sinks", model, "arguments").decode()
            self.assertIn(f"configs/sinks/{configuration}.yaml", given)
            self.assertIn(f"data/{made}/task}}", given)
            self.assertIn("tokens: [97, 98, 99]", given)


class SinkWords(Folder):
    def run_with(self, name, share, ratio=0.04):
        record = {
            "step": 100,
            "analysis": {
                "sinks": {
                    "threshold": 0.3,
                    "strongest": {
                        "layer": 0,
                        "first_token_attention": 0.6 * share,
                        "by_class": {"trigger": 0.001, "other": share},
                    },
                },
                "layers": [{"value_norm_first": ratio, "value_norm_rest": 1.0}],
            },
            "sets": {"backcopy": {"classes": {"trigger": {"loss": 0.25}, "other": {"loss": 1.5}}}},
        }
        self.write(f"{name}/eval.jsonl", json.dumps(record) + "\n" + '{"analysis": {"sin')
        return self.path(name)

    def said(self, *shares):
        return "\n".join(sink_words.words(*(self.run_with(f"run{i}", s) for i, s in enumerate(shares))))

    def test_says_what_was_measured_and_no_more(self):
        text = self.said(0.9, 0.1)
        self.assertRegex(text, r"nothing to copy +90\.0% +10\.0%")
        self.assertRegex(text, r"others' = 1 +0\.040 +0\.040")
        self.assertRegex(text, r"elsewhere +1\.500 +1\.500")
        self.assertIn("emptied: an attention sink. The gate can close the head instead", text)
        self.assertIn("the gate did not remove it", self.said(0.9, 0.8))
        for gated in (0.1, 0.9):
            self.assertIn("No sink has formed in the plain model", self.said(0.2, gated))

    def test_a_value_that_is_not_small_is_not_called_emptied(self):
        runs = self.run_with("a", 0.9, ratio=0.8), self.run_with("b", 0.1)
        self.assertNotIn("emptied", "\n".join(sink_words.words(*runs)))

    def test_damaged_evaluations_are_said_to_have_measured_nothing(self):
        sound = self.run_with("sound", 0.9)
        for content in (
            "",
            "[]\n",
            '{"analysis": {"sinks": []}}\n',
            '{"analysis": {"sinks": {"strongest": 3}}}\n',
        ):
            self.write("damaged/eval.jsonl", content)
            self.assertIn("did not measure sinks", "\n".join(sink_words.words(sound, self.path("damaged"))))
        self.assertIn("did not measure sinks", "\n".join(sink_words.words(self.path("nowhere"), sound)))


class Launch(Folder):
    def test_options_that_take_a_value_are_not_overrides(self):
        for arguments, folder in (
            (["x.yaml", "--allow-change", "train.max_steps", "run_dir=a"], "run_dir=a"),
            (["--allow-change", "train.max_steps", "--fresh", "x.yaml", "run_dir=a"], "run_dir=a"),
            (["x.yaml", "--allow-change=train.max_steps", "run_dir=a"], "run_dir=a"),
            (["x.yaml", "run_dir=a", "--run-dir=b"], "run_dir=b"),
            (["x.yaml", "--run-dir", "b", "run_dir=a"], "run_dir=b"),
        ):
            configuration, overrides = launch.overrides_of(arguments)
            self.assertEqual(configuration, ["x.yaml"])
            self.assertEqual(overrides[-1], folder)
            self.assertNotIn("train.max_steps", overrides)

    def test_the_run_folder_of_an_option_is_the_one_that_is_watched(self):
        program = self.write("sluice", PROGRAM, executable=True)
        # Dies at once, as a lost rank does, and has saved step 7 in the folder that the option names.
        mpirun = self.write("mpirun", "#!/bin/sh\nexit 76\n", executable=True)
        self.write("b/ckpt/step_00000007/MANIFEST.json", "{}")
        for option in (
            ["--run-dir=" + self.path("b")],
            ["--run-dir", self.path("b"), "--allow-change", "train.max_steps"],
        ):
            done = subprocess.run(
                [
                    os.path.join(SCRIPTS, "launch"),
                    "-n",
                    "1",
                    "--restarts",
                    "0",
                    "--mpirun",
                    mpirun,
                    program,
                    "train",
                    "x.yaml",
                    *option,
                ],
                capture_output=True,
                text=True,
            )
            self.assertEqual(done.returncode, 76, done.stderr)
        self.assertEqual(
            launch.run_folder([program, "train", "x.yaml", "--run-dir=" + self.path("b")]), self.path("b")
        )
        self.assertEqual(launch.last_step(self.path("b")), 7)

    def test_what_is_not_there_is_told_in_one_line(self):
        program = self.write("sluice", PROGRAM, executable=True)
        for mpirun, command, missing in (
            ("mpirun", self.path("none"), self.path("none")),
            (self.path("no_mpirun"), program, "no_mpirun"),
            ("", program, "name another launcher"),
        ):
            done = subprocess.run(
                [os.path.join(SCRIPTS, "launch"), "-n", "1", "--mpirun", mpirun, command, "train", "x.yaml"],
                capture_output=True,
                text=True,
            )
            self.assertEqual(done.returncode, 1)
            self.assertIn(missing, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)


class MissingPackages(Folder):
    def test_a_package_that_cannot_be_loaded_is_told_in_one_line(self):
        for package in ("matplotlib", "torch"):
            self.write(f"packages/{package}/__init__.py", 'raise ImportError("it is broken here")\n')
        self.write("run/metrics.jsonl", '{"step": 1, "tokens": 5, "loss": 2.5}\n')
        self.write("run/run.json", "{}")
        environment = {**os.environ, "PYTHONPATH": self.path("packages")}
        for script, arguments, package in (
            ("report", [self.path("run"), "-o", self.path("page")], "python3-matplotlib"),
            ("make_goldens", [], "broken"),
            ("make_goldens_qwen3", [], "broken"),
            ("make_goldens_qwen3_moe", [], "broken"),
        ):
            done = subprocess.run(
                [sys.executable, os.path.join(SCRIPTS, script), *arguments],
                env=environment,
                capture_output=True,
                text=True,
            )
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(package, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


class Trial:
    hash = "0123456789abcdef"


class Sweeps(Folder):
    def sweep(self, text, name="s.yaml"):
        self.write("x.yaml", "model: {}\n")
        return sweep_file.SweepFile(self.write(name, text))

    def test_hostile_files_are_refused_by_line(self):
        base = "base: x.yaml\n"
        wrong = {
            "a newline in output": (base + r'output: "out\ntouch PWNED\n#"' + "\n", ":2:9: the value"),
            "a newline in set": (base + r'set: {run.x: "a\nb"}' + "\n", ":2:14: the value"),
            "NUL in a value": (base + "output: a\0b\n", ":2:1: control character 0x00"),
            "an escape": (base + "output: a\x1b[2J\n", ":2:1: control character 0x1b"),
            "the parent folder": (base + "name: ..\n", ":2:7: the name '..'"),
            "this folder": (base + "name: .\n", ":2:7: the name '.'"),
            "5,000 brackets": (
                base + "set: " + "[" * 5000 + "\n",
                ":2:7: a list or section cannot be a key; is a bracket missing?",
            ),
            "1,000 levels": (
                "".join(" " * i + "k:\n" for i in range(1000)),
                ":33:33: nested deeper than 32 levels",
            ),
            "10^8 trials": (
                base
                + "grid:\n"
                + "".join(f"  a.b{i}: [{', '.join(map(str, range(100)))}]\n" for i in range(4)),
                ":3:3: 100,000,000 trials; a sweep has at most 10,000",
            ),
            "a number of 5,000 digits": (
                base + "resources: {slots: " + "9" * 5000 + "}\n",
                "at most 18 digits",
            ),
            "a seed of 5,000 digits": (base + "seeds: [" + "9" * 5000 + "]\n", "a seed is a whole number"),
        }
        for what, (text, message) in wrong.items():
            with self.subTest(what):
                began = time.monotonic()
                with self.assertRaises(sweep_file.Refused) as refused:
                    self.sweep(text)
                self.assertIn(message, str(refused.exception))
                self.assertLess(time.monotonic() - began, 5)
        for name in ("a\ntouch PWNED\n#.yaml", "two words.yaml"):
            with self.subTest(name):
                self.assertRaises(sweep_file.Refused, self.sweep, base, name)
        self.assertEqual(self.sweep(base + "name: ok\n", "two words.yaml").name, "ok")

    def test_a_rule_names_a_metric_that_runs_write(self):
        rule = "base: x.yaml\nstop_if: {{metric: {}, op: nonfinite}}\n".format
        for metric, message in (
            ("los", ":2:19: stop_if.metric: unknown metric los; did you mean loss?"),
            ("mood", "and of evaluations val.SET.loss"),
            ("heads", "unknown metric heads"),
            ("val.held_out.los", "unknown metric val.held_out.los; of a validation set there are val.SET."),
            ("val.held_out", "unknown metric val.held_out"),
            ("val.held_out.classes.a.perplexity", "val.SET.classes.CLASS."),
        ):
            with self.subTest(metric), self.assertRaises(sweep_file.Refused) as refused:
                self.sweep(rule(metric))
            self.assertIn(message, str(refused.exception))
        for metric in ("epochs.web", "val.held_out.bits_per_byte", "val.held_out.classes.a.loss"):
            self.sweep(rule(metric))
        # All that the sources name.
        named = set()
        folder = os.path.join(os.path.dirname(SCRIPTS), "src/nn")
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                named |= set(re.findall(r'{\.name = "([a-z_/]+)"(?!.*\.layer)', file.read()))
        self.assertIn("heads/imbalance", named)
        for name in named:
            self.assertEqual(stop_rules.wrong_metric(name.replace("/", ".")), "", name)

    def test_a_job_of_a_failed_trial_does_not_ask_for_another_start(self):
        for code in (73, 75, 76, 137, None):
            self.assertEqual(runner.given_up({"code": code}), 70)
        self.assertEqual(runner.given_up({"code": 65}), 65)

    def test_no_path_becomes_a_command_of_the_job_array(self):
        sweep = self.sweep("base: x.yaml\n")
        evil = self.path("out' $(touch PWNED) `touch PWNED` 5%")
        script = slurm.write(sweep, [Trial], evil, "/bin/true", self.root, 1)
        os.makedirs(self.path("scripts"))
        self.write("scripts/sweep", '#!/bin/sh\nprintf "%s\\n" "$@" >arguments\n', executable=True)
        done = subprocess.run(
            ["bash", script],
            cwd=self.root,
            env={**os.environ, "SLURM_ARRAY_TASK_ID": "0"},
            capture_output=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(evil.encode() + b"\n", self.read("arguments"))
        self.assertFalse(os.path.exists(self.path("PWNED")))
        with open(script, encoding="utf-8") as file:
            directives = [line for line in file if line.startswith("#SBATCH --output=")]
        self.assertIn("5%%", directives[0])  # a percent sign alone begins one of Slurm's own words
        for bad in ("out\ntouch PWNED\n#", "out\udcff"):
            with self.assertRaises(Mistake):
                slurm.write(sweep, [Trial], self.path(bad), "/bin/true", self.root, 1)


class ShippedRecords(Folder):
    def test_every_record_of_the_repository_is_read_whole_and_kept_as_it_is(self):
        """Also those from before validation sets had fingerprints and settings were recorded."""
        found = 0
        for folder, _, names in os.walk(os.path.join(ROOT, "configs")):
            for name in [n for n in names if n.endswith(".jsonl")]:
                with open(os.path.join(folder, name), "rb") as file:
                    text = file.read()
                kept = records.Records(self.write(name, text))
                self.assertEqual((len(kept.lines), kept.unread), (text.count(b"\n"), []), name)
                kept.write(list(kept.lines))
                self.assertEqual(self.read(name), text)
                found += 1
        self.assertGreater(found, 0)


class Mixtures(unittest.TestCase):
    def test_units_for_products_of_bf16_are_told_apart_in_bf16(self):
        def told(precision, *units):
            runs = [
                {"instruction_set": "avx512", "precision": precision, "bf16_products": unit} for unit in units
            ]
            looks = [types.SimpleNamespace(state="done", run=run, trial=types.SimpleNamespace(after=None)) for run in runs]
            return records.mixtures(dict(enumerate(looks)))

        expected = ["of several units for products of bf16: amx (2 trials), avx512_bf16 (1 trials)"]
        self.assertEqual(told("bf16", "amx", "avx512_bf16", "amx"), expected)
        self.assertEqual(told("bf16", "amx", "amx", None), [])  # older records do not say
        self.assertEqual(told("f32", "amx", "avx512_bf16"), [])  # none is used


class BenchPytorch(Folder):
    """With a package in the place of torch that ends when the options have been accepted."""

    def run_it(self, *arguments):
        self.write("packages/torch/nn/functional.py", "")
        self.write("packages/torch/nn/__init__.py", "class Module:\n    pass\n")
        self.write(
            "packages/torch/__init__.py",
            "import sys\n\nclass cuda:\n    is_available = staticmethod(lambda: False)\n\n"
            "def set_num_threads(_):\n    sys.exit('accepted')\n",
        )
        done = subprocess.run(
            [sys.executable, os.path.join(SCRIPTS, "bench_pytorch"), *arguments],
            env={**os.environ, "PYTHONPATH": self.path("packages")},
            capture_output=True,
            text=True,
        )
        self.assertNotIn("Traceback", done.stderr)
        return done.stderr

    def test_without_torch_the_help_and_what_is_refused_are_said_and_nothing_is_measured(self):
        self.write("packages/torch/__init__.py", "raise ImportError('none')\n")
        for arguments, code, message in (
            ("--help", 0, "Training speed of the same models in PyTorch"),
            ("--model none", 2, "unknown model 'none'"),
            ("", 1, "has no torch; install it"),
        ):
            done = subprocess.run(
                [sys.executable, os.path.join(SCRIPTS, "bench_pytorch"), *arguments.split()],
                env={**os.environ, "PYTHONPATH": self.path("packages")},
                capture_output=True,
                text=True,
            )
            self.assertEqual(done.returncode, code, arguments)
            self.assertIn(message, done.stdout + done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_nothing_is_measured_under_a_name_that_it_does_not_have(self):
        for arguments, message in (
            ("--device cuda --precision f32", "--precision f32: 1.7b is measured in bf16 alone"),
            ("--model tiny --precision f32,bf16", "--precision f32,bf16: tiny is measured in bf16 alone"),
            ("--precision fp16", "--precision fp16: unknown precision 'fp16'; there are f32, bf16"),
            ("--variants foo", "--variants foo: unknown variant 'foo'; there are eager, compile"),
            ("--variants eager,", "unknown variant ''"),
            ("--model none", "--model none: unknown model 'none'; there are small"),
            ("--part decode --model qwen", "--model has no effect on --part decode"),
            ("--part decode --precision bf16", "--precision has no effect on --part decode"),
            ("--part decode --seconds 1", "--seconds has no effect on --part decode"),
            ("--part decode --device cuda", "measures a processor"),
            ("--longest 64", "--longest is of --part decode"),
        ):
            with self.subTest(arguments):
                said = self.run_it(*arguments.split())
                self.assertIn(message, said)
                self.assertNotIn("accepted", said)

    def test_what_is_measured_is_accepted(self):
        for arguments in (
            "",
            "--model qwen,gpt2-124m --precision f32 --threads 2",
            "--model tiny --precision bf16 --variants eager",
            "--part decode --longest 64 --variants compile",
        ):
            self.assertEqual(self.run_it(*arguments.split()).strip(), "accepted", arguments)
        self.assertIn("sees no GPU", self.run_it("--device", "cuda", "--precision", "bf16"))


class Benchmarks(Folder):
    LINE = '{"context": "a", "choices": ["b", "c"], "label": 0}\n'

    def convert(self):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            code = benchmarks.main([self.path("source"), "-o", self.path("out")])
        return code, said.getvalue(), sorted(os.listdir(self.path("out")))

    def test_files_of_one_name_are_tasks_of_their_own(self):
        for name, count in (("a/test", 1), ("b/test", 2), ("b/c/test", 3), ("other", 4)):
            self.write(f"source/{name}.jsonl", self.LINE * count)
        code, said, names = self.convert()
        self.assertEqual(
            (code, names), (0, ["a_test.jsonl", "b_c_test.jsonl", "b_test.jsonl", "other.jsonl"])
        )
        self.assertIn("b/test.jsonl: 2 questions, b_test.jsonl\n", said)
        self.assertIn("other.jsonl: 4 questions\n", said)
        self.assertEqual(self.read("out", "b_c_test.jsonl").count(b"\n"), 3)

    def test_names_that_stay_the_same_are_refused(self):
        for name in ("a/test", "b/test", "a_test"):
            self.write(f"source/{name}.jsonl", self.LINE)
        code, said, names = self.convert()
        self.assertEqual((code, names), (65, []))
        self.assertIn("would both become a_test.jsonl; rename one of them", said)


class Interop(Folder):
    def difference(self, diff):
        """Of Bench.difference, where `sluice checkpoint diff` does what is given."""
        for package in ("numpy", "transformers", "torch"):
            self.write(f"packages/{package}/__init__.py", "def __getattr__(name):\n    return None\n")
        sluice = self.write("sluice", f'#!/bin/sh\n[ "$1" = tokenize ] && exit 0\n{diff}\n', executable=True)
        program = (
            "import pathlib, sys; from sluice.interop.bench import Bench; "
            "print(repr(Bench(pathlib.Path(sys.argv[1]), sys.argv[2], '', 0).difference('a', 'b')))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, self.root, sluice],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([self.path("packages"), SCRIPTS])},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return ast.literal_eval(done.stdout)

    def test_a_comparison_that_died_has_not_found_the_weights_equal(self):
        self.assertEqual(self.difference("echo no differences; exit 0"), "")
        self.assertEqual(self.difference("echo one differs; exit 1"), "one differs\n")
        self.assertEqual(self.difference("kill -9 $$"), "checkpoint diff ended with -9, without a word")
        self.assertIn("ended with 137", self.difference("exit 137"))


RUN = """name: one
run_dir: run
model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, intermediate_size: 24}
train: {global_batch_size: 8, max_steps: 5}
"""


class WhereTheUserStands(Folder):
    """Commands called from another folder than the checkout's."""

    def command(self, name, *arguments, **environment):
        done = subprocess.run(
            [os.path.join(SCRIPTS, name), *arguments],
            cwd=self.path("here"),
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def setUp(self):
        super().setUp()
        self.write("here/sweeps/a.yaml", "base: ../models/*.yaml\ngrid: {optimizer.lr: [1e-3, 2e-3]}\n")
        self.write("here/models/one.yaml", RUN)

    def test_a_sweep_takes_its_file_and_folders_from_there(self):
        os.symlink(sluice_program.find(), self.path("here", "program"))
        said = self.command("sweep", "plan", "sweeps/a.yaml", "--output", "out", SLUICE="./program")
        self.assertIn("lr_2e-3", said)
        self.assertIn("2 trials: 2 waiting", said)
        made = self.command("sweep", "slurm", "sweeps/a.yaml", "--output", "out", "--sluice", "./program")
        self.assertTrue(os.path.exists(self.path("here", "out", "array.sbatch")))
        self.assertIn(f"sbatch {self.path('here', 'out', 'array.sbatch')}", made)
        self.assertIn(
            "out/sweep.csv", self.command("sweep", "table", "sweeps/a.yaml", "--output", "out").splitlines()
        )
        self.assertTrue(os.path.exists(self.path("here", "out", "sweep.csv")))

    def test_the_same_trials_from_everywhere(self):
        """Their hashes hold paths of data, which do not depend on where the user stands."""
        self.write("here/models/with_data.yaml", RUN + "data: {train: [{name: a, path: ../data/a}]}\n")
        self.write("here/sweeps/b.yaml", "base: ../models/with_data.yaml\n")
        self.command("sweep", "slurm", "sweeps/b.yaml", "--output", "out")
        trials = [
            line
            for line in self.read("here", "out", "array.sbatch").splitlines()
            if line.startswith(b"trials=")
        ]
        os.makedirs(self.path("here", "below"))
        done = subprocess.run(
            [os.path.join(SCRIPTS, "sweep"), "slurm", "../sweeps/b.yaml", "--output", "out"],
            cwd=self.path("here", "below"),
            capture_output=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(trials[0], self.read("here", "below", "out", "array.sbatch").splitlines())

    def test_a_report_takes_runs_and_writes_pages_there(self):
        for name in ("one", "two"):
            self.write(f"here/runs/{name}/metrics.jsonl", '{"step": 1, "tokens": 5, "loss": 2.5}\n')
            self.write(f"here/runs/{name}/run.json", "{}")
            self.write(f"here/runs/{name}/config.yaml", RUN)
        self.command("report", "runs/one", "runs/two", "-o", "page", "--tables-only")
        self.assertTrue(os.path.exists(self.path("here", "page", "report.html")))


class Program(Folder):
    def test_without_a_program_the_message_says_what_to_do(self):
        self.write("run/metrics.jsonl", '{"step": 1, "tokens": 5, "loss": 2.5}\n')
        self.write("run/run.json", "{}")
        self.write("run/config.yaml", RUN)
        self.write("s.yaml", "base: run/config.yaml\n")
        environment = {**os.environ, "SLUICE": self.path("none")}
        for script, arguments in (
            ("report", [self.path("run"), "-o", self.path("page"), "--tables-only"]),
            ("sweep", [self.path("s.yaml")]),
        ):
            done = subprocess.run(
                [os.path.join(SCRIPTS, script), *arguments], env=environment, capture_output=True, text=True
            )
            self.assertEqual(done.returncode, 66)
            self.assertIn(
                f"no program {self.path('none')}; build it (scripts/build release), or say where it is: SLUICE",
                done.stderr,
            )
            self.assertEqual(done.stderr.count("\n"), 1)

    def test_installed_commands_find_the_program_and_run_where_the_user_stands(self):
        for name in ("sweep", "report"):
            os.makedirs(self.path("share/sluice/scripts"), exist_ok=True)
            shutil.copy(os.path.join(SCRIPTS, name), self.path("share/sluice/scripts", name))
        shutil.copytree(os.path.join(SCRIPTS, "sluice"), self.path("share/sluice/scripts/sluice"))
        self.write("here/one.yaml", RUN)
        self.write("here/s.yaml", "base: one.yaml\nset: {data.train: [{name: a, path: data/a}]}\n")
        os.makedirs(self.path("bin"))
        os.symlink(sluice_program.find(), self.path("bin/sluice"))
        environment = {
            key: value for key, value in os.environ.items() if key not in ("SLUICE", "SLUICE_BINARY")
        }
        done = subprocess.run(
            [self.path("share/sluice/scripts/sweep"), "slurm", "s.yaml"],
            cwd=self.path("here"),
            env=environment,
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        script = self.read("here/runs/sweeps/s/array.sbatch").decode()
        self.assertIn(f"cd {self.path('here')} ", script)
        self.assertIn(f"{self.path('share/sluice/scripts/sweep')} trial", script)


class Style(Folder):
    """scripts/style in a checkout of its own, in which one file was committed unformatted."""

    def setUp(self):
        super().setUp()
        if not all(shutil.which(tool) for tool in ("git", "clang-format", "git-clang-format")):
            self.skipTest("no git or no clang-format")
        for name in ("scripts/style", ".clang-format"):
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            shutil.copy(os.path.join(ROOT, name), self.path(name))
        self.write("a.cpp", "int  old ;\n\nint b;\n")
        self.git("init", "-q")
        self.git("add", ".")
        self.git("-c", "user.name=n", "-c", "user.email=n@n", "commit", "-q", "-m", "one")

    def git(self, *arguments):
        subprocess.run(["git", "-C", self.root, *arguments], check=True, capture_output=True)

    def style(self, *arguments):
        # Python's tools are found in no folder that has these alone.
        tools = self.path("tools")
        os.makedirs(tools, exist_ok=True)
        for tool in ("bash", "env", "git", "clang-format", "git-clang-format", "python3", "grep", "find", "sort", "sed", "head", "cp",
                     "mktemp", "rm", "dirname"):  # fmt: skip
            if not os.path.lexists(os.path.join(tools, tool)):
                # A python3 found by PATH can be a wrapper that itself needs more of PATH.
                os.symlink(sys.executable if tool == "python3" else shutil.which(tool), os.path.join(tools, tool))
        return subprocess.run(
            [self.path("scripts", "style"), *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": tools},
        )

    def test_changed_lines_alone_are_looked_at(self):
        self.write("a.cpp", "int  old ;\n\nint b;\nint c;\n")
        said = self.style()
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        self.assertIn("ruff passed over: not installed", said.stdout)
        self.write("a.cpp", "int  old ;\n\nint b;\nint   c ;\n")
        said = self.style()
        self.assertEqual(said.returncode, 1)
        self.assertIn("+int c;", said.stdout)
        self.assertNotIn("+int old;", said.stdout)

    def test_a_new_file_is_looked_at_and_can_be_fixed(self):
        self.write("b.h", "int   x ;\n")
        self.assertEqual(self.style().returncode, 1)
        self.assertEqual(self.style("--fix").returncode, 0)
        self.assertEqual(self.read("b.h"), b"int x;\n")
        status = subprocess.run(["git", "-C", self.root, "status", "--short"], capture_output=True).stdout
        self.assertIn(b"?? b.h", status)  # the index is left alone

    def test_a_git_clang_format_that_fails_is_an_error(self):
        for fix in ([], ["--fix"]):
            said = self.style(*fix, "no-such-commit")
            self.assertEqual(said.returncode, 1, said.stdout + said.stderr)
            self.assertIn("git-clang-format failed", said.stdout)


# Play fuzz programs: one that finds nothing, and one that keeps an input.
SOUND = """#!/bin/sh
echo "#80 DONE cov: 321 ft: 400 corp: 17/2Kb exec/s: 40 rss: 50Mb"
echo "stat::number_of_executed_units: 80"
echo "stat::average_exec_per_sec:     40"
"""
BROKEN = """#!/bin/sh
for a; do case $a in -artifact_prefix=*) prefix=${a#*=} ;; -*) ;; *) last=$a ;; esac; done
ls "$last" >seen
echo bytes >"${prefix}crash-12"
echo "FINDING: a token lies outside its document"
echo "Test unit written to ${prefix}crash-12"
exit 77
"""


class Fuzz(Folder):
    def setUp(self):
        super().setUp()
        self.write("scripts/fuzz", "")
        shutil.copy(os.path.join(SCRIPTS, "fuzz"), self.path("scripts", "fuzz"))
        self.write("scripts/setup", "#!/bin/sh\n", executable=True)
        for name, program in (("sound", SOUND), ("broken", BROKEN)):
            self.write(f"tests/fuzz/{name}.cpp", "")
            self.write(f"tests/fuzz/seeds/{name}/first", "seed")
            self.write(f"build-fuzz/fuzz_{name}", program, executable=True)

    def fuzz(self, *arguments):
        return subprocess.run(
            [self.path("scripts", "fuzz"), *arguments], capture_output=True, text=True, cwd=self.root
        )

    def test_a_finding_is_named_with_its_input_and_fails(self):
        done = self.fuzz("--seconds", "1")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stdout, r"sound +80 +40 +321 +17 +0")
        self.assertIn("broken: FINDING: a token lies outside its document", done.stdout)
        kept = self.path("build-fuzz/findings/broken-crash-12")
        self.assertIn(f"input: {os.path.realpath(kept)}", done.stdout)
        self.assertEqual(self.read(kept), b"bytes\n")
        self.assertEqual(self.read("seen"), b"first\n")
        self.assertIn("2 programs, 80 executions, 1 findings", done.stdout)

    def test_no_finding_is_success_and_one_program_can_be_chosen(self):
        done = self.fuzz("--only", "sound")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("broken", done.stdout)

    def test_a_program_that_ends_without_a_word_is_a_finding(self):
        self.write("build-fuzz/fuzz_sound", "#!/bin/sh\nexit 3\n", executable=True)
        done = self.fuzz("--only", "sound")
        self.assertEqual(done.returncode, 1)
        self.assertIn("exit code 3", done.stdout)


class Help(unittest.TestCase):
    def test_every_command_says_what_it_does(self):
        for name in sorted(os.listdir(SCRIPTS)):
            path = os.path.join(SCRIPTS, name)
            if os.path.isfile(path) and os.access(path, os.X_OK) and not name.startswith("make_goldens"):
                with self.subTest(name):
                    done = subprocess.run([path, "--help"], capture_output=True, text=True)
                    self.assertIn(f"scripts/{name}", done.stdout + done.stderr)
                    self.assertNotIn("Traceback", done.stderr)


class Build(Folder):
    def test_a_preset_that_is_none_is_refused_with_the_list(self):
        done = subprocess.run([os.path.join(SCRIPTS, "build"), "fast"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 64)
        for preset in ("release", "debug", "asan", "tsan", "cuda", "emulated", "fuzz"):
            self.assertIn(f"  {preset} ", done.stderr)


if __name__ == "__main__":
    unittest.main()
