"""summary.py STEPS.tsv FOLDER EMULATED: the table at the end of scripts/gpu_check, and FOLDER/gpu_check.json with every figure.
The exit code is 1 where a step failed, or none ran."""

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from sluice.reporting.files import open_file, read_object
from sluice.reporting.shapes import NUMBER, TEXT, WHOLE, clean, warn

KERNEL = {"name": TEXT, "tb_per_second": NUMBER, "percent_of_copy": NUMBER}
ATTENTION = {
    "name": TEXT,
    "tokens": WHOLE,
    "heads": TEXT,
    "gate": TEXT,
    "kernel": TEXT,
    "tflops": NUMBER,
    "of_cudnn": NUMBER,
    "with": TEXT,
}
MATMUL = {"name": TEXT, "shape": TEXT, "precision": TEXT, "algorithm": TEXT, "tflops": NUMBER, "of_heuristic": NUMBER}
MOE = {"name": TEXT, "tokens": WHOLE, "experts": TEXT, "us": NUMBER, "of_dense": NUMBER}
SPARSE = {
    "name": TEXT,
    "tokens": WHOLE,
    "kernel": TEXT,
    "neighbours": TEXT,
    "us": NUMBER,
    "of_dense": NUMBER,
}
STEP = {"model": TEXT, "ms": NUMBER, "tokens_per_second": NUMBER, "percent_of_peak": NUMBER, "peak": TEXT}
PARTS: dict[str, dict[str, Any]] = {
    "kernels": {"kernels": [KERNEL]},
    "matmul": {"matmul": [MATMUL]},
    "moe": {"moe": [MOE]},
    "attention": {"attention": [ATTENTION]},
    "sparse": {"sparse": [SPARSE]},
    "step": {"steps": [STEP]},
}


def read_steps(path: str) -> list[dict[str, Any]]:
    """Rows of step, result, seconds and note; a line that is none counts as a step that failed."""
    rows = []
    with open_file(path) as file:
        for i, line in enumerate(file, 1):
            cells = [clean(cell, 200) for cell in line.rstrip("\n").split("\t")]
            if len(cells) == 4 and cells[2].isdecimal() and len(cells[2]) < 10:
                step, result, seconds, note = cells
            else:
                warn(f"{path}:{i}: not a line of step, result, seconds and note")
                step, result, seconds, note = f"line {i}", "FAILED", "0", "not readable"
            rows.append({"step": step, "result": result, "seconds": int(seconds), "note": note})
    return rows


def read_figures(folder: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the benchmarks that passed, by part. One whose file holds no figures has failed."""
    figures = {}
    for part, shape in PARTS.items():
        for row in rows:
            if row["step"] != "bench-" + part or row["result"] != "passed":
                continue
            found = read_object(os.path.join(folder, f"bench-{part}.json"), shape, must=True)
            if found:
                figures[part] = found
            else:
                row.update(result="FAILED", note="wrote no figures")
    return figures


def table(figures: dict[str, Any], part: str, name: str, needed: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a part that have all that a table shows."""
    rows = figures.get(part, {}).get(name) or []
    return [row for row in rows if all(row.get(key) is not None for key in needed)]


def print_figures(figures: dict[str, Any], emulated: bool) -> None:
    """Speeds, which an emulated GPU does not have; those of a step are shown there, too, as a test of this script."""
    kernels = [] if emulated else table(figures, "kernels", "kernels", KERNEL)
    if kernels:
        print(f"\n{'kernel':<34} {'TB/s':>10} {'% of copy':>9}")
    for k in kernels:
        print(f"{k['name']:<34} {k['tb_per_second']:>10.3f} {k['percent_of_copy']:>9.1f}")
    compared = {key: shape for key, shape in ATTENTION.items() if key not in ("of_cudnn", "with")}
    attention = [] if emulated else table(figures, "attention", "attention", compared)
    if attention:
        print(
            f"\n{'attention':<20} {'tokens':>7} {'heads':>6} {'gate, or with':<18} {'kernel':<7} {'TFLOP/s':>9} {'x cuDNN':>8}"
        )
    for a in attention:
        of_cudnn = f"{a['of_cudnn']:.2f}" if a.get("of_cudnn") is not None else ""
        print(
            f"{a['name']:<20} {a['tokens']:>7} {a['heads']:>6} {a.get('with') or a['gate']:<18} {a['kernel']:<7}"
            f" {a['tflops']:>9.1f} {of_cudnn:>8}"
        )
    products = [] if emulated else table(figures, "matmul", "matmul", MATMUL)
    if products:
        print(f"\n{'timed product':<46} {'shape':<22} {'type':<5} {'TFLOP/s':>9} {'x heuristic':>12}")
    for p in products:
        print(
            f"{p['name']:<46} {p['shape']:<22} {p['precision']:<5} {p['tflops']:>9.1f} {p['of_heuristic']:>12.3f}"
        )
    experts = [] if emulated else table(figures, "moe", "moe", MOE)
    if experts:
        print(f"\n{'mixture of experts':<30} {'tokens':>7} {'experts':<20} {'ms':>9} {'x dense':>8}")
    for m in experts:
        print(
            f"{m['name']:<30} {m['tokens']:>7} {m['experts']:<20} {m['us'] * 1e-3:>9.2f} {m['of_dense']:>8.2f}"
        )
    timed = {key: shape for key, shape in SPARSE.items() if key != "of_dense"}
    sparse = [] if emulated else table(figures, "sparse", "sparse", timed)
    if sparse:
        print(f"\n{'sparse attention':<20} {'tokens':>7} {'kernel':<14} {'neighbours':<10} {'ms':>9} {'x dense':>8}")
    for a in sparse:
        of_dense = f"{a['of_dense']:.2f}" if a.get("of_dense") is not None else ""
        print(
            f"{a['name']:<20} {a['tokens']:>7} {a['kernel']:<14} {a['neighbours']:<10} {a['us'] * 1e-3:>9.2f} {of_dense:>8}"
        )
    models = {s["model"]: s for s in table(figures, "step", "steps", STEP)}
    for s in models.values():
        print(
            f"\n{s['model']}: {s['ms']:.0f} ms, {s['tokens_per_second']:.0f} tokens/s, {s['percent_of_peak']:.1f} % of {s['peak']}"
        )
    for name, s in models.items():
        plain, _, gate = name.rpartition("-")
        if gate in ("headwise", "elementwise") and plain in models:
            print(f"{gate} gate: {100 * (s['ms'] / models[plain]['ms'] - 1):+.1f} % of a step of {plain}")


def main() -> int:
    path, folder, emulated = sys.argv[1], sys.argv[2], sys.argv[3] != "0"
    try:
        rows = read_steps(path)
    except OSError as error:
        print(f"gpu_check: {path}: {error.strerror}", file=sys.stderr)
        return 1
    figures = read_figures(folder, rows)
    with open(os.path.join(folder, "gpu_check.json"), "w", encoding="utf-8") as file:
        json.dump({"emulated": emulated, "steps": rows, "bench": figures}, file, indent=2)
    print(f"\n{'step':<24} {'result':<9} {'seconds':>8}  note")
    for row in rows:
        print(f"{row['step']:<24} {row['result']:<9} {row['seconds']:>8}  {row['note']}")
    print_figures(figures, emulated)
    failed = [row["step"] for row in rows if row["result"] == "FAILED"]
    print(
        f"\n{folder}/gpu_check.json" + (f"\nFAILED: {', '.join(failed)} (logs in {folder})" if failed else "")
    )
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
