"""train_slurm.sbatch in a real Slurm cluster of two nodes on one machine (see slurm.sh)."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

from lm.distributed.mpirun import mpirun_environment
from tests.commands import ROOT, kill_marked, marked_processes, new_mark
from tests.faults.jobs import check_same_run, config_flags, events, last_step, run, saved_steps

pytestmark = pytest.mark.soak

SCRIPT = str(ROOT / "tests" / "faults" / "slurm.sh")
FLAGS = ("--hidden_size", 16, "--noeval", "--log_every_steps", 1, "--checkpoint_every_steps", 25)
STEPS = 1000  # a fast machine must not finish before the job is interrupted
WHOLE = (*FLAGS, "--max_steps", STEPS)
ENDLESS = (*FLAGS, "--max_steps", 10**6, "--num_epochs", 1000)

both_launchers = pytest.mark.parametrize("launcher", ["mpirun", "srun"])


class SlurmJob:
    """A submitted job of run_scripts/train_slurm.sbatch."""

    def __init__(self, directory, corpora, output_dir, *flags, sbatch=(), **env):
        self.output_dir, self._mark = output_dir, new_mark()
        self._env = mpirun_environment(
            SLURM_CONF=f"{directory}/slurm.conf", CONFIG="config_test", **env, **self._mark
        )
        self._console = output_dir.with_suffix(".out")
        script = ROOT / "run_scripts" / "train_slurm.sbatch"
        submitted = self.slurm(
            "sbatch", "--parsable", "--output", self._console, *sbatch, script,
            *config_flags(corpora), "--output_dir", output_dir, *flags,
        )  # fmt: skip
        self.id = submitted.strip()

    def slurm(self, *command) -> str:
        """Run a Slurm command and return its output."""
        words = [str(word) for word in command]
        return subprocess.run(
            words, env=self._env, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def fact(self, name) -> str:
        """Return a field of `scontrol show job`."""
        return re.search(rf"\b{name}=(\S+)", self.slurm("scontrol", "show", "job", self.id))[1]

    def console(self) -> str:
        return self._console.read_text() if self._console.exists() else ""

    def wait_for(self, condition, timeout=120):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"{self.fact('JobState')}\n{self.console()}"
            time.sleep(0.2)

    def wait_for_step(self, step):
        self.wait_for(lambda: last_step(self.output_dir) >= step)

    def wait_for_restart(self, count):
        self.wait_for(lambda: self.fact("Restarts") == str(count))

    def ends(self) -> tuple[str, str]:
        """Wait for the end, check that no process is left, and return state and exit code."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.fact("JobState") in over)
        self.wait_for(lambda: not marked_processes(self._mark), timeout=10)
        return self.fact("JobState"), self.fact("ExitCode").partition(":")[0]

    def set_time_limit(self, minutes):
        self.slurm("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")

    def kill(self, variable):
        """Send SIGKILL to the processes with this variable in their environment."""
        for pid in marked_processes(self._mark):
            variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if variable.encode() in variables:
                os.kill(pid, signal.SIGKILL)

    def remove(self):
        with contextlib.suppress(subprocess.CalledProcessError):  # fails if the job already ended
            self.slurm("scancel", self.id)
        kill_marked(self._mark)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start a Slurm cluster and return its directory."""
    if os.geteuid() != 0:
        pytest.skip("needs root for Slurm's daemons")
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
        pytest.skip("needs Slurm: apt install slurm-wlm munge libpmix-dev")
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("needs run_scripts/setup.sh")
    directory = str(tmp_path_factory.mktemp("slurm"))
    try:
        subprocess.run([SCRIPT, "up", directory], check=True, timeout=60)
        yield directory
    finally:
        subprocess.run([SCRIPT, "down", directory], check=True, timeout=60)


@pytest.fixture
def submit(cluster, corpora, tmp_path):
    """Submit jobs with flags of lm.train, and cancel them when the test ends."""
    jobs = []

    def submit_job(*flags, **options):
        jobs.append(SlurmJob(cluster, corpora, tmp_path / "run", *flags, **options))
        return jobs[-1]

    yield submit_job
    for job in jobs:
        job.remove()


def assert_is_the_run_of_one_process(start, job, tmp_path):
    run(start, tmp_path / "alone", *WHOLE)
    check_same_run(job.output_dir, tmp_path / "alone")


@both_launchers
def test_a_job_resumes_after_the_death_of_a_rank(start, submit, tmp_path, launcher):
    job = submit(*WHOLE, LAUNCHER=launcher, sbatch=["--cpus-per-task", 2])
    job.wait_for(lambda: saved_steps(job.output_dir))
    job.kill("PMIX_RANK=1")
    job.wait_for_restart(1)
    assert job.ends() == ("COMPLETED", "0")
    started, resumed = events(job.output_dir, "start")
    assert (started["world_size"], started["backend"]) == (2, "MPI")
    assert resumed["intra_op_threads"] == [2, 2]  # all cores of a task
    assert_is_the_run_of_one_process(start, job, tmp_path)


def test_a_job_resumes_when_a_dead_node_returns(start, submit, cluster, tmp_path):
    job = submit(*WHOLE)
    job.wait_for(lambda: saved_steps(job.output_dir))
    os.kill(int(pathlib.Path(cluster, "slurmd-n2.pid").read_text()), signal.SIGKILL)
    try:
        job.kill("SLURMD_NODENAME=n2")
        job.wait_for_restart(1)
        assert last_step(job.output_dir) < STEPS
    finally:
        subprocess.run([SCRIPT, "start", cluster, "n2"], check=True, timeout=60)
    assert job.ends() == ("COMPLETED", "0")
    assert_is_the_run_of_one_process(start, job, tmp_path)


@contextlib.contextmanager
def drained_node(job):
    job.slurm("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        yield
    finally:
        job.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")


def test_a_job_waits_for_a_drained_node_and_resumes(start, submit, tmp_path):
    job = submit(*WHOLE)
    job.wait_for_step(10)
    with drained_node(job):
        job.wait_for_step(20)
        assert job.fact("JobState") == "RUNNING"
        # Send the signal that Slurm sends before the time limit.
        job.slurm("scancel", "--batch", "--signal=USR2", job.id)
        job.wait_for(lambda: "DRAINED" in job.fact("Reason"))
        step = last_step(job.output_dir)
        assert saved_steps(job.output_dir)[-1] == step < STEPS
    assert job.ends() == ("COMPLETED", "0")
    assert last_step(job.output_dir) == STEPS
    assert_is_the_run_of_one_process(start, job, tmp_path)


@both_launchers
def test_the_time_limit_requeues_a_job_that_makes_progress(submit, launcher):
    job = submit(*ENDLESS, LAUNCHER=launcher, MAX_REQUEUES="1")
    step = 0
    for restarts in (0, 1, 2):
        job.wait_for_restart(restarts)
        job.set_time_limit(60)
        job.wait_for_step(step + 10)
        # The signal comes 120 s before the limit, so now. Slurm checks twice a minute.
        job.set_time_limit(2)
        job.wait_for(lambda n=restarts: job.console().count("which is saved") > n)
        step = last_step(job.output_dir)
        assert saved_steps(job.output_dir)[-1] == step
        assert job.console().count("resumed after step") == restarts
    job.wait_for_restart(3)
    assert "giving up" not in job.console()


@both_launchers
def test_a_preempted_job_is_saved_and_requeued(start, submit, tmp_path, launcher):
    job = submit(*WHOLE, "--checkpoint_every_steps", 10**6, LAUNCHER=launcher)
    job.wait_for_step(10)
    others = ("--partition", "urgent", "--nodes", 2, "--output", "/dev/null", "--wrap", "true")
    job.slurm("sbatch", "--exclusive", *others)
    job.wait_for_restart(1)
    told = job.slurm("scontrol", "show", "job", job.id)
    assert " PreemptTime=2" not in told  # otherwise scancel would requeue the job later
    step = last_step(job.output_dir)
    assert saved_steps(job.output_dir)[-1] == step < STEPS
    assert job.ends() == ("COMPLETED", "0")
    assert_is_the_run_of_one_process(start, job, tmp_path)


@both_launchers
def test_a_cancelled_job_is_saved_and_not_requeued(submit, launcher):
    job = submit(*ENDLESS, "--checkpoint_every_steps", 10**6, LAUNCHER=launcher)
    job.wait_for_step(10)
    job.slurm("scancel", job.id)
    assert job.ends() == ("CANCELLED", "143")
    assert job.fact("Restarts") == "0"
    assert saved_steps(job.output_dir)[-1] >= last_step(job.output_dir) >= 10


def test_trials_of_a_search_share_the_nodes(cluster, corpora, tmp_path):
    """Slurm must not block the second mpirun on a node."""
    mark = new_mark()
    env = mpirun_environment(
        SLURM_CONF=f"{cluster}/slurm.conf", CONFIG="config_test", RANKS="1",
        SPACE="learning_rate=0.1:1", **mark,
    )  # fmt: skip
    flags = ("--data_path", corpora, "--hidden_size", 8, "--num_epochs", 1000, "--trials", 4)
    script = ROOT / "run_scripts" / "search_slurm.sbatch"
    words = ["sbatch", "--parsable", "--ntasks-per-node", "2", str(script), *map(str, flags)]
    options = dict(env=env, cwd=tmp_path, check=True, text=True, timeout=60)
    job = subprocess.run(words, stdout=subprocess.PIPE, **options).stdout.strip()
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("searches/*/trials/*/metrics.jsonl"))) < 4:
            assert time.monotonic() < deadline, (tmp_path / f"slurm-{job}.out").read_text()
            time.sleep(0.2)
    finally:
        subprocess.run(["scancel", job], **options)
        kill_marked(mark)
