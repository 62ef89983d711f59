"""The papers' rows (paper.json), and which of them a run is, by its configuration."""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from .. import program, yaml

if TYPE_CHECKING:
    from .runs import Run

SINK_SIZES = {(20, 1280): "0.6B", (26, 1664): "1B", (32, 2048): "2B"}  # layers, hidden_size
# Of a run's origin (its configuration's file and what it extends): a row, a depth, a size.
NAMED_ROW = re.compile(r"table(\d)_(\d\d)_?(\w*)")
NAMED_DEPTH = re.compile(r"(?<!\d)(28|48)l(?![a-z])|(?<![a-z0-9])a5_\d\d_")  # appendix A.5's have 48
NAMED_TASK = re.compile(r"(?<![\w-])sinks/")  # configs/sinks: models that form sinks within minutes
NAMED_SIZE = re.compile(r"sink_aware\S*?[/_](0[._p]?6b|1b|2b)(?![a-z])", re.IGNORECASE)


def load() -> dict[str, Any]:
    with open(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "paper.json"), encoding="utf-8"
    ) as file:
        paper = json.load(file)
    for table in paper["tables"]:
        for row in table["rows"]:
            row["family"] = row.get("family", table["family"])
            row["table"] = table["id"]
    return paper


def paper_delta(table: dict[str, Any], row: dict[str, Any], key: str) -> float | None:
    """The paper's value less its value for the row's baseline; None where either is missing."""
    base = next((r for r in table["rows"] if r["id"] == row.get("baseline")), None)
    if base is None or row.get(key) is None or base.get(key) is None:
        return None
    return row[key] - base[key]


def variant(config: dict[str, Any]) -> str:
    """What differs from a plain transformer, in the words of paper.json; everything left out is the default."""
    get = lambda path, default=None: yaml.get(config, "model." + path, default)
    kind = get("attention.kind") or "softmax"
    parts = [kind] if kind != "softmax" else []
    if get("attention.window", 0):
        pattern = get("attention.window_pattern", 0)
        parts.append(f"window {get('attention.window')}" + (f" of pattern {pattern}" if pattern else ""))
    for gate in get("attention.gates", []):
        words = [gate.get("position") or "sdpa_output", gate.get("granularity") or "elementwise"]
        words += [gate["heads"]] if (gate.get("heads") or "specific") != "specific" else []
        words += ["add"] if gate.get("combine") == "add" else []
        words += [gate["activation"]] if (gate.get("activation") or "sigmoid") != "sigmoid" else []
        words += ["constant"] if gate.get("input") in ("none", None) and "input" in gate else []
        words += ["self"] if gate.get("input") == "self" else []
        words += [f"of {gate['input_channels']} channels"] if gate.get("input_channels") else []
        words += ["zero_start"] if gate.get("init") == "zero" else []
        words += [f"bias {gate['bias']:g}"] if gate.get("bias") is not None else []
        parts.append(" ".join(words))
    if get("attention.exclusive", "none") != "none":
        parts.append("exclusive " + get("attention.exclusive"))
    if get("gated_norm.rank", 0):
        parts.append(f"gated_norm {get('gated_norm.rank')}")
    if get("attention.output_norm", "none") != "none":
        parts.append("output_norm" + (" shared" if get("attention.output_norm").endswith("shared") else ""))
    if get("attention.output_activation", "none") != "none":
        parts.append("output_" + get("attention.output_activation"))
    if get("attention.switch_heads.num_experts", 0):
        switch = get("attention.switch_heads")
        parts.append(
            f"switch {switch.get('projections', 'value')} {switch['num_experts']} "
            f"{switch.get('num_experts_per_tok', 1)}"
        )
    if get("norm_placement", "pre") == "sandwich":
        parts.append("sandwich")
    if get("branch_clip"):
        parts.append(f"clip {get('branch_clip'):g}")
    return " + ".join(parts or ["plain"]) + (
        " balanced" if get("attention.head_balance.coefficient", 0) else ""
    )


# Keys of the model that variant() puts into words, that geometry() is of, and that bear on no result.
OF_VARIANT = re.compile(
    r"attention\.(kind|window|window_pattern|gates|exclusive|output_norm|output_activation|switch_heads\..*|head_balance\..*)$"
    r"|gated_norm\..*|norm_placement$|branch_clip$"
)
OF_GEOMETRY = ("num_attention_heads", "num_key_value_heads", "moe.num_experts", "moe.num_experts_per_tok")
OF_NO_RESULT = ("attention.kernel", "match_parameters_of", "match_multiple")
WIDTHS = ("intermediate_size", "moe.moe_intermediate_size")  # model.match_parameters_of chooses one
MATCHED = 0.02  # of the parameters, by which a model of a matched width may differ
OFF: tuple[Any, ...] = (None, False, 0, "none", "", [], {})


