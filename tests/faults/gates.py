"""scripts/faults gates: every promise of the table in gate_table.py, as often as the time allows, and a table of the outcome.

  scripts/faults gates --folder nightly                the promises of a release, in about five hours
  scripts/faults gates --hours 1.5 --folder nightly    fewer trials of each
  scripts/faults gates --quick                         a few of each, in some minutes
  scripts/faults gates --only P2 --only P17            these alone

FOLDER/gates.txt, gates.md and gates.json are written anew after every promise. The same command goes on with what is not done
yet; --only does it again. The exit code is 1 when a promise was broken.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback

from . import gate_table, harness
from .gate_table import NotRun

HOURS = 5.0
FINAL = ("kept", "BROKEN", "in part")


class OtherGates(Exception):
    """A folder holds the table of another program, or of another length, or is in use."""


class Record:
    """What is known of every gate, and the files that say so."""

    def __init__(self, folder, gates, about):
        self.folder, self.gates = folder, gates
        self.path = os.path.join(folder, "gates.json")
        os.makedirs(folder, exist_ok=True)
        self.lock = open(os.path.join(folder, "lock"), "w")  # until this process ends
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OtherGates(f"gates are being run in {folder}") from None
        self.data = {"about": about, "gates": {}}
        if os.path.exists(self.path):
            with open(self.path) as file:
                self.data = json.load(file)
            was = self.data["about"]
            for key in ("program", "quick"):
                if was[key] != about[key]:
                    raise OtherGates(
                        f"{folder} holds gates of another kind ({key}: {was[key]}, now {about[key]})"
                    )

    def done(self, name):
        return self.data["gates"].get(name, {}).get("outcome") in FINAL

    def spent(self):
        return sum(part["seconds"] for gate in self.data["gates"].values() for part in gate["parts"])

    def put(self, gate, parts, cut_short=False):
        self.data["gates"][gate.name] = {
            "promise": gate.promise,
            "outcome": outcome(parts, cut_short),
            "parts": parts,
        }
        self.write()

    def write(self):
        for name, text in (
            ("gates.json", json.dumps(self.data, indent=1) + "\n"),
            ("gates.txt", self.text()),
            ("gates.md", self.markdown()),
        ):
            path = os.path.join(self.folder, name)
            with open(path + ".new", "w") as file:
                file.write(text)
            os.replace(path + ".new", path)

    def rows(self):
        """(gate, outcome, parts) in the order of the table."""
        known = self.data["gates"]
        for gate in self.gates:
            found = known.get(gate.name, {"outcome": "not done yet", "parts": []})
            yield gate, found["outcome"], found["parts"]

    def counts(self):
        found = {}
        for _, state, _ in self.rows():
            found[state] = found.get(state, 0) + 1
        return ", ".join(f"{count} {state}" for state, count in found.items())

    def heading(self):
        about = self.data["about"]
        return (
            f"seed {about['seed']}; {about['program']}; begun {about['begun']}; "
            f"{self.spent() / 3600:.2f} h of {about['hours']:g} h; limits of time times {about['slack']:g}"
        )

    def text(self):
        lines = [f"{'':<4} {'outcome':<12} {'trials':>14} {'failed':>6} {'time':>8}  what"]
        for gate, state, parts in self.rows():
            if not parts:
                lines.append(f"{gate.name:<4} {state:<12} {'':>14} {'':>6} {'':>8}  {gate.promise}")
            for i, part in enumerate(parts):
                begin = f"{gate.name:<4} {state:<12}" if i == 0 else f"{'':<4} {'':<12}"
                if part["outcome"] == "not run":
                    lines.append(f"{begin} {'not run':>14} {'':>6} {'':>8}  {part['what']}: {part['reason']}")
                    continue
                seconds = f"{part['seconds']:.0f} s"
                lines.append(
                    f"{begin} {number(part):>14} {len(part['failures']):>6} {seconds:>8}  {part['what']}"
                )
                if part["figures"]:
                    lines.append(" " * 50 + figures(part))
        return "\n".join([*lines, "", self.counts(), self.heading()]) + "\n"

    def markdown(self):
        lines = ["# Release gates", "", self.heading() + ".", "", self.counts() + ".", ""]
        lines += [
            "| | promise | outcome | checks: trials (of a release's), failed, seconds |",
            "|---|---|---|---|",
        ]
        for gate, state, parts in self.rows():
            cells = [
                f"{part['what']}: not run, {part['reason']}"
                if part["outcome"] == "not run"
                else f"{part['what']}: {number(part)}, {len(part['failures'])} failed, {part['seconds']:.0f} s"
                + (f"; {figures(part)}" if part["figures"] else "")
                for part in parts
            ]
            text = "<br>".join(cells).replace("|", "\\|")
            lines.append(f"| {gate.name} | {gate.promise} | {state} | {text} |")
        for gate, _, parts in self.rows():
            for part in parts:
                for failure in part["failures"]:
                    lines += ["", f"## {gate.name}: {part['what']}", "", "```", failure, "```"]
        return "\n".join(lines) + "\n"


def number(part):
    """How many of what the release asks for."""
    asked = part["release"]
    return f"{part['count']} of {asked}" if asked and part["count"] < asked else f"{part['count']}"


def figures(part):
    return "  ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in part["figures"].items()
    )


def outcome(parts, cut_short=False):
    """Of a gate, by those of its parts. What was not run is never kept."""
    states = [part["outcome"] for part in parts]
    if "broken" in states:
        return "BROKEN"
    if cut_short or not states:
        return "cut short"
    if all(state == "not run" for state in states):
        return "not run"
    return "in part" if "not run" in states else "kept"


def not_run(part, reason):
    return {"what": part.what, "outcome": "not run", "reason": reason, "seconds": 0.0, "failures": []}


def fail(tally, what):
    """A failure that is no trial's."""
    tally.failures.append(what)
    print(f"FAILED {tally.name}: {what}", file=sys.stderr, flush=True)


