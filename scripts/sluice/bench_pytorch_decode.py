"""Generation with a cache in PyTorch, beside `sluice bench decode`: scripts/bench_pytorch --part decode.

Models, lengths and batches are those of tools/bench/decode.cpp; weights are random, and held in the precision
named. The cache has room for all positions and is written in place; variants: {eager, torch.compile} of one
token's forward pass."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F

from sluice.bench_pytorch_models import Block, compile_anew

# As in tools/bench/decode.cpp: precision, then layers, width, heads, kv heads, head_dim, FFN width, words, gate.
DECODERS = {
    "plain": ("f32", 8, 384, 6, 2, 64, 1024, 16384, None),
    "gated": ("f32", 8, 384, 6, 2, 64, 1024, 16384, "elementwise"),
    "124M": ("bf16", 12, 768, 12, 12, 64, 2048, 50304, None),
}
TOGETHER = 8


class Decoder(torch.nn.Module):
    """One token of each of several sequences of equal length, behind `length` cached keys and values."""

    def __init__(self, name: str, context: int) -> None:
        super().__init__()
        precision, layers, width, heads, kv_heads, dim, ffn, words, gate = DECODERS[name]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.embed = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(
            Block(width, heads, kv_heads, dim, ffn, True, gate, False, False) for _ in range(layers)
        )
        self.norm = torch.nn.RMSNorm(width, 1e-6)
        self.to(dtype)
        angle = torch.outer(torch.arange(context), 1e4 ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)
        self.register_buffer("cos", angle.cos().to(dtype))
        self.register_buffer("sin", angle.sin().to(dtype))
        for p in self.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)
        shape = (layers, 2, TOGETHER, kv_heads, context, dim)
        self.register_buffer("cache", torch.randn(shape).to(dtype))

    def attend(self, block: Block, layer: int, x: torch.Tensor, length: int) -> torch.Tensor:
        n = x.shape[0]
        h = block.norm1(x)
        q, k, v = block.qkv(h).split(
            [block.heads * block.dim, block.kv_heads * block.dim, block.kv_heads * block.dim], -1
        )
        q, k, v = (y.view(n, -1, 1, block.dim) for y in (q, k, v))
        cos, sin = self.cos[length], self.sin[length]
        assert block.q_norm is not None and block.k_norm is not None
        q, k = block.rotate(block.q_norm(q), cos, sin), block.rotate(block.k_norm(k), cos, sin)
        keys, values = self.cache[layer, 0, :n], self.cache[layer, 1, :n]
        keys[:, :, length] = k[:, :, 0]
        values[:, :, length] = v[:, :, 0]
        y = F.scaled_dot_product_attention(
            q,
            keys[:, :, : length + 1],
            values[:, :, : length + 1],
            enable_gqa=block.heads != block.kv_heads,
        )
        if block.gate is not None:
            y = y * torch.sigmoid(block.gate(h)).view(n, block.heads, 1, -1)
        return block.o(y.reshape(n, -1))

    def forward(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = x + self.attend(block, layer, x, length)
            x = x + block.ffn(block.norm2(x))
        return F.linear(self.norm(x), self.embed.weight)


@torch.inference_mode()
def tokens_per_second(step: Any, batch: int, length: int, steps: int = 9) -> float:
    tokens = torch.full((batch,), 7)
    for _ in range(3):
        step(tokens, length)
    times = []
    for i in range(steps):
        start = time.perf_counter()
        step(tokens, length + i)
        times.append(time.perf_counter() - start)
    return batch / statistics.median(times)


def run_sluice(binary: str, longest: int, threads: int) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [binary, "bench", "--part", "decode", "--longest", str(longest)]
            + ["--threads", str(threads), "--json", file.name],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        with open(file.name, encoding="utf-8") as written:
            rows: list[dict[str, Any]] = json.load(written)["decode"]
    return rows


def measure(compiled: bool, longest: int) -> dict[tuple[str, int, int], float]:
    """Tokens/s by model, length and batch."""
    speeds = {}
    for name in DECODERS:
        lengths = [1024 << i for i in range(8) if 1024 << i <= longest]
        compile_anew()
        decoder = Decoder(name, longest + 64).eval()
        step = torch.compile(decoder, dynamic=True) if compiled else decoder
        for length in lengths:
            for batch in (1, TOGETHER):
                speeds[name, length, batch] = tokens_per_second(step, batch, length)
    return speeds


def run(
    variants: list[str], longest: int, threads: int, rounds: int, against: str | None
) -> list[dict[str, Any]]:
    """Prints and returns tokens/s of every variant; with `against`, the ratios of pairs to the better variant."""
    ours: list[dict[tuple[str, int, int], float]] = []
    theirs: list[dict[str, dict[tuple[str, int, int], float]]] = []
    for _ in range(rounds if against else 1):
        theirs.append({v: measure(v == "compile", longest) for v in variants})
        if against:
            found = {}
            for of_sluice in run_sluice(against, longest, threads):
                where = of_sluice["model"], of_sluice["length"]
                found[(*where, 1)] = of_sluice["decode_tokens_per_second"]
                found[(*where, TOGETHER)] = of_sluice["decode_tokens_per_second_together"]
            ours.append(found)
    results = []
    for key in theirs[0][variants[0]]:
        name, length, batch = key
        speeds = {v: statistics.median(round_[v][key] for round_ in theirs) for v in variants}
        best = max(speeds, key=lambda v: speeds[v])
        row: dict[str, Any] = {
            "model": name,
            "length": length,
            "batch": batch,
            "variants": speeds,
            "best": best,
        }
        text = f"{name:<7}{DECODERS[name][0]:<5}{length:>6} tokens, batch {batch}: PyTorch's best ({best}) {speeds[best]:.0f} tokens/s"
        if against:
            ratios = [a[key] / max(b[v][key] for v in variants) for a, b in zip(ours, theirs)]
            row.update(sluice=[a[key] for a in ours], ratio=statistics.median(ratios))
            text += f", sluice {statistics.median(a[key] for a in ours):.0f}: {row['ratio']:.2f}x ({min(ratios):.2f}-{max(ratios):.2f} in {len(ratios)} pairs)"
        print(text, flush=True)
        results.append(row)
    return results