@functools.cache
def defaults() -> dict[str, Any]:
    """{dotted key below model: value}"""
    path = os.path.join(program.ROOT, "configs", "reference.yaml")
    with open(path, encoding="utf-8") as file:
        return yaml.leaves(yaml.get(yaml.read_plain(path, file.read()), "model", {}))


def model_keys(run: Run) -> dict[str, Any]:
    """{dotted key below model: value}, without those that are off and those that bear on no result. Keys that the run's program did not
    have yet are at their defaults."""
    found = {**defaults(), **yaml.leaves(run.config.get("model") or {})}
    return {key: value for key, value in found.items() if value not in OFF and key not in OF_NO_RESULT}


def model_text(run: Run) -> str:
    return json.dumps(model_keys(run), sort_keys=True)


def same_but_for_the_row(run: Run, base: Run, row: dict[str, Any]) -> bool:
    """Whether two models agree in all that the row of a paper does not set. A feed-forward network's width may be another where it
    makes the parameters as many."""
    mine, theirs = model_keys(run), model_keys(base)
    other = {
        key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key) and not OF_VARIANT.match(key)
    }
    other -= set(OF_GEOMETRY if row.get("geometry") else ())
    ours, of_base = run.info.get("parameters"), base.info.get("parameters")
    if ours and of_base and abs(ours - of_base) <= MATCHED * of_base:
        other -= set(WIDTHS)
    return not other


def shape(run: Run) -> tuple[int, ...]:
    return tuple(
        run.get("model." + key, 0)
        for key in (
            "num_attention_heads",
            "num_key_value_heads",
            "moe.num_experts",
            "moe.num_experts_per_tok",
        )
    )


def named_geometry(run: Run) -> str:
    """Of table 1's rows that change the model's shape, by the file they come from."""
    rows = {number for table, number, _ in NAMED_ROW.findall(run.origin) if table == "1"}
    return {"02": "kv_heads", "03": "query_heads", "04": "experts"}.get(
        next(iter(rows)) if len(rows) == 1 else ""
    )


def geometries(runs: list[Run]) -> list[str]:
    """Per run: base, kv_heads, query_heads, experts or other. The base is the commonest shape of the same width and depth."""
    votes: dict[tuple[Any, ...], Counter[tuple[int, ...]]] = {}
    size = lambda run: (
        run.get("model.hidden_size"),
        run.get("model.num_hidden_layers"),
        run.get("model.head_dim"),
    )
    for run in runs:
        if not named_geometry(run):
            votes.setdefault(size(run), Counter())[shape(run)] += 1
    out = []
    for run in runs:
        if size(run) not in votes:
            out.append(named_geometry(run))
            continue
        base = min(votes[size(run)].items(), key=lambda item: (-item[1], item[0]))[0]
        heads, kv, experts, top = shape(run)
        if shape(run) == base:
            out.append("base")
        elif (kv, experts, top) == base[1:] and heads > base[0]:
            out.append("query_heads")
        elif (heads, experts, top) == (base[0], base[2], base[3]) and kv > base[1]:
            out.append("kv_heads")
        elif (heads, kv) == base[:2] and experts > base[2] and top >= base[3]:
            out.append("experts")
        else:
            out.append("other")
    return out


def families(run: Run) -> set[str]:
    """Which of the papers' models a run stands for: moe, 28l, 48l, 0.6B, 1B, 2B; sinks: none of them, but a model in which
    the rows of a table about sinks can be looked at; none for other models."""
    if not run.config:
        return set()
    if NAMED_TASK.search(run.origin):
        return {"sinks"}
    if run.get("model.moe.num_experts", 0):
        return {"moe"}
    layers, hidden = run.get("model.num_hidden_layers", 0), run.get("model.hidden_size", 0)
    size = NAMED_SIZE.search(run.origin)
    if size or (layers, hidden) in SINK_SIZES:
        text = size.group(1).upper() if size else SINK_SIZES[(layers, hidden)]
        return {"0.6B" if text.endswith("6B") else text}
    depth = NAMED_DEPTH.search(run.origin)
    if depth or (layers, hidden) in ((28, 2048), (48, 1536)):
        return {f"{depth.group(1) or 48 if depth else layers}l"}
    return set()


