"""Each launch script runs the real training, and all ways to launch give the same run.

train_slurm.sbatch needs a Slurm: tests/faults/test_slurm.py.
"""

import os
import re
import shutil
import subprocess

import pytest

from lm import kernels
from tests.commands import (
    ROOT,
    environment,
    events,
    kill_marked,
    marked_processes,
    new_mark,
    run_command,
)

TINY = ("--hidden_size", "8", "--max_steps", "10", "--log_every_steps", "1", "--noeval")

pytestmark = pytest.mark.skipif(
    not os.path.exists(ROOT / ".venv" / ".done-package"),
    reason="the scripts set up first, which takes minutes: run run_scripts/setup.sh before",
)


def run_script(name, output_dir, corpora, **env):
    command = [
        ROOT / "run_scripts" / name, *TINY, "--data_path", corpora, "--output_dir", output_dir
    ]  # fmt: skip
    return run_command(command, environment(CONFIG="config_test", **env), timeout=120, cwd=ROOT)


def losses(output_dir):
    return [event["loss"] for event in events(output_dir, "step")]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory, corpora):
    output_dir = tmp_path_factory.mktemp("single") / "run"
    result = run_script("train_single.sh", output_dir, corpora)
    assert result.returncode == 0, result.stderr
    return losses(output_dir)


