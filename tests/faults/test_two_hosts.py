"""Two real hosts: network namespaces with their own sshd (see two_hosts.sh)."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from lm import kernels
from lm.distributed.cores import claim_cores
from lm.distributed.mpirun import mpirun_environment
from tests import machine
from tests.commands import ROOT, run_command
from tests.faults.jobs import check_same_run, events, last_step, run, saved_steps

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
    pytest.mark.skipif(
        not (shutil.which("ip") and os.path.exists("/usr/sbin/sshd")),
        reason="needs iproute2 and openssh-server",
    ),
]

SCRIPT = str(ROOT / "tests" / "faults" / "two_hosts.sh")
FLAGS = ("--hidden_size", 16, "--noeval", "--max_steps", 250, "--checkpoint_every_steps", 25)


@pytest.fixture
def hosts(tmp_path):
    """Return the command line of two_hosts.sh for an action (cut, mend, or run and a command)."""
    directory = str(tmp_path / "hosts")
    os.mkdir(directory)

    def act(action, *arguments):
        return [SCRIPT, action, directory, *map(str, arguments)]

    started = subprocess.run(act("up"), capture_output=True, text=True, timeout=60)
    if started.returncode:
        subprocess.run(act("down"), check=False)
        pytest.skip(f"network namespaces do not work here: {started.stderr}")
    yield act
    subprocess.run(act("down"), check=True, timeout=60)


def mpirun_options(hosts):
    directory = hosts("cut")[-1]
    ssh = (
        f"-i {directory}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        " -o LogLevel=ERROR -o ConnectTimeout=5 -o ServerAliveInterval=5 -o ServerAliveCountMax=2"
    )
    return ["-mca", "plm_rsh_args", ssh, "-mca", "pml", "ob1", "-mca", "btl", "tcp,self"]


def launcher(hosts, slots=1):
    return [
        *hosts("run", "lmhost1"),
        "mpirun", "-np", str(2 * slots), "-H", f"lmhost1:{slots},lmhost2:{slots}",
        *mpirun_options(hosts), "-mca", "mpi_yield_when_idle", "1",
        "-mca", "oob_tcp_keepalive_time", "5", "-mca", "oob_tcp_keepalive_intvl", "2",
        "-mca", "oob_tcp_keepalive_probes", "3",
    ]  # fmt: skip


def test_four_ranks_on_two_hosts_are_bitwise_identical_to_one(start, hosts, tmp_path):
    # Weights of more than 64 KB are exchanged by a different algorithm.
    flags = (*FLAGS, "--hidden_size", 128, "--keep_prob", 0.7)
    run(start, tmp_path / "run", *flags, launcher=launcher(hosts, slots=2))
    run(start, tmp_path / "alone", *flags)
    check_same_run(tmp_path / "run", tmp_path / "alone")


def test_hosts_that_differ_in_everything_train_together(start, hosts, tmp_path):
    """They have different instruction sets, core counts, home directories and paths."""
    if claim_cores() < 2 or not kernels.available():
        pytest.skip("needs two cores and the compiled ops")
    homes = [tmp_path / "home1", tmp_path / "home2"]
    for home in homes:
        home.mkdir()
    host = tmp_path / "host.sh"  # the settings of each host; and a shell, as in the docs
    host.write_text(
        "#!/bin/bash\nif [[ $(hostname) == lmhost1 ]]; then\n"
        f"  export HOME={homes[0]} LM_KERNELS_ISA=avx2\nelse\n"
        f"  export HOME={homes[1]} LM_KERNELS_ISA=generic LM_HOST_SLOTS=0:1:2\nfi\n"
        'exec bash -c "exec $*"\n'
    )
    host.chmod(0o755)
    flags = ("--config", "config_test", "--data_path", "$HOME/corpora", "--hidden_size", 16)
    flags += ("--noeval", "--checkpoint_every_steps", 10, "--resume")
    for steps in (20, 40):  # the second job resumes
        job = start(
            "$HOME/run", *flags, "--max_steps", steps, config=False,
            launcher=[*launcher(hosts), host],
        )  # fmt: skip
        code, output = job.finish()
        assert code == 0, output
    assert last_step(homes[0] / "run") == 40 and saved_steps(homes[0] / "run")
    assert (homes[1] / "corpora").exists() and not (homes[1] / "run").exists()
    (begun, resumed) = events(homes[0] / "run", "start")
    assert begun["hosts"] == ["lmhost1", "lmhost2"] and resumed["resumed_from_step"] == 20
    many, few = begun["intra_op_threads"]
    assert (many, few) == (claim_cores(), claim_cores() // 2)
    threads = "inside an operation, 1 operation at a time on rank"
    assert f"threads     {many} {threads} 0; {few} {threads} 1: the fastest ranks" in output
    if machine.has("avx2"):  # otherwise both hosts use the same instruction set
        assert re.search(r"compiled ops for avx2\b.* on rank 0; .*generic\b.* on rank 1: ", output)
        assert "exact       no: the ranks' arithmetic differs" in output


def test_scaling_over_two_hosts_is_measured(hosts, tmp_path):
    ssh = mpirun_options(hosts)[2]
    command = [*hosts("run", "lmhost1"), sys.executable, "-m", "lm.benchmark", "scaling",
               "--hosts", "lmhost1:1,lmhost2:1", "--ranks", 2, "--config", "config_test",
               "--repeats", 1, "--out", tmp_path]  # fmt: skip
    done = run_command(command, mpirun_environment(OMPI_MCA_plm_rsh_args=ssh), timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| strong +\| +2 ", done.stdout, re.MULTILINE)


def test_a_cut_network_ends_the_job_and_it_resumes(start, hosts, tmp_path):
    flags = (*FLAGS, "--step_timeout_seconds", 5, "--resume")
    job = start(tmp_path / "run", *flags, launcher=launcher(hosts))
    job.wait_for(lambda: saved_steps(tmp_path / "run"))
    subprocess.run(hosts("cut"), check=True)
    code, output = job.finish(timeout=5 + 30)
    assert code != 0
    assert re.search("rank 0 on lmhost1: no progress for [56] s in step", output)
    assert "waiting for rank 1 on lmhost2" in output
    assert last_step(tmp_path / "run") < 250
    subprocess.run(hosts("mend"), check=True)
    run(start, tmp_path / "run", *flags, launcher=launcher(hosts))
    assert last_step(tmp_path / "run") == 250
    run(start, tmp_path / "alone", *FLAGS)
    check_same_run(tmp_path / "run", tmp_path / "alone")


def test_the_resilient_script_continues_without_the_lost_host(start, hosts, corpora, tmp_path):
    discover = tmp_path / "discover.sh"
    discover.write_text(
        "#!/bin/bash\necho lmhost1:1\n"
        "timeout 3 bash -c 'exec 3<>/dev/tcp/lmhost2/22' 2>/dev/null && echo lmhost2:1\ntrue\n"
    )
    discover.chmod(0o755)
    env = {
        "OUTPUT_DIR": str(tmp_path / "run"), "DISCOVER_HOSTS": str(discover), "BACKOFF": "1",
        "VENV": sys.prefix,
    }  # fmt: skip
    wrapper = tmp_path / "ssh.sh"
    wrapper.write_text(f'#!/bin/bash\nexec ssh {mpirun_options(hosts)[2]} "$@"\n')
    wrapper.chmod(0o755)
    env["MPIRUN_FLAGS"] = f"-mca plm_rsh_agent {wrapper}"
    script = [*hosts("run", "lmhost1"), str(ROOT / "run_scripts" / "train_resilient.sh")]
    command = [*script, "--config", "config_test", "--data_path", corpora, *FLAGS,
               "--log_every_steps", 1, "--step_timeout_seconds", 5]  # fmt: skip
    output = tmp_path / "output"
    with open(output, "w") as file:
        process = subprocess.Popen(
            [str(word) for word in command], env=mpirun_environment(**env), cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not saved_steps(tmp_path / "run"):
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        subprocess.run(hosts("cut"), check=True)
        assert process.wait(timeout=120) == 0, output.read_text()
    finally:
        process.kill()
    text = output.read_text()
    assert "restart 1 in 1 s" in text and "over 2 ranks" in text
    assert last_step(tmp_path / "run") == 250
    run(start, tmp_path / "alone", *FLAGS)
    check_same_run(tmp_path / "run", tmp_path / "alone")
