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


def test_the_resilient_script_starts_the_python_of_its_own_checkout_on_all_hosts(tmp_path):
    """With the host's Open MPI, whose arguments are shown instead; and with CDPATH exported."""
    shutil.copytree(ROOT / "run_scripts", tmp_path / "run_scripts")
    options = "lm/distributed/mpirun_options.conf"
    (tmp_path / options).parent.mkdir(parents=True)
    shutil.copy(ROOT / options, tmp_path / options)
    (tmp_path / "other" / "run_scripts").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "mpirun"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    env = {
        "OUTPUT_DIR": "run", "HOSTS": "host1:1,host2:1", "CDPATH": str(tmp_path / "other"),
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
    }  # fmt: skip
    command = ["run_scripts/train_resilient.sh", "--config", "config_test"]
    options = dict(cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    nowhere = subprocess.run(command, **{**options, "env": {"PATH": env["PATH"]}})
    assert nowhere.returncode == 2 and "set OUTPUT_DIR" in nowhere.stderr
    without = subprocess.run(command, **options)
    assert without.returncode == 2 and "run run_scripts/setup.sh" in without.stderr
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stderr
    assert " -H host1:1,host2:1 " in result.stdout
    assert f" {python} -m lm.train --output_dir run --resume " in result.stdout


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
