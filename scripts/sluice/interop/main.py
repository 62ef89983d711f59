"""Installs torch, transformers and lm-eval into a folder of their own, and checks with them that models go in and out
unchanged."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

from .. import program

PACKAGES = ["torch", "transformers", "tokenizers", "safetensors", "numpy", "lm_eval"]


def install(folder: pathlib.Path) -> str:
    """The Python of FOLDER/venv, with the packages."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    probe = "import tenacity, " + ", ".join(PACKAGES)  # of lm_eval's extra "api", which a bare lm_eval lacks
    if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode:
        wanted = [*PACKAGES[:-1], "lm_eval[api,hf]"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *wanted], check=True)
    return str(python)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/check_interop",
        description="Exports of every kind of model, loaded by transformers, and folders of transformers, "
        "evaluated by Sluice: largest difference of logits over 512 tokens in f32, greedy text with a cache and "
        "without, gradients, weights imported back; lm-eval on a server and with transformers.",
    )
    parser.add_argument("folder", type=pathlib.Path, help="for the packages (FOLDER/venv) and all models")
    parser.add_argument("--sluice", help="the program; default: build/sluice")
    parser.add_argument(
        "--only",
        default="",
        help="run only cases whose name contains one of these texts, separated by commas",
    )
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of a logit (1e-4)")
    parser.add_argument("--goldens", action="store_true", help="write tests/golden/hf_* instead")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    python = install(args.folder)
    command = [python, "-m", "sluice.interop.cases", str(args.folder.resolve()), program.find(args.sluice)]
    command += [args.only, str(args.tolerance), "goldens" if args.goldens else "check"]
    environment = dict(os.environ, PYTHONPATH=program.SCRIPTS, PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run(command, env=environment, check=False).returncode
