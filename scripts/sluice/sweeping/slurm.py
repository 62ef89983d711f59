"""The sweep as one Slurm job array: each task trains one trial, and comes back after a stop or a lost rank."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from ..program import IN_CHECKOUT, SCRIPTS
from .plan import Mistake
from .text import unprintable

if TYPE_CHECKING:
    from .sweep_file import SweepFile, Trial

SCRIPT = """#!/bin/bash
# The sweep {sweep} as a job array, one trial a task. Written by scripts/sweep slurm; submit it with
#   sbatch {script}
# from {source}, which all nodes must see.

#SBATCH --job-name={name}
#SBATCH --array=0-{last}%{slots}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={procs}
{more}#SBATCH --signal=USR1@180          # to the ranks, 180 s before the time is up: the step ends, all is saved, exit status 75
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}

set -uo pipefail
cd {source} || exit 66
trials=({trials})
# Losses in a row, one a line. SLURM_RESTART_COUNT will not do: it also counts the starts after a stop that saved.
restarts=${{SLUICE_RESTARTS:-5}}
losses={logs}/slurm-${{SLURM_ARRAY_JOB_ID-}}_$SLURM_ARRAY_TASK_ID.losses
# srun does not pass --cpus-per-task on by itself (Slurm 22.05 and later).
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}
# The task's own shell must outlive the signal that is meant for the ranks.
trap '' USR1

{command} trial {sweep} "${{trials[$SLURM_ARRAY_TASK_ID]}}" --output {output} --sluice {program} --threads "${{SLURM_CPUS_PER_TASK:-1}}" \\
  --launcher "srun --mpi=pmix --kill-on-bad-exit=1"
status=$?

# 75: stopped and saved. 76, or death by a signal: a rank hung or was lost; after so many losses in a row, not again. Everything
# else would only fail again.
again() {{
  echo "slurm: exit status $status: queued again"
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
}}
if [ "$status" -eq 76 ] || [ "$status" -gt 128 ]; then
  if ! echo "exit status $status" >>"$losses"; then
    echo "slurm: exit status $status, and losses cannot be counted in $losses: not again"
  elif [ "$(wc -l <"$losses")" -gt "$restarts" ]; then
    echo "slurm: exit status $status after $restarts restarts without a stop that saved: not again"
  else
    again
    exit "$status"
  fi
fi
rm -f "$losses"
if [ "$status" -eq 75 ]; then again; fi
exit "$status"
"""


def refuse_control_characters(**paths: str) -> None:
    """A newline in a comment or a #SBATCH line would end it, and what follows it would be run."""
    for what, path in paths.items():
        if unprintable(path):
            raise Mistake(
                64,
                f"{what} {path!r} has a control character or is not UTF-8: not written into a script; rename it",
            )


def write(sweep: SweepFile, trials: list[Trial], output: str, program: str, source: str, threads: int) -> str:
    """OUTPUT/array.sbatch over these trials; its path."""
    refuse_control_characters(sweep=sweep.path, output=output, program=program, folder=source)
    command = "scripts/sweep" if IN_CHECKOUT else shlex.quote(os.path.join(SCRIPTS, "sweep"))
    resources, path = sweep.resources, os.path.join(output, "array.sbatch")
    options = [
        ("cpus-per-task", threads),
        ("gpus", resources.gpus or None),
        ("time", resources.time),
        ("partition", resources.partition),
        ("account", resources.account),
        ("qos", resources.qos),
        ("constraint", resources.constraint),
        ("mem", resources.memory),
    ]
    text = SCRIPT.format(
        command=command,
        sweep=shlex.quote(os.path.abspath(sweep.path)),
        script=shlex.quote(path),
        name=sweep.name,
        last=len(trials) - 1,
        slots=resources.slots,
        nodes=resources.nodes,
        procs=resources.procs,
        more="".join(f"#SBATCH --{k}={v}\n" for k, v in options if v is not None),
        output=shlex.quote(output),
        logs=shlex.quote(output + "/logs"),
        log=shlex.quote(output.replace("%", "%%") + "/logs/slurm-%A_%a.log"),
        source=shlex.quote(source),
        trials=" ".join(t.hash[:12] for t in trials),
        program=shlex.quote(program),
    )
    os.makedirs(os.path.join(output, "logs"), exist_ok=True)
    temporary = path + ".tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
    return path
