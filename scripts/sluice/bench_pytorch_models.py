"""The models of scripts/bench_pytorch in PyTorch, and a training of one on a processor. What they are: bench_pytorch.MODELS."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F

from sluice.bench_pytorch import MODELS, SAMPLES, SEQUENCE


def compile_anew() -> None:
    """Before each model: torch.compile keeps at most eight versions of a function, of whichever models, and runs what comes after
    without compiling it; that is an error here, where the version of PyTorch can make it one."""
    torch.compiler.reset()
    limits = torch._dynamo.config
    if hasattr(limits, "fail_on_recompile_limit_hit"):
        limits.fail_on_recompile_limit_hit = True


class Dense(torch.nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_up, self.down = (
            torch.nn.Linear(width, 2 * ffn, bias=False),
            torch.nn.Linear(ffn, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g, u = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(g) * u)


class Experts(torch.nn.Module):
    """Softmax router, top k renormalised, slots sorted by expert; balance and z losses as sluice's defaults. grouped: with
    torch._grouped_mm, else a loop over the experts."""

    def __init__(self, width: int, experts: int, per_token: int, ffn: int, grouped: bool) -> None:
        super().__init__()
        self.experts, self.per_token, self.grouped = experts, per_token, grouped
        self.router = torch.nn.Linear(width, experts, bias=False)
        weights = lambda o, i: (
            torch.nn.Parameter(torch.empty(experts, o, i))
            if grouped
            # or each by itself
            else torch.nn.ParameterList(torch.empty(o, i) for _ in range(experts))
        )
        self.gate_up, self.down = weights(2 * ffn, width), weights(width, ffn)
        self.loss = 0

    def products(self, x: torch.Tensor, counts: torch.Tensor, weights: Any) -> torch.Tensor:
        if self.grouped:
            ends = counts.cumsum(0).to(torch.int32)
            g, u = torch._grouped_mm(x, self.gate_up.to(x.dtype).transpose(1, 2), offs=ends).chunk(2, -1)
            return torch._grouped_mm(
                F.silu(g) * u * weights, self.down.to(x.dtype).transpose(1, 2), offs=ends
            )
        out = []
        for e, (rows, scale) in enumerate(zip(x.split(counts.tolist()), weights.split(counts.tolist()))):
            g, u = F.linear(rows, self.gate_up[e]).chunk(2, -1)
            out.append(F.linear(F.silu(g) * u * scale, self.down[e]))
        return torch.cat(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        device = x.device.type
        with torch.autocast(device, enabled=False):
            logits = F.linear(x.float(), self.router.weight.float())
        p = logits.softmax(-1)
        weights, experts = p.topk(self.per_token, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.experts)
        tokens = order // self.per_token
        self.loss = (
            1e-2 * self.experts * (counts / counts.sum() * p.mean(0)).sum()
            + 1e-3 * logits.logsumexp(-1).square().mean()
        )
        compute = torch.bfloat16 if torch.is_autocast_enabled(device) else x.dtype
        y = self.products(x.to(compute)[tokens], counts, weights.flatten()[order].unsqueeze(-1).to(compute))
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, tokens, y).view(shape)


class Block(torch.nn.Module):
    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        dim: int,
        ffn: Any,
        qk_norm: bool,
        gate: str | None,
        plain: bool,
        grouped: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.plain = heads, kv_heads, dim, plain
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False)
        self.norm1, self.norm2 = torch.nn.RMSNorm(width, 1e-6), torch.nn.RMSNorm(width, 1e-6)
        self.qkv = linear(width, (heads + 2 * kv_heads) * dim)
        self.o = linear(heads * dim, width)
        self.gate = linear(width, heads * dim if gate == "elementwise" else heads) if gate else None
        self.q_norm = torch.nn.RMSNorm(dim, 1e-6) if qk_norm else None
        self.k_norm = torch.nn.RMSNorm(dim, 1e-6) if qk_norm else None
        self.ffn = Experts(width, *ffn, grouped) if isinstance(ffn, tuple) else Dense(width, ffn)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.plain:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        groups = self.heads // self.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(self.dim))
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, -torch.inf).softmax(-1) @ v

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        n, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = self.qkv(h).split(
            [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], -1
        )
        split = lambda y, heads: y.view(n, s, heads, self.dim).transpose(1, 2)
        q, k, v = split(q, self.heads), split(k, self.kv_heads), split(v, self.kv_heads)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = self.attend(q.to(v.dtype), k.to(v.dtype), v).transpose(1, 2)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(h)).view(n, s, self.heads, -1)
        x = x + self.o(y.reshape(n, s, -1))
        return x + self.ffn(self.norm2(x))


class Model(torch.nn.Module):
    def __init__(self, name: str, plain: bool, grouped: bool) -> None:
        super().__init__()
        layers, width, heads, kv_heads, dim, ffn, words, qk_norm, gate = MODELS[name]
        self.embed = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(
            Block(width, heads, kv_heads, dim, ffn, qk_norm, gate, plain, grouped) for _ in range(layers)
        )
        self.norm = torch.nn.RMSNorm(width, 1e-6)
        angle = torch.outer(torch.arange(SEQUENCE), 1e4 ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for p in self.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))
        routers = [block.ffn.loss for block in self.blocks if isinstance(block.ffn, Experts)]
        return loss + sum(routers) / len(routers) if routers else loss


class Training:
    """One variant, ready to step."""

    def __init__(self, name: str, precision: str, plain: bool, compiled: bool, grouped: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Model(name, plain, grouped)
        self.loss_of = torch.compile(self.model) if compiled else self.model
        self.bf16 = precision == "bf16"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        words = MODELS[name][6]
        self.tokens = torch.randint(words, (SAMPLES, SEQUENCE))
        self.targets = torch.randint(words, (SAMPLES, SEQUENCE))

    def step(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.loss_of(self.tokens, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tokens_per_second(self, seconds: float) -> float:
        times, begin = [], time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return SAMPLES * SEQUENCE / statistics.median(times)
