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
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

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
    from sluice.bench_pytorch_models import Training

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
        "--model",
        help=f"of {', '.join(MODELS)} (default: small,qwen); on a GPU of {', '.join(GPU_MODELS)} (1.7b)",
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
    if args.device == "cuda":  # compiled kernels on the disk are keyed without the kind of attention in them
        os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    try:  # not before: the help and what is refused need none
        import torch
    except ImportError:
        sys.exit(
            f"bench_pytorch: {sys.executable} has no torch; install it, or run this with a Python that has it"
        )
    gpu, seconds = args.device == "cuda", SECONDS if args.seconds is None else args.seconds
    if gpu and not torch.cuda.is_available():
        sys.exit("bench_pytorch: this PyTorch sees no GPU")
    from sluice.bench_pytorch_models import compile_anew

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
                    compile_anew()
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
            compile_anew()
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
