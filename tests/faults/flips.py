"""Bits that flip in a weight or moment of one rank: found when replicas are compared, the rank and the tensor named, nothing saved (P12)."""

import re

from .harness import Failure, Start, saved_step

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
    who = (
        rf"rank {victim} \(host .* holds other bits"
        if ranks > 2
        else r"ranks 0-1 \(host .* hold different bits"
    )
    found = re.search(
        rf"{who} of (.*?)(?: than the other ranks that have a replica)?, after (\d+) steps", start.text()
    )
    if not found or name not in found.group(1).split(", ") or int(found.group(2)) != step:
        raise Failure(f"SLUICE_FLIP={flip}: not named\n{start.tail()}")
    if saved_step(run) > step:
        raise Failure(f"SLUICE_FLIP={flip}: saved step {saved_step(run)}")
    tally.add("found")


def check(world, tally, count):
    for n in range(count):
        ranks, stage = (4, 2)[n % 2], n // 2 % 3
        victim = world.random.randrange(ranks)
        tally.trial(
            f"ZeRO {stage}, rank {victim} of {ranks}", lambda: trial(world, tally, stage, ranks, victim)
        )
