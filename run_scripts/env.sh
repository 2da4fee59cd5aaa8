# shellcheck shell=bash disable=SC2034
# Sourced by the run scripts after setup.sh: puts .venv first on PATH (its mpirun is the one that
# Horovod was built with) and lets root start ranks, which Open MPI otherwise refuses.
# Leaves the working directory at the project's root, the options that every mpirun needs in the
# array mpirun_options, and in pass_on those that an mpirun over several hosts needs besides.
# lm/distributed/mpirun.py does the same for Python: change both.
unset CDPATH # with it, cd may enter another directory
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
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

slots_of() { # host1:2,host2 -> 3
    local host total=0
    for host in ${1//,/ }; do
        [[ $host == *:* ]] && total=$((total + ${host##*:})) || total=$((total + 1))
    done
    echo "$total"
}
