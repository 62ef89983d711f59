"""The program and transformers side by side: logits of the same tokens, and greedy text."""

from __future__ import annotations

import contextlib
import io
import pathlib
import random
import string
import subprocess
from typing import Any

import numpy as np
import torch
import transformers

from .families import LENGTH

# Letters by chance: where words come again, keys have nearly the same scores in sparse attention, and rounding decides which
# of them is selected.
TEXT = "".join(random.Random(1).choices(string.ascii_letters + string.digits + string.punctuation, k=1200)) + "\n"
PROMPT = TEXT[-151:-1]  # with the new tokens, longer than the windows of 128 in configs/
NEW_TOKENS = 64


class Bench:
    """The program, a folder with token files, and what has been found."""

    def __init__(self, folder: pathlib.Path, sluice: str, only: str, tolerance: float) -> None:
        self.folder, self.sluice, self.only, self.tolerance = folder, sluice, only, tolerance
        self.failures: list[str] = []
        self.checks: dict[str, int] = {}
        self.largest = 0.0
        self.precision = "f32"  # of both sides
        self.last: tuple[Any, Any] = (None, None)  # logits
        text = folder / "text.txt"
        text.write_text(TEXT)
        self.run("tokenize", str(text), "-o", str(folder / "text"), "--tokenizer", "byte", "--force")

    def wants(self, name: str) -> bool:
        """Whether the name contains one of the texts of --only."""
        return any(text in name for text in self.only.split(","))

    def run(self, *arguments: str) -> bytes:
        result = subprocess.run([self.sluice, *arguments], capture_output=True, cwd=self.folder, check=False)
        if result.returncode:
            raise RuntimeError(f"sluice {' '.join(arguments)}: {result.returncode}: {result.stderr.decode()}")
        return result.stdout

    def refusal(self, *arguments: str) -> str:
        """The message of a command that must not succeed."""
        result = subprocess.run([self.sluice, *arguments], capture_output=True, cwd=self.folder, check=False)
        return result.stderr.decode() if result.returncode else ""

    def difference(self, run: str, folder: str) -> str:
        """What `sluice checkpoint diff` finds, or how it ended without finding anything; empty where the weights are the same to the
        bit, which is exit code 0 and nothing else."""
        command = [self.sluice, "checkpoint", "diff", run, folder]
        result = subprocess.run(command, capture_output=True, cwd=self.folder, check=False)
        if result.returncode == 0:
            return ""
        said = (result.stdout + result.stderr).decode(errors="replace")
        return said if said.strip() else f"checkpoint diff ended with {result.returncode}, without a word"

    def logits(self, path: str, *more: str) -> np.ndarray:
        """Of the first 512 tokens of the text, as `sluice eval` computes them; kept for the last model."""
        key = path, self.precision, more
        if self.last[0] == key:
            return self.last[1]
        out = self.folder / "logits.npy"
        self.run(
            "eval", path, "--data", f"t={self.folder / 'text'}", "--max-tokens", str(LENGTH), "--logits", str(out), "--force",
            "--tokenizer", "byte", f"data.seq_len={LENGTH}", f"train.precision={self.precision}", *more,
        )  # fmt: skip
        self.last = key, np.load(out)[0]
        return self.last[1]

    def greedy(self, path: str, prompt: str) -> bytes:
        return self.run(
            "generate", path, "-p", prompt, "-n", str(NEW_TOKENS), "--temperature", "0", "--ignore-end",
            "--tokenizer", "byte", f"train.precision={self.precision}", f"data.seq_len={LENGTH}",
        )  # fmt: skip

    def report(self, kind: str, name: str, good: bool, remark: str) -> None:
        """One line of the table; kind: import, export, back, ..."""
        self.checks[kind] = self.checks.get(kind, 0) + 1
        if not good:
            self.failures.append(f"{kind} {name}")
        print(f"{kind:<10}{name:<36}{'same' if good else 'FAILED':<8}{remark}", flush=True)

    def close(self, difference: float) -> bool:
        self.largest = max(self.largest, difference)
        return difference <= self.tolerance


def tokens() -> torch.Tensor:
    return torch.tensor([list(TEXT.encode()[:LENGTH])])


def loaded(folder: pathlib.Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder. What transformers prints while it loads is not wanted."""
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=dtype
        )
    return model.eval()


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(tokens()).logits[0].numpy()


def greedy_tokens(model: Any, prompt: str) -> tuple[list[int], bool]:
    """The most probable tokens, generated with a cache; and whether one pass over all of them, without a cache,
    has the same tokens as its most probable ones."""
    ids = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        out = model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True, eos_token_id=None,
            pad_token_id=0, attention_mask=torch.ones_like(ids),
        )  # fmt: skip
        most_probable = model(out, use_cache=False).logits[0].argmax(-1)
    return out[0].tolist(), torch.equal(most_probable[ids.shape[1] - 1 : -1], out[0, ids.shape[1] :])


def compare(bench: Bench, kind: str, name: str, model: Any, path: str, remark: str = "") -> None:
    """transformers' logits and text, with a cache and without, against Sluice's of the model at `path`."""
    ours, theirs = bench.logits(path), logits_of(model)
    difference = float(np.abs(ours - theirs).max())
    generated, same = greedy_tokens(model, PROMPT)
    text = b"".join(bytes([t]) if t < 256 else b"" for t in generated).decode(errors="replace")
    here = bench.greedy(path, PROMPT).decode(errors="replace")
    texts = [] if same else ["other text with a cache than without"]
    if here.rstrip("\n") != text.rstrip("\n"):
        texts.append("other text here than there")
    remark = f"{difference:.1e} of {float(np.abs(ours).max()):.1f}  {remark}  {', '.join(texts)}"
    bench.report(kind, name, bench.close(difference) and not texts, remark.rstrip())
