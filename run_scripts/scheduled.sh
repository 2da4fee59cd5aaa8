# shellcheck shell=bash disable=SC2154
# Source this file in a batch script. run_scheduled COMMAND ARGUMENTS... runs a command with --output_dir and
# --resume, and ends the script with its exit code. If the time limit or a failure interrupts the command, the
# job is queued again, at most MAX_REQUEUES times without a new checkpoint.
#
# Environment: CONFIG, FLAGS (arguments), MAX_REQUEUES (10), FLAGS_FILE (see below), and those of train.sh
#   except HOSTS and HOSTFILE: a job uses the hosts that it got from the scheduler.
# The job with the index N in an array of jobs adds line N of FLAGS_FILE to the arguments. Without this file,
# it adds --seed N.
# Exit codes: 0 (done), 2 (a mistake or a divergence, which a restart cannot fix), 143 (cancelled), 140 (time
#   limit; a PBS job ends with it even if it is queued again), 99 (SGE and LSF: queued again).
#   Other codes are failures.
# shellcheck source=run_scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
trap 'stopped_by=140' USR2 # the time limit is near, but the job has not started
whole_number MAX_REQUEUES "${MAX_REQUEUES:-10}"
[[ -x $python ]] || fail "run run_scripts/setup.sh first"
HOSTS='' HOSTFILE=''
load_settings
[[ -n $job ]] || fail "submit this script to a scheduler, or use train.sh"
requeues=runs/.$job.requeues # has a line from `checkpoints` for each time that the job was queued again

run_scheduled() { # COMMAND ARGUMENTS...
    local before code=0 line words=()
    if [[ -n $job_index && -n ${FLAGS_FILE:-} ]]; then
        line=$(sed -n "${job_index}{s/\r\$//;p}" "$FLAGS_FILE") || exit 2
        [[ -n $line ]] || fail "$FLAGS_FILE has no line $job_index"
        line=$(xargs printf '%s\n' <<<"$line" 2>/dev/null) ||
            fail "$FLAGS_FILE, line $job_index: unmatched quote"
        mapfile -t words <<<"$line"
    elif [[ -n $job_index ]]; then
        words=(--seed "$job_index")
    fi
    # shellcheck disable=SC2206  # FLAGS is a list
    words=("$@" --resume ${FLAGS:-} "${words[@]}")
    output_dir=$(printf '%s\n' "${words[@]}" | sed -nE '/^--output_dir$/{n;p}; s/^--output_dir=//p' | tail -n 1)
    output_dir=${output_dir:-$OUTPUT_DIR}
    output_dir=${output_dir/#\~\//${HOME:-}/} # lm.train expands it too
    before=$(checkpoints)
    # A new run would repeat all steps.
    if [[ $before == *" 0" ]] && grep -qsv ' 0$' "$requeues"; then
        code=1
        say "$job: the checkpoints of $output_dir are missing; mount its disk"
    else
        "${words[@]}" || code=$?
    fi
    # Schedulers may also signal mpirun, which then returns 1.
    [[ $stopped_by != @(130|143) ]] || code=$stopped_by
    case $stopped_by/$code in
        */0 | */2 | 130/*) ;; # done, a mistake, or stopped by Ctrl-C
        143/*) ! preempted || requeue ;;
        *) requeue ;;
    esac
    exit "$code"
}

# With a grace period, preemption begins with scancel's signal, and Slurm does not requeue the job if it
# ends during this period.
preempted() { [[ $job == slurm-* && $(retry scontrol show job "${job#slurm-}") == *" PreemptTime="[0-9]* ]]; }

# Prints a checksum of the names of all checkpoints, and the length of these names.
checkpoints() {
    { find -L "$output_dir" -path '*/checkpoints/step-*' -prune -printf '%P\n' 2>/dev/null || true; } | sort | cksum
}

# A scheduler may be restarting, and a disk may be full for a moment.
retry() { # COMMAND ARGUMENTS...
    local tries=1
    until "$@"; do
        ((tries++ < 5)) || return
        sleep 10
    done
}

requeue() {
    local next count checkpoints
    checkpoints=$(checkpoints)
    count=$(grep -csxF "$checkpoints" "$requeues") || true
    if ((${count:-0} >= ${MAX_REQUEUES:-10})); then
        say "$job: exit code $code, giving up: no new checkpoint in MAX_REQUEUES=${MAX_REQUEUES:-10} attempts"
        exit "$code"
    fi
    # Only an attempt without a new checkpoint must be counted.
    if ! { mkdir -p runs && echo "$checkpoints" >>"$requeues"; } && [[ $checkpoints == "$before" ]]; then
        say "$job: exit code $code, giving up: no new checkpoint, and $requeues is not writable"
        exit "$code"
    fi
    case $job in
        slurm-*) retry scontrol requeue "${job#slurm-}" ;; # one job of an array has the ID of the whole array
        sge-* | lsf-*) exit 99 ;; # see the scheduler's options in train_sge.sh and train_lsf.sh
        pbs-*)
            # Only operators may requeue a job. Submit the same job again, with the same run.
            next=$(retry pbs_submit -h)
            if ! retry continue_in "pbs-${next%%.*}"; then
                say "$job: runs is not writable; run ln -s $job runs/pbs-${next%%.*}, then qrls $next"
                exit "$code"
            fi
            mv "$requeues" "runs/.pbs-${next%%.*}.requeues" || true # only a counter
            retry qrls "$next"
            ;;
    esac
}

# Makes the ranks save and stop STOP_SECONDS (120) before a time limit in seconds, or never if it is empty.
stop_before() { # LIMIT
    [[ -n $1 ]] || return 0
    set -m # a separate process group, so that sleep ends too
    (sleep "$(($1 > 2 * ${STOP_SECONDS:-120} ? $1 - ${STOP_SECONDS:-120} : $1 / 2))" && kill -USR2 $$) &
    set +m
    timer=$!
    trap 'kill -- "-$timer" 2>/dev/null || true' EXIT
}

# Links the run of a PBS job to the run of this job.
continue_in() { # JOB
    mkdir -p "runs/$job" || return # the first attempt may have failed before it created the run
    # A chain of links would exceed the system's limit (40).
    ln -sfn "$(readlink "runs/$job" || echo "$job")" "runs/$1"
}

# qstat breaks long lines, and continues them after a tab.
pbs_fact() { qstat -f "$PBS_JOBID" | sed -e ':a' -e 'N;$!ba' -e 's/\n\t//g' | sed -nE "s/^ *$1 = //p"; }

pbs_submit() { # OPTIONS
    local words
    words=$(pbs_fact '[Ss]ubmit_arg(ument)?s' | xargs printf '%s\n') || return
    mapfile -t words <<<"$words"
    (cd "$PBS_O_WORKDIR" && qsub "$@" "${words[@]}")
}
