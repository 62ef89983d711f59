"""summary.py STEPS.tsv FOLDER EMULATED: the table at the end of scripts/gpu_check, and FOLDER/gpu_check.json with every figure.
The exit code is 1 where a step failed, or none ran."""

import json
import os
import sys
from typing import Any

PARTS = ("kernels", "matmul", "attention", "step")


def read_steps(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        rows = [
            dict(zip(("step", "result", "seconds", "note"), line.rstrip("\n").split("\t"))) for line in file
        ]
    return [{**row, "seconds": int(row["seconds"])} for row in rows]


def read_figures(folder: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the benchmarks that passed, by part."""
    figures = {}
    for part in PARTS:
        path = os.path.join(folder, f"bench-{part}.json")
        if os.path.exists(path) and any(
            r["step"] == "bench-" + part and r["result"] == "passed" for r in rows
        ):
            with open(path, encoding="utf-8") as file:
                figures[part] = json.load(file)
    return figures


def print_figures(figures: dict[str, Any], emulated: bool) -> None:
    """Speeds, which an emulated GPU does not have; those of a step are shown there, too, as a test of this script."""
    kernels = [] if emulated else figures.get("kernels", {}).get("kernels", [])
    if kernels:
        print(f"\n{'kernel':<34} {'TB/s':>10} {'% of copy':>9}")
    for k in kernels:
        if "tb_per_second" in k:
            print(f"{k['name']:<34} {k['tb_per_second']:>10.3f} {k['percent_of_copy']:>9.1f}")
    attention = [] if emulated else figures.get("attention", {}).get("attention", [])
    if attention:
        print(
            f"\n{'attention':<20} {'tokens':>7} {'heads':>6} {'gate':<12} {'kernel':<7} {'TFLOP/s':>9} {'x cuDNN':>8}"
        )
    for a in attention:
        if "tflops" in a:
            of_cudnn = f"{a['of_cudnn']:.2f}" if "of_cudnn" in a else ""
            print(
                f"{a['name']:<20} {a['tokens']:>7} {a['heads']:>6} {a['gate']:<12} {a['kernel']:<7} {a['tflops']:>9.1f} {of_cudnn:>8}"
            )
    for s in figures.get("step", {}).get("steps", []):
        print(
            f"\n{s['model']}: {s['ms']:.0f} ms, {s['tokens_per_second']:.0f} tokens/s, {s['percent_of_peak']:.1f} % of {s['peak']}"
        )


def main() -> int:
    path, folder, emulated = sys.argv[1], sys.argv[2], sys.argv[3] != "0"
    rows = read_steps(path)
    figures = read_figures(folder, rows)
    with open(os.path.join(folder, "gpu_check.json"), "w", encoding="utf-8") as file:
        json.dump({"emulated": emulated, "steps": rows, "bench": figures}, file, indent=2)
    print(f"\n{'step':<16} {'result':<9} {'seconds':>8}  note")
    for row in rows:
        print(f"{row['step']:<16} {row['result']:<9} {row['seconds']:>8}  {row['note']}")
    print_figures(figures, emulated)
    failed = [row["step"] for row in rows if row["result"] == "FAILED"]
    print(
        f"\n{folder}/gpu_check.json" + (f"\nFAILED: {', '.join(failed)} (logs in {folder})" if failed else "")
    )
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
