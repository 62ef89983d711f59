"""Turns run folders into tables (CSV, LaTeX), figures (PNG, SVG, PDF), one Markdown file and one HTML page.

  scripts/report runs/baseline runs/gated -o report
  scripts/report sweeps/table1 -o report             # every run below a sweep's folder

Reads run.json, config.yaml, metrics.jsonl and eval.jsonl of each run, and RUN/analysis where `sluice analyze RUN -o
RUN/analysis` was run; running ones may be read, too. Runs that are rows of the papers' tables, by their configuration,
stand beside the papers' numbers. Runs of a sweep with variants are called as its file calls them, and are compared with
its control. Figures have no titles: captions stand in the page. Figures need matplotlib; --tables-only does not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .. import program, yaml
from . import exports, long_context, page, paper, selection, sinks, tables, tensorboard
from .comparing import NoBaseline, choose_baselines
from .files import find_runs, read_text
from .groups import group_runs
from .looks import label_runs
from .paper_tables import GLOSSARY, paper_tables
from .runs import Run
from .shapes import warn
from .study import Study, places_of, studies_of

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
    groups: list[Group],
    controls: dict[Group, Group],
    ours_and_theirs: list[PaperTable],
    studies: list[Study],
) -> list[Section]:
    """[(heading, tables, what to know about them)]"""
    made = [study.table() for study in studies]
    made += [tables.difference_table(groups, controls), tables.seeds_table(groups)]
    sections = [("Variants and seeds", [t for t in made if t], "")]
    sets = tables.sets_table(groups)
    heading = "Perplexity of the validation sets" if len(groups) > 6 else "Validation sets"
    sections.append((heading, [sets] if sets else [], "Means over seeds, ± their standard deviation."))
    measured = [sinks.sinks_table(groups), sinks.classes_table(groups), sinks.gate_health_table(groups)]
    sections.append(("Attention sinks and gates", [t for t in measured if t], ""))
    selected = selection.selection_table(groups)
    sections.append(("Sparse attention", [selected] if selected else [], ""))
    ruler = long_context.ruler_table(groups)
    sections.append(("Long contexts", [ruler] if ruler else [], ""))
    if ours_and_theirs:
        sections.append(("The papers' tables, ours beside theirs", [*ours_and_theirs], GLOSSARY))
    sections.append(
        ("Stability", [t for t in (tables.lr_table(groups), tables.spike_table(groups)) if t], "")
    )
    return [section for section in sections if section[1]]


def save(
    figures: list[tuple[str, Callable[[], Figure | None], str]],
    folder: str,
    missing: list[str],
    formats: Sequence[str],
) -> list[Picture]:
    """Writes every figure in every format given; [(name, PNG, caption)]. What cannot be drawn is reported on standard error and added to `missing`: damaged runs may hold
    numbers that no axis takes."""
    import matplotlib.pyplot as plt

    pictures = []
    for name, draw, text in figures:
        path = os.path.join(folder, name)
        try:
            figure = draw()
            if figure is None:
                continue
            for suffix in formats:
                # Without the time of the day in it, the same runs make the same file.
                metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
                figure.savefig(f"{path}.{suffix}", bbox_inches="tight", pad_inches=0.12, metadata=metadata)
        except OSError:
            raise
        except Exception as error:
            missing.append(f"{name}: cannot be drawn from these runs ({type(error).__name__}: {error})")
            warn(missing[-1])
            continue
        finally:
            plt.close("all")
        with open(path + ".png", "rb") as file:
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
        "-o",
        "--output",
        required=True,
        metavar="FOLDER",
        help="where report.html, report.md, the figures and the folder of the tables go",
    )
    parser.add_argument(
        "--control",
        "--baseline",
        metavar="NAME",
        help="variant or run that all are compared with (default: the control of the sweep; without one, of each model size the plain "
        "transformer)",
    )
    parser.add_argument("--title", default="Sluice runs", help="heading of the page")
    parser.add_argument("--png-only", action="store_true", help="figures as PNG alone: a third of the time")
    parser.add_argument("--tables-only", action="store_true", help="no pictures; needs no matplotlib")
    options = parser.parse_args()

    runs = read_runs(options.runs)
    papers = paper.load()
    studies = studies_of([run.folder for run in runs])
    groups = group_runs(runs, papers, places_of(studies))
    label_runs(runs, groups)
    ours_and_theirs = paper_tables(groups, papers)
    try:
        controls = choose_baselines(groups, options.control)
    except NoBaseline as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(64)
    overview = tables.overview(groups, controls)
    sections = make_sections(groups, controls, ours_and_theirs, studies)
    missing = tables.missing_pieces(runs)
    formats = page.FORMATS[:1] if options.png_only else page.FORMATS
    try:
        os.makedirs(options.output, exist_ok=True)
        pictures = []
        if not options.tables_only:
            for heading, made in load_figures().all_figures(runs, groups, controls, ours_and_theirs):
                shown = save(made, options.output, missing, formats)
                if shown:
                    pictures.append((heading, shown))
        linked = tensorboard.link_runs(groups, options.output)
        names = exports.write_tables(
            options.output,
            [("overview", overview), *((heading, table) for heading, made, _ in sections for table in made)],
            {
                "overview": exports.overview_numbers(groups),
                "every_run": exports.run_numbers(groups),
                "differences_to_the_control": exports.difference_numbers(groups, controls),
            },
        )
        html = os.path.join(options.output, "report.html")
        for write, path in ((page.write_html, html), (page.write_markdown, html[:-4] + "md")):
            write(path, options.title, runs, overview, sections, pictures, missing, names, formats)
    except OSError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(73)
    print(page.text_table(overview, [group.state() for group in groups]))
    count = sum(len(shown) for _, shown in pictures)
    print(f"\nfigures  {count}, each as {', '.join(formats)}: {options.output}/*.png")
    print(f"tables   {len(names)}, each as csv and tex: {options.output}/{exports.FOLDER}")
    if linked:
        print(
            f"events   of {linked} runs by variant and seed: tensorboard --logdir {options.output}/tensorboard"
        )
    print(f"report   {html}")
