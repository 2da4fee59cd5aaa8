"""The command `lm.check` as a user runs it."""

import re

from tests.commands import run_module


def test_this_machine_is_ready():
    result = run_module("lm.check", timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    names = [line.split()[1] for line in lines[:-1] if not line.startswith(" ")]
    assert names == [
        "versions", "horovod", "same", "ranks", "devices", "kernels", "network", "allreduce",
        "bandwidth", "scaling",
    ]  # fmt: skip
    assert "the sum of ones over the ranks is 2" in result.stdout
    assert lines[-1].startswith("ready: 0 FAIL")


def test_unreachable_hosts_are_a_one_line_error():
    result = run_module("lm.check", "--hosts", "host.invalid:1,other.invalid:1")
    assert result.returncode == 1
    assert re.fullmatch("lm: error: mpirun ended .* each host must accept ssh.*\n", result.stderr)


def test_missing_mpirun_is_an_error(tmp_path):
    result = run_module("lm.check", env={"PATH": str(tmp_path)})
    assert result.returncode == 2 and "mpirun is not in PATH" in result.stderr
