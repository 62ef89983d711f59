"""The checks of scripts/check_interop: run by the Python that has torch and transformers."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import torch
import transformers

from .families import FAMILIES, LENGTH
from .repository import load_repository
from .variants import BASE, FORCED, VARIANTS

TEXT = "Attention needs no sink where a gate can close, and a head that has nothing to say may stay silent. "
NEW_TOKENS = 64


class Bench:
    """The program, a folder with token files, and what has been found."""

    def __init__(self, folder: pathlib.Path, sluice: str, only: str, tolerance: float) -> None:
        self.folder, self.sluice, self.only, self.tolerance = folder, sluice, only, tolerance
        self.failures = 0
        text = folder / "text.txt"
        text.write_text(TEXT * 12)
        if not (folder / "text.bin").exists():
            self.run("tokenize", str(text), "-o", str(folder / "text"), "--tokenizer", "byte")

    def run(self, *arguments: str) -> bytes:
        result = subprocess.run([self.sluice, *arguments], capture_output=True, cwd=self.folder, check=False)
        if result.returncode:
            raise RuntimeError(f"sluice {' '.join(arguments)}: {result.returncode}: {result.stderr.decode()}")
        return result.stdout

    def logits(self, path: str, *more: str) -> np.ndarray:
        """Of the first 512 tokens of the text, as `sluice eval` computes them."""
        out = self.folder / "logits.npy"
        self.run(
            "eval", path, "--data", "t=text", "--max-tokens", str(LENGTH), "--logits", str(out),
            "--tokenizer", "byte", f"data.seq_len={LENGTH}", "train.precision=f32", *more,
        )  # fmt: skip
        return np.load(out)[0]

    def greedy(self, path: str, prompt: str) -> bytes:
        return self.run(
            "generate", path, "-p", prompt, "-n", str(NEW_TOKENS), "--temperature", "0", "--ignore-end",
            "--tokenizer", "byte", "train.precision=f32",
        )  # fmt: skip

    def report(self, name: str, difference: float, text_agrees: bool, remark: str = "") -> None:
        good = difference <= self.tolerance and text_agrees
        self.failures += not good
        text = "same text" if text_agrees else "OTHER TEXT"
        print(f"{name:<34}{difference:>12.2e}  {text}  {'' if good else 'FAILED  '}{remark}", flush=True)


def tokens() -> torch.Tensor:
    return torch.tensor([list((TEXT * 12).encode()[:LENGTH])])


def greedy_tokens(model: transformers.PreTrainedModel, prompt: str, cache: bool) -> list[int]:
    ids = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        out = model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=cache, eos_token_id=None,
            pad_token_id=0, attention_mask=torch.ones_like(ids),
        )  # fmt: skip
    return out[0].tolist()


def compare(
    bench: Bench, name: str, model: transformers.PreTrainedModel, path: str, remark: str = ""
) -> None:
    """transformers' logits and text against Sluice's of the model at `path`."""
    with torch.no_grad():
        theirs = model(tokens()).logits[0].float().numpy()
    difference = float(np.abs(bench.logits(path) - theirs).max())
    prompt = TEXT[:40]
    with_cache = greedy_tokens(model, prompt, cache=True)
    agrees = with_cache == greedy_tokens(model, prompt, cache=False)
    text = b"".join(bytes([t]) if t < 256 else b"" for t in with_cache).decode(errors="replace")
    agrees = agrees and bench.greedy(path, prompt).decode(errors="replace").rstrip("\n") == text.rstrip("\n")
    bench.report(name, difference, agrees, remark)


def import_families(bench: Bench) -> None:
    for name, (build, how) in FAMILIES.items():
        if bench.only not in name:
            continue
        folder = bench.folder / "families" / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build()
        if "dtype" in how:
            model = model.to(how["dtype"])
        model.save_pretrained(folder, **{k: v for k, v in how.items() if k != "dtype"})
        compare(bench, "import " + name, model.float(), str(folder))


def train(bench: Bench, name: str, overrides: list[str]) -> pathlib.Path:
    run = bench.folder / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    config = bench.folder / "base.yaml"
    config.write_text("".join(f"{section}: {value}\n" for section, value in BASE.items()))
    bench.run("train", str(config), f"run_dir={run}", *overrides)
    return run


def weights(path: pathlib.Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def check_export(bench: Bench, name: str, run: pathlib.Path, wanted: str, chosen: str) -> None:
    folder = bench.folder / "exports" / name
    shutil.rmtree(folder, ignore_errors=True)
    out = bench.run("export", str(run), "-o", str(folder), "--format", chosen).decode()
    if f"({wanted})" not in out:
        bench.report("export " + name, float("inf"), False, f"expected {wanted}: {out.strip()}")
        return
    if wanted != "gated_attention":  # transformers has no code for it
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32
        ).eval()
        compare(bench, "export " + name, model, str(run), wanted)
        model.train()
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        missing = [n for n, p in model.named_parameters() if p.grad is None]
        if missing and "experts" not in "".join(missing):
            bench.report("gradients " + name, float("inf"), True, f"none for {missing}")
    else:
        with torch.no_grad():
            theirs = load_repository(folder)(tokens()).logits[0].numpy()
        difference = float(np.abs(bench.logits(str(run)) - theirs).max())
        bench.report("export " + name, difference, True, wanted)
    # Back again: the same weights, to the bit but for norms below 1/2 stored as w - 1.
    back = bench.logits(str(folder))
    bench.report("import of " + name, float(np.abs(back - bench.logits(str(run))).max()), True, wanted)


def check_tokenizer(bench: Bench) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(bench.folder / "exports" / "plain")
    text = "A byte é 漢 \n\t end<|endoftext|>"
    expected = [*text[:-13].encode(), 256]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bench.report("byte tokenizer", 0.0, ids == expected and tokenizer.decode(expected[:-1]) == text[:-13])


def main() -> int:
    folder, sluice, only, tolerance, work = sys.argv[1:6]
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_MODULES_CACHE", os.path.join(folder, "modules"))
    bench = Bench(pathlib.Path(folder), sluice, only, float(tolerance))
    if work == "goldens":
        from .goldens import write_goldens

        write_goldens()
        return 0
    import_families(bench)
    runs: dict[str, pathlib.Path] = {}
    cases: list[tuple[str, str, str, str]] = [(n, n, w, "auto") for n, (w, _) in VARIANTS.items()]
    cases += [(n, variant, form, form) for n, (variant, form) in FORCED.items()]
    for name, variant, wanted, chosen in cases:
        if only not in name:
            continue
        try:
            if variant not in runs:
                runs[variant] = train(bench, variant, VARIANTS[variant][1])
            check_export(bench, name, runs[variant], wanted, chosen)
        except Exception as error:
            bench.report("export " + name, float("inf"), False, f"{type(error).__name__}: {error}")
    if "plain" in runs:
        check_tokenizer(bench)
    print(f"{bench.failures} failures; transformers {transformers.__version__}, torch {torch.__version__}")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
