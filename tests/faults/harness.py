"""What all checks of scripts/faults share: a tiny training, ranks under mpirun, who is alive, are two runs equal bit for bit."""

import glob
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MPIRUN = os.path.join(SOURCE, "tests", "support", "mpirun")
LAUNCH = os.path.join(SOURCE, "scripts", "launch")
TAG = "SLUICE_FAULTS_TAG"  # every process of a start carries it, so that orphans are found under any parent

CONFIG = """name: tiny
model:
  hidden_size: 16
  num_hidden_layers: {layers}
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 8
  intermediate_size: 24
  attention: {{gates: [{{position: sdpa_output}}]}}
{moe}data:
  seq_len: 16
  train: [{{name: tiny, path: train}}]
  validation: [{{name: held, path: held}}]
train: {{micro_batch_size: 1, global_batch_size: 12, max_steps: 100, threads: 1}}
optimizer: {{lr: 1e-2}}
parallel: {{determinism: exact, exact_sum: fixed64, timeout_seconds: 30}}
checkpoint: {{every_steps: 5, every_minutes: 0, async: true}}
log: {{every_steps: 10, bits: 5, tensorboard: false}}
"""
MOE = """  moe: {num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8, load_balance: {scope: micro_batch}}
"""


class Failure(Exception):
    """A promise that was not kept."""


