"""Start training jobs, wait for their progress, and check that no process is left."""

import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from lm.checkpoint import store
from tests import fork_server
from tests.commands import (
    ROOT,
    environment,
    events,
    kill_marked,
    marked_processes,
    mpirun,
    new_mark,
    without_repetition,
)

GONE_SECONDS = 10  # time limit for a job to end after a fault


class Job:
    """A running `lm.train`, under mpirun if there are several ranks."""

    def __init__(
        self, output_dir, *flags, num_ranks=1, fault=None, launcher=None, forked=False, **popen
    ):
        self.output_dir = pathlib.Path(output_dir)
        self._mark = new_mark()
        module = ["tests.faults.inject", fault] if fault else ["lm.train"]
        launcher = launcher or (mpirun(num_ranks) if num_ranks > 1 else [])
        arguments = ["--output_dir", output_dir, "--log_every_steps", 1, *flags]
        env = {**popen.pop("env", {}), **self._mark}
        python = fork_server.python(**env) if forked else [sys.executable]
        self.process = subprocess.Popen(
            [*launcher, *python, "-m", *module, *map(str, arguments)],
            cwd=ROOT, env=environment(**env), text=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
               **popen},
        )  # fmt: skip
        self.output = ""

    def ranks(self) -> list[int]:
        """Return the process IDs of the ranks in rank order."""
        found = {}
        for pid in self.processes():
            variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            for variable in variables:
                if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                    found[int(variable.partition(b"=")[2])] = pid
        return [found[rank] for rank in sorted(found)] or [self.process.pid]

    def processes(self) -> list[int]:
        """Return the IDs of all processes of this job."""
        return marked_processes(self._mark)

    def wait_for(
        self, condition: Callable[[], object], timeout: float = 60, may_end: bool = False
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert may_end or self.process.poll() is None, self.finish()[1]
            if time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"timed out while waiting for the job: {self.process.communicate()[0]}")
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: last_step(self.output_dir) >= step)

    def finish(self, timeout: float = 90) -> tuple[int, str]:
        """Wait for the end, check that no process is left, and return exit code and output."""
        try:
            self.output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail("the job hangs")
        deadline = time.monotonic() + GONE_SECONDS
        while self.processes():
            if time.monotonic() > deadline:
                self.kill()
                pytest.fail("processes are left")
            time.sleep(0.05)
        return self.process.returncode, without_repetition(self.output or "")

    def ends(self) -> tuple[int, str]:
        """Return exit code and output like `finish`, but allow only GONE_SECONDS."""
        return self.finish(timeout=GONE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        kill_marked(self._mark)


def config_flags(corpora) -> tuple:
    """Return the flags that select the small config of the tests."""
    return ("--config", "config_test", "--data_path", corpora)


@pytest.fixture
def start(corpora) -> Iterator[Callable[..., Job]]:
    """Start jobs with the small config of the tests, and kill them when the test ends."""
    jobs = []

    def start_job(output_dir, *flags, config=True, **options):
        given = config_flags(corpora) if config else ()
        jobs.append(Job(output_dir, *given, *flags, **options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


def run(start, output_dir, *flags, **options) -> Job:
    """Run a job and check that it succeeds."""
    job = start(output_dir, *flags, forked="launcher" not in options, **options)
    code, output = job.finish()
    assert code == 0, output
    return job


def last_step(output_dir) -> int:
    return max((event["step"] for event in events(output_dir)), default=0)


def losses(output_dir) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in events(output_dir)]


def saved_steps(output_dir) -> list[int]:
    return [int(path[-8:]) for path in store.list_checkpoints(str(output_dir))]


def final_tensors(output_dir) -> str:
    """Return the checksum of the weights and recurrent state in the last checkpoint."""
    files = store.find_newest(str(output_dir)).manifest.files
    return files["model.data-00000-of-00001"]["sha256"]


def check_same_run(one, other) -> None:
    """Check that all losses, perplexities and final weights of two runs are identical."""
    assert losses(one) == losses(other) and losses(one)
    for kind, name in [
        ("epoch", "train_perplexity"), ("epoch", "valid_perplexity"),
        ("validation", "valid_perplexity"), ("test", "test_perplexity"),
    ]:  # fmt: skip
        values = [[event.get(name) for event in events(run, kind)] for run in (one, other)]
        assert values[0] == values[1]
    assert final_tensors(one) == final_tensors(other)