def rows_of(run: Run, geometry: str, paper: dict[str, Any]) -> list[str]:
    """Ids of the rows that a run is. Where several of a table fit (a proxy cannot distinguish 400B tokens from 1T), the row whose
    configuration file it was trained from, or those of as many tokens as that file's."""
    found, kinds, what = [], families(run), variant(run.config)
    named = [f"{table}-{number}" for table, number, _ in NAMED_ROW.findall(run.origin)]
    for table in paper["tables"]:
        fits = []
        for row in table["rows"]:
            lr = row.get("lr")
            if (
                (row["family"] in kinds or kinds & set(table.get("also", [])))
                and row["variant"] == what
                and ("moe" not in kinds or geometry == row.get("geometry", "base"))
                and (lr is None or abs((run.get("optimizer.lr") or 0) - lr) < 1e-6 * lr)
            ):
                fits.append(row)
        if len(fits) > 1:
            of_table = [r for r in table["rows"] if f"{table['table']}-{r['row']:02d}" in named]
            exact = [r for r in fits if r in of_table]
            tokens = {r.get("tokens") for r in of_table}
            fits = exact or [r for r in fits if r.get("tokens") in tokens] or fits
        found += [row["id"] for row in fits]
    return found


def protocol(run: Run, table_family: str) -> str:
    """How a run was trained, apart from what the table's rows differ in: runs of one protocol stand in one table."""
    get = run.get
    sources = lambda key: [
        [s.get("name"), os.path.basename(str(s.get("path"))), s.get("weight")] for s in get(key, [])
    ]
    optimizer = dict(get("optimizer", {}))
    if optimizer.get("type", "adamw") != "muon":
        optimizer.pop("muon", None)
    elif table_family == "sink" and optimizer.get("lr"):
        # nanochat's preset: the embedding's rate falls as 1 / sqrt(width), so sizes have one rate times sqrt(width).
        optimizer["lr"] = f"{optimizer['lr'] * get('model.hidden_size', 0) ** 0.5:.3g} / sqrt(hidden_size)"
    # A rule for what only some rows have, the sinks, is a part of the row.
    optimizer["rules"] = [rule for rule in optimizer.get("rules", []) if rule.get("match") != "sinks"]
    out = {
        "seq_len": get("data.seq_len"),
        "train": sources("data.train"),
        "validation": sources("data.validation"),
        "eval": get("eval.max_tokens"),
        "precision": get("train.precision"),
        "vocab": get("model.vocab_size"),
        "continued": bool(get("train.init_from")),
    }
    if table_family in ("moe", "sink"):
        out["batch"] = get("train.global_batch_size")
    if table_family == "moe":
        out["model"] = [get("model.hidden_size"), get("model.num_hidden_layers"), get("model.head_dim")]
    if table_family in ("moe",):
        out["steps"] = [get("train.max_steps"), get("train.max_tokens")]
    if table_family == "dense":
        optimizer.pop("lr", None)
    out["optimizer"] = optimizer
    return json.dumps(out, sort_keys=True)


def describe_protocol(runs: list[Run]) -> str:
    """One line about the runs of a table, for readers."""
    run = runs[0]
    spread = lambda values: " / ".join(str(v) for v in sorted(set(values), key=lambda v: (str(type(v)), v)))
    text = (
        f"hidden {spread(r.get('model.hidden_size', 0) for r in runs)}, "
        f"{spread(r.get('model.num_hidden_layers', 0) for r in runs)} layers"
    )
    experts = run.get("model.moe.num_experts", 0)
    if experts:
        text += ", mixture of experts"
    tokens = {r.get("train.global_batch_size", 0) * r.get("data.seq_len", 0) for r in runs}
    steps = {r.status.get("max_steps") or r.info.get("max_steps") or 0 for r in runs}
    text += f"; {spread(f'{s:,}' for s in steps)} steps of {spread(f'{t:,}' for t in tokens)} tokens"
    text += f"; {run.get('optimizer.type', 'adamw')}, lr {spread(r.get('optimizer.lr', 0) for r in runs)}"
    text += "; trained on " + ", ".join(str(s.get("name")) for s in run.get("data.train", []))
    return text + f"; {spread(str(r.info.get('device', '-')) for r in runs)}"
