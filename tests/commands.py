"""Run the project's command lines as a user does: real processes, under real mpirun."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence

from lm.cli.parser import ConfigChoice, parse
from lm.config import Config, RunOptions
from lm.distributed.communicator import Communicator
from lm.distributed.mpirun import mpirun_command, mpirun_environment
from lm.functions import NetworkFunctions
from tests import fork_server

ROOT = pathlib.Path(__file__).parent.parent
# The variables of a Slurm job on two hosts.
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
}  # fmt: skip


# This variable sets the seconds between SIGTERM and SIGKILL when mpirun ends its ranks.
# mpirun waits twice this long even if all ranks have exited, so tests use a short time.
END_SECONDS = "OMPI_MCA_odls_base_sigkill_timeout"


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a command, with changes."""
    return mpirun_environment(**{END_SECONDS: "1", **changes})


def mpirun(num_ranks: int) -> list[str]:
    """Return an mpirun command without its program."""
    return list(mpirun_command(num_ranks))


def new_mark() -> dict[str, str]:
    """Return an environment variable that marks a command and all its child processes."""
    return {"LM_TEST_JOB": str(uuid.uuid4())}


def marked_processes(mark: Mapping[str, str]) -> list[int]:
    """Return the IDs of all processes with this mark."""
    ((name, value),) = mark.items()
    found = []
    for directory in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if directory.name.isdigit():
                if f"{name}={value}".encode() in (directory / "environ").read_bytes():
                    found.append(int(directory.name))
    return sorted(found)


def kill_marked(mark: Mapping[str, str]) -> None:
    """Kill all processes with this mark and return after all have exited."""
    while pids := marked_processes(mark):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def run_command(
    command: Sequence[object], env: Mapping[str, str], timeout: float, cwd=ROOT, **options
) -> subprocess.CompletedProcess:
    """Run a command like `subprocess.run`, but kill its ranks too after a timeout.

    Each rank is in a separate process group, so it would outlive a killed mpirun.
    """
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    mark = new_mark()
    try:
        return subprocess.run(
            [str(word) for word in command], env={**env, **mark}, timeout=timeout, cwd=cwd,
            capture_output=True, text=True, **options,
        )  # fmt: skip
    except BaseException:  # the timeout of this call, the timeout of pytest, or Ctrl-C
        kill_marked(mark)
        raise


def run_module(
    module: str,
    *arguments: object,
    num_ranks: int = 1,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike | None = None,
    forked: bool = True,
) -> subprocess.CompletedProcess:
    """Run `python -m module` on some ranks, and kill it and fail after `timeout` seconds.

    Unless `forked`, a new Python starts each rank, even if the fork server could.
    """
    ranks: Sequence[str] = mpirun(num_ranks) if num_ranks > 1 else []
    python = fork_server.python(**(env or {})) if forked else [sys.executable]
    command = [*ranks, *python, "-m", module, *arguments]
    return run_command(command, environment(**(env or {})), timeout, cwd=cwd or ROOT)


def run_code(
    code: str,
    *arguments: object,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    forked: bool = False,
    **options,
) -> subprocess.CompletedProcess:
    """Run Python code in a new process; options are those of `run_command`.

    If `forked`, the process has already imported TensorFlow, unless `env` prevents this.
    """
    python = fork_server.python(**(env or {})) if forked else [sys.executable]
    command = [*python, "-c", code, *arguments]
    return run_command(command, environment(**(env or {})), timeout, **options)


def train(output_dir, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Run `lm.train` into a directory and check that it succeeds."""
    result = run_module("lm.train", "--output_dir", output_dir, *arguments, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def parse_flags(argv: Sequence[str]) -> tuple[Config, RunOptions, NetworkFunctions]:
    """Return the config, the options and the network functions of a command line of `lm.train`."""
    arguments = parse(argv, "", ConfigChoice, Config, RunOptions)
    return arguments[Config], arguments[RunOptions], arguments.config_file.functions


def train_here(output_dir, *arguments: object) -> None:
    """Train with these flags of `lm.train` in this process, and raise its errors."""
    from lm.training.run import train  # slow: most tests do not need TensorFlow

    flags = ["--output_dir", output_dir, *arguments]
    config, options, functions = parse_flags(["lm.train", *map(str, flags)])
    train(config, options, Communicator(), functions)


def train_together(runs: Sequence[Sequence[object]], **options) -> None:
    """Run `lm.train` with the flags of each run in the same processes, which start only once."""
    flags = json.dumps([[str(word) for word in flags] for flags in runs])
    result = run_module("tests.several_runs", flags, **options)
    assert result.returncode == 0, result.stdout + result.stderr


def events(output_dir, kind: str = "step") -> list[dict]:
    """Return the events of a kind in a run's metrics.jsonl, except an incomplete last line."""
    with contextlib.suppress(FileNotFoundError):
        lines = pathlib.Path(output_dir, "metrics.jsonl").read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == kind]
    return []


def without_repetition(output: str) -> str:
    """Remove the message that is repeated after the lines of mpirun, which end with dashes."""
    lines = output.splitlines(keepends=True)
    is_repeated = len(lines) > 1 and lines[-2].startswith("-----") and lines[-1].startswith("lm: ")
    return "".join(lines[:-1]) if is_repeated else output


def one_error(result, code, num_ranks=1):
    """Check the exit code and that stderr has one error line, and no stack trace."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("lm: error: ")]
    # Under mpirun, the line is repeated after the lines of mpirun.
    assert len(lines) == (1 if num_ranks == 1 else 2) and len(set(lines)) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == lines[0]
    return lines[0]
