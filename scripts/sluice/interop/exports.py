"""Models of Sluice, exported, loaded by transformers, fine-tuned a step there, and imported back."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .bench import Bench, compare, loaded, logits_of, tokens
from .repository import load_repository
from .variants import BASE

TRAIN = ["log.tensorboard=false", "log.console=none", "checkpoint.every_minutes=0", "checkpoint.async=false"]


def train(bench: Bench, name: str, config: str | pathlib.Path | None, overrides: list[str]) -> pathlib.Path:
    """A short training of a configuration, or of the tiny model."""
    run = bench.folder / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    if config is None:
        config = bench.folder / "base.yaml"
        config.write_text("".join(f"{section}: {value}\n" for section, value in BASE.items()))
    bench.run("train", str(config), f"run_dir={run}", *TRAIN, *overrides)
    return run


def check_same_weights(bench: Bench, name: str, run: pathlib.Path, folder: pathlib.Path, form: str) -> None:
    """The folder has the weights of the run, to the bit. Where they are packed or norms are w - 1: a training that
    begins with the folder and moves nothing has them, as its own export shows, which has no moments."""
    back = folder
    if form in ("qwen3_next", "gated_attention", "gpt_oss"):
        config, back = bench.folder / "back.yaml", bench.folder / "runs" / (name + "_back")
        config.unlink(missing_ok=True)
        shutil.rmtree(back, ignore_errors=True)
        bench.run("import", str(folder), "-o", str(config))
        data = f"[{{name: t, path: {bench.folder / 'text'}}}]"
        bench.run(
            "train", str(config), f"run_dir={back}", *TRAIN, "train.max_steps=1", f"data.train={data}",
            "train.micro_batch_size=1", "train.global_batch_size=1", "train.precision=f32",
            "data.seq_len=64", "optimizer.lr=1e-30", "optimizer.min_lr=0", "optimizer.weight_decay=0",
            "optimizer.rules=[{match: ., trainable: false}, {match: model.norm.weight, trainable: true}]",
        )  # fmt: skip
        own = bench.folder / "exports" / (name + "_back")
        shutil.rmtree(own, ignore_errors=True)
        bench.run("export", str(back), "-o", str(own), "--format", "sluice")
        back = own
    difference = bench.difference(str(run), str(back))
    bench.report("weights", name, not difference, difference.strip().replace("\n", "; ")[:200])


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The result of the first call, for all others."""
    kept: list[Any] = []

    def call(*arguments: Any) -> Any:
        kept.append(None if kept else function(*arguments))
        return kept[0]

    return call


def check_step(bench: Bench, name: str, model: Any) -> None:
    """Every parameter has a gradient. In our own code a small step along it lowers the loss by as much as it says: in
    f64, where the step can be so small that no token changes its experts."""
    ours = model.config.model_type == "sluice"
    fall = 1e-8 if ours else 1e-4
    ids = tokens()
    with torch.no_grad():
        reported = float(model(ids, labels=ids).loss)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no f64
    model = model.double().train()

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:])

    for module in model.modules():
        if type(module).__name__ == "SluiceIndexer":  # its choice jumps
            module.forward = once(module.forward)
    before = loss()
    before.backward()
    # An expert that no token goes to has none, nor an indexer, whose choice is no function of its weights.
    without = (".experts.", ".indexer.")
    none = [n for n, p in model.named_parameters() if p.grad is None and not any(w in n for w in without)]
    square = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    rate = fall / square
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
        share = float((before - loss()).detach()) / fall
    as_said = abs(share - 1) < 1e-2 and abs(reported - float(before.detach())) < 1e-4
    good = not none and (as_said or not ours)
    bench.report("gradient", name, good, f"{share:.5f} {none[:3] if none else ''}")


def check_export(bench: Bench, name: str, run: pathlib.Path, wanted: str, chosen: str) -> None:
    """wanted: the format that is expected, or empty for any."""
    folder = bench.folder / "exports" / name
    shutil.rmtree(folder, ignore_errors=True)
    out = bench.run("export", str(run), "-o", str(folder), "--format", chosen).decode()
    if wanted and f"({wanted})" not in out:
        bench.report("export", name, False, f"expected {wanted}: {out.strip()}")
        return
    form = wanted or out.split("(")[-1].split(")")[0]
    # Which keys an indexer selects hangs on rounding where two have nearly the same score.
    selects = "kind: sparse" in bench.run("config", "show", str(run / "config.yaml")).decode()
    bench.precision = "f64" if selects else "f32"
    if form == "gated_attention":  # transformers has no code for it
        theirs = logits_of(load_repository(folder))
        difference = float(np.abs(bench.logits(str(run)) - theirs).max())
        bench.report("export", name, bench.close(difference), f"{difference:.1e}  {form}")
    else:
        model = loaded(folder, torch.float64 if selects else torch.float32)
        compare(bench, "export", name, model, str(run), form)
        if form == "sluice":
            other = "eager" if model.config._attn_implementation == "sdpa" else ""
            if other:
                model.set_attn_implementation(other)
                difference = float(np.abs(bench.logits(str(run)) - logits_of(model)).max())
                bench.report(other, name, bench.close(difference), f"{difference:.1e}")
        check_step(bench, name, model)
    ours = bench.logits(str(run))
    difference = float(np.abs(bench.logits(str(folder)) - ours).max())
    bench.report("back", name, difference == 0, f"{difference:.1e}  {form}")
    bench.precision = "f32"
    check_same_weights(bench, name, run, folder, form)


def check_refused(bench: Bench, name: str, run: pathlib.Path, form: str, key: str) -> None:
    """A model that the format does not hold is refused with the key's name."""
    folder = str(bench.folder / "exports" / name)
    message = bench.refusal("export", str(run), "-o", folder, "--format", form)
    bench.report("refusal", name, key in message, message.strip().split("\n")[-1].strip()[:100])
