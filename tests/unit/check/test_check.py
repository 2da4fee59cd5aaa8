"""How the ranks of a check-up are started, and how its lines read."""

import pathlib

import pytest

from lm.check import ranks
from lm.check.checklist import FAIL, OK, WARN, Checklist
from lm.check.launcher import launch_command
from lm.check.ranks import check_output_dir
from lm.errors import UserError


def test_hosts_and_slots_make_the_number_of_ranks():
    command = launch_command("host1:2,host2", "-mca btl_tcp_if_include eth0")
    assert command[0] == "mpirun" and " -np 3 -H host1:2,host2 " in " ".join(command)
    assert command[-3:] == ["-mca", "btl_tcp_if_include", "eth0"]
    assert "^openib" in command


def test_without_hosts_there_are_two_local_ranks():
    assert launch_command("", "")[:3] == ["mpirun", "-np", "2"]


@pytest.mark.parametrize(
    "hosts, flags, message",
    [("host1:many", "", "hosts must be like"), ("host1", "-x 'open", "mpirun_flags must be like")],
)
def test_flags_that_cannot_be_understood_are_errors(hosts, flags, message):
    with pytest.raises(UserError, match=message):
        launch_command(hosts, flags)


def test_lines_have_a_status_and_a_remedy(capsys):
    checklist = Checklist()
    checklist.add(OK, "one", "fine", "unheard")
    checklist.add(WARN, "two", "slow", "buy a faster one")
    checklist.add(FAIL, "three", "broken", "mend it")
    checklist.conclude()
    assert capsys.readouterr().out.splitlines() == [
        "OK    one         fine",
        "WARN  two         slow",
        "                  -> buy a faster one",
        "FAIL  three       broken",
        "                  -> mend it",
        "not ready: 1 FAIL, 1 WARN",
    ]


def test_an_output_dir_is_checked_without_being_made(tmp_path, capsys):
    checklist = Checklist()
    check_output_dir(checklist, str(tmp_path / "runs/later"))
    assert not checklist.counts[FAIL] and not list(tmp_path.iterdir())
    check_output_dir(checklist, "/proc/nowhere")
    assert checklist.counts[FAIL] == 1
    assert "cannot write to /proc" in capsys.readouterr().out
    check_output_dir(checklist, __file__)
    assert checklist.counts[FAIL] == 2 and "Not a directory" in capsys.readouterr().out


VERSIONS = {"python": "3.11.7", "tensorflow": "2.18.1", "horovod": "0.28.1", "numpy": "2.0.2"}


def facts(**changes):
    """What a rank that is in order tells of itself."""
    build = {"version": "0.28.1", "MPI": True, "Gloo": True, "NCCL": False, "CUDA": False}
    good = {
        "host": "host1", "sharers": 1, "backend": "MPI", "cores": 2, "gpus": 0,
        "device": "CPU:0", "no_gpu": "", "build": build,
        "kernels": "compiled ops for avx2", "lacks_kernels": False,
        "versions": VERSIONS, "same": {"code": "c0de"},
    }  # fmt: skip
    return {**good, **changes}


@pytest.mark.parametrize(
    "check, change, status, said",
    [
        ("versions", {}, "OK", "tensorflow 2.18.1"),
        ("versions", {"gpus": 1}, "WARN", "without NCCL"),
        ("versions", {"versions": {**VERSIONS, "tensorflow": "2.15.1"}}, "WARN", "tested with"),
        ("versions", {"versions": {**VERSIONS, "numpy": "1.26.4"}}, "WARN", "1.26.4 on rank 0"),
        ("devices", {"no_gpu": "they are hidden"}, "WARN", "no GPU on host1: they are hidden"),
        ("devices", {"sharers": 3}, "WARN", "more ranks than cores on host1"),
        ("kernels", {"kernels": "no compiled ops: x", "lacks_kernels": True}, "WARN", "slower"),
        ("kernels", {"kernels": "compiled ops for avx2"}, "OK", "avx2"),
        ("kernels", {"kernels": "compiled ops for generic"}, "WARN", "generic on rank 0; "),
    ],
)
def test_what_a_rank_tells_is_judged(check, change, status, said, capsys):
    getattr(ranks, f"_check_{check}")(Checklist(), [facts(**change), facts(host="host2")])
    out = capsys.readouterr().out
    assert said in out
    assert {line.split()[0] for line in out.splitlines()} & {"WARN", "FAIL"} == {status} - {"OK"}


def test_the_versions_that_are_tested_are_those_that_set_up_installs():
    root = pathlib.Path(__file__).parents[3]
    pins = [path.stem.split("-tensorflow") for path in (root / "constraints").glob("*.txt")]
    assert {tensorflow for _, tensorflow in pins} == set(ranks.TENSORFLOWS)
    assert {python for python, _ in pins} == {f"python3.{minor}" for minor in range(9, 14)}


def test_ranks_with_another_code_are_told_apart(capsys):
    other = facts(same={**facts()["same"], "code": "beef"})
    ranks._check_sameness(Checklist(), [facts(), facts(), other])
    out = capsys.readouterr().out
    assert out.startswith("FAIL  same") and "code: c0de on ranks 0, 1; beef on rank 2" in out
    ranks._check_sameness(Checklist(), [facts(), facts()])
    assert "all 2 ranks have the same code" in capsys.readouterr().out
