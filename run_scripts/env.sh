# shellcheck shell=bash disable=SC2034
# Sourced by the run scripts after setup.sh: puts .venv first on PATH (its mpirun is the one that
# Horovod was built with) and lets root start ranks, which Open MPI otherwise refuses.
# Leaves the working directory at the project's root and the options that every mpirun needs in the
# array mpirun_options.
unset CDPATH # with it, cd may enter another directory
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=$PWD/.venv/bin:$PATH
if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Without ssh, Open MPI refuses to start ranks even on this very host.
if ! command -v ssh >/dev/null && ! command -v rsh >/dev/null; then
    export OMPI_MCA_plm=isolated
fi
# Unbound, because a rank bound to one core runs all of its threads there. Yielding, because
# Horovod's background thread otherwise spins in MPI on a core that the training needs.
# Oversubscribed, because Open MPI counts physical cores and refuses a rank beyond them.
# With 4 seconds, not 1, between the signals with which mpirun ends its ranks: to save in. And with
# signs of life between the hosts: without, mpirun waits 8 minutes for a host that is cut off.
mpirun_options=(
    --bind-to none --oversubscribe -mca mpi_yield_when_idle 1 -mca odls_base_sigkill_timeout 4
    -mca oob_tcp_keepalive_time 10 -mca oob_tcp_keepalive_intvl 5 -mca oob_tcp_keepalive_probes 3
)
