"""Bits that flip in a weight or moment of one rank: found by the next update of the rank that owns it, or when replicas are compared,
the rank and the tensor named, nothing saved; and memory that did not change is never reported (P12)."""

import array
import json
import math
import os
import re

from .harness import Failure, Start, last_step, saved_step

EVERY = 5
KEYS = [f"parallel.verify_every_steps={EVERY}", "checkpoint.every_steps=7"]
LAYER = "model.layers.0."
WEIGHTS = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(
        LAYER + name + ".weight"
        for name in (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
        )
    ),
]


STATE = ["", ".m", ".v"]


def flipped(world, keys, ranks, victim, step):
    """A training in which one bit of what a rank holds of some tensor flips: (tensor, start, run, flip). With ZeRO a rank may hold
    nothing of a small tensor, and another one is taken."""
    while True:
        run = world.run_folder("flipped")
        name = world.random.choice(WEIGHTS) + world.random.choice(STATE)
        flip = f"{victim}:{step}:{name}:{world.random.randrange(1 << 20)}:{world.random.randrange(32)}"
        start = Start(world, run, ranks, keys, environment={"SLUICE_FLIP": flip})
        if start.wait() != 64 or "holds nothing of" not in start.text():
            return name, start, run, f"SLUICE_FLIP={flip}"


def trial(world, tally, stage, ranks, victim):
    # A step that ends in a comparison. Of another rank's slice of the weights nothing is left at a later one: whole weights are
    # gathered again in every step.
    step = EVERY * world.random.choice([1, 2, 3, 4, 5, 6, 8, 9, 10])
    keys = [*KEYS, f"parallel.zero_stage={stage}"]
    name, start, run, flip = flipped(world, keys, ranks, victim, step)
    if start.code() != 79:
        raise Failure(f"{flip}: exit code {start.code()}\n{start.tail()}")
    own, noticed, reported = named(start.text(), victim, ranks, name)
    if reported != step or own and noticed != step:
        raise Failure(f"{flip}: not named\n{start.tail()}")
    if saved_step(run) > step:
        raise Failure(f"{flip}: saved step {saved_step(run)}")
    tally.add("found by the rank itself" if own else "found by comparison")


def named(text, victim, ranks, name):
    """(whether by the rank itself, the updates after which it noticed, the step after which it was reported); reported None: neither
    this rank nor this tensor was named."""
    weight = name.removesuffix(".m").removesuffix(".v")
    own = re.search(
        rf"rank {victim} \(host .*? holds other bits of {re.escape(weight)} or its moments than it wrote, noticed after (\d+) "
        r"updates, and reported after (\d+) steps",
        text,
    )
    if own:
        return True, int(own.group(1)), int(own.group(2))
    who = (
        rf"rank {victim} \(host .* holds other bits"
        if ranks > 2
        else r"ranks 0-1 \(host .* hold different bits"
    )
    found = re.search(
        rf"{who} of (.*?)(?: than the other ranks that have a replica)?, after (\d+) steps", text
    )
    # After a step with a changed weight its moments differ, too, and a list of names ends with "and 4 more".
    if not found or (name not in re.split(", | and ", found.group(1)) and " more" not in found.group(1)):
        return False, None, None
    return False, None, int(found.group(2))


def trial_anywhen(world, tally, stage, ranks, victim):
    """A flip at any step, also between comparisons."""
    step = world.random.randint(1, 95)
    keys = [
        f"parallel.zero_stage={stage}",
        "parallel.verify_every_steps=50",
        "checkpoint.every_steps=0",
        "log.bits=1",
    ]
    name, start, run, flip = flipped(world, keys, ranks, victim, step)
    code = start.code()
    if code == 79:
        own, noticed, reported = named(start.text(), victim, ranks, name)
        if reported is None or own and noticed != step or not step <= reported <= step + 50:
            raise Failure(f"{flip}: reported after {reported} steps, noticed after {noticed}\n{start.tail()}")
        if saved_step(run) > step:
            raise Failure(f"{flip}: saved step {saved_step(run)}")
        tally.add("found by the rank itself" if own else "found by comparison")
        tally.largest("steps until it was reported, at most", reported - step)
        return
    # Another rank's slice of the weights is gathered again before it is used.
    if code == 0 and stage in (1, 2) and name in WEIGHTS:
        problem = world.difference(world.reference(keys[1:]), run)
        if problem:
            raise Failure(f"{flip}: not found, and {problem}")
        tally.add("gathered again before use")
    elif code == 78 and saved_step(run) <= step:
        tally.add("no longer finite")
    else:
        raise Failure(f"{flip}: exit code {code}\n{start.tail()}")


