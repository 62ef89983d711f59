"""Trains many configurations, each exactly once.

  scripts/sweep plan FILE             what will be trained, and what it costs; plan may be left out
  scripts/sweep run FILE              trains it here; the same command goes on where it was stopped or killed
  scripts/sweep status FILE           where every trial is
  scripts/sweep table FILE            what came out, seeds together; also written to OUTPUT/sweep.csv; --markdown: for a README
  scripts/sweep record FILE           adds what has finished to the file of results that the key `record` names
  scripts/sweep analyze FILE          `sluice analyze` of every finished trial that has no analysis yet, for scripts/report
  scripts/sweep slurm FILE            writes OUTPUT/array.sbatch, a Slurm job array of what is not finished
  scripts/sweep trial FILE TRIAL      trains one, by its number or hash: a job of that array

FILE, --output and --sluice are relative to where you stand. In a sweep file (configs/sweeps/ has examples) paths of `base` and
`set_from` are relative to it; all others to the folder of the checkout, in which runs start, or, of an installed sweep, to where you stand:

  base: ../quickstart/baseline.yaml                      # or a list; * and ? match several
  set_from: common/six_domains.yaml                      # a file of keys as `set` has them, for several sweeps; this one may change them
  set: {train.max_steps: 400}                            # for all trials
  variants:                                              # names, and what each changes; a trial for each of them
    baseline: {}
    headwise: {model.attention.gates: [{position: sdpa_output, granularity: headwise}]}
  control: baseline                                      # the variant that the others are compared with; without variants one of
                                                         # several bases, by its file's name
  grid: {optimizer.lr: [1e-3, 2e-3, 4e-3]}               # every value with every other
  paired: [{model.num_hidden_layers: 4, model.hidden_size: 192}, {model.num_hidden_layers: 8, model.hidden_size: 128}]
  seeds: [1, 2]                                          # the first of all trials before the second
  resources: {slots: 2, threads: 1, procs: 1, gpus: 1}   # trials at once; of each: threads, ranks, GPUs;
                                                         # for Slurm also nodes, time, partition, account, qos, constraint, memory
  stop_if: {metric: loss, op: ">", value: 6, after_steps: 100}     # or a list; op: > >= < <= nonfinite; val.SET.loss: evaluations
  name: lr                                               # and output: runs/sweeps/NAME
  record: results/lr.jsonl                               # results of finished trials, to be kept with this file
  after: first.yaml                                      # a sweep from whose weights these trials start (train.init_from), each
                                                         # from those of its own variant and seed

Keys are written with dots, or as sections. Every variant is trained with every value of the grid and every seed.

A trial is known by the hash of its resolved configuration: in OUTPUT/NAME-HASH it is skipped when it is finished and goes on when it
is not. What a stop rule ended, what diverged (78) and what failed is not run again without --retry. OUTPUT/sweep.jsonl is the journal,
OUTPUT/logs has what each trial printed. A trial in the record counts as finished, on any machine; its run folder is made without
weights, for tables and reports, so that no other sweep can start from it. SIGINT and SIGTERM let the trials save; a second one kills them.

Exit codes: 0 every trial has its result (done, stopped by a rule, diverged), 75 interrupted, 64 a mistake in the files, 73 the sweep
or a folder belongs to another run, otherwise the worst of the trials that failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from .. import program
from ..reporting.comparing import NoBaseline
from ..yaml import Refused
from . import analyzing, markdown, plan, records, runner, slurm, state, study, tables, text
from .plan import Mistake
from .sweep_file import SweepFile

if TYPE_CHECKING:
    from .state import Look
    from .sweep_file import Trial

COMMANDS = ("plan", "run", "status", "table", "record", "analyze", "slurm", "trial")


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("file", metavar="FILE", help="the sweep file")
    parser.add_argument("trial", metavar="TRIAL", nargs="?", help="of `trial`: number or hash")
    parser.add_argument("--output", help="folder of the runs, instead of the file's")
    parser.add_argument("--sluice", help="the program (default: SLUICE in the environment, or build/sluice)")
    parser.add_argument("--slots", type=int, help="instead of resources.slots")
    parser.add_argument("--threads", type=int, help="instead of resources.threads")
    parser.add_argument(
        "--retry",
        action="append",
        default=[],
        choices=["failed", "stopped", "diverged"],
        help="run: trials that ended so go on from their last checkpoint; repeatable",
    )
    parser.add_argument("--launcher", help="what starts the ranks of a trial, instead of scripts/launch")
    parser.add_argument(
        "--control",
        "--baseline",
        metavar="NAME",
        help="table: the variant or configuration that the others are compared with (default: the file's control; without one, of each "
        "model size the first plain transformer, or the first)",
    )
    parser.add_argument(
        "--markdown",
        metavar="MEASURES",
        nargs="?",
        const=markdown.USUAL,
        help="table: as Markdown, with these measures, joined by commas: "
        f"{', '.join(markdown.MEASURES)} (without a list: {markdown.USUAL})",
    )
    parser.add_argument(
        "--every", type=float, default=60, help="run: seconds between lines of progress, outside a terminal"
    )
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        arguments = ["plan", *arguments]
    options = parser.parse_args(arguments)
    if (options.trial is None) == (options.command == "trial"):
        parser.error("`trial` needs a number or hash; nothing else takes one")
    if options.markdown is not None and (unknown := markdown.unknown(options.markdown.split(","))):
        parser.error(f"--markdown: no measure {', '.join(unknown)}; known are {', '.join(markdown.MEASURES)}")
    if any(n is not None and n < 1 for n in (options.slots, options.threads)):
        parser.error("--slots and --threads are at least 1")
    return options


def show_results(
    sweep: SweepFile,
    found: dict[str, Look],
    output: str,
    control: str | None = None,
    measures: str | None = None,
) -> None:
    state.refuse_foreign(found)
    results = tables.results_of(sweep, found)
    path = os.path.join(output, "sweep.csv")
    os.makedirs(output, exist_ok=True)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(tables.csv_text(sweep, results))
    os.replace(path + ".tmp", path)
    try:
        if measures:
            print(markdown.markdown(results, measures.split(","), control), end="")
            notes = "".join(f"{line}\n" for line in records.mixtures(found))
            print(f"\n{notes}{path}", file=sys.stderr)
            return
        print(tables.results_text(sweep, results, control), end="")
        print("".join(f"{line}\n" for line in records.mixtures(found)) + path)
    except NoBaseline as error:
        raise Mistake(64, str(error)) from None


def retry(sweep: SweepFile, output: str, states: list[str]) -> None:
    journal = state.Journal(output)
    for look in state.looks(sweep.trials, output).values():
        if look.state in states:
            journal.add("retry", look.trial, was=look.state)


def one_trial(sweep: SweepFile, which: str) -> Trial:
    if which.isdigit() and len(which) < plan.PREFIX and int(which) < len(sweep.trials):
        return sweep.trials[int(which)]
    found = [trial for trial in sweep.trials if len(which) >= 4 and trial.hash.startswith(which)]
    if len(found) != 1:
        raise Mistake(64, f"{sweep.path} has no trial {which}; scripts/sweep plan shows their numbers")
    return found[0]


def train(options: argparse.Namespace) -> int:
    sluice = program.find(options.sluice)
    os.environ["SLUICE"] = sluice  # the tables read the runs' configurations with the same program
    try:
        sweep = SweepFile(options.file, sluice)
    except OSError as error:
        raise Mistake(66, f"{options.file}: {error.strerror}") from None
    sweep.resources.slots = options.slots or sweep.resources.slots
    sweep.resources.threads = options.threads or sweep.resources.threads
    # Runs start in the folder that paths in the file are relative to; what is shown to the user is relative to his own.
    folder = program.working_folder()
    output = plan.output_of(sweep, options.output)
    merged = plan.add_plans(sweep, sluice, output)
    recorded = records.Records(sweep.record) if sweep.record else None
    lines = recorded.lines if recorded else {}
    if recorded and options.command not in ("plan", "status"):  # those write nothing
        recorded.make_folders(state.looks(sweep.trials, output, lines), sluice)
    if options.command in ("run", "table", "analyze", "slurm"):
        os.makedirs(output, exist_ok=True)
        study.write(sweep, sluice, output)
    if options.command == "plan":
        if len(sweep.variants) > 1 or sweep.control:
            print(study.Differences(sweep, sluice).text(sweep.control))
        print(tables.plan_text(sweep, state.looks(sweep.trials, output, lines), merged), end="")
    elif options.command == "status":
        print(tables.status_text(sweep, state.looks(sweep.trials, output, lines)), end="")
    elif options.command == "table":
        show_results(sweep, state.looks(sweep.trials, output), output, options.control, options.markdown)
    elif options.command == "record":
        if not recorded:
            raise Mistake(64, f"{sweep.path}: no key `record`: the file that results are added to")
        found = state.looks(sweep.trials, output)
        state.refuse_foreign(found)
        print(records.record(sweep, found, sweep.record, sluice))
    elif options.command == "slurm":
        state.refuse_early(sweep, sweep.trials, output)
        waiting = [
            look.trial for look in state.looks(sweep.trials, output).values() if look.state not in state.ENDS
        ]
        if not waiting:
            print("Nothing is left to train.")
            return 0
        path = slurm.write(
            sweep, waiting, os.path.abspath(output), sluice, folder, sweep.resources.threads or 1
        )
        print(
            f"{len(waiting)} of {len(sweep.trials)} trials, {sweep.resources.slots} at once. From {folder}:\n  sbatch {path}\n"
            f"Then: scripts/sweep status {options.file}"
        )
    else:
        os.makedirs(output, exist_ok=True)
        work = runner.Runner(sweep, output, sluice, options.launcher, text.Display(options.every))
        if options.command == "analyze":
            return analyzing.Analyzer(work).run()
        if options.command == "trial":
            trial = one_trial(sweep, options.trial)
            state.refuse_early(sweep, [trial], output)
            return work.run_one(trial)
        work.own()
        state.refuse_early(sweep, sweep.trials, output, options.retry)
        retry(sweep, output, options.retry)
        print(tables.plan_text(sweep, state.looks(sweep.trials, output), merged), flush=True)
        code = work.run()
        work.ignore_signals()  # processes that end now need no signal
        print()
        show_results(sweep, state.looks(sweep.trials, output), output)
        return code
    return 0


def main() -> int:
    """Runs the command; returns its exit code."""
    try:
        return train(options_of(sys.argv[1:]))
    except (Refused, Mistake, program.NoProgram) as mistake:
        sys.stdout.flush()
        print(f"sweep: {mistake}", file=sys.stderr)
        return (
            mistake.code
            if isinstance(mistake, Mistake)
            else 66
            if isinstance(mistake, program.NoProgram)
            else 64
        )
    except KeyboardInterrupt:  # before anything was begun
        return 130
    except BrokenPipeError:
        return 0
