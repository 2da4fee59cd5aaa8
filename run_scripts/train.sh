#!/usr/bin/env bash
# Trains a config, by default with 2 ranks on this host.
#
#   run_scripts/train.sh
#   NP=4 CONFIG=config_medium run_scripts/train.sh --num_epochs 1     arguments go to lm.train
#   HOSTS=host1:1,host2:1 run_scripts/train.sh                        several hosts, by ssh
#   LAUNCHER=none run_scripts/train.sh                                one process
#
# Environment:
#   CONFIG        the config (config_small, or with --resume the config of the run)
#   LAUNCHER      mpirun (default), horovodrun or none (one process). horovodrun uses Gloo instead of MPI.
#                 Its exchange is 2 to 4 times slower, and SIGUSR1 does not save.
#   HOSTS         host:slots,... (default: the hosts of the scheduler's job, or this host). Alternatively, set NP
#                 and HOSTFILE, a file with one line "host slots=N" per host.
#   NP            number of ranks (default: all slots of HOSTS, the tasks of the scheduler's job, otherwise 2)
#   PLACE         socket or numa: one rank per socket or NUMA domain, which uses only its cores (none)
#   NETWORK       tcp, ucx (InfiniBand), ofi (Omni-Path, Slingshot) or auto: Open MPI's choice if this host has
#                 a fabric, otherwise TCP (auto)
#   INTERFACE     network interface between the hosts, such as eth0. Open MPI's own choice fails if the
#                 hosts have interfaces with equal private addresses, such as docker0.
#   SSH_FLAGS     more options for ssh (mpirun only)
#   MPIRUN_FLAGS  more options for mpirun
#   VENV          virtual environment (default: .venv in the project's directory)
# Several hosts need ssh without a password, and the project with its .venv at the same path on all hosts.
# Cost: see docs/results.md. Result: a run in ./runs, and the exit code of the training. After a signal,
#   everything is saved and the exit code is 143 (SIGTERM, SIGHUP), 130 (SIGINT) or 140 (SIGUSR2).
#   A second SIGINT ends the job immediately.
set -euo pipefail
# shellcheck source=run_scripts/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/launch.sh"
"$root/run_scripts/setup.sh"
run_training "$@"
