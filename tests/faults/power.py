"""Power loss (P2): every state of the disk that a crash of the machine may leave behind, given to the real program.

A training with two saves is recorded by recorder.cpp: each call that changes the run's folder, with its bytes. A crash after any of
them keeps what fsync has made durable, and any part of the rest that a file system may have written by itself:

  ordered  names (files made, renamed, removed) in their order up to some point; of bytes not synced nothing, half, zeros in their
           place, or all
  weak     any of the names, in any choice; of each file's bytes the same four, each file by itself

A state is good if the newest whole checkpoint in it is at least as new as the last one that the program had reported as saved: that
is looked at in every state. Of as many as there is time for, drawn at random, also if `sluice checkpoint verify` finds the same one,
and of one in eight of these if the training goes on from it to its end with equal bits.
"""

import math
import os
import re
import shutil
import subprocess
import time

from .harness import SOURCE, Failure, Start, saved_step

KEYS = ["train.max_steps=20"]
BASE = 10  # steps that are saved before the recording begins
RESUME_EVERY = 8  # of so many states one is trained to the end; all are looked at by `checkpoint verify`
SUBSETS = 64  # choices of names at one moment, of the weak model
AMOUNTS = ("none", "half", "zeros", "all")


def compiler():
    return next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)


class Disk:
    """What is in a folder, what of it is durable, and what a crash may leave of the rest. Directories and files are numbers; `names`
    maps a directory to its entries."""

    def __init__(self, folder, obeyed=("files", "folders")):
        self.folder, self.obeyed = folder, obeyed
        self.names, self.data, self.safe = {}, {}, {}
        self.count = 0
        self.root = self.read(folder)
        # Of both models: names that are durable, and the changes since, each [(directory, name, what it is now, what it was)].
        self.durable = {model: {d: dict(e) for d, e in self.names.items()} for model in ("ordered", "weak")}
        self.pending = {"ordered": [], "weak": []}

    def new(self):
        self.count += 1
        return self.count

    def read(self, path):
        number = self.new()
        if os.path.isdir(path):
            self.names[number] = {n: self.read(os.path.join(path, n)) for n in sorted(os.listdir(path))}
        else:
            with open(path, "rb") as file:
                self.data[number] = self.safe[number] = file.read()
        return number

    def find(self, path):
        number = self.root
        for part in os.path.relpath(path, self.folder).split("/"):
            if part != ".":
                number = self.names.get(number, {}).get(part)
        return number

    def place(self, path):
        return self.find(os.path.dirname(path)), os.path.basename(path)

    def change(self, settings):
        for directory, name, now, was in settings:
            set_name(self.names, directory, name, now, was)
        for model in self.pending.values():
            model.append(settings)

    def apply(self, call, path, other, offset, data):
        if call in ("create", "mkdir"):
            number = self.new()
            if call == "create":
                self.data[number] = self.safe[number] = b""
            else:
                self.names[number] = {}
                for model in self.durable.values():
                    model[number] = {}
            self.change([(*self.place(path), number, None)])
        elif call == "write":
            number = self.find(path)
            if number is not None:  # else a file that is removed already
                old = self.data[number].ljust(offset, b"\0")
                self.data[number] = old[:offset] + data + old[offset + len(data) :]
        elif call == "truncate":
            number = self.find(path)
            self.data[number] = self.data[number][:offset].ljust(offset, b"\0")
        elif call == "remove":
            self.change([(*self.place(path), None, self.find(path))])
        elif call == "rename":
            number = self.find(path)
            self.change([(*self.place(other), number, None), (*self.place(path), None, number)])
        elif call == "swap":
            a, b = self.find(path), self.find(other)
            self.change([(*self.place(path), b, None), (*self.place(other), a, None)])
        elif call == "sync":
            number = self.find(path)
            if number in self.data and "files" in self.obeyed:
                self.safe[number] = self.data[number]
            if number in self.names and "folders" in self.obeyed:
                self.sync_folder(number)

    def sync_folder(self, number):
        touching = [i for i, s in enumerate(self.pending["ordered"]) if any(d == number for d, *_ in s)]
        upto = touching[-1] + 1 if touching else 0
        for settings in self.pending["ordered"][:upto]:
            for setting in settings:
                set_name(self.durable["ordered"], *setting)
        del self.pending["ordered"][:upto]
        rest = []
        for settings in self.pending["weak"]:
            if any(d == number for d, *_ in settings):
                for setting in settings:
                    set_name(self.durable["weak"], *setting)
            else:
                rest.append(settings)
        self.pending["weak"] = rest

    def moment(self, reported):
        return Moment(
            self.root,
            {m: {d: dict(e) for d, e in names.items()} for m, names in self.durable.items()},
            {m: list(p) for m, p in self.pending.items()},
            dict(self.data),
            dict(self.safe),
            reported,
        )

    def files(self, number):
        return {name: self.data[n] for name, n in self.names[number].items() if n in self.data}


