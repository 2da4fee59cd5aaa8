# shellcheck shell=bash disable=SC2034
# Source this file to enter the project's root and use .venv, whose mpirun Horovod was built with.
# It sets mpirun_options, the options of every mpirun, and pass_on, the options that pass environment
# variables to other hosts. lm/distributed/launch.py does the same for Python.
# shellcheck source=run_scripts/root.sh
source "$(dirname "${BASH_SOURCE[0]}")/root.sh"
[[ $PATH == "$PWD/.venv/bin":* ]] || export PATH=$PWD/.venv/bin:$PATH
if ((EUID == 0)); then # Open MPI refuses to start ranks as root otherwise
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Open MPI rejects jobs on hosts without ssh, even local jobs. A Slurm job uses srun instead.
if [[ -z ${SLURM_JOB_ID:-} ]] && ! command -v ssh >/dev/null && ! command -v rsh >/dev/null; then
    export OMPI_MCA_plm=isolated
fi
# shellcheck disable=SC2207  # split into words
mpirun_options=($(grep -v '^#' lm/distributed/mpirun_options.conf))
pass_on=()
for name in $(grep -v '^#' lm/distributed/passed_on.conf); do
    [[ -z ${!name:-} ]] || pass_on+=(-x "$name")
done

script=${0##*/}
fail() { echo "${script%.*}: $*" >&2; exit 2; } # for user mistakes

# Bash arithmetic would interpret a word as the name of a variable.
whole_number() { # NAME VALUE
    [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] || fail "$1 must be a whole number, not '$2'"
}

slots_of() { # host1:2,host2 -> 3
    local host total=0
    [[ $1, =~ ^([^:,[:space:]]+(:[1-9][0-9]*)?,)+$ ]] || fail "hosts must be like host1:1,host2:1, not '$1'"
    for host in ${1//,/ }; do
        [[ $host == *:* ]] && ((total += ${host##*:})) || ((total += 1))
    done
    echo "$total"
}
