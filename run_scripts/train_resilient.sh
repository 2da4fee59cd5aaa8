#!/usr/bin/env bash
# Trains until it is done: runs mpirun again with --resume when the job has failed, with the hosts
# that are there. Any number of ranks continues the same run, so a lost host costs time only.
#
#   OUTPUT_DIR=runs/a HOSTS=host1:1,host2:1 run_scripts/train_resilient.sh
#   OUTPUT_DIR=runs/a NP=2 run_scripts/train_resilient.sh      2 ranks on this host
#
# Arguments go to lm.train, in the project's root; only variables know where the user is. Environment:
#   OUTPUT_DIR       the run's directory; needed
#   CONFIG           the config (config_small)
#   HOSTS            host:slots,... ; or
#   DISCOVER_HOSTS   a program that prints the hosts that are there now, one host:slots a line, as
#                    Horovod Elastic's discovery script does; asked before each start. List the
#                    host with OUTPUT_DIR first: rank 0 alone reads and writes it.
#   NP               the most ranks to start (default: all slots; without hosts, 1 here)
#   MAX_RESTARTS     how often to start again before giving up (default 10)
#   BACKOFF          seconds before the first restart, then twice as long each time, up to 5
#                    minutes (default 5); progress since the last start begins both counts anew
#   MPIRUN_FLAGS     more options for mpirun
#   PYTHON           the Python of the ranks (default: that of .venv, at the same path on all hosts)
# Cost: that of the training. Result: exit code 0 when it is done; 143 after SIGTERM or SIGHUP, 130
#   after SIGINT, 140 after SIGUSR2, with everything saved (a second SIGINT ends the job at once); 2
#   for a mistake in the command line or in these variables, which no restart mends; else the code of
#   the last attempt.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=run_scripts/env.sh
source "$scripts/env.sh"
# shellcheck source=run_scripts/mpirun_job.sh
source run_scripts/mpirun_job.sh
[[ -n ${OUTPUT_DIR:-} ]] || {
    echo "train_resilient: set OUTPUT_DIR to the directory of the run" >&2
    exit 2
}
# By its path, the same on all hosts: what is first in PATH there need not be .venv's.
python=${PYTHON:-$PWD/.venv/bin/python}
command -v "$python" >/dev/null || {
    echo "train_resilient: there is no $python: run run_scripts/setup.sh, or set PYTHON" >&2
    exit 2
}

# Mistakes that no restart mends.
whole_number NP "${NP:-1}"
whole_number MAX_RESTARTS "${MAX_RESTARTS:-10}"
whole_number BACKOFF "${BACKOFF:-5}"
slots_of "${HOSTS:-}" >/dev/null
[[ -z ${DISCOVER_HOSTS:-} ]] || command -v "$DISCOVER_HOSTS" >/dev/null || {
    echo "train_resilient: DISCOVER_HOSTS=$DISCOVER_HOSTS is not there, or is not executable" >&2
    exit 2
}

# Prints the mpirun arguments that say where and how many.
placement() {
    local hosts=${HOSTS:-} slots
    if [[ -n ${DISCOVER_HOSTS:-} ]]; then
        hosts=$("$DISCOVER_HOSTS" | tr -d ' \t\r' | grep . | paste -sd,) || true
        [[ -n $hosts ]] || return 1
    fi
    if [[ -z $hosts ]]; then
        echo "-np ${NP:-1}"
        return
    fi
    slots=$(slots_of "$hosts") || return
    if [[ -n ${NP:-} ]] && ((NP < slots)); then
        slots=$NP
    fi
    echo "-np $slots -H $hosts"
}

# All of them, not the newest: a damaged one stays the newest while the run, resumed from an older
# one, gets on.
checkpoints() {
    { find "$OUTPUT_DIR/checkpoints/" -maxdepth 1 -name 'step-*' 2>/dev/null || true; } | sort
}

# Also an empty one, which hides the GPUs of all hosts.
[[ -z ${CUDA_VISIBLE_DEVICES+set} ]] || pass_on+=(-x CUDA_VISIBLE_DEVICES)
restarts=0 code=1
backoff=${BACKOFF:-5}
while true; do
    before=$(checkpoints)
    if where=$(placement); then
        code=0
        # shellcheck disable=SC2086  # MPIRUN_FLAGS is a list
        run_job mpirun $where "${mpirun_options[@]}" "${pass_on[@]}" ${MPIRUN_FLAGS:-} \
            "$python" -m lm.train --config "${CONFIG:-config_small}" --output_dir "$OUTPUT_DIR" \
            --resume "$@" || code=$?
        if ((code == 0 || code == 2 || stopped_by)); then
            exit "$code"
        fi
    else
        echo "train_resilient: DISCOVER_HOSTS names no hosts to start on" >&2
    fi
    if [[ $(checkpoints) != "$before" ]]; then
        restarts=0 backoff=${BACKOFF:-5}
    fi
    if ((++restarts > ${MAX_RESTARTS:-10})); then
        echo "train_resilient: $((restarts - 1)) restarts without progress, giving up" >&2
        exit "$code"
    fi
    echo "train_resilient: exit code $code, restart $restarts in $backoff s" >&2
    sleep "$backoff"
    backoff=$((backoff * 2 > 300 ? 300 : backoff * 2))
done
