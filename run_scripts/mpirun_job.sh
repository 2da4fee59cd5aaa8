# shellcheck shell=bash
# Source this file to run a job that receives signals: run_job COMMAND... runs the command.
#
# SIGTERM, SIGINT and SIGHUP (a closed terminal) become SIGUSR2, which makes the ranks save and stop. mpirun
# forwards SIGUSR2 immediately and waits. Its own SIGTERM would reach the ranks late, and kill them soon
# after. SIGUSR1 (save and continue) is forwarded unchanged, and ignored while no job runs. horovodrun only
# forwards SIGTERM, and SIGUSR1 would kill it: set stop_signal=TERM for it. srun forwards all signals.
# A second SIGINT kills the process group of a job that hangs. mpirun's ranks are in separate process groups.
# They end as soon as mpirun, or its daemon on their host, dies.
# Returns the job's exit code, or 143 (SIGTERM, SIGHUP), 130 (SIGINT) or 140 (SIGUSR2) if a signal stopped the
# job. $stopped_by is this number, or 0 without a signal, even if the job returns a different exit code.
stopped_by=0
stop_signal=USR2
trap : USR1

# Before the start and just after the end of the job, there is no process to signal.
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
        echo "${0##*/}: stopping; Ctrl-C again ends the job without saving" >&2 || true # a full disk
    fi
}

run_job() {
    local code job='' killed='' restore
    restore=$(set +o | grep monitor)
    # The traps are set before the start. Otherwise, an early signal would only end this script.
    # SIGUSR2 announces a time limit. SIGTERM at this limit does not mean that the job was cancelled.
    trap '((stopped_by == 140)) || stopped_by=143; signal_job "$stop_signal"' TERM HUP
    trap interrupt_job INT
    trap 'stopped_by=140; signal_job "$stop_signal"' USR2
    [[ $stop_signal == TERM ]] || trap 'signal_job USR1' USR1
    set -m # a separate process group: Ctrl-C must reach this script, not mpirun
    "$@" </dev/null &
    eval "$restore"
    # Until the new process runs the command, it is a copy of this shell, which would swallow signals.
    # (If Ctrl-C ended cmp, ignore its result and compare again.)
    while cmp -s /proc/$$/cmdline /proc/$!/cmdline 2>/dev/null || (($? > 128)); do :; done
    job=$!
    [[ -z $killed ]] || signal_job KILL -
    ((stopped_by == 0)) || signal_job "$stop_signal" # the signal came before there was a job
    # A trap ends `wait` early, with a code above 128, although the job is still running.
    while :; do
        code=0
        wait "$job" || code=$?
        kill -0 "$job" 2>/dev/null || break
    done
    trap - TERM INT HUP
    trap : USR1 USR2 # a time limit that comes now must not interrupt a script that queues the job again
    [[ -z $killed ]] || code=130
    # Other codes are errors, for example of the last save. But 0 does not mean that the run is complete:
    # mpirun returns 0 if a signal arrives while it connects to a host. horovodrun only returns 0 and 1.
    case $stopped_by/$code/$stop_signal in
        0/*) ;;
        */0/* | */130/* | */140/* | */143/* | */TERM) code=$stopped_by ;;
    esac
    return "$code"
}
