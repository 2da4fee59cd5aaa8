"""The launch scripts: each runs the real training, and all ways to launch give the same run.

test_batch_scripts.py tests the scripts for schedulers.
"""

import re
import subprocess

import pytest

from lm import kernels
from tests.commands import (
    ROOT,
    SLURM,
    environment,
    events,
    kill_marked,
    marked_processes,
    new_mark,
    run_command,
)

TINY = ("--hidden_size", "8", "--max_steps", "10", "--log_every_steps", "1", "--noeval")


def losses(output_dir):
    return [event["loss"] for event in events(output_dir, "step")]


def test_all_ways_to_launch_give_the_run_of_one_process(project, corpora, tmp_path):
    flags = (*TINY, "--data_path", corpora)
    for name, ranks, env in (
        ("alone", 1, {"LAUNCHER": "none"}),
        ("local", 2, {"NP": "2"}),
        ("gloo", 2, {"LAUNCHER": "horovodrun"}),
    ):
        command = [project / "run_scripts/train.sh", *flags, "--output_dir", tmp_path / name]
        result = run_command(command, environment(CONFIG="config_test", **env), timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
        assert events(tmp_path / name, "start")[0]["world_size"] == ranks
        tolerance = 0 if kernels.available() else 1e-4
        expected = pytest.approx(losses(tmp_path / "alone"), rel=tolerance, abs=0)
        assert len(losses(tmp_path / name)) == 10 and losses(tmp_path / name) == expected


def test_the_quickstart_trains_on_two_ranks_and_ends_with_the_true_perplexity(
    project, corpora, tmp_path
):
    flags = ("--hidden_size", 8, "--max_steps", 5, "--data_path", corpora)
    command = [project / "run_scripts/quickstart.sh", *flags]
    result = run_command(command, environment(), timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").glob("quickstart-*")
    assert events(run, "start")[0]["world_size"] == 2
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(r"test perplexity [\d.]+ \(true: [\d.]+\), [\d.]+ bits/byte", last)


@pytest.mark.soak
def test_the_proof_finds_identical_checkpoints(project, tmp_path):
    command = [project / "run_scripts/prove.sh"]
    result = run_command(command, environment(OUTPUT_DIR="proof"), timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    _, *rows, last = result.stdout.splitlines()
    assert len(rows) == 7 and last == "identical"
    assert "resumed after step 100" in (tmp_path / "proof/killed.txt").read_text()


# Writes a different checkpoint on $changed ranks. Says that the run on $inexact ranks is not exact.
_MPIRUN_OF_THE_PROOF = """
    while [ $# -gt 0 ]; do
        case $1 in -np) ranks=$2 ;; --output_dir) run=$2 ;; --on_event) killed=1 ;; esac
        shift
    done
    mkdir -p $run/checkpoints/step-00000${killed:-3}00
    [ -z "$killed" ] || exit 137
    [ $ranks != "$inexact" ] || echo "  exact       no: an MPI parameter"
    echo $((ranks == changed)) >$run/checkpoints/step-00000300/model.data-0"""


def test_the_proof_reports_a_different_checkpoint(launch):
    result = launch("prove.sh", _MPIRUN_OF_THE_PROOF, arguments=(), changed="4")
    assert result.returncode == 1, result.stderr
    *_, resumed, last = result.stdout.splitlines()
    assert resumed.startswith("killed ") and last.startswith("different: ")


def test_the_proof_compares_only_exact_runs(launch):
    result = launch("prove.sh", _MPIRUN_OF_THE_PROOF, arguments=(), inexact="8")
    assert result.returncode == 2 and "eight-ranks is not exact, so it is" in result.stderr


def test_the_resilient_script_starts_the_python_of_its_checkout(launch, tmp_path):
    """This holds even if CDPATH is exported."""
    (tmp_path / "other" / "run_scripts").mkdir(parents=True)
    env = {"HOSTS": "host1:1,host2:1", "CDPATH": str(tmp_path / "other")}
    nowhere = launch("train_resilient.sh")
    assert nowhere.returncode == 2 and "set OUTPUT_DIR" in nowhere.stderr
    result = launch("train_resilient.sh", OUTPUT_DIR="run", **env)
    assert result.returncode == 0, result.stderr
    assert " -H host1:1,host2:1 " in result.stdout
    python = tmp_path / ".venv/bin/python"
    training = f" {python} -m lm.train --output_dir run --resume "
    assert training in result.stdout
    python.unlink()
    without = launch("train_resilient.sh", OUTPUT_DIR="run", **env)
    assert without.returncode == 2 and "run run_scripts/setup.sh" in without.stderr


def test_the_resilient_script_starts_one_rank_per_place(launch, tmp_path):
    assert "-np 1 " in launch("train_resilient.sh", OUTPUT_DIR="run").stdout
    python = tmp_path / ".venv/bin/python"  # a host with four NUMA domains
    python.write_text(python.read_text().replace("exec", "") + "echo places=4\n")
    assert "-np 4 " in launch("train_resilient.sh", OUTPUT_DIR="run", PLACE="numa").stdout
    assert "-np 2 " in launch("train_resilient.sh", OUTPUT_DIR="run", PLACE="numa", NP="2").stdout


def test_the_resilient_script_gives_up_without_progress(launch):
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


def test_a_full_log_does_not_end_the_resilient_script(launch, tmp_path):
    script = 'exec "$(dirname "$0")/train_resilient.sh" 2>/dev/full'
    (tmp_path / "run_scripts" / "full_log.sh").write_text(script)
    env = {"OUTPUT_DIR": "run", "MAX_RESTARTS": "2", "BACKOFF": "0"}
    result = launch("full_log.sh", "echo trains; exit 7", **env)
    assert (result.returncode, result.stdout) == (7, "trains\n" * 3)


def test_the_resilient_script_waits_while_the_checkpoints_are_missing(launch, tmp_path):
    """A new run in an empty mount point would repeat everything."""
    (tmp_path / "run/checkpoints/step-00000100").mkdir(parents=True)
    mpirun = "[ ! -e waited ] || exit 0; mv run unmounted; exit 7"
    sleep = "[ ! -e waited ] || mv unmounted run; touch waited"
    env = {"OUTPUT_DIR": "run", "MAX_RESTARTS": "2"}
    result = launch("train_resilient.sh", mpirun, {"sleep": sleep}, **env)
    assert result.returncode == 0
    first, gone, *_ = result.stderr.splitlines()
    assert "exit code 7, restart 1" in first
    assert gone == "train_resilient: the checkpoints of run are missing; mount its disk"
    assert "exit code 1, restart 2" in result.stderr


def test_a_script_can_be_called_by_a_link(launch, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/train").symlink_to("../run_scripts/train.sh")
    result = launch("../home/train", cwd=tmp_path / "home")
    assert result.returncode == 0 and "-m lm.train" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "name, variables, message",
    [
        ("train_resilient.sh", {"DISCOVER_HOSTS": "./typo.sh"}, "typo.sh does not exist, or"),
        ("train_resilient.sh", {"DISCOVER_HOSTS": "run_scripts/env.sh"}, "executable"),
        ("train_resilient.sh", {"HOSTS": "host1:two"}, "like host1:1,host2:1, not 'host1:two'"),
        (
            "train_resilient.sh",
            {"HOSTFILE": "x"},
            "set HOSTS or DISCOVER_HOSTS instead of HOSTFILE",
        ),
        ("train_resilient.sh", {"BACKOFF": "0.5"}, "BACKOFF must be a whole number, not '0.5'"),
        ("train_resilient.sh", {"MAX_RESTARTS": "08"}, "MAX_RESTARTS must be a whole number"),
        ("train.sh", {"HOSTS": "host1:1, host2:1"}, "train: hosts must be like host1:1,host2:1,"),
        ("train.sh", {"HOSTS": "host1:"}, "hosts must be like host1:1,host2:1, not 'host1:'"),
        ("train.sh", {"NP": "x"}, "train: NP must be a whole number, not 'x'"),
        ("train.sh", {"HOSTFILE": "x"}, "train: with HOSTFILE, set NP too"),
        ("train.sh", {"NP": "2", "HOSTFILE": "crlf"}, "crlf has Windows line ends: run sed -i"),
        ("train.sh", {"LAUNCHER": "x"}, "LAUNCHER must be mpirun, horovodrun or none, not 'x'"),
        ("train.sh", {"PLACE": "core"}, "PLACE must be none, socket or numa, not 'core'"),
        (
            "train_slurm.sbatch",
            {"LAUNCHER": "srun", "NP": "2", **SLURM},
            "set --ntasks of sbatch instead of NP",
        ),
        (
            "train_slurm.sbatch",
            {"FLAGS_FILE": "quote", "SLURM_ARRAY_TASK_ID": "1", **SLURM},
            "train_slurm: quote, line 1: unmatched quote",
        ),
        (
            "prove.sh",
            {},
            "prove: this script takes no arguments; compare_baseline.sh compares",
        ),
        ("train_sge.sh", {}, "train_sge: submit this script to a scheduler, or use train.sh"),
        ("train.sh", {"PBS_JOBID": "7", "PBS_NODEFILE": "x"}, "PBS_NODEFILE=x is not readable"),
    ],
)
def test_a_mistake_in_a_variable_is_one_line(launch, tmp_path, name, variables, message):
    (tmp_path / "crlf").write_bytes(b"host1 slots=2\r\n")
    (tmp_path / "quote").write_text('--data_path "a b\n')
    result = launch(name, OUTPUT_DIR="run", **variables)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_invalid_discovered_hosts_are_discovered_again(launch, tmp_path):
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho busy: later\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    env = {"DISCOVER_HOSTS": "./hosts.sh", "MAX_RESTARTS": "1", "BACKOFF": "0"}
    result = launch("train_resilient.sh", OUTPUT_DIR="run", **env)
    assert result.returncode == 1 and "1 restarts without progress" in result.stderr
    assert result.stderr.count("DISCOVER_HOSTS names no valid hosts") == 2


@pytest.mark.parametrize("name", ["search.sh", "compare_baseline.sh"])
def test_a_script_that_prints_a_help_does_not_report_a_run(launch, tmp_path, name):
    with (tmp_path / ".venv/bin/python").open("a") as stand_in:
        stand_in.write('echo "$@"\n')
    result = launch(name, arguments=["--help"])
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert " --help" in line and "lm.report" not in line


def test_a_quoted_home_directory_is_expanded(launch, tmp_path):
    with (tmp_path / ".venv/bin/python").open("a") as stand_in:
        stand_in.write('echo "$@"\n')
    (tmp_path / "a/1-rank").mkdir(parents=True)
    env = {"OUTPUT_DIR": "~/a", "HOME": str(tmp_path)}
    report = launch("compare_baseline.sh", 'echo "$@"', arguments=(), **env).stdout.splitlines()[-1]
    assert report.startswith(f"-m lm.report {tmp_path}/a/1-rank {tmp_path}/a/ranks ")


def test_scripts_stay_in_the_users_directory(launch, tmp_path):
    """So relative paths refer to this directory. VENV selects the Python and its mpirun."""
    user = tmp_path / "user"
    user.mkdir()
    (user / "hosts.sh").write_text("#!/bin/sh\necho host1:3\n")
    (user / "hosts.sh").chmod(0o755)
    (user / "env").symlink_to("../.venv")
    env = {"OUTPUT_DIR": "a", "DISCOVER_HOSTS": "./hosts.sh"}
    said = launch("train_resilient.sh", 'echo "$PWD $*"', cwd=user, **env).stdout
    assert said.startswith(f"{user} ") and " -np 3 -H host1:3 " in said
    assert " -m lm.train --output_dir a --resume " in said
    for venv in ("env", f"{user}/env"):
        said = launch("train.sh", 'echo "$PWD $*"', cwd=user, VENV=venv, CONFIG="m.py").stdout
        assert said.startswith(f"{user} ")
        assert f" {user}/env/bin/python -m lm.train --config m.py --max_steps 1\n" in said


@pytest.mark.parametrize("name", ["train_resilient.sh", "train.sh"])
def test_named_or_hidden_gpus_apply_to_all_hosts(launch, name):
    env = {"OUTPUT_DIR": "run", "HOSTS": "host1:1,host2:1"}
    for gpus in ("", "1,2"):
        said = launch(name, CUDA_VISIBLE_DEVICES=gpus, **env).stdout
        assert " -x CUDA_VISIBLE_DEVICES " in said
    assert "CUDA" not in launch(name, **env).stdout
    # A scheduler gives each host its own value.
    sge = {"JOB_ID": "7", "SGE_ROOT": "/sge"}
    assert "CUDA" not in launch(name, CUDA_VISIBLE_DEVICES="1,2", **env, **sge).stdout
    assert " -x CUDA" in launch(name, CUDA_VISIBLE_DEVICES="", **env, **sge).stdout


def test_hostfile_and_interface(launch, tmp_path):
    env = {"HOSTFILE": "hosts.txt", "NP": "3", "INTERFACE": "eth0"}
    said = launch("train.sh", **env).stdout
    assert " -np 3 -hostfile hosts.txt " in said
    assert " -mca btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0 " in said
    env["LAUNCHER"] = "horovodrun"
    said = launch("train.sh", others={"horovodrun": 'echo "$@"'}, **env).stdout
    assert "-np 3 -hostfile hosts.txt --network-interfaces eth0 " in said
    env = {"HOSTS": "host1,host2:12", "LAUNCHER": "horovodrun"}
    said = launch("train.sh", others={"horovodrun": 'echo "$@"'}, **env).stdout
    assert " -np 13 -H host1:1,host2:12 " in said  # horovodrun rejects hosts without slots


@pytest.mark.parametrize(
    "job, code",
    [("trap 'exit 143' USR2", 143), ("trap 'exit 0' USR2", 143), ("trap 'exit 1' USR2", 1),
     ("trap 'kill -9 \\$\\$' USR2", 137)],
)  # fmt: skip
def test_a_job_that_could_not_save_keeps_its_exit_code(job, code):
    script = (
        "set -euo pipefail; source run_scripts/mpirun_job.sh; kill -USR1 $$;"
        f' run_job bash -c "{job}; kill -TERM $$; while :; do sleep 0.05; done" || code=$?;'
        " kill -USR1 $$; echo $stopped_by; exit $code"
    )
    result = run_command(["bash", "-c", script], environment(), 30)
    assert (result.returncode, result.stdout) == (code, "143\n"), result.stderr


@pytest.mark.parametrize(
    "moment, job",
    [("set -m", "sleep 60"), ('"$@"', "sleep 60"), ("job=", "sleep 60"), ("wait", "sleep 60"),
     ("kill -0", "true"), ("trap - TERM", "true")],
)  # fmt: skip
def test_no_signal_is_lost_at_any_moment(moment, job):
    script = (
        "set -Teuo pipefail; source run_scripts/mpirun_job.sh;"
        f' moment=$1; trap "$2" DEBUG; run_job {job}'
    )
    trap = '[[ $BASHPID != $$ || $BASH_COMMAND != "$moment"* ]] || kill -TERM $$'
    mark = new_mark()
    try:
        result = subprocess.run(
            ["bash", "-c", script, "script", moment, trap],
            cwd=ROOT, env=environment(**mark), capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert result.returncode == 143, result.stderr
        assert not marked_processes(mark)
    finally:
        kill_marked(mark)


# This job hangs. When the job should save, it sends the script a second SIGINT.
HANGS = "trap 'kill -INT $PPID' USR2; kill -INT $PPID; while :; do sleep 0.05; done"


@pytest.mark.parametrize("name", ["train.sh", "train_resilient.sh", "train_slurm.sbatch"])
def test_a_second_sigint_kills_a_job_that_hangs(launch, name):
    others = {"scontrol": '[ "$1" = show ] || echo requeued'}
    result = launch(name, HANGS, others, OUTPUT_DIR="run", **SLURM)
    assert (result.returncode, result.stdout) == (130, "")
    assert "restart" not in result.stderr


def test_any_new_checkpoint_is_progress_for_the_resilient_script(launch, tmp_path):
    """This holds even after step 10^8, and even if a newer checkpoint is corrupt."""
    (tmp_path / "disk/step-300000000").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    mpirun = """
        turns=$(ls run/checkpoints | wc -l)
        mkdir run/checkpoints/step-$((99999998 + turns))
        exit $((turns < 3))"""
    env = {"OUTPUT_DIR": "run", "MAX_RESTARTS": "1", "BACKOFF": "0"}
    result = launch("train_resilient.sh", mpirun, **env)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("restart 1 in 0 s") == 2
