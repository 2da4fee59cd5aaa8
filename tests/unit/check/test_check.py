"""The ranks that `lm.check` starts, and the results of its checks."""

import pathlib

import pytest

import lm.check.__main__ as command
from lm.check import ranks
from lm.check.ranks import FAIL, OK, WARN, Checklist
from lm.errors import RunError, UserError


def test_number_of_ranks_comes_from_the_hosts():
    assert command.launch_command(None)[:3] == ["mpirun", "-np", "2"]
    on_hosts = " ".join(command.launch_command("host1:2,host2"))
    assert " -np 3 -H host1:2,host2" in on_hosts and "^openib" in on_hosts


@pytest.mark.parametrize(
    "hosts, message", [("host1:many", "hosts must be like"), ("host1", "two or more ranks")]
)
def test_invalid_hosts_are_errors(hosts, message):
    with pytest.raises(UserError, match=message):
        command.launch_command(hosts)


@pytest.mark.parametrize(
    "script, message",
    [
        ("exec sleep 1000", "mpirun ran over 1 s .no message.: each host must accept"),
        ("echo no route >&2; exit 3", "mpirun ended with exit code 3 .no route.: each host must"),
    ],
)
def test_failed_launch_is_reported_in_bounded_time(script, message, tmp_path, monkeypatch):
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(command, "_TIMEOUT_SECONDS", 1)
    with pytest.raises(RunError, match=message):
        command.start_ranks(command.CheckOptions())


def test_lines_have_a_status_and_a_fix(capsys):
    checklist = Checklist()
    checklist.add(OK, "one", "fine", "not printed")
    checklist.add(WARN, "two", "slow", "buy a faster one")
    checklist.add(FAIL, "three", "broken", "repair it")
    checklist.conclude()
    assert capsys.readouterr().out.splitlines() == [
        "OK    one         fine",
        "WARN  two         slow",
        "                  -> buy a faster one",
        "FAIL  three       broken",
        "                  -> repair it",
        "not ready: 1 FAIL, 1 WARN",
    ]


def test_output_dir_is_checked_without_creating_it(tmp_path, capsys):
    checklist = Checklist()
    ranks.check_output_dir(checklist, str(tmp_path / "runs/later"))
    assert not checklist.counts[FAIL] and not list(tmp_path.iterdir())
    ranks.check_output_dir(checklist, "/proc/nowhere")
    assert checklist.counts[FAIL] == 1
    assert "cannot write to /proc" in capsys.readouterr().out


VERSIONS = {"python": "3.11.7", "tensorflow": "2.18.1", "horovod": "0.28.1", "numpy": "2.0.2"}


def facts(**changes):
    """Return the facts of a rank without problems, with changes."""
    build = {"version": "0.28.1", "MPI": True, "Gloo": True, "NCCL": False, "CUDA": False}
    good = {
        "host": "host1", "sharers": 1, "backend": "MPI", "cores": 2, "gpus": 0,
        "device": "CPU:0", "no_gpu": "", "build": build, "kernels": "compiled ops for avx2",
        "arithmetic": "x86-64 with FMA", "lacks_kernels": False, "versions": VERSIONS,
        "software": {"code": "c0de"},
    }  # fmt: skip
    return {**good, **changes}


@pytest.mark.parametrize(
    "check, change, status, message",
    [
        ("versions", {}, "OK", "tensorflow 2.18.1"),
        ("versions", {"gpus": 1}, "WARN", "without NCCL"),
        ("versions", {"versions": {**VERSIONS, "tensorflow": "2.15.1"}}, "WARN", "tested with"),
        ("versions", {"versions": {**VERSIONS, "numpy": "1.26.4"}}, "WARN", "1.26.4 on rank 0"),
        ("equal_software", {}, "OK", "all 2 ranks have the same code"),
        ("equal_software", {"software": {"code": "beef"}}, "FAIL", "code: beef on rank 0; c0de on"),
        ("devices", {"no_gpu": "they are hidden"}, "WARN", "no GPU on host1: they are hidden"),
        ("devices", {"sharers": 3}, "WARN", "more ranks than cores on host1"),
        ("kernels", {"kernels": "no compiled ops: x", "lacks_kernels": True}, "WARN", "slowly"),
        ("kernels", {}, "OK", "avx2"),
        ("kernels", {"kernels": "compiled ops for avx512"}, "OK", "avx512 on rank 0; "),
        ("kernels", {"arithmetic": "generic"}, "WARN", "set LM_KERNELS_ISA"),
    ],
)
def test_facts_of_the_ranks_are_judged(check, change, status, message, capsys):
    getattr(ranks, f"check_{check}")(Checklist(), [facts(**change), facts(host="host2")])
    out = capsys.readouterr().out
    assert message in out
    assert {line.split()[0] for line in out.splitlines()} & {"WARN", "FAIL"} == {status} - {"OK"}


def test_tested_versions_are_those_in_constraints():
    root = pathlib.Path(__file__).parents[3]
    pins = [path.stem.split("-tensorflow") for path in (root / "constraints").glob("*.txt")]
    assert {tensorflow for _, tensorflow in pins} == set(ranks.TENSORFLOWS)
    assert {python for python, _ in pins} == {f"python3.{minor}" for minor in range(10, 14)}
