#!/usr/bin/env bash
# Trains a config under Sun, Son of or Univa Grid Engine, one rank per host. Two minutes before the time
# limit, the run is saved, and the job is queued again. It resumes from the last checkpoint.
#
#   qsub -pe mpi 32 run_scripts/train_sge.sh                           32 slots, 1 rank per host
#   qsub -pe mpi 32 -v CONFIG=config_medium,NP=4 run_scripts/train_sge.sh --num_epochs 1
#   qsub -pe mpi 32 -t 1-5 run_scripts/train_sge.sh                    5 runs with --seed 1 to 5
#   qdel JOB                                                           saves and ends
#
# Environment: LM_ROOT (the project, if qsub was not run there), and the variables in scheduled.sh.
# Needs: .venv from run_scripts/setup.sh and this project at the same path on all hosts, and a parallel environment
#   with `control_slaves TRUE` (`qconf -sp mpi`), in which mpirun starts its daemons by qrsh.
#   SGE does not pass your environment to the job: if mpirun is in a module, use qsub -V, or load the module in a
#   copy of this script.
# Result: the run is in runs/sge-<job id>. scheduled.sh lists the exit codes.
#$ -N lm
#$ -cwd
#$ -S /bin/bash
#$ -j y
#$ -l h_rt=24:00:00
# qdel sends SIGUSR2, and kills the job after the `notify` seconds of the queue (60 by default).
#$ -notify
#$ -r y
set -euo pipefail
[[ -d ${LM_ROOT:-.}/run_scripts ]] ||
    { echo "train_sge: ${LM_ROOT:-$PWD} is not this project: submit the job with qsub -v LM_ROOT=PROJECT" >&2; exit 2; }
# shellcheck source=run_scripts/scheduled.sh
source "${LM_ROOT:-.}/run_scripts/scheduled.sh"
# A job that SGE ends at its limit is not queued again, and the soft limit s_rt kills mpirun's daemons.
stop_before "$(qstat -j "$JOB_ID" | sed -nE 's/^hard resource_list:.*h_rt=([0-9]+).*/\1/p')"
run_scheduled run_training --output_dir "runs/$job" "$@"
