"""Turns run folders into tables, PNG plots, one Markdown file and one self-contained HTML page.

  scripts/report runs/baseline runs/gated -o report
  scripts/report sweeps/table1 -o report             # every run below a sweep's folder

Reads run.json, config.yaml, metrics.jsonl and eval.jsonl of each run, and RUN/analysis where `sluice analyze RUN -o
RUN/analysis` was run; running ones may be read, too. Runs that are rows of the papers' tables, by their configuration,
stand beside the papers' numbers. Plots need matplotlib; --tables-only does not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import program, yaml
from . import page, paper, tables, tensorboard
from .comparing import NoBaseline, choose_baselines
from .files import find_runs, read_text
from .groups import group_runs
from .looks import label_runs
from .paper_tables import GLOSSARY, paper_tables
from .runs import Run
from .shapes import warn

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.figure import Figure

    from .groups import Group
    from .page import Picture, Section
    from .paper_tables import PaperTable


def read_runs(folders: list[str]) -> list[Run]:
    """Runs of the folders given, and of those below a folder that is none."""
    runs, seen = [], set()
    configurations = [os.path.join(run, "config.yaml") for folder in folders for run in find_runs(folder)]
    with contextlib.suppress(program.NoProgram):  # reported by the run that needs it
        yaml.read_ahead({path: text for path in configurations if (text := read_text(path)).strip()})
    for folder in folders:
        if not os.path.isdir(folder):
            print(f"report: {folder}: no such run folder", file=sys.stderr)
            sys.exit(66)
        found = find_runs(folder)
        kept = 0
        for path in found:
            run = Run(path)
            if not run.metrics and not run.evals and found == [folder]:
                print(
                    f"report: {folder}: neither metrics.jsonl nor eval.jsonl holds a record", file=sys.stderr
                )
                sys.exit(65)
            kept += 1
            if os.path.realpath(path) not in seen:
                runs.append(run)
            seen.add(os.path.realpath(path))
        if not kept:
            print(
                f"report: {folder}: neither metrics.jsonl nor eval.jsonl holds a record, nor is there a run below it",
                file=sys.stderr,
            )
            sys.exit(65)
    return runs


def make_sections(
    groups: list[Group], baselines: dict[Group, Group], ours_and_theirs: list[PaperTable]
) -> list[Section]:
    """[(heading, tables, what to know about them)]"""
    sections = [
        (
            "Variants and seeds",
            [t for t in (tables.difference_table(groups, baselines), tables.seeds_table(groups)) if t],
            "",
        )
    ]
    sets = tables.sets_table(groups)
    heading = "Perplexity of the validation sets" if len(groups) > 6 else "Validation sets"
    sections.append((heading, [sets] if sets else [], "Means over seeds, ± their standard deviation."))
    if ours_and_theirs:
        sections.append(("The papers' tables, ours beside theirs", [*ours_and_theirs], GLOSSARY))
    sections.append(
        ("Stability", [t for t in (tables.lr_table(groups), tables.spike_table(groups)) if t], "")
    )
    return [section for section in sections if section[1]]


def save(
    figures: list[tuple[str, Callable[[], Figure | None], str]], folder: str, missing: list[str]
) -> list[Picture]:
    """Writes the PNGs; [(name, bytes, text)]. What cannot be drawn is reported on standard error and added to `missing`: damaged runs may hold
    numbers that no axis takes."""
    import matplotlib.pyplot as plt

    pictures = []
    for name, draw, text in figures:
        path = os.path.join(folder, name + ".png")
        try:
            figure = draw()
            if figure is None:
                continue
            figure.savefig(path, bbox_inches="tight", pad_inches=0.12)
        except OSError:
            raise
        except Exception as error:
            missing.append(f"{name}: cannot be drawn from these runs ({type(error).__name__}: {error})")
            warn(missing[-1])
            continue
        finally:
            plt.close("all")
        with open(path, "rb") as file:
            pictures.append((name, file.read(), text))
    return pictures


def load_figures() -> ModuleType:
    try:
        from . import figures

        return figures
    except ImportError as error:
        print(
            f"report: matplotlib cannot be loaded: {error}; on Debian: apt-get install python3-matplotlib (or --tables-only)",
            file=sys.stderr,
        )
        sys.exit(69)


SYSTEM_PYTHON = "/usr/bin/python3"


def choose_python() -> None:
    """A Python of the user's own comes first in PATH; Debian's has python3-matplotlib."""
    if "--tables-only" in sys.argv or importlib.util.find_spec("matplotlib") is not None:
        return
    if os.environ.get("SLUICE_REPORT_PYTHON") is None and os.access(SYSTEM_PYTHON, os.X_OK):
        os.environ["SLUICE_REPORT_PYTHON"] = SYSTEM_PYTHON
        os.execv(SYSTEM_PYTHON, [SYSTEM_PYTHON, *sys.argv])
    sys.exit(
        "report: matplotlib is missing; on Debian: apt-get install python3-matplotlib (or --tables-only)"
    )


def main(description: str = __doc__) -> None:
    if sys.stdout is sys.__stdout__:
        sys.stdout.reconfigure(errors="replace")  # names of folders may be no text
    parser = argparse.ArgumentParser(
        prog="scripts/report", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder, or a folder of runs, as a sweep leaves it"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="where report.html, report.md and the PNGs go"
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="variant or run that all are compared with (default: of each model size the plain transformer)",
    )
    parser.add_argument("--title", default="Sluice runs", help="heading of the page")
    parser.add_argument("--tables-only", action="store_true", help="no pictures; needs no matplotlib")
    options = parser.parse_args()

    runs = read_runs(options.runs)
    papers = paper.load()
    groups = group_runs(runs, papers)
    label_runs(runs, groups)
    ours_and_theirs = paper_tables(groups, papers)
    try:
        baselines = choose_baselines(groups, options.baseline)
    except NoBaseline as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(64)
    overview = tables.overview(groups, baselines)
    sections = make_sections(groups, baselines, ours_and_theirs)
    missing = tables.missing_pieces(runs)
    try:
        os.makedirs(options.output, exist_ok=True)
        pictures = []
        if not options.tables_only:
            for heading, made in load_figures().all_figures(runs, groups, ours_and_theirs):
                shown = save(made, options.output, missing)
                if shown:
                    pictures.append((heading, shown))
        linked = tensorboard.link_runs(groups, options.output)
        html = os.path.join(options.output, "report.html")
        page.write_html(html, options.title, runs, overview, sections, pictures, missing)
        page.write_markdown(
            os.path.join(options.output, "report.md"),
            options.title,
            runs,
            overview,
            sections,
            pictures,
            missing,
        )
    except OSError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(73)
    print(page.text_table(overview, [group.state() for group in groups]))
    print(f"\nplots    {sum(len(shown) for _, shown in pictures)} in {options.output}/*.png")
    print(f"tables   {sum(len(made) for _, made, _ in sections)}, also in {options.output}/report.md")
    if linked:
        print(
            f"events   of {linked} runs by variant and seed: tensorboard --logdir {options.output}/tensorboard"
        )
    print(f"report   {html}")