def run_part(part, options, folder, seconds):
    """One check in its own world; `seconds`: its share of the time, or None."""
    for need in part.needs:
        reason = need(options)
        if reason:
            return not_run(part, reason)
    mine = argparse.Namespace(**{**vars(options), **part.options, "folder": folder})
    tally = harness.Tally(part.what)
    tally.began = time.monotonic()
    interrupted = False
    try:
        world = harness.World(mine)
        world.least = part.quick
        world.deadline = None if seconds is None else tally.began + seconds
        part.run(world, tally, part.quick if options.quick else part.release)
    except NotRun as reason:
        return not_run(part, str(reason))
    except harness.Failure as failure:
        fail(tally, str(failure))
    except KeyboardInterrupt:
        interrupted = True
        harness.destroy_all()
    except Exception:  # of the check itself: what it would have shown is not shown
        fail(tally, traceback.format_exc())
    count = tally.figures.get(part.unit, 0) if part.unit else tally.trials
    if not count and not tally.failures and not interrupted:
        fail(tally, "nothing was tried")
    if not tally.failures:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "what": part.what,
        "outcome": "broken" if tally.failures else "cut short" if interrupted else "kept",
        "interrupted": interrupted,
        "count": count,
        "release": part.release if part.release < gate_table.ALL else 0,
        "failures": tally.failures,
        "figures": {k: v for k, v in tally.figures.items() if k != part.unit},
        "seconds": time.monotonic() - tally.began,
    }


def interrupt(_number, _frame):
    raise KeyboardInterrupt


def run(options, gates=gate_table.GATES):
    unknown = [name for name in options.only if name not in {gate.name for gate in gates}]
    if unknown:
        print(
            f"faults: --only {unknown[0]}: one of {', '.join(gate.name for gate in gates)}", file=sys.stderr
        )
        return 64
    signal.signal(signal.SIGTERM, interrupt)
    options.folder = os.path.abspath(options.folder or tempfile.mkdtemp(prefix="sluice-gates-"))
    options.mutants = options.mutants or os.path.join(options.folder, "mutants")
    about = {
        "seed": options.seed,
        "program": harness.version_of(options.binary),
        "quick": options.quick,
        "hours": options.hours,
        "slack": options.slack,
        "begun": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    try:
        record = Record(options.folder, gates, about)
    except OtherGates as problem:
        print(f"faults: {problem}; take another --folder", file=sys.stderr)
        return 64
    options.seed = record.data["about"]["seed"]  # of the first call
    record.data["about"]["hours"] = options.hours
    record.write()
    todo = [
        gate for gate in gates if (gate.name in options.only if options.only else not record.done(gate.name))
    ]
    # Mutants last: while they build, nothing else is lost if the time ends.
    todo.sort(key=lambda gate: gate.name == "P22")
    begun, before = time.monotonic(), record.spent()
    waiting = [part for gate in todo for part in gate.parts]
    cut_short = False
    for gate in todo:
        print(f"{gate.name}: {gate.promise}", flush=True)
        parts = []
        for i, part in enumerate(gate.parts):
            left = options.hours * 3600 - before - (time.monotonic() - begun)
            share = max(0.0, left) * part.minutes / sum(p.minutes for p in waiting)
            waiting.remove(part)
            folder = os.path.join(options.folder, "work", f"{gate.name}-{i}")
            result = run_part(part, options, folder, None if options.quick else share)
            cut_short = result.get("interrupted", False)
            parts.append(result)
            said = result.get("reason") or f"{number(result)} {part.unit or 'trials'}  {figures(result)}"
            print(f"  {result['outcome']:<9} {part.what}: {said}", flush=True)
            if cut_short:
                break
        record.put(gate, parts, cut_short)
        if cut_short:
            break
    print("\n" + record.text() + f"table: {options.folder}/gates.md", flush=True)
    broken = any(state == "BROKEN" for _, state, _ in record.rows())
    return 1 if broken else 130 if cut_short else 0
