#!/usr/bin/env bash
# Trains a config with NP ranks on this host, under mpirun.
#
#   run_scripts/train_local.sh
#   NP=4 CONFIG=config_medium run_scripts/train_local.sh --num_epochs 1
#
# Environment: NP (2), CONFIG (config_small), MPIRUN_FLAGS (more options for mpirun).
# Cost: see docs/results.md. Result: a run in runs/; the exit status of the training; 143
#   after SIGTERM or SIGHUP, 130 after SIGINT, 140 after SIGUSR2, with everything saved. A second
#   SIGINT ends the job at once.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --keep
source "$scripts/env.sh"
source run_scripts/mpirun_job.sh

# shellcheck disable=SC2086  # MPIRUN_FLAGS is a list
run_job mpirun -np "${NP:-2}" "${mpirun_options[@]}" ${MPIRUN_FLAGS:-} \
    python -m lm.train --config "${CONFIG:-config_small}" "$@"
