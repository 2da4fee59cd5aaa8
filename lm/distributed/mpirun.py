"""The command and the environment of mpirun, and the placement of ranks on a host ($PLACE).

`run_scripts/launch.sh` passes the variables of its own settings.
"""

import contextlib
import fnmatch
import os
import pathlib
import re
import shutil
import sys

from lm.distributed.allocation import remote_shell
from lm.errors import UserError
from lm.system import environment_without_launcher, script

# Defaults of every mpirun that this project starts. Variables of the user and options of mpirun
# take precedence. The defaults of the exchange are in horovod.py and transport.py, because they
# also apply to other launchers.
_DEFAULTS = {
    # Open MPI counts physical cores, and rejects more ranks than cores.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # The mpiruns of a search share hosts. Otherwise, Slurm blocks the second mpirun on a host.
    "SLURM_OVERLAP": "1",
    # The seconds between the signals with which mpirun ends its ranks. With the default of 1
    # second, large models cannot save.
    "OMPI_MCA_odls_base_sigkill_timeout": "4",
    # Check connections between hosts. Otherwise, mpirun waits 8 minutes for a host that is cut off.
    "OMPI_MCA_oob_tcp_keepalive_time": "10",
    "OMPI_MCA_oob_tcp_keepalive_intvl": "5",
    "OMPI_MCA_oob_tcp_keepalive_probes": "3",
}
# The environment variables that ranks on other hosts need. Open MPI passes its own variables, and
# the variables that -x names.
_PASSED_ON = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "OPAL_PREFIX", "NETWORK", "UCX_*", "FI_*", "PSM2_*",
    "HOROVOD_CPU_OPERATIONS", "HOROVOD_HIERARCHICAL_*", "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY", "GLIBC_TUNABLES", "NCCL_*", "XLA_FLAGS",
    "TF_ENABLE_ONEDNN_OPTS", "TF_SET_ONEDNN_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE", "LM_KERNELS",
    "LM_KERNELS_ISA", "XDG_CACHE_HOME", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY",
    "HTTPS_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
_HOST = re.compile(r"[^:\s]+(?::([1-9][0-9]{0,4}))?")
# Under Slurm, mpirun starts one daemon per host with srun. With these variables, all ranks of the
# host would share the cores and GPUs of a single task.
PER_TASK = (
    "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK",
    "SLURM_CPUS_PER_TASK",  # read by srun before Slurm 22.05
)  # fmt: skip
_FOR_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Otherwise, mpirun spreads ranks over the hosts of a scheduler's job.
_THIS_HOST = ("-mca", "ras", "^slurm,tm,lsf,gridengine")
_PLACES = ("none", "socket", "numa")
# mpirun rejects a rankfile if a mapping is set, and does not bind ranks if the binding is "none".
_PLACING = re.compile(
    r"-(map-by|rf|rankfile|cpu-set|cpu-list|N|npernode|pernode|npersocket|ppr|by(node|slot|core))(\s|$)"
)


def mpirun_command(num_ranks: int, hosts: str | None = None) -> list[str]:
    """Return the mpirun part of a command line, for this host or for "host1:1,host2:1"."""
    if not shutil.which("mpirun"):
        raise UserError(
            f"mpirun is not in PATH: source {script('env.sh')}, activate the environment that"
            " contains it (docs/installation.md), or load the module of your Open MPI"
        )
    ranks = ranks_on(num_ranks, hosts) if hosts else [*_THIS_HOST, "-np", str(num_ranks)]
    return ["mpirun", *ranks]


def ranks_on(num_ranks: int, hosts: str) -> list[str]:
    """Return the mpirun arguments that start ranks on the given hosts.

    mpirun accepts several such groups, separated by colons. Each group needs its own -x.
    """
    return ["-np", str(num_ranks), "-H", hosts, *passed_variables()]


def passed_variables() -> list[str]:
    """Return the mpirun arguments that pass environment variables to ranks on other hosts."""
    words = []
    for pattern in _PASSED_ON:
        names = fnmatch.filter(sorted(os.environ), pattern)
        words += [word for name in names if os.environ[name] for word in ("-x", name)]
    return words


def mpirun_environment(hosts: str | None = None, **changes: str) -> dict[str, str]:
    """Return the environment of an mpirun on `hosts`, by default on $HOSTS.

    This is the environment of this process with changes, and with this project's defaults.
    """
    for_root = _FOR_ROOT if os.geteuid() == 0 else {}
    given = {k: v for k, v in environment_without_launcher().items() if k not in PER_TASK}
    given |= _library_path()
    return {**_DEFAULTS, **place_settings(), **remote_shell(hosts), **for_root, **given, **changes}


def _library_path() -> dict[str, str]:
    """Return the LD_LIBRARY_PATH for the mpirun of this virtual environment, if it needs one.

    A module of the cluster may add a different Open MPI to LD_LIBRARY_PATH. Its libraries would
    replace the libraries of this mpirun, because they have the same names.
    """
    given = os.environ.get("LD_LIBRARY_PATH")
    # The directory of a Conda environment has many libraries, which could break ssh.
    is_virtual = sys.prefix != sys.base_prefix
    if not given or not is_virtual or shutil.which("mpirun") != f"{sys.prefix}/bin/mpirun":
        return {}
    return {"LD_LIBRARY_PATH": f"{sys.prefix}/lib:{given}"}


def slots_of_hosts(hosts: str) -> list[int]:
    """Return the number of ranks per host: [2, 1] for "host1:2,host2"."""
    found = [_HOST.fullmatch(host) for host in hosts.split(",")]
    if not all(found):
        raise UserError(f"hosts must be like host1:1,host2:1, not {hosts!r}")
    return [int(host[1] or 1) for host in found]


def place() -> str:
    """Return $PLACE: each socket or NUMA domain gets a rank, which uses only its cores."""
    name = os.environ.get("PLACE") or "none"
    if name not in _PLACES:
        raise UserError(f"PLACE must be none, socket or numa, not {name!r}")
    return name


def place_settings() -> dict[str, str]:
    """Return the variables of Open MPI that place ranks, unless $MPIRUN_FLAGS places them.

    Without $PLACE, the ranks fill a host before the next host. They are not bound, because a rank
    runs all of its threads on the cores that it is bound to.
    """
    if _PLACING.search(os.environ.get("MPIRUN_FLAGS", "")):
        return {}
    mapping, binding = ("slot", "none") if place() == "none" else (place(), place())
    return {
        "OMPI_MCA_rmaps_base_mapping_policy": mapping,
        "OMPI_MCA_hwloc_base_binding_policy": binding,
    }


def count_places(root: str = "/") -> int:
    """Return the number of sockets or NUMA domains of $PLACE that have cores of this process.

    Return 1 without $PLACE, and if the kernel does not list them.
    """
    found, cores = set(), os.sched_getaffinity(0)
    for core in cores if place() != "none" else ():
        directory = pathlib.Path(root, f"sys/devices/system/cpu/cpu{core}")
        with contextlib.suppress(OSError):
            if place() == "socket":
                found.add((directory / "topology/physical_package_id").read_text())
            else:
                found.update(node.name for node in directory.glob("node[0-9]*"))
    return len(found) or 1