def check_anywhen(world, tally, count):
    for n in world.turns(count):
        stage, ranks = n % 4, (4, 0, 3, 2)[n // 4 % 4]
        victim = world.random.randrange(max(ranks, 1))
        tally.trial(
            f"ZeRO {stage}, rank {victim} of {max(ranks, 1)}",
            lambda: trial_anywhen(world, tally, stage, ranks, victim),
        )


def check_alarms(world, tally, count):
    """count: steps without a fault, all of them compared, in trainings of each ZeRO stage."""
    part = 2000
    for n in world.turns(count, part):
        stage, ranks = n % 4, (2, 3, 4, 0)[n // 4 % 4]

        def quiet():
            run = world.run_folder("quiet")
            keys = [
                f"train.max_steps={part}",
                "parallel.verify_every_steps=1",
                f"parallel.zero_stage={stage}",
                "checkpoint.every_steps=0",
                "log.bits=1000",
            ]
            start = Start(world, run, ranks, keys)
            if start.wait(600) != 0:
                raise Failure(f"exit code {start.code()}\n{start.tail()}")
            tally.add("steps compared", last_step(run))

        tally.trial(f"ZeRO {stage}, {max(ranks, 1)} ranks", quiet)


def check_nonfinite(world, tally, count):
    """A weight of one of two ranks becomes huge or infinite, and they do not compare: what is not finite is skipped by both, ends the
    run, and is never saved."""
    for n in world.turns(count):

        def trial():
            run = world.run_folder("not-finite")
            step = world.random.randint(0, 60)
            # Of a norm's weights, near 1, many become infinite; others become huge, and the next norm makes little of that.
            name = world.random.choice([w for w in WEIGHTS if "norm" in w] if n % 2 else WEIGHTS)
            flip = f"{n // 2 % 2}:{step}:{name}:{world.random.randrange(1 << 20)}:30"  # the exponent's highest bit
            keys = ["checkpoint.keep_last=30", "parallel.verify_every_steps=0"]
            start = Start(world, run, 2, keys, environment={"SLUICE_FLIP": flip})
            code = start.wait()
            if code not in (0, 78):
                raise Failure(f"SLUICE_FLIP={flip}: exit code {code}\n{start.tail()}")
            tally.add("ended the run" if code == 78 else "trained on")
            for folder, _, files in os.walk(os.path.join(run, "ckpt")):
                for file in files:
                    if file.endswith(".safetensors"):
                        tally.add("files of tensors read")
                        bad = not_finite(os.path.join(folder, file))
                        if bad:
                            raise Failure(f"SLUICE_FLIP={flip}: {file} in {folder} holds {bad}")

        tally.trial("a flip of an exponent", trial)
    if tally.trials >= 10 and not tally.figures.get("ended the run"):
        raise Failure(f"none of {tally.trials} weights that became huge or infinite ended its run")


def not_finite(path):
    """The first f32 tensor of a safetensors file with a value that is not finite; "" without one."""
    with open(path, "rb") as file:
        data = file.read()
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8:begin]).items():
        if name == "__metadata__" or tensor["dtype"] != "F32":
            continue
        first, last = tensor["data_offsets"]
        values = array.array("f", data[begin + first : begin + last])
        if not all(math.isfinite(v) for v in values):
            return name
    return ""


def check(world, tally, count):
    for n in world.turns(count):
        ranks, stage = (4, 2)[n % 2], n // 2 % 4
        victim = world.random.randrange(ranks)
        tally.trial(
            f"ZeRO {stage}, rank {victim} of {ranks}", lambda: trial(world, tally, stage, ranks, victim)
        )
