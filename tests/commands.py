"""Run the project's command lines as a user does: real processes, under real mpirun."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Optional

ROOT = pathlib.Path(__file__).parent.parent


def mpirun(num_ranks: int) -> list[str]:
    """Return the launcher's part of a command line; more ranks than cores are allowed."""
    return [
        "mpirun", "-np", str(num_ranks), "--oversubscribe", "--bind-to", "none",
        "-mca", "mpi_yield_when_idle", "1",
    ]  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, fit for Open MPI as root."""
    root_ok = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **root_ok, **changes}


def run_module(
    module: str,
    *arguments: object,
    num_ranks: int = 1,
    timeout: float = 120,
    env: Optional[Mapping[str, str]] = None,
    cwd: Optional[os.PathLike] = None,
) -> subprocess.CompletedProcess:
    """Run `python -m module` on some ranks; kills it, and fails, after `timeout` seconds."""
    launcher: Sequence[str] = mpirun(num_ranks) if num_ranks > 1 else []
    command = [*launcher, sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd or ROOT,
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train(output_dir, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Run `lm.train` into a directory and check that it succeeds."""
    result = run_module("lm.train", "--output_dir", output_dir, *arguments, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def events(output_dir, kind: str) -> list[dict]:
    """Return the events of a kind in a run's metrics.jsonl."""
    lines = pathlib.Path(output_dir, "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]