@pytest.mark.parametrize(
    "name, env",
    [
        ("train_local.sh", {"NP": "2"}),
        ("train_hosts.sh", {"HOSTS": "localhost:2"}),
        ("train_horovodrun.sh", {"NP": "2"}),
    ],
)
def test_a_distributed_launch_gives_the_run_of_one_process(tmp_path, corpora, baseline, name, env):
    result = run_script(name, tmp_path / "run", corpora, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert events(tmp_path / "run", "start")[0]["world_size"] == 2
    tolerance = 0 if kernels.available() else 1e-4
    assert losses(tmp_path / "run") == pytest.approx(baseline, rel=tolerance, abs=0)


def test_the_quickstart_trains_on_two_ranks_and_ends_with_the_true_perplexity(project, corpora):
    flags = ("--hidden_size", 8, "--max_steps", 5, "--data_path", corpora)
    command = [project / "run_scripts/quickstart.sh", *flags]
    result = run_command(command, environment(), timeout=120)
    assert result.returncode == 0, result.stderr
    (run,) = (project / "runs").glob("quickstart-*")
    assert events(run, "start")[0]["world_size"] == 2
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(r"test perplexity [\d.]+ \(true: [\d.]+\)", last)


@pytest.fixture
def launch(tmp_path):
    """Run a script of a checkout without a set-up; a shell runs stand-ins for mpirun and others."""
    shutil.copytree(ROOT / "run_scripts", tmp_path / "run_scripts")
    (tmp_path / "run_scripts/setup.sh").write_text("#!/bin/sh\n")
    options = "lm/distributed/mpirun_options.conf"
    (tmp_path / options).parent.mkdir(parents=True)
    shutil.copy(ROOT / options, tmp_path / options)
    (tmp_path / "bin").mkdir()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")

    def run(name, mpirun='echo "$@"', others=(), cwd=tmp_path, **env):
        for command, stand_in in {"mpirun": mpirun, **dict(others)}.items():
            (tmp_path / "bin" / command).write_text(f"#!/bin/sh\n{stand_in}\n")
            (tmp_path / "bin" / command).chmod(0o755)
        return run_command(
            ["bash", tmp_path / "run_scripts" / name, "--config", "config_test"],
            {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **env}, timeout=30, cwd=cwd,
        )  # fmt: skip

    return run


def test_the_resilient_script_starts_the_python_of_its_own_checkout_on_all_hosts(launch, tmp_path):
    """With the host's Open MPI, and with CDPATH exported."""
    (tmp_path / "other" / "run_scripts").mkdir(parents=True)
    env = {"HOSTS": "host1:1,host2:1", "CDPATH": str(tmp_path / "other")}
    nowhere = launch("train_resilient.sh")
    assert nowhere.returncode == 2 and "set OUTPUT_DIR" in nowhere.stderr
    result = launch("train_resilient.sh", OUTPUT_DIR="run", **env)
    assert result.returncode == 0, result.stderr
    assert " -H host1:1,host2:1 " in result.stdout
    python = tmp_path / ".venv/bin/python"
    training = f" {python} -m lm.train --config config_small --output_dir {tmp_path}/run --resume "
    assert training in result.stdout
    python.unlink()
    without = launch("train_resilient.sh", OUTPUT_DIR="run", **env)
    assert without.returncode == 2 and "run run_scripts/setup.sh" in without.stderr


def test_the_resilient_script_gives_up_where_nothing_gets_on(launch):
    env = {"OUTPUT_DIR": "run", "MAX_RESTARTS": "2", "BACKOFF": "0"}
    failed = launch("train_resilient.sh", "exit 7", **env)
    assert failed.returncode == 7 and failed.stderr.count(" in 0 s") == 2
    assert "restart 2 in 0 s" in failed.stderr
    assert "2 restarts without progress, giving up" in failed.stderr
    env.update(MAX_RESTARTS="3", BACKOFF="100")
    patient = launch("train_resilient.sh", "exit 7", {"sleep": ":"}, **env)
    assert re.findall(r"restart \d in (\d+) s", patient.stderr) == ["100", "200", "300"]
    mistake = launch("train_resilient.sh", "exit 2", **env)
    assert (mistake.returncode, mistake.stderr) == (2, "")


def test_a_script_may_be_called_by_a_link_to_it(launch, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/train").symlink_to("../run_scripts/train_local.sh")
    result = launch("../home/train", cwd=tmp_path / "home")
    assert result.returncode == 0 and "-m lm.train" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "name, variable, value, message",
    [
        (
            "train_resilient.sh",
            "DISCOVER_HOSTS",
            "./typo.sh",
            "/typo.sh is not there, or is not exec",
        ),
        ("train_resilient.sh", "DISCOVER_HOSTS", "lm/distributed/mpirun_options.conf", "not exec"),
        ("train_resilient.sh", "HOSTS", "host1:two", "colon of host1:two must be a whole number"),
        ("train_hosts.sh", "HOSTS", "host1:1, host2:1", "train_hosts: commas alone separate hosts"),
        ("train_resilient.sh", "BACKOFF", "0.5", "BACKOFF must be a whole number, not '0.5'"),
        ("train_resilient.sh", "NP", "x", "NP must be a whole number, not 'x'"),
        ("train_resilient.sh", "MAX_RESTARTS", "08", "MAX_RESTARTS must be a whole number"),
        ("train_hosts.sh", "HOSTS", "host1:", "train_hosts: the number after the colon of host1:"),
    ],
)
def test_a_mistake_in_a_variable_is_one_line(launch, name, variable, value, message):
    result = launch(name, OUTPUT_DIR="run", **{variable: value})
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_a_batch_job_of_another_directory_says_where_it_belongs(launch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    result = launch("train_slurm.sbatch", SLURM_SUBMIT_DIR=str(tmp_path / "elsewhere"))
    assert (result.returncode, result.stdout) == (2, "")
    message = f"run sbatch in the directory of the project, not in {tmp_path}/elsewhere\n"
    assert result.stderr == f"train_slurm: {message}"


def test_hosts_that_are_discovered_with_a_mistake_are_asked_for_again(launch, tmp_path):
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho busy: later\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    env = {"DISCOVER_HOSTS": "./hosts.sh", "MAX_RESTARTS": "1", "BACKOFF": "0"}
    result = launch("train_resilient.sh", OUTPUT_DIR="run", **env)
    assert result.returncode == 1 and "1 restarts without progress" in result.stderr
    assert result.stderr.count("DISCOVER_HOSTS names no hosts to start on") == 2


def test_a_relative_path_in_a_variable_means_the_users_directory(launch, tmp_path):
    user = tmp_path / "user"
    user.mkdir()
    (user / "hosts.sh").write_text("#!/bin/sh\necho host1:3\n")
    (user / "hosts.sh").chmod(0o755)
    (user / "python").symlink_to("/bin/true")
    env = {"OUTPUT_DIR": "a", "DISCOVER_HOSTS": "./hosts.sh", "PYTHON": "../user/python"}
    said = launch("train_resilient.sh", cwd=user, **env).stdout
    assert (
        f" {user}/../user/python -m lm.train --config config_small --output_dir {user}/a --resume "
        in said
    )
    assert said.startswith("-np 3 -H host1:3 ")
    for given, meant in {
        "mine.py": f"{user}/mine.py", "a/b.py": f"{user}/a/b.py", "/c.py": "/c.py", "d": "d"
    }.items():  # fmt: skip
        for script in ("train_local.sh", "train_resilient.sh"):
            said = launch(script, cwd=user, CONFIG=given, OUTPUT_DIR="a").stdout
            assert f" --config {meant} " in said
    said = launch("train_hosts.sh", cwd=user, HOSTFILE="hosts.txt", NP="3").stdout
    assert f" -hostfile {user}/hosts.txt " in said


@pytest.mark.parametrize("name", ["train_resilient.sh", "train_hosts.sh"])
def test_the_gpus_that_are_named_or_hidden_are_so_on_all_hosts(launch, name):
    env = {"OUTPUT_DIR": "run", "HOSTS": "host1:1,host2:1"}
    for gpus in ("", "1,2"):
        said = launch(name, CUDA_VISIBLE_DEVICES=gpus, **env).stdout
        assert " -x CUDA_VISIBLE_DEVICES " in said
    assert "CUDA" not in launch(name, **env).stdout


def test_train_hosts_knows_a_hostfile_and_an_interface(launch, tmp_path):
    said = launch("train_hosts.sh", HOSTFILE="hosts.txt", NP="3", INTERFACE="eth0").stdout
    assert f" -np 3 -hostfile {tmp_path}/hosts.txt " in said
    assert " -mca btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0 " in said


@pytest.mark.parametrize("env, message", [({}, "set HOSTS"), ({"HOSTFILE": "x"}, "set NP too")])
def test_train_hosts_says_what_it_needs(env, message):
    result = subprocess.run(
        [ROOT / "run_scripts" / "train_hosts.sh"],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2 and message in result.stderr


@pytest.mark.parametrize(
    "job, code",
    [("trap 'exit 143' USR2", 143), ("trap 'exit 0' USR2", 143), ("trap 'exit 1' USR2", 1),
     ("trap 'kill -9 \\$\\$' USR2", 137)],
)  # fmt: skip
def test_a_job_that_could_not_save_is_not_told_to_have_stopped(job, code):
    script = (
        "set -euo pipefail; source run_scripts/mpirun_job.sh; kill -USR1 $$;"
        f' run_job bash -c "{job}; kill -TERM $$; while :; do sleep 0.05; done" || code=$?;'
        " kill -USR1 $$; echo $stopped_by; exit $code"
    )
    result = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (result.returncode, result.stdout) == (code, "143\n"), result.stderr


@pytest.mark.parametrize(
    "moment, job",
    [("set -m", "sleep 60"), ('"$@"', "sleep 60"), ("job=", "sleep 60"), ("wait", "sleep 60"),
     ("kill -0", "true"), ("trap - TERM", "true")],
)  # fmt: skip
def test_at_no_moment_a_signal_is_lost_or_leaves_the_job_alone(moment, job):
    mark = new_mark()
    script = (
        "set -Teuo pipefail; source run_scripts/mpirun_job.sh;"
        f' moment=$1; trap "$2" DEBUG; run_job {job}'
    )
    trap = '[[ $BASHPID != $$ || $BASH_COMMAND != "$moment"* ]] || kill -TERM $$'
    try:
        result = subprocess.run(
            ["bash", "-c", script, "script", moment, trap],
            cwd=ROOT, env=environment(**mark), capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert result.returncode == 143, result.stderr
        assert not marked_processes(mark)
    finally:
        kill_marked(mark)


# A job that hangs: asked to save, it gets the user's second SIGINT sent.
HANGS = "trap 'kill -INT $PPID' USR2; kill -INT $PPID; while :; do sleep 0.05; done"
SLURM = {"SLURM_SUBMIT_DIR": ".", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize("name", ["train_local.sh", "train_resilient.sh", "train_slurm.sbatch"])
def test_a_second_sigint_kills_a_job_that_hangs(launch, name):
    others = {"scontrol": "echo requeued"}
    result = launch(name, HANGS, others, OUTPUT_DIR="run", **SLURM)
    assert (result.returncode, result.stdout) == (130, "")
    assert "restart" not in result.stderr


# What srun 22.05 says where libpmix.so is missing, and where a node is dead.
@pytest.mark.parametrize(
    "said, code, requeued",
    [
        ("Invalid MPI type 'pmix', --mpi=list for acceptable types", 2, False),
        ("Application launch failed: Communication connection failure", 233, True),
    ],
)
def test_only_a_missing_pmix_keeps_srun_from_a_requeue(launch, said, code, requeued):
    others = {"srun": f'echo "srun: error: {said}" >&2; exit 233', "scontrol": 'echo "$@"'}
    result = launch("train_slurm.sbatch", others=others, LAUNCHER="srun", **SLURM)
    assert result.returncode == code, result.stderr
    assert result.stdout == "requeue 7\n" * requeued
    assert ("install libpmix.so" in result.stderr) is not requeued
    assert said in result.stderr


def test_the_resilient_script_sees_progress_at_any_step(tmp_path):
    """A new checkpoint begins the count anew, past step 10^8 and below a newer, damaged one."""
    (tmp_path / "disk/step-300000000").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    trainer = tmp_path / "python"
    trainer.write_text(
        f"""#!/bin/bash
        turns=$(ls {tmp_path}/run/checkpoints | wc -l)
        mkdir {tmp_path}/run/checkpoints/step-$((99999998 + turns))
        exit $((turns < 3))
        """
    )
    trainer.chmod(0o755)
    result = subprocess.run(
        [ROOT / "run_scripts" / "train_resilient.sh"],
        env=environment(
            OUTPUT_DIR=str(tmp_path / "run"), PYTHON=str(trainer), MAX_RESTARTS="1", BACKOFF="0"
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("restart 1 in 0 s") == 2
