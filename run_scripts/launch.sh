# shellcheck shell=bash disable=SC2034,SC2154
# Source this file to start jobs. run_training ARGUMENTS... runs lm.train with the variables that train.sh
# documents, and run_search ARGUMENTS... runs lm.search with the variables that search.sh documents. Both
# return the job's exit code (see mpirun_job.sh).
# shellcheck source=run_scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=run_scripts/mpirun_job.sh
source "$root/run_scripts/mpirun_job.sh"
# The path is the same on all hosts. The first python in PATH may be a different one there.
python=$venv/bin/python
# The shell does not expand a quoted ~, but lm.train and lm.search do.
[[ -z ${OUTPUT_DIR:-} ]] || OUTPUT_DIR=${OUTPUT_DIR/#\~\//${HOME:-}/}

# Loads the settings of mpirun and of the scheduler's allocation, which lm/distributed/__main__.py lists.
load_settings() {
    local settings
    [[ -z ${NP:-} ]] || whole_number NP "$NP"
    settings=$("$python" -m lm.distributed) || exit
    eval "$settings"
}

run_training() {
    local slots placement=() train
    [[ -n ${local_ranks:-} ]] || load_settings
    slots=$local_ranks
    train=("$python" -m lm.train ${CONFIG:+--config "$CONFIG"})
    # A single process uses all cores.
    [[ ${LAUNCHER:-mpirun} == none || -z $threads ]] || train+=(--intra_op_threads "$threads")
    train+=("$@")
    if [[ -n ${HOSTS:-} ]]; then
        slots=$(slots_of "$HOSTS") || return
        placement=(-H "$(sed -E 's/([^,]+)/\1:1/g; s/(:[0-9]+):1/\1/g' <<<"$HOSTS")") # horovodrun needs the slots
    elif [[ -n ${HOSTFILE:-} ]]; then
        [[ -n ${NP:-} ]] || fail "with HOSTFILE, set NP too"
        ! grep -qs $'\r' "$HOSTFILE" || fail "$HOSTFILE has Windows line ends: run sed -i 's/\r\$//' $HOSTFILE"
        placement=(-hostfile "$HOSTFILE")
    fi
    placement=(-np "${NP:-$slots}" "${placement[@]}")
    case ${LAUNCHER:-mpirun} in
        none) run_job "${train[@]}" ;;
        mpirun) run_mpirun "${placement[@]}" "${train[@]}" ;;
        horovodrun)
            # horovodrun loads TensorFlow, which would print several lines.
            export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
            stop_signal=TERM
            run_job horovodrun --gloo "${placement[@]}" \
                ${INTERFACE:+--network-interfaces "$INTERFACE"} "${train[@]}"
            ;;
        *) fail "LAUNCHER must be mpirun, horovodrun or none, not '$LAUNCHER'" ;;
    esac
}

run_mpirun() {
    local options=("${pass_on[@]}")
    command -v mpirun >/dev/null || fail "mpirun is not in PATH: load the module of the Open MPI that setup.sh" \
        "used$(sed -nE 's|.* (/[^ ]+)/mpicxx .*| (in \1)|p' "$venv/.done-base" 2>/dev/null)"
    if [[ -n ${INTERFACE:-} ]]; then
        export HOROVOD_GLOO_IFACE=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
        options+=(-mca btl_tcp_if_include "$INTERFACE" -mca oob_tcp_if_include "$INTERFACE"
            -x HOROVOD_GLOO_IFACE -x NCCL_SOCKET_IFNAME)
    fi
    # An empty value hides the GPUs of all hosts. A scheduler gives each host its own value.
    [[ -z ${CUDA_VISIBLE_DEVICES+set} || (-n $job && -n $CUDA_VISIBLE_DEVICES) ]] || options+=(-x CUDA_VISIBLE_DEVICES)
    [[ -z ${SSH_FLAGS:-} ]] || options+=(-mca plm_rsh_args "$SSH_FLAGS")
    unset "${per_task[@]}"
    # shellcheck disable=SC2086  # MPIRUN_FLAGS is a list
    run_job mpirun "${options[@]}" ${MPIRUN_FLAGS:-} "$@"
}

run_search() {
    local config=${CONFIG:-config_small} output_dir
    [[ " $* " != *" --"@(output_dir|config)[\ =]* ]] || fail "set OUTPUT_DIR and CONFIG, not --output_dir and --config"
    output_dir=${OUTPUT_DIR:-searches/$(basename "$config" .py)-$(date +%Y%m%d-%H%M%S)}
    if [[ -e $output_dir/search.json ]]; then
        set -- --config "$output_dir/config.py" "$@" # defines flags that "$@" may contain
    else
        set -- --config "$config" --trials "${TRIALS:-20}" --ranks_per_trial "${RANKS:-2}" \
            ${PARALLEL:+--parallel_trials "$PARALLEL"} \
            --space "${SPACE:-learning_rate=0.3:3:log, keep_prob=0.5:1.0}" "$@"
    fi
    run_job "$python" -m lm.search --output_dir "$output_dir" ${HOSTS:+--hosts "$HOSTS"} "$@" || return
    # There is no search after --help.
    [[ ! -e $output_dir/search.json ]] || "$python" -m lm.report "$output_dir" --html "$output_dir/report.html" ||
        say "the search has finished, but its report cannot be written"
}
