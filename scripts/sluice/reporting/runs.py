"""A run: run.json, config.yaml, status.json, metrics.jsonl, eval.jsonl and what `sluice analyze` left, and how it ended."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import program, yaml
from . import shapes
from .files import Analysis, read_lines, read_object, read_text, ruler_summaries, sweep_verdict
from .values import count_spikes, ema, mean, mean_of_all, number

if TYPE_CHECKING:
    from .groups import Group

SCALAR = re.compile(r"[a-z][a-z0-9_]{0,39}(/[a-z0-9_]{1,40})?")
MOST_SCALARS = 20  # that have figures
THRESHOLDS = (0.1, 0.2, 0.5)  # nats above the trailing line from which a loss is a spike


class Run:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        if not os.path.isdir(folder):
            print(f"report: {folder}: no such run folder", file=sys.stderr)
            sys.exit(66)
        self.metrics = read_lines(os.path.join(folder, "metrics.jsonl"), shapes.METRICS)
        self.evals = read_lines(os.path.join(folder, "eval.jsonl"), shapes.EVALUATION)
        self.info = read_object(os.path.join(folder, "run.json"), shapes.RUN, must=True)
        self.status = read_object(os.path.join(folder, "status.json"), shapes.STATUS)
        self.config = {}
        path = os.path.join(folder, "config.yaml")
        try:
            text = read_text(path)
            config = yaml.read_plain(path, text)
            self.config = shapes.fit(config, shapes.CONFIGURATION, shapes.Misfits(path).of_text(text))
        except yaml.Refused as error:
            shapes.warn(str(error).splitlines()[0])
        except program.NoProgram as error:
            print(f"report: {path} is read by the program: {error}", file=sys.stderr)
            sys.exit(66)
        self.base = shapes.clean(os.path.basename(os.path.abspath(folder)))
        self.title = self.name = shapes.clean(
            self.info.get("name") or self.base
        )  # name: label_runs makes it unambiguous
        self.origin = " ".join(
            [
                self.base,
                self.name,
                read_text(os.path.join(folder, "config.input.yaml")),
                read_text(os.path.join(folder, "cmdline.txt")),
            ]
        )
        self.last = self.evals[-1] if self.evals else {}
        self.analysis = self.last.get("analysis") or {}
        self.deep = Analysis(os.path.join(folder, "analysis"))
        self.ruler = ruler_summaries(folder)
        self.verdict = sweep_verdict(folder)
        # How plots show it; label_runs says.
        self.label, self.colour, self.marker, self.dash, self.grey = self.name, "#0072B2", "o", "-", False
        self.group: Group | None = None
        self.from_analysis = False  # what `measures` reads; groups.choose_sources says

    def get(self, path: str, default: Any = None) -> Any:
        return yaml.get(self.config, path, default)

    # ---- series

    def _pairs(
        self, records: list[dict[str, Any]], pick: Callable[..., Any]
    ) -> tuple[list[float], list[float]]:
        pairs = [(r.get("tokens"), number(pick(r))) for r in records]
        pairs = [(x, y) for x, y in pairs if x is not None and y is not None]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """(tokens, values) of one number of the metrics, where it is finite; "group/name" is one of an object."""
        group, _, name = key.rpartition("/")
        held = [(r.get("tokens"), r.get(group) if group else r) for r in self.metrics]
        values = [{"tokens": tokens, "value": o.get(name)} for tokens, o in held if isinstance(o, dict)]
        return self._pairs(values, lambda r: r["value"])

    def other_scalars(self) -> list[str]:
        """Numbers of the metrics that no figure knows by name, as a new loss reports them: "name" or "group/name"."""
        found: list[str] = []
        for record in self.metrics:
            for key, value in record.items():
                if key in shapes.METRICS or key in ("schema", "samples", "epochs", "diverged_since"):
                    continue
                names = [f"{key}/{name}" for name in value] if isinstance(value, dict) else [key]
                found += [n for n in names if n not in found and SCALAR.fullmatch(n)]
        return [name for name in found[:MOST_SCALARS] if self.series(name)[0]]

    def routers(self, pick: Callable[..., Any]) -> tuple[list[float], list[float]]:
        """(tokens, values) of what the routers of the logged steps did."""
        return self._pairs(
            [r for r in self.metrics if isinstance(r.get("router"), dict)], lambda r: pick(r["router"])
        )

    def heads(self, key: str) -> tuple[list[float], list[float]]:
        """(tokens, values) of how evenly attention heads were open."""
        return self._pairs(
            [r for r in self.metrics if isinstance(r.get("heads"), dict)], lambda r: r["heads"].get(key)
        )

    def eval_series(self, pick: Callable[..., Any]) -> tuple[list[float], list[float]]:
        return self._pairs(self.evals, pick)

    def sets(self) -> list[str]:
        names = []
        for record in self.evals:
            names += [n for n in record.get("sets") or {} if n not in names]
        return names

    def layers(self, pick: Callable[..., Any]) -> tuple[list[float], list[float]]:
        """(layer, value) of the last evaluation."""
        pairs = [(i, number(pick(layer))) for i, layer in enumerate(self.analysis.get("layers") or [])]
        pairs = [(x, y) for x, y in pairs if y is not None]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def gates(self) -> int:
        return max(
            [len(layer.get("gate_scores") or []) for layer in self.analysis.get("layers") or []], default=0
        )

    def events(self, key: str) -> list[float]:
        """Tokens at which a counter (spikes, skipped) went up."""
        places, before = [], 0
        for record in self.metrics:
            count = record.get(key) or 0
            if count > before:
                places.append(record.get("tokens"))
            before = count
        return places

    # ---- single values

    def _files(self) -> dict[Any, Any]:
        return {s.get("name"): s.get("path") for s in self.get("data.validation") or []}

    def evaluated(self) -> tuple[tuple[Any, ...], ...]:
        """What the last evaluation read: of every set its name, its file, and how many tokens."""
        files, sets = self._files(), self.last.get("sets") or {}
        return tuple((name, files.get(name), (sets[name] or {}).get("tokens")) for name in sorted(sets))

    def analysed(self) -> tuple[Any, ...]:
        """What the analysis read: how many sequences, and of every set its name, its file, and how many tokens. Sequences are whole,
        so both counts give their length."""
        files, sets = self._files(), self.deep.data.get("sets") or []
        read = sorted((str(s.get("name")), str(files.get(s.get("name"))), s.get("tokens")) for s in sets)
        return self.deep.data.get("sequences"), tuple(read)

    def fingerprints(self) -> dict[str, str]:
        """{validation set: fingerprint of its contents}; {} of runs from before run.json had them."""
        return {name: text for name, text in (self.info.get("validation_fingerprints") or {}).items() if text}

    def trained_on(self) -> dict[tuple[str, str], str]:
        """{(what it read, where its configuration says): fingerprint of the contents}, where known: the training data, and the weights
        that it started from."""
        start = self.info.get("init_from") or {}
        read = {
            "data": (self.get("data"), self.info.get("data_fingerprint")),
            "first weights": (self.get("train.init_from"), start.get("fingerprint")),
        }
        return {(what, json.dumps(place)): text for what, (place, text) in read.items() if place and text}

    def changed(self) -> tuple[tuple[Any, ...], ...]:
        """(step, key, before, after) of every setting that was changed on the way."""
        return tuple(tuple(c.get(k) for k in ("step", "key", "before", "after")) for c in self.info.get("changes") or [])

    def set_mean(self, key: str) -> float | None:
        return mean_of_all(number(s.get(key)) for s in (self.last.get("sets") or {}).values())

    def perplexities(self) -> dict[str, float | None]:
        """Perplexity per validation set at the last evaluation: exp of its loss."""
        out = {}
        for name, values in (self.last.get("sets") or {}).items():
            loss = number(values.get("loss"))
            out[name] = math.exp(loss) if loss is not None and loss < 700 else None
        return out

    @functools.cached_property
    def spikes(self) -> tuple[list[Any], int]:
        """(counts per threshold, logged losses looked at), after twice the warm-up (the paper's curves: after step 2,000)."""
        after = 2 * (number(self.get("optimizer.warmup_steps")) or 0)
        kept = [(r["step"], number(r.get("loss"))) for r in self.metrics]
        kept = [(step, loss) for step, loss in kept if loss is not None]
        return count_spikes([loss for _, loss in kept], THRESHOLDS, sum(step <= after for step, _ in kept))

    def deep_is_current(self) -> bool:
        return bool(self.deep) and (not self.evals or self.deep.data.get("step") == self.last.get("step"))

    def read_from_analysis(self, wanted: bool) -> None:
        """Whether `measures` takes from the analysis what an evaluation measures, too. The two read other tokens, so runs that are
        compared must all read the one or all the other."""
        if wanted != self.from_analysis:
            self.from_analysis = wanted
            self.__dict__.pop("measures", None)

    @functools.cached_property
    def measures(self) -> dict[str, float | None]:
        """The figures of all tables, those of the papers by the papers' names. M-Act: the mean over layers of the largest
        |residual| after the layer."""
        ppl = self.perplexities()
        layers = self.analysis.get("layers") or []
        heads, speeds = self.heads("imbalance")[1], self.series("tokens_per_second")[1]
        if self.from_analysis:
            total = self.deep.total if self.deep_is_current() else {}
            of_layers = {
                "first_token_attention": number(total.get("first_token_attention")),
                "gate_score": number(total.get("mean_gate_score")),
                "m_act": number(total.get("m_act_mean")),
                "imbalance": number(total.get("imbalance")),
            }
        else:
            imbalance = number(self.analysis.get("imbalance"))
            of_layers = {
                "first_token_attention": number(self.analysis.get("first_token_attention")),
                "gate_score": number(self.analysis.get("mean_gate_score")),
                "m_act": mean([number(layer.get("ffn_residual_max")) for layer in layers]),
                "imbalance": ema(heads)[-1] if imbalance is None and heads else imbalance,
            }
        active = number(self.info.get("parameters_active"))
        sinks = self.analysis.get("sinks") or {}
        gates = [gate for layer in layers for gate in layer.get("gates") or []]
        return {
            "parameters": number(self.info.get("parameters")),
            "active": number(self.info.get("parameters")) if active is None else active,
            "tokens": number(self.metrics[-1].get("tokens") if self.metrics else self.last.get("tokens")),
            "spikes": number(self.spikes[0][0]),
            "speed": statistics.median(speeds) if speeds else None,
            "largest_residual": number(self.analysis.get("largest_residual")),
            "loss": self.set_mean("loss"),
            "ppl": mean_of_all(ppl.values()),
            "bpb": self.set_mean("bits_per_byte"),
            "sink_share": number(sinks.get("share")),
            "strongest_sink": number((sinks.get("strongest") or {}).get("first_token_attention")),
            "gates_low": mean_of_all(number(gate.get("below_0.05")) for gate in gates),
            "gates_high": mean_of_all(number(gate.get("above_0.95")) for gate in gates),
            **of_layers,
        }

    # ---- how it ended

    @functools.cached_property
    def outcome(self) -> tuple[str, str]:
        """done | diverged | stopped | running | not begun, and a detail for readers. Diverged: the training or the sweep said
        so, the last logged loss is not finite, or the median of the last twentieth of the losses lies more than 0.5 nats above
        the best such median."""
        losses = [number(r.get("loss")) for r in self.metrics]
        step = self.status.get("step") or (
            self.metrics[-1]["step"] if self.metrics else self.last.get("step") or 0
        )
        most = self.status.get("max_steps") or self.info.get("max_steps")
        at = f"step {step:,} of {most:,}" if most else f"step {step:,}"
        state = self.status.get("state")
        verdict, reason = self.verdict.get("event"), str(self.verdict.get("reason") or "")
        if state != "done" and (
            verdict == "diverged" or state == "failed" and self.status.get("exit_code") == 78
        ):
            return "diverged", f"diverged at {at}" + (f" ({reason[:80]})" if reason else "")
        if losses and losses[-1] is None:
            return "diverged", f"diverged: loss not finite, {at}"
        finite = [v for v in losses if v is not None]
        width = max(3, len(finite) // 20)
        if len(finite) >= 4 * width:
            medians = [
                statistics.median(finite[i : i + width])
                for i in range(0, len(finite) - width, max(1, width // 10))
            ]
            medians.append(statistics.median(finite[-width:]))
            if medians[-1] > min(medians) + 0.5:
                return "diverged", f"diverged: loss {medians[-1]:.2f} after {min(medians):.2f}, {at}"
        if state == "done" or (most and step >= most):
            return "done", f"done, {step:,} steps"
        if not self.metrics and not self.evals:
            return "not begun", "no step logged"
        if state in ("failed", "preempted") or verdict == "stopped":
            error = (reason if verdict == "stopped" else str(self.status.get("error") or ""))[:80]
            return "stopped", f"stopped at {at}" + (f" ({error})" if error else "")
        return "running", f"at {at}"

    def seed(self) -> Any:
        return self.get("train.seed")

    def without_seed(self) -> str | None:
        """The text of all that the configuration's hash is of, except the seed; None without one. Runs whose texts are equal are one
        variant. How it is computed counts, too: parallel.*, train.recompute or train.micro_batch_size may be what is compared."""
        if not self.config:
            return None
        aside = ("name", "run_dir", "log", "checkpoint", "eval", "analysis")  # as in src/config/changes.cpp
        tree = {k: v for k, v in self.config.items() if k not in aside}
        tree["train"] = {k: v for k, v in (tree.get("train") or {}).items() if k not in ("seed", "threads")}
        return json.dumps(tree, sort_keys=True)
