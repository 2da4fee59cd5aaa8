"""Each launch script runs the real training, and all ways to launch give the same run.

train_slurm.sbatch needs a Slurm: tests/faults/test_slurm.py.
"""

import os
import shutil
import subprocess

import pytest

from tests.commands import ROOT, environment, events, run_command

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
    assert losses(tmp_path / "run") == pytest.approx(baseline, rel=1e-4)


@pytest.fixture
def launch(tmp_path):
    """Run a script of a checkout without a set-up; instead of mpirun, a shell runs `stand_in`."""
    shutil.copytree(ROOT / "run_scripts", tmp_path / "run_scripts")
    (tmp_path / "run_scripts/setup.sh").write_text("#!/bin/sh\n")
    options = "lm/distributed/mpirun_options.conf"
    (tmp_path / options).parent.mkdir(parents=True)
    shutil.copy(ROOT / options, tmp_path / options)
    (tmp_path / "bin").mkdir()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")

    def run(name, stand_in='echo "$@"', **env):
        (tmp_path / "bin/mpirun").write_text(f"#!/bin/sh\n{stand_in}\n")
        (tmp_path / "bin/mpirun").chmod(0o755)
        return subprocess.run(
            [f"run_scripts/{name}", "--config", "config_test"],
            cwd=tmp_path, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **env},
            capture_output=True, text=True, timeout=30,
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
    assert f" {python} -m lm.train --output_dir run --resume " in result.stdout
    python.unlink()
    without = launch("train_resilient.sh", OUTPUT_DIR="run", **env)
    assert without.returncode == 2 and "run run_scripts/setup.sh" in without.stderr


def test_the_resilient_script_gives_up_where_nothing_gets_on(launch):
    env = {"OUTPUT_DIR": "run", "MAX_RESTARTS": "2", "BACKOFF": "0"}
    failed = launch("train_resilient.sh", "exit 7", **env)
    assert failed.returncode == 7 and failed.stderr.count(" in 0 s") == 2
    assert "restart 2 in 0 s" in failed.stderr
    assert "2 restarts without progress, giving up" in failed.stderr
    mistake = launch("train_resilient.sh", "exit 2", **env)
    assert (mistake.returncode, mistake.stderr) == (2, "")


@pytest.mark.parametrize("name", ["train_resilient.sh", "train_hosts.sh"])
def test_the_gpus_that_are_named_or_hidden_are_so_on_all_hosts(launch, name):
    env = {"OUTPUT_DIR": "run", "HOSTS": "host1:1,host2:1"}
    for gpus in ("", "1,2"):
        said = launch(name, CUDA_VISIBLE_DEVICES=gpus, **env).stdout
        assert " -x CUDA_VISIBLE_DEVICES " in said
    assert "CUDA" not in launch(name, **env).stdout


def test_train_hosts_knows_a_hostfile_and_an_interface(launch):
    said = launch("train_hosts.sh", HOSTFILE="hosts.txt", NP="3", INTERFACE="eth0").stdout
    assert " -np 3 -hostfile hosts.txt " in said
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


def test_the_resilient_script_sees_progress_at_any_step(tmp_path):
    """A new checkpoint begins the count anew, past step 10^8 and below a newer, damaged one."""
    (tmp_path / "run/checkpoints/step-300000000").mkdir(parents=True)
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
