# shellcheck shell=bash disable=SC2034
# Sourced by the run scripts after setup.sh: puts .venv first on PATH (its mpirun is the one that
# Horovod was built with) and lets root start ranks, which Open MPI otherwise refuses.
# Leaves the working directory at the project's root, the options that every mpirun needs in the
# array mpirun_options, and in pass_on those that an mpirun over several hosts needs besides.
# lm/distributed/mpirun.py does the same for Python: change both.
# shellcheck source=run_scripts/root.sh
source "$(dirname "${BASH_SOURCE[0]}")/root.sh"
[[ $PATH == "$PWD/.venv/bin":* ]] || export PATH=$PWD/.venv/bin:$PATH
if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Without ssh, Open MPI refuses to start ranks even on this very host; a Slurm job's hosts it reaches
# through srun.
if [[ -z ${SLURM_JOB_ID:-} ]] && ! command -v ssh >/dev/null && ! command -v rsh >/dev/null; then
    export OMPI_MCA_plm=isolated
fi
# shellcheck disable=SC2207  # to be split into words
mpirun_options=($(grep -v '^#' lm/distributed/mpirun_options.conf))
# Open MPI passes no variable to other hosts unless told to.
pass_on=()
for name in PATH LD_LIBRARY_PATH PYTHONPATH OPAL_PREFIX NCCL_DEBUG; do
    [[ -z ${!name:-} ]] || pass_on+=(-x "$name")
done

# Ends the script where a number is none: bash would only find out when it reckons with it, and might
# take it for the name of a variable.
whole_number() { # WHAT VALUE
    local script=${0##*/}
    [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] || {
        echo "${script%.*}: $1 must be a whole number, not '$2'" >&2
        exit 2
    }
}

slots_of() { # host1:2,host2 -> 3
    local host slots total=0 script=${0##*/}
    if [[ $1 == *[[:space:]]* ]]; then
        echo "${script%.*}: commas alone separate hosts, not '$1'" >&2
        exit 2
    fi
    for host in ${1//,/ }; do
        [[ $host == *:* ]] && slots=${host##*:} || slots=1
        whole_number "the number after the colon of $host" "$slots"
        total=$((total + slots))
    done
    echo "$total"
}
