"""Exact training (P8): the same bits on any number of ranks, at any ZeRO stage, wherever experts lie, however many ranks share
a sequence, for 200 steps; and a run that changes its layout on the way."""

import json
import os
import signal
import sys
from typing import NamedTuple

from .harness import MOE, Failure, last_step, require_resumed, saved_step, wait_until

STEPS = 200
MODELS = {  # keys beside the harness's configuration, whose attention is gated
    "dense": ["model.attention.gates=[]"],
    "gated": [
        "model.attention.head_balance.coefficient=1e-2",
        "model.attention.head_balance.scope=previous_step",
    ],
    "moe": [
        "model.num_hidden_layers=2",
        "model.moe="
        + MOE.split("moe:")[1].strip().replace("moe_intermediate_size: 8", "moe_intermediate_size: 32"),
        "model.moe.load_balance.scope=previous_step",
    ],
}
MODELS["moe with biases"] = [
    *MODELS["moe"],
    "model.hidden_size=32",
    "model.attention_bias=true",
    "model.moe.bias=true",
    "model.moe.swiglu_limit=1.0",
]
SUMS = ("tree", "fixed64")


class Layout(NamedTuple):
    ranks: int = 1
    stage: int = 0  # of ZeRO
    expert: int = 1  # ranks that share the experts
    context: int = 1  # ranks that share a sequence
    threads: int = 1

    def __repr__(self):
        shared = f", expert {self.expert}" * (self.expert > 1) + f", context {self.context}" * (self.context > 1)
        return f"({self.ranks} ranks, ZeRO {self.stage}{shared}, {self.threads} threads)"


ALONE = Layout()


def all_layouts(model):
    """All layouts that are promised to have equal bits; the first is the reference's."""
    found = {Layout(threads=2), Layout(ranks=2, threads=2)}
    for ranks in (1, 2, 4, 8):
        for stage in range(4):
            for expert in (1, 2, 4) if model.startswith("moe") else (1,):
                for context in (1, 2, 4):
                    if expert <= ranks and context <= ranks:
                        found.add(Layout(ranks, stage, expert, context))
    return [ALONE, *sorted(found - {ALONE})]


def odd_layouts():
    """Numbers of ranks that are no powers of two, which fixed-point sums allow."""
    found = [Layout(ranks, stage) for ranks in (3, 6) for stage in range(4)]
    return found + [Layout(6, stage, context=2) for stage in range(4)]


def keys_of(model, total, layout, determinism="exact", batch=8):
    return [
        *MODELS[model],
        f"train.global_batch_size={batch}",
        f"train.max_steps={STEPS}",
        f"train.threads={layout.threads}",
        f"parallel.exact_sum={total}",
        f"parallel.determinism={determinism}",
        f"parallel.zero_stage={layout.stage}",
        f"parallel.expert={layout.expert}",
        f"parallel.context={layout.context}",
        "checkpoint.every_steps=50",
        "eval.every_steps=0",
        "log.every_steps=1",
    ]


