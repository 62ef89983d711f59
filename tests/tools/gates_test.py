#!/usr/bin/env python3
"""scripts/faults gates, with gates made for this: what is broken, not run or cut short is told and counted as such, the table is there
after every gate, a second call goes on; and the explorer of crash states finds what a missing fsync loses. Standard library alone; the
program is played by a shell script.
"""

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import unittest
import unittest.mock

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
from faults import gate_table, gates, power
from faults.gate_table import Gate, NotRun, Part
from faults.harness import Failure

PROGRAM = "#!/bin/sh\necho 'sluice 9.9'; echo '  commit  abc'\n"


class Gates(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.program = os.path.join(self.temporary.name, "sluice")
        with open(self.program, "w") as file:
            file.write(PROGRAM)
        os.chmod(self.program, 0o755)
        self.folder = os.path.join(self.temporary.name, "table")
        self.ran, self.seeds = [], []

    def options(self, **more):
        given = {
            "only": [],
            "folder": self.folder,
            "mutants": None,
            "binary": self.program,
            "seed": 3,
            "hours": 1.0,
            "slack": 1.0,
            "quick": False,
            "layout": [],
            "ranks": "2",
            "model": "dense",
        }
        return argparse.Namespace(**{**given, **more})

    def part(self, name, body=None, **more):
        def run(world, tally, count):
            self.ran.append(name)
            self.seeds.append(world.options.seed)
            for n in world.turns(count):
                tally.trial(f"trial {n}", (lambda: body(n)) if body else (lambda: None))

        return Part(name, run, more.pop("release", 5), 2, more.pop("minutes", 1), **more)

    def gate(self, name, *parts):
        return Gate(name, f"the promise of {name}", parts)

    def call(self, table, **more):
        """(exit code, gates.json, what was printed)"""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = gates.run(self.options(**more), table)
        with open(os.path.join(self.folder, "gates.json")) as file:
            return code, json.load(file)["gates"], said.getvalue()

    def table(self, suffix):
        with open(os.path.join(self.folder, f"gates.{suffix}")) as file:
            return file.read()

    def test_all_kept(self):
        code, data, _ = self.call([self.gate("P1", self.part("a"), self.part("b"))])
        self.assertEqual(code, 0)
        self.assertEqual(data["P1"]["outcome"], "kept")
        self.assertEqual([part["count"] for part in data["P1"]["parts"]], [5, 5])

    def test_a_broken_promise_is_exit_code_1_and_the_next_gate_is_run(self):
        def fails(n):
            if n == 3:
                raise Failure("three is too much")

        code, data, said = self.call(
            [self.gate("P1", self.part("a", fails)), self.gate("P2", self.part("b"))]
        )
        self.assertEqual(code, 1)
        self.assertEqual([data[p]["outcome"] for p in ("P1", "P2")], ["BROKEN", "kept"])
        self.assertEqual(data["P1"]["parts"][0]["count"], 5)
        for text in (said, self.table("md")):
            self.assertIn("trial 3: three is too much", text)
        # A later call that runs nothing still says so.
        self.assertEqual(self.call([self.gate("P1", self.part("a", fails))])[0], 1)

    def test_a_check_that_cannot_work_has_shown_nothing(self):
        def wrong(_world, _tally, _count):
            raise KeyError("a mistake in the check")

        def idle(_world, _tally, _count):
            pass

        code, data, _ = self.call(
            [self.gate("P1", Part("a", wrong, 1, 1, 1)), self.gate("P2", Part("b", idle, 1, 1, 1))]
        )
        self.assertEqual(code, 1)
        self.assertEqual([data[p]["outcome"] for p in ("P1", "P2")], ["BROKEN", "BROKEN"])
        self.assertIn("a mistake in the check", data["P1"]["parts"][0]["failures"][0])

    def test_what_cannot_run_is_not_kept(self):
        def late(_world, _tally, _count):
            raise NotRun("no time")

        lacking = {"needs": (lambda _options: "no mpirun",)}
        table = [
            self.gate("P1", self.part("a", **lacking)),
            self.gate("P2", self.part("b", **lacking), self.part("c")),
            self.gate("P3", Part("d", late, 1, 1, 1)),
        ]
        code, data, _ = self.call(table)
        self.assertEqual(code, 0)
        self.assertEqual([data[g.name]["outcome"] for g in table], ["not run", "in part", "not run"])
        self.assertIn("a: no mpirun", self.table("txt"))
        self.assertIn("d: no time", self.table("txt"))
        self.assertEqual(self.ran, ["c"])
        # What was not run is tried again, what was run is not.
        code, data, _ = self.call([self.gate("P1", self.part("a")), *table[1:]])
        self.assertEqual(data["P1"]["outcome"], "kept")
        self.assertEqual(self.ran, ["c", "a"])

    def test_a_run_that_is_cut_short_has_its_table_and_goes_on(self):
        def stops(_n):
            raise KeyboardInterrupt

        first = self.gate("P1", self.part("a"))
        last = self.gate("P3", self.part("c"))
        code, data, _ = self.call([first, self.gate("P2", self.part("b", stops)), last])
        self.assertEqual(code, 130)
        self.assertEqual([data[p]["outcome"] for p in ("P1", "P2")], ["kept", "cut short"])
        for line in self.table("txt").splitlines():
            if line.startswith("P3"):
                self.assertIn("not done yet", line)
        code, data, _ = self.call([first, self.gate("P2", self.part("b")), last], seed=99)
        self.assertEqual(code, 0)
        self.assertEqual([data[p]["outcome"] for p in ("P1", "P2", "P3")], ["kept"] * 3)
        self.assertEqual(self.ran, ["a", "b", "b", "c"])
        self.assertIn("seed 3;", self.table("txt"))
        self.assertEqual(set(self.seeds), {3})
        self.assertEqual(self.call([first, last], only=["P1"])[0], 0)
        self.assertEqual(self.ran[-1], "a")

    def test_what_was_broken_before_it_was_cut_short_is_broken_and_ends_the_run(self):
        def stops(n):
            if n == 0:
                raise Failure("the first")
            raise KeyboardInterrupt

        code, data, _ = self.call([self.gate("P1", self.part("a", stops)), self.gate("P2", self.part("b"))])
        self.assertEqual((code, self.ran), (1, ["a"]))
        self.assertEqual(data["P1"]["outcome"], "BROKEN")

    def test_the_table_is_there_after_every_gate(self):
        seen = []

        def look(_n):
            seen.append(json.loads(self.table("json"))["gates"].get("P1", {}).get("outcome"))

        self.call([self.gate("P1", self.part("a")), self.gate("P2", self.part("b", look, release=1))])
        self.assertEqual(seen, ["kept"])

    def test_time_is_shared_and_the_least_is_done_without_any(self):
        shares = []

        def note(world, tally, count):
            shares.append(world.deadline - tally.began)
            for n in world.turns(count):
                tally.trial(str(n), lambda: None)

        table = [self.gate("P1", Part("a", note, 50, 2, 3)), self.gate("P2", Part("b", note, 50, 2, 1))]
        self.call(table, hours=1.0)
        self.assertAlmostEqual(shares[0], 2700, delta=60)
        self.assertAlmostEqual(shares[1], 3600, delta=60)  # what the first left
        self.folder += "-2"
        _, data, _ = self.call(table, hours=0.0)
        self.assertEqual([data[p]["parts"][0]["count"] for p in ("P1", "P2")], [2, 2])
        self.assertIn("2 of 50", self.table("txt"))

    def test_turns_of_several_trials_end_with_the_least_of_them(self):
        def steps(world, tally, count):
            for n in world.turns(count, 250):
                tally.trial(str(n), lambda: tally.add("steps", 250))

        part = Part("a", steps, 10_000, 300, 1, "steps")
        _, data, _ = self.call([self.gate("P1", part)], hours=0.0)
        self.assertEqual(data["P1"]["parts"][0]["count"], 500)
        self.folder += "-2"
        _, data, _ = self.call([self.gate("P1", part)], hours=1.0)
        self.assertEqual(data["P1"]["parts"][0]["count"], 10_000)

    def test_another_program_is_another_table(self):
        self.call([self.gate("P1", self.part("a"))])
        with open(self.program, "w") as file:
            file.write(PROGRAM.replace("abc", "def"))
        code, data, said = self.call([self.gate("P1", self.part("a"))])
        self.assertEqual((code, self.ran), (64, ["a"]))
        self.assertIn("sluice 9.9 def", said)

    def test_two_at_once_in_one_folder_are_refused(self):
        def again(_n):
            self.assertEqual(self.call([self.gate("P1", self.part("b"))])[0], 64)

        self.assertEqual(self.call([self.gate("P1", self.part("a", again, release=1))])[0], 0)
        self.assertEqual(self.ran, ["a"])

    def test_a_count_of_nothing_has_shown_nothing(self):
        code, data, _ = self.call([self.gate("P1", self.part("a", unit="kills"))])
        self.assertEqual((code, data["P1"]["outcome"]), (1, "BROKEN"))

    def test_a_gate_that_does_not_exist(self):
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(gates.run(self.options(only=["P99"])), 64)

    def test_the_promises_are_all_there(self):
        self.assertEqual([gate.name for gate in gate_table.GATES], [f"P{n}" for n in range(1, 24)])
        for gate in gate_table.GATES:
            self.assertTrue(gate.promise.endswith(".") and gate.parts, gate.name)
            for part in gate.parts:
                self.assertTrue(0 < part.quick and 0 < part.release and 0 < part.minutes, part.what)

    def test_a_filter_that_matches_nothing_is_a_failure(self):
        with open(self.program, "w") as file:
            file.write("#!/bin/sh\necho 'No tests ran'\n")
        world = argparse.Namespace(binary=self.program)
        with self.assertRaises(Failure):
            gate_table.run_tests(world, gates.harness.Tally("tests"), [self.program, "[nothing]"])

    def test_fuzz_programs_count_by_their_executions(self):
        os.mkdir(os.path.join(self.temporary.name, "scripts"))
        script = os.path.join(self.temporary.name, "scripts", "fuzz")
        world = argparse.Namespace(deadline=None, options=self.options(quick=True))
        for code, ending in ((0, "0 findings"), (1, "1 findings")):
            with open(script, "w") as file:
                file.write(f"#!/bin/sh\necho '9 programs, 1,234 executions, {ending}'; exit {code}\n")
            os.chmod(script, 0o755)
            tally = gates.harness.Tally("fuzz")
            with unittest.mock.patch.object(gate_table, "SOURCE", self.temporary.name):
                if code:
                    with self.assertRaises(Failure):
                        gate_table.fuzz(world, tally, 1)
                else:
                    gate_table.fuzz(world, tally, 1)
            self.assertEqual(tally.figures["executions"], 1234)


class PowerLoss(unittest.TestCase):
    """A file that is replaced in the way of checkpoints: written aside, synced, renamed."""

    def states(self, calls, model):
        """All that a crash may leave at any moment, as sets of (path, content)."""
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "x"), "w") as file:
                file.write("old")
            disk = power.Disk(folder)
            found = set()
            for call, path, other, data in calls:
                places = [os.path.join(folder, p) if p is not None else "" for p in (path, other)]
                disk.apply(call, *places, 0, data)
                moment = disk.moment(0)
                for candidate in moment.candidates(random.Random(1)):
                    if candidate[0] == model:
                        for seed in range(20):
                            found.add(frozenset(moment.state(random.Random(seed), *candidate).items()))
            return found

    CREATE = ("create", "t", None, b"")
    WRITE = ("write", "t", None, b"newer")
    SYNC = ("sync", "t", None, b"")
    RENAME = ("rename", "t", "x", b"")
    FOLDER = ("sync", "", None, b"")

    def contents(self, calls, model):
        return {dict(state).get("x") for state in self.states(calls, model)}

    def test_the_right_order_leaves_the_old_or_the_new(self):
        for model in ("ordered", "weak"):
            calls = [self.CREATE, self.WRITE, self.SYNC, self.RENAME, self.FOLDER]
            self.assertEqual(self.contents(calls, model), {b"old", b"newer"})

    def test_without_sync_of_the_file_it_may_be_empty_torn_or_zeros(self):
        for model in ("ordered", "weak"):
            found = self.contents([self.CREATE, self.WRITE, self.RENAME, self.FOLDER], model)
            self.assertEqual(found, {b"old", b"newer", b"", b"ne", b"\0" * 5})

    def test_a_name_is_durable_after_the_sync_of_its_folder_alone(self):
        done = [self.CREATE, self.WRITE, self.SYNC, self.RENAME]
        last = self.states([*done, self.FOLDER], "ordered") - self.states(done, "ordered")
        self.assertEqual(last, set())  # nothing new is possible
        with tempfile.TemporaryDirectory() as folder:
            disk = power.Disk(folder)
            for call, path, other, data in [*done, self.FOLDER]:
                disk.apply(call, os.path.join(folder, path), os.path.join(folder, other or ""), 0, data)
            moment = disk.moment(0)
            for candidate in moment.candidates(random.Random(1)):
                self.assertEqual(moment.state(random.Random(1), *candidate), {"x": b"newer"})

    def test_weak_names_come_in_any_choice_ordered_ones_in_order(self):
        calls = [("create", "a", None, b""), ("create", "b", None, b"")]

        def names(model):
            return {frozenset(p for p, _ in state) - {"x"} for state in self.states(calls, model)}

        none, a, b, both = frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")
        self.assertEqual(names("ordered"), {none, a, both})
        self.assertEqual(names("weak"), {none, a, b, both})


if __name__ == "__main__":
    unittest.main()
