"""Bits that flip in a weight or moment of one rank: found when replicas are compared, the rank and the tensor named, nothing saved;
and replicas that are equal are never reported (P12)."""

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


def trial(world, tally, stage, ranks, victim):
    run = world.run_folder("flipped")
    # Moments are in several memories with ZeRO 0 alone.
    name = world.random.choice(WEIGHTS) + (world.random.choice(["", ".m", ".v"]) if stage == 0 else "")
    # A step that ends in a comparison. After a save at that step, which has compared already, the next comparison may come too late:
    # with ZeRO 1 and 2 whole weights are gathered again in every step, and low bits of moments round away.
    step = EVERY * world.random.choice([1, 2, 3, 4, 5, 6, 8, 9, 10])
    flip = f"{victim}:{step}:{name}:{world.random.randrange(1 << 20)}:{world.random.randrange(32)}"
    start = Start(
        world, run, ranks, [*KEYS, f"parallel.zero_stage={stage}"], environment={"SLUICE_FLIP": flip}
    )
    code = start.wait()
    if code != 79:
        raise Failure(f"SLUICE_FLIP={flip}: exit code {code}\n{start.tail()}")
    if named(start.text(), victim, ranks, name) != step:
        raise Failure(f"SLUICE_FLIP={flip}: not named\n{start.tail()}")
    if saved_step(run) > step:
        raise Failure(f"SLUICE_FLIP={flip}: saved step {saved_step(run)}")
    tally.add("found")


def named(text, victim, ranks, name):
    """The step after which a comparison found this rank and tensor; None if it did not."""
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
        return None
    return int(found.group(2))


def trial_anywhen(world, tally, ranks, victim):
    """A flip at any step, also between comparisons, of state that every rank has whole."""
    run = world.run_folder("flipped")
    name = world.random.choice(WEIGHTS) + world.random.choice(["", ".m", ".v"])
    step = world.random.randint(1, 95)
    flip = f"{victim}:{step}:{name}:{world.random.randrange(1 << 20)}:{world.random.randrange(32)}"
    keys = ["parallel.verify_every_steps=50", "checkpoint.every_steps=0", "log.bits=1"]
    start = Start(world, run, ranks, keys, environment={"SLUICE_FLIP": flip})
    code = start.wait()
    if code == 79:
        # The low bits of a moment may change the weight and then be rounded away.
        found = named(start.text(), victim, ranks, name) or named(
            start.text(), victim, ranks, name.removesuffix(".m").removesuffix(".v")
        )
        if found is None or not step <= found <= step + 50:
            raise Failure(f"SLUICE_FLIP={flip}: found after {found} steps\n{start.tail()}")
        if saved_step(run) > step:
            raise Failure(f"SLUICE_FLIP={flip}: saved step {saved_step(run)}")
        tally.add("found")
        tally.largest("after steps, at most", found - step)
        return
    # The low bits of a moment may have been rounded away before anything came of them. Not finite: every step is skipped.
    if code == 0:
        problem = world.difference(world.reference(keys), run)
        if problem:
            raise Failure(f"SLUICE_FLIP={flip}: not found, and {problem}")
        tally.add("without effect")
    elif code == 78 and saved_step(run) <= step:
        tally.add("no longer finite")
    else:
        raise Failure(f"SLUICE_FLIP={flip}: exit code {code}\n{start.tail()}")


def check_anywhen(world, tally, count):
    for n in world.turns(count):
        ranks = (4, 3, 2)[n % 3]
        victim = world.random.randrange(ranks)
        tally.trial(f"rank {victim} of {ranks}", lambda: trial_anywhen(world, tally, ranks, victim))


def check_alarms(world, tally, count):
    """count: steps without a fault, all of them compared, in trainings of each ZeRO stage."""
    part = 2000
    for n in world.turns(-(-count // part)):
        stage, ranks = n % 3, (2, 3, 4)[n // 3 % 3]

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

        tally.trial(f"ZeRO {stage}, {ranks} ranks", quiet)


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
        ranks, stage = (4, 2)[n % 2], n // 2 % 3
        victim = world.random.randrange(ranks)
        tally.trial(
            f"ZeRO {stage}, rank {victim} of {ranks}", lambda: trial(world, tally, stage, ranks, victim)
        )
