"""Training steps on a GPU in PyTorch, beside `sluice bench step --device cuda`: scripts/bench_pytorch --device cuda.

Models are those of tools/bench/step.cpp: 16,384 tokens in a micro-batch, 8 micro-batches in a step. Weights are f32 under bf16
autocast, or bf16 with an f32 copy that AdamW updates, as Sluice keeps them; their gradients are summed over the micro-batches in
bf16, where Sluice sums in f32, which spares PyTorch half of those bytes. Each block is compiled by itself, or none; attention is
cuDNN's or FlashAttention's; the output head and its loss work on chunks of rows, since whole logits would take 15 GB; AdamW is
fused; gradients are clipped by their norm. A variant that does not fit into memory is reported as one that fails.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sluice.bench_pytorch_models import Block

ROWS = 2048  # of logits at once


@dataclasses.dataclass(frozen=True)
class Size:
    """As in tools/bench/step.cpp. ffn: the width, or (experts, experts per token, width of one)."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    ffn: Any
    words: int
    gate: str | None = None
    tied: bool = True
    sequence: int = 4096
    samples: int = 4
    micro_batches: int = 8


DENSE = Size(28, 2048, 16, 8, 128, 6144, 151936)
TINY = Size(2, 32, 2, 1, 64, 48, 61, "elementwise", sequence=24, samples=2, micro_batches=2)
MODELS = {
    "1.7b": DENSE,
    "1.7b-headwise": dataclasses.replace(DENSE, gate="headwise"),
    "1.7b-elementwise": dataclasses.replace(DENSE, gate="elementwise"),
    "moe-slice": Size(24, 2048, 32, 4, 128, (16, 8, 768), 151936, tied=False),
    "tiny": TINY,
    "tiny-moe": dataclasses.replace(TINY, ffn=(5, 2, 24)),
}
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "plain": SDPBackend.MATH,
}


def chunk(
    h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, count: int
) -> tuple[torch.Tensor, ...]:
    """Of some rows: their part of the mean loss, dh and dweight, all with logits that are gone afterwards."""
    logits = (h @ weight.t()).float()
    lse = logits.logsumexp(-1)
    loss = (lse - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).sum() / count
    d = (logits - lse.unsqueeze(-1)).exp()
    d = d.scatter_add(-1, targets.unsqueeze(-1), torch.full_like(lse, -1).unsqueeze(-1)) / count
    d = d.to(h.dtype)
    return loss, d @ weight, d.t() @ h


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of h @ weight.t(), ROWS rows at a time; its gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, of_rows: Any
    ) -> torch.Tensor:
        loss, dh = torch.zeros((), device=h.device), torch.empty_like(h)
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=h.device)
        for begin in range(0, h.shape[0], ROWS):
            rows = slice(begin, begin + ROWS)
            part, dh[rows], dw = of_rows(h[rows], weight, targets[rows], h.shape[0])
            loss += part
            dweight += dw
        ctx.save_for_backward(dh, dweight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, dweight = ctx.saved_tensors
        return dh * d.to(dh.dtype), dweight * d.to(dweight.dtype), None, None


class Model(torch.nn.Module):
    def __init__(self, size: Size, grouped: bool) -> None:
        super().__init__()
        s = size
        self.embed = torch.nn.Embedding(s.words, s.width)
        self.blocks = torch.nn.ModuleList(
            Block(s.width, s.heads, s.kv_heads, s.dim, s.ffn, True, s.gate, False, grouped)
            for _ in range(s.layers)
        )
        self.norm = torch.nn.RMSNorm(s.width, 1e-6)
        self.head = None if s.tied else torch.nn.Linear(s.width, s.words, bias=False)
        angle = torch.outer(torch.arange(s.sequence), 1e4 ** (-torch.arange(0, s.dim, 2) / s.dim)).repeat(
            1, 2
        )
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for p in self.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, blocks: list[Any], of_rows: Any
    ) -> torch.Tensor:
        x = self.embed(tokens).bfloat16()
        for block in blocks:
            x = block(x, self.cos, self.sin)
        weight = (self.embed if self.head is None else self.head).weight.bfloat16()
        h = self.norm(x).to(weight.dtype)
        loss = HeadLoss.apply(h.flatten(0, 1), weight, targets.flatten(), of_rows)
        routers = [block.ffn.loss for block in self.blocks if hasattr(block.ffn, "loss")]
        return loss + sum(routers) / len(routers) if routers else loss


class Training:
    """One variant, ready to step."""

    def __init__(
        self, name: str, device: str, backend: str, compiled: bool, copies: bool, grouped: bool = True
    ) -> None:
        torch.manual_seed(0)
        size = MODELS[name]
        self.size, self.device, self.backend, self.copies = size, device, BACKENDS[backend], copies
        with torch.device(device):
            self.model = Model(size, grouped)
            self.tokens, self.targets = torch.randint(size.words, (2, size.samples, size.sequence))
        weights = list(self.model.parameters())
        # f32 copies of bf16 weights; without them the weights themselves.
        self.masters = [p.detach().clone().requires_grad_() for p in weights] if copies else weights
        if copies:
            self.model.to(torch.bfloat16)
        self.model.cos, self.model.sin = self.model.cos.bfloat16(), self.model.sin.bfloat16()
        compile = torch.compile if compiled else lambda f: f
        self.blocks = [compile(block) for block in self.model.blocks]
        self.of_rows = compile(chunk)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self) -> float:
        """One step; its mean loss."""
        losses = []
        context = torch.autocast(self.device, torch.bfloat16, enabled=not self.copies)
        for _ in range(self.size.micro_batches):
            with context, sdpa_kernel(self.backend):
                loss = self.model(self.tokens, self.targets, self.blocks, self.of_rows)
            (loss / self.size.micro_batches).backward()
            losses.append(loss.detach())
        if self.copies:
            for master, p in zip(self.masters, self.model.parameters()):
                master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), self.masters)
        return float(torch.stack(losses).mean())  # waits for the device, as Sluice's step does

    def tokens_per_second(self, seconds: float) -> float:
        times, begin = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        size = self.size
        return size.samples * size.sequence * size.micro_batches / statistics.median(times)


def variants(name: str, device: str, modes: list[str]) -> dict[str, Callable[[], Training]]:
    """{what it is: makes it}"""
    out: dict[str, Callable[[], Training]] = {}
    for mode in modes:
        for backend in ("cuDNN", "flash") if device == "cuda" else ("plain",):
            for copies in (False, True):
                what = f"{mode}, {backend}, {'bf16 weights' if copies else 'autocast'}"
                out[what] = functools.partial(Training, name, device, backend, mode == "compile", copies)
    return out