def losses(run):
    with open(os.path.join(run, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    return {
        line["step"]: line["loss"] for line in lines if line.get("event", "step") == "step" and "loss" in line
    }


def train(world, run, keys, ranks):
    start = world.start(run, ranks if ranks > 1 else 0, keys)
    if start.wait(600) != 0:
        raise Failure(f"exit code {start.code()}\n{start.tail()}")


def change_layout(world, run, model, total, layouts, batch):
    """One training in parts, each with its own layout; how many of them continued what another had saved."""
    changes = 0
    for part, layout in enumerate(layouts):
        before, begin = last_step(run), saved_step(run)
        start = world.start(run, layout.ranks, keys_of(model, total, layout, batch=batch), launch=[])
        # A part before may have gone further than it was asked to; a launcher that has only just begun dies of the signal.
        target = max(STEPS * (part + 1) // len(layouts), before + 1)
        if part + 1 < len(layouts):
            wait_until(lambda: start.over() or last_step(run) >= target, 300)
            if not start.over():
                os.kill(start.process.pid, signal.SIGTERM)
        code = start.wait(600)
        if code not in (0, 75) or (part + 1 == len(layouts) and code != 0):
            raise Failure(f"{layout}: exit code {code}\n{start.tail()}")
        if saved_step(run) == 0:
            raise Failure(f"{layout}: nothing saved\n{start.tail()}")
        require_resumed(start, begin)
        changes += 0 < begin < STEPS  # one that is finished is not continued
    return changes


ODD_BATCH = 12  # divisible by odd numbers of ranks


def same(world, tally, model, total, layout, batch):
    """A training with this layout has the bits of one rank."""
    reference = world.reference(keys_of(model, total, ALONE, batch=batch))
    run = world.run_folder("layout")
    train(world, run, keys_of(model, total, layout, batch=batch), layout.ranks)
    problem = world.difference(reference, run)
    if problem:
        raise Failure(problem)
    tally.add("layouts")
    tally.add("steps", STEPS)


def changed(world, tally, model, total, parts, batch):
    """So has a training that changes its layout twice: two pairs of a layout that saves and one that loads, or fewer if it came
    to its end before it was stopped."""
    reference = world.reference(keys_of(model, total, ALONE, batch=batch))
    run = world.run_folder("changed")
    changes = change_layout(world, run, model, total, parts, batch)
    problem = world.difference(reference, run)
    if problem:
        raise Failure(problem)
    tally.add("pairs of layouts", changes)


def other_grade(world, tally, model):
    """The comparison can fail: four ranks in the other grade end with other bits, and losses that agree to rounding."""
    reference = world.reference(keys_of(model, "tree", ALONE))
    run = world.run_folder("same-layout")
    train(world, run, keys_of(model, "tree", Layout(4), "same_layout"), 4)
    if not world.difference(reference, run):
        raise Failure("same_layout on four ranks has the bits of exact on one")
    one, four = losses(reference), losses(run)
    if set(one) != set(four) or len(one) != STEPS:
        raise Failure(f"metrics of {len(one)} and {len(four)} steps")
    off = {s: abs(one[s] - four[s]) for s in one}
    # A token that goes to another expert by a rounding makes another training of a mixture; later than this.
    last = 20 if model.startswith("moe") else STEPS
    tally.figures[f"{model}: losses of the other grade off by"] = f"{max(off.values()):.1e}"
    worst = max(v for s, v in off.items() if s <= last)
    if worst > 1e-5:
        raise Failure(f"losses of the first {last} steps are off by {worst:.1e}")


def combinations():
    """(model, sum, global batch, its layouts) of all that is compared."""
    found = [(model, total, 8, all_layouts(model)) for model in MODELS for total in SUMS]
    return found + [(model, "fixed64", ODD_BATCH, odd_layouts()) for model in MODELS]


def check_layouts(world, tally, count):
    """count: of layouts, at most; first one of each model and sum, then whichever."""
    jobs = []
    for model, total, batch, layouts in combinations():
        some = [layout for layout in layouts if layout != ALONE]
        world.random.shuffle(some)
        jobs += [(place, model, total, layout, batch) for place, layout in enumerate(some)]
    jobs.sort(key=lambda job: job[0])
    tally.figures["layouts in all"] = len(jobs)
    for model in MODELS:
        tally.trial(f"{model}, the other grade", lambda: other_grade(world, tally, model))
    for n in world.turns(min(count, len(jobs))):
        _, model, total, layout, batch = jobs[n]
        tally.trial(f"{model}, {total}, {layout}", lambda: same(world, tally, model, total, layout, batch))


def check_changes(world, tally, count):
    """count: of trainings that change their layout twice."""
    every = combinations()
    for n in world.turns(count):
        model, total, batch, layouts = every[n % len(every)]
        parts = world.random.sample(layouts, 3)
        tally.trial(f"{model}, {total}, {parts}", lambda: changed(world, tally, model, total, parts, batch))


def check(world, tally, count):
    """count: of layouts, and of changes of them; 0: every layout, and sixty changes."""
    if world.options.quick:
        model, total, batch, layouts = world.random.choice(combinations())
        layout = world.random.choice([layout for layout in layouts if layout != ALONE])
        parts = world.random.sample(layouts, 3)
        tally.trial(f"{model}, {total}, {layout}", lambda: same(world, tally, model, total, layout, batch))
        tally.trial(f"{model}, {total}, {parts}", lambda: changed(world, tally, model, total, parts, batch))
        tally.trial(f"{model}, the other grade", lambda: other_grade(world, tally, model))
        return
    check_layouts(world, tally, count or sys.maxsize)
    check_changes(world, tally, count or 60)
