# shellcheck shell=bash
# Sourced by scripts that run a job: run_job COMMAND... runs it and passes signals on.
#
# SIGTERM, SIGINT and SIGHUP (the terminal is closed) reach an mpirun's ranks as SIGUSR2, which asks
# them to save and stop: mpirun hands that on at once and waits for them. A SIGTERM of its own it
# would pass on late, and kill the ranks soon after. SIGUSR1 (save and go on) is passed on as it is.
# horovodrun hands on SIGTERM alone: set stop_signal=TERM for it. srun hands all of them on.
# Returns the job's exit code; after SIGTERM or SIGHUP 143, after SIGINT 130, after SIGUSR2 (which
# asks the same) 140, also in $stopped_by.
stopped_by=0
stop_signal=USR2

run_job() {
    local code=0 restore
    restore=$(set +o | grep monitor)
    set -m # a process group of its own: Ctrl-C in a terminal must come to us, not to mpirun
    "$@" </dev/null &
    local job=$!
    eval "$restore"
    trap 'stopped_by=143; kill -$stop_signal $job' TERM HUP
    trap 'stopped_by=130; kill -$stop_signal $job' INT
    trap 'stopped_by=140; kill -$stop_signal $job' USR2
    trap 'kill -USR1 $job' USR1
    # A trap ends `wait` early, with a code above 128, while the job is still there.
    while wait "$job" && code=0 || code=$?; kill -0 "$job" 2>/dev/null; do :; done
    trap - TERM INT HUP USR1 USR2
    if ((stopped_by)); then
        code=$stopped_by
    fi
    return "$code"
}
