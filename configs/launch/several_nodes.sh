#!/bin/bash
# A training on several machines, by mpirun and ssh, without a scheduler:
#
#   configs/launch/several_nodes.sh configs/launch/hostfile 4 configs/x.yaml run_dir=/shared/runs/x    # four threads a rank
#
# What must hold: ssh from this machine to all of them without a password; the same program, configuration, data and run_dir under the
# same paths (a shared file system); the same Open MPI. Ask first:
#   mpirun --hostfile configs/launch/hostfile --bind-to none build/sluice doctor --run-dir /shared/runs
set -euo pipefail
hostfile=${1:?usage: several_nodes.sh HOSTFILE THREADS CONFIG [key=value...]}
threads=${2:?usage: several_nodes.sh HOSTFILE THREADS CONFIG [key=value...]}
config=${3:?usage: several_nodes.sh HOSTFILE THREADS CONFIG [key=value...]}
program=${SLUICE:-build/sluice}

# One rank per slot of the hostfile, machine by machine, so that ranks which follow each other are neighbours.
ranks=$(sed 's/#.*//' "$hostfile" | awk 'NF { n = 1; for (i = 2; i <= NF; i++) if (sub(/^slots=/, "", $i)) n = $i; total += n } END { print total + 0 }')

# With several networks, say which one: --mca btl_tcp_if_include 10.0.0.0/16. --tag-output puts its rank before every line.
exec "$(dirname "$0")/../../scripts/launch" -n "$ranks" \
  --mpirun "mpirun --hostfile $hostfile --map-by slot --bind-to none ${SLUICE_MPIRUN:-}" \
  "$program" train "$config" "train.threads=$threads" "${@:4}"
