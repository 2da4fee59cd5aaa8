# shellcheck shell=bash
# Sourced by scripts that run a job: run_job COMMAND... runs it and passes signals on.
#
# SIGTERM, SIGINT and SIGHUP (the terminal is closed) reach an mpirun's ranks as SIGUSR2, which asks
# them to save and stop: mpirun hands that on at once and waits for them. A SIGTERM of its own it
# would pass on late, and kill the ranks soon after. SIGUSR1 (save and go on) is passed on as it is;
# between jobs there is nothing to save. horovodrun hands on SIGTERM alone, and SIGUSR1 would kill it:
# set stop_signal=TERM for it. srun hands all of them on.
# A second SIGINT is for a job that hangs: it kills the job's process group. The ranks of an mpirun, which
# are in groups of their own, end because it, or its daemon on their host, is gone.
# Returns the job's exit code; where it has stopped for SIGTERM or SIGHUP 143, for SIGINT 130, for
# SIGUSR2 (which asks the same) 140. $stopped_by has that number, or 0, whatever the job returns.
stopped_by=0
stop_signal=USR2
trap : USR1

# Before the job's start, and just after its end, there is nobody to signal, which is no error.
signal_job() { # SIGNAL [-, for the whole group]
    [[ -z $job ]] || kill "-$1" -- "${2:-}$job" 2>/dev/null || true
}

interrupt_job() {
    if ((stopped_by == 130)); then
        killed=1
        signal_job KILL -
    else
        stopped_by=130
        signal_job "$stop_signal"
    fi
}

run_job() {
    local code=0 job='' killed='' restore
    restore=$(set +o | grep monitor)
    # Before the start: a signal just after it would end this script alone, and the job would go on.
    trap 'stopped_by=143; signal_job "$stop_signal"' TERM HUP
    trap interrupt_job INT
    trap 'stopped_by=140; signal_job "$stop_signal"' USR2
    [[ $stop_signal == TERM ]] || trap 'signal_job USR1' USR1
    set -m # a process group of its own: Ctrl-C in a terminal must come to us, not to mpirun
    "$@" </dev/null &
    eval "$restore"
    # Until it has become the command it is a copy of this shell, in which our signals would be lost.
    # (Where a Ctrl-C has ended cmp, that says nothing.)
    while cmp -s /proc/$$/cmdline /proc/$!/cmdline 2>/dev/null || (($? > 128)); do :; done
    job=$!
    [[ -z $killed ]] || signal_job KILL -
    ((stopped_by == 0)) || signal_job "$stop_signal" # that came when there was no job yet
    # A trap ends `wait` early, with a code above 128, while the job is still there.
    while wait "$job" && code=0 || code=$?; kill -0 "$job" 2>/dev/null; do :; done
    trap - TERM INT HUP USR2
    trap : USR1
    [[ -z $killed ]] || code=130
    # Another code is an error, such as of the last save. But 0 is not the end of the run: an mpirun
    # that gets a signal while it reaches for a host returns it. horovodrun knows 0 and 1 alone.
    case $stopped_by/$code/$stop_signal in
        0/*) ;;
        */0/* | */130/* | */140/* | */143/* | */TERM) code=$stopped_by ;;
    esac
    return "$code"
}