def processes(tag):
    """{pid: (rank or None, state)} of every living process that carries the tag."""
    found = {}
    wanted = f"{TAG}={tag}".encode()
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            if wanted not in variables:
                continue
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state in "ZX":
            continue
        rank = [v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
        found[int(pid)] = (int(rank[0].split(b"=")[1]) if rank else None, state)
    return found


def destroy_all():
    """Kills whatever this process has started and left."""
    mine = f"{TAG}={os.getpid()}-".encode()
    for pid in os.listdir("/proc"):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if any(v.startswith(mine) for v in file.read().split(b"\0")):
                    kill(int(pid), signal.SIGKILL)
        except (OSError, ValueError):
            continue


class Start:
    """One start of the program: alone (ranks 0), by mpirun, or by scripts/launch."""

    count = 0

    def __init__(self, world, run, ranks, keys=(), environment=None, launch=None, arguments=()):
        Start.count += 1
        self.tag = f"{os.getpid()}-{Start.count}"
        self.log = os.path.join(world.folder, f"start-{self.tag}.log")
        self.slack = world.options.slack
        command = [world.binary, "train", world.config, f"run_dir={run}", *keys, *arguments]
        variables = dict(os.environ, **{TAG: self.tag}, **(environment or {}))
        if launch is not None:
            variables.update(OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_mpi_yield_when_idle="1")
            command = [LAUNCH, "-n", str(ranks), *launch, *command]
        elif ranks:
            command = [MPIRUN, str(ranks), *command]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=world.folder,
                env=variables,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.began = time.monotonic()

    def text(self):
        with open(self.log, "rb") as file:
            return file.read().decode("utf-8", "replace")

    def over(self):
        return self.process.poll() is not None

    def ranks(self):
        """{rank: pid}"""
        return {rank: pid for pid, (rank, _) in processes(self.tag).items() if rank is not None}

    def wait_for_ranks(self, count, limit=30):
        end = time.monotonic() + limit
        while time.monotonic() < end and not self.over():
            ranks = self.ranks()
            if len(ranks) == count:
                return ranks
            time.sleep(0.01)
        return self.ranks()

    def code(self):
        """As a shell says it; -1 while it runs."""
        code = self.process.poll()
        return -1 if code is None else 128 - code if code < 0 else code

    def wait(self, limit=120):
        """Exit code; a start that does not end is killed, and a failure. A busy machine (--slack) gets longer."""
        limit *= self.slack
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.destroy()
            raise Failure(f"did not end in {limit} s\n{self.tail()}") from None
        return self.code()

    def until_gone(self, limit, ranks_only=False):
        """Seconds until no process, or no rank, is alive; None if one outlives the limit."""
        begin = time.monotonic()
        while time.monotonic() - begin < limit:
            self.process.poll()
            if not (self.ranks() if ranks_only else processes(self.tag)):
                return time.monotonic() - begin
            time.sleep(0.01)
        return None

    def who_lives(self):
        """A line for each: what it is, its state, what the kernel does for it."""
        lines = []
        for pid, (rank, state) in sorted(processes(self.tag).items()):
            try:
                with open(f"/proc/{pid}/comm") as file:
                    name = file.read().strip()
                with open(f"/proc/{pid}/wchan") as file:
                    waits = file.read().strip()
            except OSError:
                name = waits = "?"
            lines.append(
                f"    {pid} {name} {'' if rank is None else f'rank {rank} '}state {state} in {waits}"
            )
        return "\n".join(lines)

    def destroy(self):
        for pid in processes(self.tag):
            kill(pid, signal.SIGKILL)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        self.until_gone(5)

    def tail(self, lines=15):
        return "    | " + "\n    | ".join(self.text().strip().splitlines()[-lines:])


def kill(pid, number):
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def wait_until(condition, limit=60, pause=0.005):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(pause)
    return False


class World:
    """A folder with data and a configuration, and the runs in it."""

    def __init__(self, options):
        self.options = options
        self.binary = os.path.abspath(options.binary)
        self.folder = options.folder
        self.random = random.Random(options.seed)
        self.deadline, self.least = None, 0  # of `turns`
        self.layouts = [shlex.split(text) for text in options.layout] or [[]]
        self.references = {}
        os.makedirs(self.folder, exist_ok=True)
        self.config = os.path.join(self.folder, "tiny.yaml")
        text = random.Random(7)
        words = ["".join(text.choice("abcdefgh") for _ in range(text.randint(2, 6))) for _ in range(60)]
        for name, documents in (("train", 60), ("held", 2)):
            source = os.path.join(self.folder, name + ".txt")
            with open(source, "w") as file:
                file.write(
                    "\n\n".join(" ".join(text.choice(words) for _ in range(40)) for _ in range(documents))
                )
            self.sluice(
                "tokenize", source, "-o", os.path.join(self.folder, name), "--force"
            )  # a kept folder has them already
        with open(self.config, "w") as file:
            file.write(
                CONFIG.format(
                    layers=2 if options.model == "moe" else 1, moe=MOE if options.model == "moe" else ""
                )
            )

    def sluice(self, *arguments, check=True):
        done = subprocess.run([self.binary, *arguments], cwd=self.folder, capture_output=True, text=True)
        if check and done.returncode != 0:
            raise Failure(f"sluice {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
        return done

    def more(self, done):
        """Whether a check that has done so many trials goes on: always, unless it was given a time; then until that is over,
        and at least `least` trials."""
        return self.deadline is None or done < self.least or time.monotonic() < self.deadline

    def turns(self, count, each=1):
        """0, 1, 2 and so on, while there is time, until there were `count` trials, `each` of them in a turn."""
        for n in range(-(-count // each)):
            if not self.more(n * each):
                return
            yield n

    def layout(self):
        return self.random.choice(self.layouts)

    def ranks(self, largest=4):
        allowed = [int(n) for n in self.options.ranks.split(",")]
        return self.random.choice([n for n in allowed if n <= largest] or allowed)

    def run_folder(self, name):
        path = os.path.join(self.folder, name)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def start(self, run, ranks, keys=(), **more):
        return Start(self, run, ranks, [*keys, *self.layout()] if ranks else keys, **more)

    def reference(self, keys=()):
        """An uninterrupted run with these keys: of one rank, or of the layout where its bits are its own."""
        name = " ".join(keys)
        if name not in self.references:
            run = self.run_folder(f"reference-{len(self.references)}")
            own = self.ranks_of_own_bits()
            start = Start(self, run, own, [*keys, *self.layouts[0]] if own else keys)
            if start.wait() != 0:
                raise Failure(f"the uninterrupted run failed\n{start.tail()}")
            self.references[name] = run
        return self.references[name]

    def ranks_of_own_bits(self):
        """The number of ranks of all runs where bits depend on the layout; 0 where they do not."""
        if "parallel.determinism=same_layout" not in self.layouts[0]:
            return 0
        if len(self.layouts) > 1 or not self.options.ranks.isdigit():
            raise Failure("same_layout: give one --layout and one number of --ranks")
        return int(self.options.ranks)

    def require_equal(self, run, keys=(), lines_may_miss=False):
        """The run ended where the uninterrupted one did: state, and the way there, of which a full disk may cost lines."""
        difference = self.difference(self.reference(keys), run, lines_may_miss)
        if difference:
            raise Failure(difference)

    def difference(self, reference, run, lines_may_miss=False):
        """What differs in the states where they ended or in the bits of a step; "" if nothing does."""
        for command in ("diff", "diff-bits"):
            done = self.sluice("checkpoint", command, reference, run, check=False)
            may_miss = command == "diff-bits" and lines_may_miss
            if may_miss and "missing from" in done.stdout:
                continue
            ends = re.search(r"the first ends at step (\d+), the second at step (\d+)", done.stdout)
            if may_miss and ends and int(ends[2]) == int(ends[1]) - 1:
                ends = None  # one fault costs one line, be it the last
            if done.returncode != 0 or ends:
                return f"checkpoint {command} {reference} {run}: {done.stdout}{done.stderr}"
        return ""

    def require_tidy(self, run):
        litter = self.litter(run)
        if litter:
            raise Failure(f"left in {run}: {', '.join(litter)}")

    def litter(self, run):
        if not os.path.isdir(run):
            return []
        names = [n for n in os.listdir(run) if n.endswith(".tmp") or n.startswith("status.json.")]
        checkpoints = os.path.join(run, "ckpt")
        if os.path.isdir(checkpoints):
            names += ["ckpt/" + n for n in os.listdir(checkpoints) if not re.fullmatch(r"step_\d+|LATEST", n)]
        return names


def version_of(binary):
    """In one line."""
    lines = subprocess.run([binary, "--version"], capture_output=True, text=True).stdout.splitlines()
    commit = [line.split()[-1] for line in lines if line.split()[:1] == ["commit"]]
    return " ".join([*lines[:1], *commit])


def last_step(run):
    """Steps done, by the last whole line of bits.log; 0 without one."""
    try:
        with open(os.path.join(run, "bits.log"), "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 4096))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def saved_step(run):
    """Newest complete checkpoint's step; 0 without one."""
    return max(
        [
            int(os.path.basename(p)[5:])
            for p in glob.glob(os.path.join(run, "ckpt", "step_*"))
            if os.path.exists(os.path.join(p, "MANIFEST.json"))
        ],
        default=0,
    )


def require_resumed(start, step):
    """A start began at `step`, the newest whole checkpoint's (0: there was none). One that trained, or ended well, says so."""
    text = start.text()
    found = re.findall(r"\(step (\d+)\)", text)
    if found and int(found[0]) != step:
        raise Failure(f"resumed from step {found[0]}, the newest whole checkpoint was {step}")
    trained = start.code() == 0 or re.search(r"^step +\d+/", text, re.M)
    if step and not found and trained and "is finished: step" not in text:
        raise Failure(f"began anew, and the newest whole checkpoint was {step}\n{start.tail()}")


def save_under_way(run):
    """Whether a save is between its first and its last operation."""
    checkpoints = os.path.join(run, "ckpt")
    if not os.path.isdir(checkpoints):
        return False
    if any(not n.startswith("step_") and n != "LATEST" for n in os.listdir(checkpoints)):
        return True
    try:
        with open(os.path.join(checkpoints, "LATEST")) as file:
            return int(file.read().strip()[5:]) != saved_step(run)
    except (OSError, ValueError):
        return saved_step(run) > 0


class Tally:
    """Figures of one check, and the failures."""

    def __init__(self, name):
        self.name, self.trials, self.failures, self.figures, self.began, self.seconds = (
            name,
            0,
            [],
            {},
            0.0,
            0.0,
        )

    def trial(self, what, body):
        self.trials += 1
        try:
            body()
        except Failure as failure:
            self.failures.append(f"{what}: {failure}")
            print(f"FAILED {self.name}: {what}: {failure}", file=sys.stderr, flush=True)

    def largest(self, name, value):
        self.figures[name] = max(self.figures.get(name, value), value)

    def add(self, name, value=1):
        self.figures[name] = self.figures.get(name, 0) + value

    def row(self):
        figures = "  ".join(
            f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in self.figures.items()
        )
        return f"{self.name:<9} {self.trials:>6} {len(self.failures):>7} {self.seconds:>8.0f} s  {figures}"