def set_name(names, directory, name, now, was):
    entries = names.setdefault(directory, {})
    if now is not None:
        entries[name] = now
    elif entries.get(name) == was:
        entries.pop(name, None)


class Moment:
    """A crash comes now."""

    def __init__(self, root, durable, pending, data, safe, reported):
        self.root, self.durable, self.pending, self.data, self.safe = root, durable, pending, data, safe
        self.reported = reported
        self.unsynced = [n for n in data if data[n] is not safe[n] and data[n] != safe[n]]

    def candidates(self, random):
        """(model, changes of names that are kept, amount of data or None for a choice per file)"""
        pending = len(self.pending["ordered"])
        for cut in range(pending + 1):
            for amount in AMOUNTS if self.unsynced else AMOUNTS[-1:]:
                yield "ordered", range(cut), amount
        pending = len(self.pending["weak"])
        if 2**pending <= SUBSETS:
            chosen = [[i for i in range(pending) if bits >> i & 1] for bits in range(2**pending)]
        else:
            chosen = [[i for i in range(pending) if random.random() < 0.5] for _ in range(SUBSETS)]
        for subset in chosen:
            for _ in range(2 if self.unsynced else 1):
                yield "weak", subset, None

    def bytes_of(self, number, amount):
        safe, data = self.safe[number], self.data[number]
        if amount == "all" or data == safe:
            return data
        if amount == "none":
            return safe
        if amount == "half":
            return data[: (len(safe) + len(data)) // 2]
        return safe + b"\0" * (len(data) - len(safe))

    def state(self, random, model, kept, amount):
        """{path: bytes, or None for a folder}"""
        names = {d: dict(e) for d, e in self.durable[model].items()}
        for i in kept:
            for setting in self.pending[model][i]:
                set_name(names, *setting)
        amounts = {n: amount or random.choice(AMOUNTS) for n in self.unsynced}
        found = {}

        def walk(directory, prefix, above):
            for name, number in names.get(directory, {}).items():
                if number in self.data:
                    found[prefix + name] = self.bytes_of(number, amounts.get(number, "all"))
                elif number not in above:
                    found[prefix + name] = None
                    walk(number, prefix + name + "/", above | {number})

        walk(self.root, "", {self.root})
        return found


def records(path):
    with open(path, "rb") as file:
        while line := file.readline():
            call, name, other, offset, count = line.decode().rstrip("\n").split("\t")
            yield call, name, other, int(offset), file.read(int(count))


def checkpoints_in(state):
    """{step: {file: bytes}} of the folders step_N."""
    found = {}
    for path, data in state.items():
        match = re.fullmatch(r"ckpt/step_(\d+)(?:/(.*))?", path)
        if match:
            files = found.setdefault(int(match[1]), {})
            if match[2]:
                files[match[2]] = data
    return found


class Recording:
    """One training that was recorded, and the moments of it."""

    def __init__(self, world, library, ranks, keys, occupied):
        self.keys = keys
        run = world.run_folder("recorded")
        Start(world, run, 0, [*KEYS, "checkpoint.async=false"], {"SLUICE_EXIT": f"0:{BASE + 1}:0"}).wait()
        if saved_step(run) != BASE:
            raise Failure(f"the run to record has step {saved_step(run)}")
        if occupied:  # the next checkpoint finds a damaged one in its place
            ckpt = os.path.join(run, "ckpt")
            shutil.copytree(os.path.join(ckpt, "step_00000005"), os.path.join(ckpt, "step_00000015"))
        self.begin = Disk(run)
        self.genuine = {
            step: files
            for step, files in checkpoints_in(self.begin.moment(BASE).state(world.random, "ordered", [], "all")).items()
            if step <= BASE
        }  # fmt: skip
        trace = os.path.join(world.folder, "record")
        if os.path.exists(trace):
            os.remove(trace)
        environment = {"LD_PRELOAD": library, "RECORDER_FOLDER": run, "RECORDER_FILE": trace}
        start = Start(world, run, ranks, [*KEYS, *keys], environment)
        if start.wait() != 0:
            raise Failure(f"the recorded training failed\n{start.tail()}")
        self.records = list(records(trace))
        self.moments = self.replay(("files", "folders"), learn=True)
        if {"sync", "rename", "say"} - {call for call, *_ in self.records}:
            raise Failure(f"{len(self.records)} calls were recorded, not all kinds among them")
        if max(m.reported for m in self.moments) != 20:
            raise Failure("the program did not report its last checkpoint")

    def replay(self, obeyed, learn=False):
        """The moments after each call; `obeyed`: what fsync is believed to do."""
        disk = Disk.__new__(Disk)
        begin = self.begin
        disk.folder, disk.obeyed, disk.count, disk.root = begin.folder, obeyed, begin.count, begin.root
        disk.names = {d: dict(e) for d, e in begin.names.items()}
        disk.data, disk.safe = dict(begin.data), dict(begin.safe)
        disk.durable = {m: {d: dict(e) for d, e in n.items()} for m, n in begin.durable.items()}
        disk.pending = {"ordered": [], "weak": []}
        reported, moments = BASE, []
        for call, path, other, offset, data in self.records:
            if call == "say":
                steps = [int(n) for n in re.findall(rb"saved step (\d+)", data)]
                reported = max([reported, *steps])
            else:
                published = re.search(r"/ckpt/step_(\d+)$", other)
                if learn and published and call in ("rename", "swap"):
                    self.genuine[int(published[1])] = disk.files(disk.find(path))
                disk.apply(call, path, other, offset, data)
            moments.append(disk.moment(reported))
        return moments

    def newest(self, state):
        """Step of the newest checkpoint that is byte for byte one that was saved; 0 without one."""
        return max(
            (s for s, files in checkpoints_in(state).items() if s in self.genuine and files == self.genuine[s]),
            default=0,
        )  # fmt: skip


def write_state(folder, state):
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for path, data in state.items():  # folders come before what is in them
        if data is None:
            os.mkdir(os.path.join(folder, path))
        else:
            with open(os.path.join(folder, path), "wb") as file:
                file.write(data)


def verified(world, folder):
    """The step of the newest checkpoint that the program calls whole; 0 without one."""
    done = world.sluice("checkpoint", "verify", folder, check=False)
    steps = [int(n) for n in re.findall(r"^whole .*  step (\d+)$", done.stdout, re.M)]
    if done.returncode not in (0, 65, 66):
        raise Failure(f"checkpoint verify: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return max(steps, default=0)


def resumed(world, recording, folder, step):
    start = Start(world, folder, world.random.choice((0, 0, 0, 2)), [*KEYS, *recording.keys])
    code = start.wait()
    if code != 0:
        raise Failure(f"not continued: exit code {code}\n{start.tail()}")
    found = re.findall(r"\(step (\d+)\)|is finished: step (\d+) of", start.text())
    if not found or int("".join(found[0])) != step:
        raise Failure(f"continued from {found}, and step {step} is whole\n{start.tail()}")
    done = world.sluice("checkpoint", "diff", world.reference(KEYS), folder, check=False)
    if done.returncode != 0:
        raise Failure(f"other bits after the crash: {done.stdout}{done.stderr}")
    world.require_tidy(folder)


def survey(world, tally, recording, until):
    """All states of one recording, or as many as there is time for: is what was reported as saved in them?"""
    moments = list(recording.moments)
    world.random.shuffle(moments)
    seen = set()
    for moment in moments[: 20 if world.options.quick else None]:
        if time.monotonic() > until:
            break
        for candidate in moment.candidates(world.random):
            state = moment.state(world.random, *candidate)
            seen.add(hash(frozenset(state.items())))
            step = recording.newest(state)
            if step < moment.reported:
                raise Failure(
                    f"{candidate[0]}, names {list(candidate[1])}, data {candidate[2]}: step {moment.reported} was reported as "
                    f"saved, and {step} is the newest whole one"
                )
    tally.add("states", len(seen))


def explore(world, tally, recording, seen, verdicts, most, until):
    """Tries states of one recording until there are `most` in all, or the clock says `until`."""
    candidates = [(m, c) for m in recording.moments for c in m.candidates(world.random)]
    world.random.shuffle(candidates)
    folder = os.path.join(world.folder, "after-power-loss")
    for moment, candidate in candidates:
        if tally.trials >= most or time.monotonic() > until:
            return
        state = moment.state(world.random, *candidate)
        key = hash(frozenset(state.items()))
        if key in seen:
            continue
        seen.add(key)

        def trial():
            step = recording.newest(state)
            if step < moment.reported:
                raise Failure(
                    f"step {moment.reported} was reported as saved, and {step} is the newest whole one"
                )
            part = hash(frozenset(i for i in state.items() if i[0].startswith("ckpt/")))
            full = tally.trials % RESUME_EVERY == 0
            if full or part not in verdicts:
                write_state(folder, state)
            if part not in verdicts:
                verdicts[part] = verified(world, folder)
                tally.add("states of checkpoints verified")
            if verdicts[part] != step:
                raise Failure(f"the program finds step {verdicts[part]} whole, and it is {step}")
            if full:
                resumed(world, recording, folder, step)
                tally.add("resumed to the end")
            tally.add("older than the newest" if step < max(recording.genuine) else "the newest")

        tally.add(candidate[0])
        tally.trial(f"{candidate[0]}, names {list(candidate[1])}, data {candidate[2]}", trial)


def control(world, tally, recording):
    """Without syncs of files, or of folders, the explorer finds what is lost."""
    for obeyed in (("files",), ("folders",)):
        bad = 0
        for moment in recording.replay(obeyed)[:: 5 if world.options.quick else 1]:
            for candidate in moment.candidates(world.random):
                bad += recording.newest(moment.state(world.random, *candidate)) < moment.reported
        if not bad:
            raise Failure(f"with syncs of {obeyed[0]} alone no state is bad: the explorer is blind")
        tally.figures[f"bad with syncs of {obeyed[0]} alone"] = bad


def check(world, tally, count):
    if compiler() is None:
        tally.figures["skipped"] = "no C++ compiler"
        return
    library = os.path.join(world.folder, "recorder.so")
    source = os.path.join(SOURCE, "tests", "faults", "recorder.cpp")
    command = [
        compiler(),
        "-std=c++20",
        "-D_GNU_SOURCE",
        "-O1",
        "-shared",
        "-fPIC",
        source,
        "-o",
        library,
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"the recorder does not compile: {done.stderr}")
    ways = [
        (ranks, [f"checkpoint.async={background}", f"checkpoint.keep_last={keep}"], occupied)
        for ranks in (0, 2, 3)
        for background in ("true", "false")
        for keep in (1, 2)
        for occupied in (False, True)
    ]
    world.random.shuffle(ways)
    if world.options.quick:
        ways = ways[:3]
    seen, verdicts = set(), {}
    for n, (ranks, keys, occupied) in enumerate(ways):
        if tally.trials >= count or not world.more(tally.trials):
            break
        recording = Recording(world, library, ranks, keys, occupied)
        tally.add("trainings recorded")
        tally.add("calls", len(recording.records))
        if n == 0:
            tally.trial("the explorer itself", lambda: control(world, tally, recording))
        # Each kind of training has its share of states and of time.
        most, until = tally.trials + max(1, (count - tally.trials) // (len(ways) - n)), math.inf
        if world.deadline is not None:
            most = max(most, world.least)
            until = time.monotonic() + max(10, (world.deadline - time.monotonic()) / (len(ways) - n))
        surveyed = min(until, time.monotonic() + (until - time.monotonic()) / 4)
        tally.trial("all states", lambda: survey(world, tally, recording, surveyed))
        explore(world, tally, recording, seen, verdicts, most, until)
