#!/usr/bin/env bash
# Trains a config over several hosts, under mpirun and ssh.
#
#   HOSTS=host1:1,host2:1 run_scripts/train_hosts.sh
#   HOSTFILE=hosts.txt CONFIG=config_medium run_scripts/train_hosts.sh --num_epochs 1
#
# Environment: HOSTS (name:ranks, comma-separated) or HOSTFILE (a line each: "name slots=ranks");
#   NP (all slots of HOSTS; to be given with HOSTFILE); CONFIG (config_small);
#   INTERFACE (the network interface between the hosts, such as eth0; default: Open MPI's choice,
#   which fails where the hosts have interfaces with equal private addresses, like docker0);
#   SSH_FLAGS (more options for ssh); MPIRUN_FLAGS (more options for mpirun).
# Needs: this directory, with its .venv, at the same path on all hosts; ssh without a password.
# Cost: see docs/results.md. Result: a run in runs/ on the first host; the training's exit status.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
[[ -n ${HOSTS:-}${HOSTFILE:-} ]] || {
    echo "train_hosts: set HOSTS=host1:1,host2:1 or HOSTFILE=FILE" >&2
    exit 2
}
[[ -n ${HOSTS:-} || -n ${NP:-} ]] || { echo "train_hosts: with HOSTFILE, set NP too" >&2; exit 2; }
"$scripts/setup.sh" --keep
source "$scripts/env.sh"
source run_scripts/mpirun_job.sh

options=("${mpirun_options[@]}" "${pass_on[@]}")
if [[ -n ${HOSTS:-} ]]; then
    slots=$(slots_of "$HOSTS")
    options+=(-np "${NP:-$slots}" -H "$HOSTS")
else
    options+=(-np "$NP" -hostfile "$HOSTFILE")
fi
if [[ -n ${INTERFACE:-} ]]; then
    options+=(-mca btl_tcp_if_include "$INTERFACE" -mca oob_tcp_if_include "$INTERFACE")
    export HOROVOD_GLOO_IFACE=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
    options+=(-x HOROVOD_GLOO_IFACE -x NCCL_SOCKET_IFNAME)
fi
# Not in pass_on: under Slurm each host has its own.
[[ -z ${CUDA_VISIBLE_DEVICES+set} ]] || options+=(-x CUDA_VISIBLE_DEVICES)
[[ -z ${SSH_FLAGS:-} ]] || options+=(-mca plm_rsh_args "$SSH_FLAGS")

# shellcheck disable=SC2086  # MPIRUN_FLAGS is a list
run_job mpirun "${options[@]}" ${MPIRUN_FLAGS:-} \
    "$PWD/.venv/bin/python" -m lm.train --config "${CONFIG:-config_small}" "$@"
