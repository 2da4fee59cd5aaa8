#!/usr/bin/env bash
# Trains until the training is done: if the job fails, mpirun starts again with --resume on the hosts
# that are available. Any number of ranks up to batch_size can continue the run. The result is
# bitwise identical if every attempt uses a power of two of at most virtual_ranks ranks (see docs/flags.md).
#
#   OUTPUT_DIR=runs/a HOSTS=host1:1,host2:1 run_scripts/train_resilient.sh
#   OUTPUT_DIR=runs/a NP=2 run_scripts/train_resilient.sh      2 ranks on this host
#
# Environment, in addition to the variables of train.sh (except LAUNCHER and HOSTFILE):
#   OUTPUT_DIR       the run's directory (required)
#   DISCOVER_HOSTS   a program that prints the available hosts before each start, one host:slots per line,
#                    like Horovod Elastic's discovery script. The host with OUTPUT_DIR must come first.
#   NP               the largest number of ranks (default: all slots; without hosts, 1, or one per domain of PLACE).
#                    With DISCOVER_HOSTS, set it to at most virtual_ranks and batch_size: a start with more
#                    ranks than rows ends the training.
#   MAX_RESTARTS     restarts without a new checkpoint before giving up (10)
#   BACKOFF          seconds before the first restart (5). They double each time, up to 5 minutes.
# Result: exit code 0 when the training is done, or 2 for a mistake in the command line or in these variables or
#   a divergence, which a restart cannot fix. After a signal, the exit code is the same as in train.sh.
#   Otherwise, it is the exit code of the last attempt.
set -euo pipefail
# shellcheck source=run_scripts/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/launch.sh"
[[ -n ${OUTPUT_DIR:-} ]] || fail "set OUTPUT_DIR to the directory of the run"
[[ -x $python ]] || fail "$python is missing: run run_scripts/setup.sh, or set VENV"
whole_number MAX_RESTARTS "${MAX_RESTARTS:-10}"
whole_number BACKOFF "${BACKOFF:-5}"
[[ -z ${HOSTFILE:-} ]] || fail "set HOSTS or DISCOVER_HOSTS instead of HOSTFILE"
[[ -z ${HOSTS:-} ]] || slots_of "$HOSTS" >/dev/null
[[ -z ${DISCOVER_HOSTS:-} ]] || command -v "$DISCOVER_HOSTS" >/dev/null ||
    fail "DISCOVER_HOSTS=$DISCOVER_HOSTS does not exist, or is not executable"

load_settings

# Sets hosts and ranks for the next start.
choose_hosts() {
    hosts=${HOSTS:-}
    if [[ -n ${DISCOVER_HOSTS:-} ]]; then
        hosts=$("$DISCOVER_HOSTS" | tr -d ' \t\r' | grep . | paste -sd,) || true
        [[ -n $hosts ]] || return
    fi
    ranks=${NP:-$places}
    if [[ -n $hosts ]]; then
        ranks=$(slots_of "$hosts") || return
        [[ -z ${NP:-} ]] || ((NP >= ranks)) || ranks=$NP
    fi
}

# Lists all checkpoints, not only the newest. A corrupt checkpoint stays the newest while the run, resumed from
# an older checkpoint, makes progress.
checkpoints() {
    { find "$OUTPUT_DIR/checkpoints/" -maxdepth 1 -name 'step-*' 2>/dev/null || true; } | sort
}

# Sleeps. A signal ends this script immediately. SIGUSR1, which requests a save, is ignored: no job is running.
pause() { # SECONDS
    sleep "$1" &
    trap 'kill $! 2>/dev/null || true; exit 140' USR2 # the time limit is near
    trap 'kill $! 2>/dev/null || true; exit 143' TERM HUP
    trap 'kill $! 2>/dev/null || true; exit 130' INT
    while kill -0 $! 2>/dev/null; do wait $! || true; done
    trap - TERM HUP INT
    trap : USR2
}

restarts=0 code=1 backoff=${BACKOFF:-5} had=''
while true; do
    before=$(checkpoints)
    had=${before:-$had}
    if [[ -n $had && -z $before ]]; then # a new run would repeat all steps
        code=1
        say "train_resilient: the checkpoints of $OUTPUT_DIR are missing; mount its disk"
    elif choose_hosts; then
        code=0
        LAUNCHER=mpirun NP=$ranks HOSTS=$hosts run_training --output_dir "$OUTPUT_DIR" --resume "$@" || code=$?
        if ((code == 0 || code == 2 || stopped_by)); then
            exit "$code"
        fi
    else
        say "train_resilient: DISCOVER_HOSTS names no valid hosts"
    fi
    after=$(checkpoints)
    [[ -z $after || $after == "$before" ]] || restarts=0 backoff=${BACKOFF:-5}
    if ((++restarts > ${MAX_RESTARTS:-10})); then
        say "train_resilient: $((restarts - 1)) restarts without progress, giving up"
        exit "$code"
    fi
    say "train_resilient: exit code $code, restart $restarts in $backoff s"
    pause "$backoff"
    backoff=$((backoff * 2 > 300 ? 300 : backoff * 2))
done
