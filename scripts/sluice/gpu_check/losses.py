"""losses.py PROGRAM FOLDER STEPS: a tiny model trained on the CPU and on the GPU, whose losses must agree. Starts in the checkout.
The last line that is printed sums it up; the exit code is not 0 where losses differ."""

import glob
import json
import os
import shutil
import subprocess
import sys

TOLERANCE = {"f32": 1e-3, "bf16": 2e-2}
ATTENTION = {"baseline": "{}", "gated": "{gates: [{position: sdpa_output}]}", "sink": "{kind: sink}"}
CONFIG = """name: gpu_check
run_dir: {run}
model:
  hidden_size: 128
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 64
  intermediate_size: 256
  attention: {attention}
data: {{seq_len: 64, train: [{{name: text, path: {folder}/text}}]}}
train: {{device: {device}, precision: {precision}, micro_batch_size: 2, global_batch_size: 4, max_steps: {steps}}}
optimizer: {{lr: 1e-3, warmup_steps: 0}}
checkpoint: {{every_steps: 0, every_minutes: 0}}
log: {{every_steps: 1, tensorboard: false}}
"""


def prepare_text(program: str, folder: str) -> None:
    """FOLDER/text: the headers of the sources, as tokens."""
    text = os.path.join(folder, "text.txt")
    with open(text, "w", encoding="utf-8") as out:
        for name in sorted(glob.glob("src/*/*.h")):
            with open(name, encoding="utf-8") as file:
                out.write(file.read())
    subprocess.run([program, "tokenize", text, "-o", os.path.join(folder, "text")], check=True)


def curve(program: str, folder: str, steps: int, variant: str, precision: str, device: str) -> list[float]:
    """The losses of one training, a step each."""
    run = f"{folder}/{variant}-{precision}-{device}"
    with open(run + ".yaml", "w", encoding="utf-8") as file:
        file.write(
            CONFIG.format(
                run=run,
                folder=folder,
                device=device,
                precision=precision,
                steps=steps,
                attention=ATTENTION[variant],
            )
        )
    done = subprocess.run(
        [program, "train", run + ".yaml"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout)
        said = [line for line in done.stdout.splitlines() if "error" in line] or ["no message"]
        sys.exit(f"{variant} {precision} on {device}: exit {done.returncode}: {said[0]}")
    with open(run + "/metrics.jsonl", encoding="utf-8") as file:
        return [record["loss"] for record in map(json.loads, file) if "loss" in record]


def compare(program: str, folder: str, steps: int, variant: str, precision: str) -> float:
    """Largest difference between the losses of both devices."""
    cpu, gpu = (curve(program, folder, steps, variant, precision, device) for device in ("cpu", "cuda"))
    if len(cpu) != steps or len(gpu) != steps:
        sys.exit(f"{variant} {precision}: {len(cpu)} losses on the CPU, {len(gpu)} on the GPU, of {steps}")
    difference = max(abs(a - b) for a, b in zip(cpu, gpu))
    print(
        f"{variant} {precision}: {cpu[0]:.4f} to {cpu[-1]:.4f} on the CPU, largest difference {difference:.2e}"
    )
    if not difference <= TOLERANCE[precision]:
        sys.exit(
            f"{variant} {precision}: losses differ by {difference:.2e}, more than {TOLERANCE[precision]}"
        )
    if not cpu[-1] < cpu[0]:
        sys.exit(f"{variant} {precision}: nothing was learnt")
    return difference


def main() -> None:
    program, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    shutil.rmtree(folder, ignore_errors=True)  # a training in an old folder would be resumed
    os.makedirs(folder)
    prepare_text(program, folder)
    worst = {p: max(compare(program, folder, steps, variant, p) for variant in ATTENTION) for p in TOLERANCE}
    print(f"{steps} steps, largest difference " + ", ".join(f"{d:.1e} in {p}" for p, d in worst.items()))


if __name__ == "__main__":
    main()
