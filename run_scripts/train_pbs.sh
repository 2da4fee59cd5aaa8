#!/usr/bin/env bash
# Trains a config under PBS Pro, OpenPBS or Torque, one rank per host. Two minutes before the time limit, the
# run is saved, and the job submits itself again with the same arguments. It resumes from the last checkpoint.
#
#   qsub run_scripts/train_pbs.sh                                            2 hosts, 1 rank each
#   FLAGS="--num_epochs 1" qsub -v FLAGS -l select=4:ncpus=32:mpiprocs=2 run_scripts/train_pbs.sh
#   qsub -v CONFIG=config_medium,NP=4 run_scripts/train_pbs.sh               4 ranks on the same hosts
#   qsub -l nodes=2:ppn=16 run_scripts/train_pbs.sh                          Torque
#   qdel JOB                                                                 saves and ends
#
# Request ncpus and mpiprocs, but not ompthreads: each rank has ncpus / mpiprocs threads.
# Environment: LM_ROOT (the project, if qsub was not run there), and the variables in scheduled.sh.
# Needs: .venv from run_scripts/setup.sh and this project at the same path on all hosts. mpirun needs an Open MPI
#   built for PBS, PBS Pro's pbs_tmrsh, or ssh between the hosts. qsub must work on the first host.
#   PBS does not pass your environment to the job: if mpirun is in a module, use qsub -V, or load the module in a
#   copy of this script.
# Result: the run is in runs/pbs-<job id>. scheduled.sh lists the exit codes.
#PBS -N lm
#PBS -l select=2:ncpus=16:mpiprocs=1
#PBS -l place=scatter:excl
#PBS -l walltime=24:00:00
#PBS -j oe
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"
[[ -d ${LM_ROOT:-.}/run_scripts ]] ||
    { echo "train_pbs: ${LM_ROOT:-$PWD} is not this project: submit the job with qsub -v LM_ROOT=PROJECT" >&2; exit 2; }
# shellcheck source=run_scripts/scheduled.sh
source "${LM_ROOT:-.}/run_scripts/scheduled.sh"
# Each job of an array would submit the whole array again.
[[ -z $job_index ]] || fail "submit one job per run, because an array of PBS jobs cannot be queued again"

# PBS sends no signal before the time limit.
stop_before "$(pbs_fact Resource_List.walltime | awk -F: '{ for (i = 1; i <= NF; i++) s = 60 * s + $i; print s }')"
run_scheduled run_training --output_dir "runs/$job" "$@"
