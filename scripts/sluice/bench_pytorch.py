"""Training speed of the same models in PyTorch, alone or side by side with `sluice bench`.

    scripts/bench_pytorch                                      every variant, tokens/s
    scripts/bench_pytorch --against build/sluice               alternates with sluice; prints ratios to PyTorch's best
    scripts/bench_pytorch --model qwen,gpt2-124m --precision f32 --threads 2
    scripts/bench_pytorch --model qwen-moe --precision bf16 --against build/sluice
    scripts/bench_pytorch --part decode --longest 4096 --against build/sluice   generation with a cache
    scripts/bench_pytorch --device cuda --against build/sluice                  on a GPU: bench_pytorch_gpu.py says how

On a processor, variants are {eager, torch.compile} x {SDPA, plain softmax} x {f32, bf16 autocast}, for a mixture of experts also x {a loop over
the experts, torch._grouped_mm}; fused AdamW; gradient clipping, as sluice does. Needs torch (and a C++ compiler for torch.compile); run it with the Python that has it."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit(
        f"bench_pytorch: {sys.executable} has no torch; install it, or run this with a Python that has it"
    )

# As in tools/bench/step.cpp: layers, width, heads, kv heads, head_dim, FFN width, words, qk_norm, gate.
# A mixture of experts has (experts, experts per token, width of one) in the place of the FFN's width.
MODELS = {
    "small": (6, 384, 6, 6, 64, 1024, 8064, False, None),
    "qwen": (6, 384, 6, 2, 64, 1024, 8192, True, None),
    "qwen-headwise": (6, 384, 6, 2, 64, 1024, 8192, True, "headwise"),
    "qwen-elementwise": (6, 384, 6, 2, 64, 1024, 8192, True, "elementwise"),
    "qwen-moe": (6, 384, 6, 2, 64, (16, 2, 256), 8192, True, "elementwise"),
    "gpt2-124m": (12, 768, 12, 12, 64, 2048, 50304, False, None),
}
SAMPLES, SEQUENCE = 4, 256
# Of bench_pytorch_gpu.py; the tiny ones also run on a processor, as a rehearsal.
TINY_MODELS = ("tiny", "tiny-moe")
GPU_MODELS = ("1.7b", "1.7b-headwise", "1.7b-elementwise", "moe-slice", *TINY_MODELS)
PRECISIONS = ("f32", "bf16")
MODES = ("eager", "compile")
SECONDS, LONGEST = 5.0, 4096


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


def run_sluice(
    binary: str, device: str, model: str, precision: str, threads: int, seconds: float
) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [
                binary,
                "bench",
                "--part",
                "step",
                "--device",
                device,
                "--model",
                model,
                "--precision",
                precision,
                "--threads",
                str(threads),
                "--seconds",
                str(seconds),
                "--json",
                file.name,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        with open(file.name, encoding="utf-8") as written:
            result = json.load(written)
    return result["steps"][0]


def variants_of(model: str, device: str, precision: str, modes: list[str]) -> dict[str, Callable[[], Any]]:
    """{what it is: makes it}"""
    if model in GPU_MODELS:
        from sluice import bench_pytorch_gpu

        return bench_pytorch_gpu.variants(model, device, modes)
    trials: dict[str, Callable[[], Any]] = {}
    for mode in modes:
        for plain in (False, True):
            for grouped in (False, True) if isinstance(MODELS[model][5], tuple) else (False,):
                name = f"{mode}, {'plain softmax' if plain else 'SDPA'}{', grouped_mm' if grouped else ''}"
                trials[name] = functools.partial(
                    Training, model, precision, plain, mode == "compile", grouped
                )
    return trials


def refuse_what_has_no_effect(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A measurement is printed under the names that were asked for, so each must be one that is measured."""
    unknown = lambda names, known: ", ".join(repr(name) for name in names if name not in known)
    models = (args.model or "").split(",") if args.model else []
    known = GPU_MODELS if args.device == "cuda" else (*MODELS, *TINY_MODELS)
    if wrong := unknown(models, known):
        parser.error(f"--model {args.model}: unknown model {wrong}; there are {', '.join(known)}")
    if wrong := unknown(args.variants.split(","), MODES):
        parser.error(f"--variants {args.variants}: unknown variant {wrong}; there are {', '.join(MODES)}")
    precisions = args.precision.split(",") if args.precision else []
    if wrong := unknown(precisions, PRECISIONS):
        parser.error(
            f"--precision {args.precision}: unknown precision {wrong}; there are {', '.join(PRECISIONS)}"
        )
    of_gpu = [model for model in models if model in GPU_MODELS] or (["1.7b"] if args.device == "cuda" else [])
    if of_gpu and any(precision != "bf16" for precision in precisions):
        parser.error(
            f"--precision {args.precision}: {', '.join(of_gpu)} is measured in bf16 alone; leave --precision out"
        )
    if args.part == "decode":
        given = [name for name in ("model", "precision", "seconds") if getattr(args, name) is not None]
        if given:
            parser.error(
                f"--{given[0]} has no effect on --part decode, whose models have precisions of their own; leave it out"
            )
        if args.device == "cuda":
            parser.error("--part decode measures a processor; leave --device cuda out")
    elif args.longest is not None:
        parser.error("--longest is of --part decode; leave it out")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        choices=("step", "decode"),
        default="step",
        help="training steps, or generation with a cache",
    )
    parser.add_argument("--longest", type=int, help=f"decode: tokens in the cache ({LONGEST})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model", help=f"of {', '.join(MODELS)} (default: small,qwen); on a GPU of {', '.join(GPU_MODELS)} (1.7b)"
    )
    parser.add_argument(
        "--precision", help="f32, bf16 or both (default: f32,bf16); models of a GPU have bf16 alone"
    )
    parser.add_argument("--variants", default=",".join(MODES), help="eager, compile or both")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, help=f"step: per measurement ({SECONDS:g})")
    parser.add_argument("--against", metavar="SLUICE", help="the program to alternate with")
    parser.add_argument(
        "--rounds", type=int, default=5, help="pairs of measurements, after one that is thrown away"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every number to this file")
    args = parser.parse_args()
    refuse_what_has_no_effect(parser, args)
    gpu, seconds = args.device == "cuda", SECONDS if args.seconds is None else args.seconds
    if gpu and not torch.cuda.is_available():
        sys.exit("bench_pytorch: this PyTorch sees no GPU")
    models = (args.model or ("1.7b" if gpu else "small,qwen")).split(",")
    torch.set_num_threads(args.threads)
    print(
        f"PyTorch {torch.__version__}, {args.threads} threads, oneDNN {torch.backends.mkldnn.is_available()}, "
        f"MKL {torch.backends.mkl.is_available()}"
    )
    results: list[dict[str, Any]] = []
    if args.part == "decode":
        from sluice import bench_pytorch_decode

        results = bench_pytorch_decode.run(
            args.variants.split(","), args.longest or LONGEST, args.threads, args.rounds, args.against
        )
    for model in models if args.part == "step" else ():
        for precision in (args.precision or ("bf16" if model in GPU_MODELS else "f32,bf16")).split(","):
            speeds = {}
            trials = variants_of(model, args.device, precision, args.variants.split(","))
            for variant, trial in trials.items():
                training = None  # the memory of the one before
                try:
                    training = trial()
                    for _ in range(3):
                        training.step()
                    speeds[variant] = training.tokens_per_second(seconds)
                    print(
                        f"{model:<18}{precision:<6}{variant:<36}{speeds[variant]:>9.0f} tokens/s", flush=True
                    )
                except Exception as error:  # a variant this build of torch cannot run
                    print(
                        f"{model:<18}{precision:<6}{variant:<36}fails: {str(error).strip().splitlines()[0]}",
                        flush=True,
                    )
            if not speeds:
                continue
            best = max(speeds, key=speeds.get)
            row = {
                "model": model,
                "precision": precision,
                "torch": torch.__version__,
                "threads": args.threads,
                "variants": speeds,
                "best": best,
            }
            results.append(row)
            if not args.against:
                continue
            training = None  # its memory first
            training = trials[best]()
            for _ in range(3):
                training.step()
            pairs = []
            for round_number in range(args.rounds + 1):
                theirs = training.tokens_per_second(seconds)
                ours = run_sluice(args.against, args.device, model, precision, args.threads, seconds)
                if round_number > 0:
                    pairs.append((ours["tokens_per_second"], theirs, ours["percent_of_peak"], ours["peak"]))
            ratios = [a / b for a, b, *_ in pairs]
            row.update(
                sluice=[p[0] for p in pairs], pytorch=[p[1] for p in pairs], ratio=statistics.median(ratios)
            )
            print(
                f"{model:<18}{precision:<6}sluice {statistics.median(p[0] for p in pairs):.0f} tokens/s "
                f"({statistics.median(p[2] for p in pairs):.0f} % of {pairs[0][3]}), PyTorch's best ({best}) "
                f"{statistics.median(p[1] for p in pairs):.0f}: {statistics.median(ratios):.2f}x "
                f"({min(ratios):.2f}-{max(ratios):.2f} in {len(ratios)} pairs)",
                flush=True,
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)
