# shellcheck shell=bash
# Sourced by scripts that run a job: run_job COMMAND... runs it and passes signals on.
#
# SIGTERM, SIGINT and SIGHUP (the terminal is closed) reach an mpirun's ranks as SIGUSR2, which asks
# them to save and stop: mpirun hands that on at once and waits for them. A SIGTERM of its own it
# would pass on late, and kill the ranks soon after. SIGUSR1 (save and go on) is passed on as it is;
# between jobs there is nothing to save. horovodrun hands on SIGTERM alone, and SIGUSR1 would kill it:
# set stop_signal=TERM for it. srun hands all of them on.
# Returns the job's exit code; where it has stopped for SIGTERM or SIGHUP 143, for SIGINT 130, for
# SIGUSR2 (which asks the same) 140. $stopped_by has that number, or 0, whatever the job returns.
stopped_by=0
stop_signal=USR2
trap : USR1

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
    [[ $stop_signal == TERM ]] || trap 'kill -USR1 $job' USR1
    # A trap ends `wait` early, with a code above 128, while the job is still there.
    while wait "$job" && code=0 || code=$?; kill -0 "$job" 2>/dev/null; do :; done
    trap - TERM INT HUP USR2
    trap : USR1
    # Another code is an error, such as of the last save. But 0 is not the end of the run: an mpirun
    # that gets a signal while it reaches for a host returns it. horovodrun knows 0 and 1 alone.
    case $stopped_by/$code/$stop_signal in
        0/*) ;;
        */0/* | */130/* | */140/* | */143/* | */TERM) code=$stopped_by ;;
    esac
    return "$code"
}
