"""Names for TensorBoard: a folder per variant with its seeds in it, each a link to the run's own events."""

import os
import re


def file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+=,-]+", "_", text).strip("._")[:80] or "run"


def link_runs(groups: list, output: str) -> int:
    """OUTPUT/tensorboard/VARIANT/seed_N; how many there are. Links of an earlier report are replaced; without events no folder."""
    root = os.path.join(output, "tensorboard")
    for folder, _, _ in os.walk(root, topdown=False):
        for name in os.listdir(folder):
            if os.path.islink(os.path.join(folder, name)):
                os.remove(os.path.join(folder, name))
        if not os.listdir(folder):
            os.rmdir(folder)
    made = 0
    for group in groups:
        for run in group.runs:
            events = os.path.join(os.path.abspath(run.folder), "tb")
            if not os.path.isdir(events):
                continue
            folder = os.path.join(root, file_name(group.label))
            os.makedirs(folder, exist_ok=True)
            name = f"seed_{file_name(str(run.seed()))}" if run.seed() is not None else file_name(run.base)
            link = os.path.join(folder, name)
            if not os.path.lexists(link):
                os.symlink(os.path.relpath(events, os.path.realpath(folder)), link)
                made += 1
    return made
