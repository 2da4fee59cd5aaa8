#!/usr/bin/env bash
# Trains a config under LSF, one rank per host. Two minutes before the time limit, the run is saved, and the job
# is queued again. It resumes from the last checkpoint.
#
#   bsub <run_scripts/train_lsf.sh                                   2 hosts, 1 rank each
#   bsub -n 64 -R "span[ptile=32]" <run_scripts/train_lsf.sh         2 hosts with 32 cores
#   CONFIG=config_medium NP=4 bsub <run_scripts/train_lsf.sh         4 ranks on the same hosts
#   FLAGS="--num_epochs 1" bsub <run_scripts/train_lsf.sh            arguments of lm.train
#   bsub -J "lm[1-5]" <run_scripts/train_lsf.sh                      5 runs with --seed 1 to 5
#   bkill -s USR2 JOB                                                saves, and queues the job again
#
# Environment: LM_ROOT (the project, if bsub was not run there), and the variables in scheduled.sh.
# Needs: .venv from run_scripts/setup.sh and this project at the same path on all hosts. mpirun needs an Open MPI
#   built for LSF, LSF's blaunch, or ssh between the hosts.
# Result: the run is in runs/lsf-<job id>. scheduled.sh lists the exit codes.
#BSUB -J lm
#BSUB -n 32
#BSUB -R "span[ptile=16]"
#BSUB -x
#BSUB -W 24:00
#BSUB -wa USR2
#BSUB -wt 2
#BSUB -Q 99
#BSUB -o lsf-%J.out
set -euo pipefail
[[ -d ${LM_ROOT:-.}/run_scripts ]] ||
    { echo "train_lsf: ${LM_ROOT:-$PWD} is not this project: submit the job with LM_ROOT=PROJECT bsub" >&2; exit 2; }
# shellcheck source=run_scripts/scheduled.sh
source "${LM_ROOT:-.}/run_scripts/scheduled.sh"
run_scheduled run_training --output_dir "runs/$job" "$@"
