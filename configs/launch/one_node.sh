#!/bin/bash
# A training on one machine, by mpirun:
#
#   configs/launch/one_node.sh 4 configs/x.yaml run_dir=runs/x        # four ranks
#
# scripts/launch starts the ranks again when one was lost, and turns SIGTERM and Ctrl-C into time to save. By hand:
#   mpirun -n 4 --bind-to none build/sluice train configs/x.yaml train.threads=2
set -euo pipefail
ranks=${1:?usage: one_node.sh RANKS CONFIG [key=value...]}
config=${2:?usage: one_node.sh RANKS CONFIG [key=value...]}
program=${SLUICE:-build/sluice}

# All cores, shared evenly; one thread where there are more ranks than cores.
cores=$(nproc)
threads=$((cores > ranks ? cores / ranks : 1))

# --bind-to none   mpirun would tie each of two ranks, with all its threads, to one core.
# --mca mpi_yield_when_idle 1   with more ranks than cores, waiting ranks yield their cores (scripts/launch adds it then).
exec "$(dirname "$0")/../../scripts/launch" -n "$ranks" --mpirun "mpirun --bind-to none" \
  "$program" train "$config" "train.threads=$threads" "${@:3}"
