"""The ranks that `lm.check` starts, and the results of its checks."""

import pytest
import tensorflow.compat.v1 as tf

import lm.check.__main__ as command
from lm.check import ranks
from lm.check.ranks import Result
from lm.distributed.communicator import Communicator
from lm.errors import RunError, UserError
from tests.commands import ROOT


@pytest.mark.parametrize(
    "hosts, message", [("host1:many", "hosts must be like"), ("host1", "two or more ranks")]
)
def test_invalid_hosts_are_errors(hosts, message):
    with pytest.raises(UserError, match=message):
        command.start_ranks(command.CheckOptions(hosts=hosts))


def test_a_single_rank_is_rejected(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    with pytest.raises(UserError, match="two or more ranks: use mpirun -np 2, or no mpirun"):
        command.start_ranks(command.CheckOptions())


@pytest.mark.parametrize(
    "script, hosts, seconds, message",
    [
        ("exec sleep 1000", "host1:2,host2", 1, "ran over 1 s .no message.: if the file system is"),
        ("exec sleep 1000", "host1:96,host2:96", 0.5, "ran over 2 s"),  # many ranks start slowly
        ("echo $* | grep -o np.3 >&2; exit 3", "host1:2,host2", 1, "exit code 3 .np 3.: each host"),
    ],
)
def test_failed_launch_is_reported_in_bounded_time(
    script, hosts, seconds, message, tmp_path, monkeypatch
):
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(command, "TIMEOUT_SECONDS", seconds)
    with pytest.raises(RunError, match=message):
        command.start_ranks(command.CheckOptions(hosts=hosts))


def test_results_show_a_status_and_a_fix():
    assert str(Result("one", "fine")) == "OK    one         fine"
    warning = str(Result("two", "slow", "buy a faster one"))
    assert warning == "WARN  two         slow\n                  -> buy a faster one"
    assert Result("three", "broken", "repair it", prevents_training=True).status == "FAIL"


def test_wrong_sums_on_any_rank_are_a_failure():
    class Ranks(Communicator):
        def gather(self, value):
            return [value, False]

    result, *_ = ranks.check_exchange(Ranks(), tf.ConfigProto(), 0.0)
    assert result.status == "FAIL" and result.text.endswith("is not 1 on ranks [1]")


VERSIONS = {"python": "3.11.7", "tensorflow": "2.18.1", "horovod": "0.28.1", "numpy": "2.0.2"}


def facts(**changes):
    """Return the facts of a rank without problems, with changes."""
    good = {
        "host": "host1", "sharers": 1, "backend": "MPI", "cores": 2,
        "transport": "UCX (pml ucx)", "fabric": ["mlx5_0", 100.0],
        "device": "CPU:0", "has_unused_gpu": False, "kernels": "compiled ops for avx2",
        "arithmetic": "x86-64 with FMA", "lacks_kernels": False, "versions": VERSIONS,
        "software": {"code": "c0de"},
    }  # fmt: skip
    return {**good, **changes}


@pytest.mark.parametrize(
    "check, change, status, message",
    [
        ("software", {"device": "GPU:0"}, "WARN", "without NCCL"),
        ("software", {"versions": {**VERSIONS, "tensorflow": "2.15.1"}}, "WARN", "tested with"),
        ("software", {"versions": {**VERSIONS, "numpy": "1.26.4"}}, "WARN", "1.26.4 on rank 0"),
        ("software", {}, "OK", "all 2 ranks have the same code"),
        ("software", {"software": {"code": "beef"}}, "FAIL", "code: beef on rank 0; c0de on"),
        ("devices", {"has_unused_gpu": True}, "WARN", "does not see the GPUs of host1"),
        ("devices", {"sharers": 3}, "WARN", "more ranks than cores on host1"),
        ("kernels", {"kernels": "no compiled ops: x", "lacks_kernels": True}, "WARN", "slowly"),
        ("kernels", {"kernels": "compiled ops for avx512"}, "OK", "avx512 on rank 0; "),
        ("kernels", {"arithmetic": "generic"}, "WARN", "set LM_KERNELS_ISA"),
        ("network", {}, "OK", "UCX (pml ucx); the hosts have mlx5_0 (100 Gbit/s) on ranks 0, 1"),
        ("network", {"transport": "TCP (pml ob1)"}, "WARN", "the job does not use the fabric"),
        ("network", {"fabric": None}, "WARN", "no fabric on rank 0; mlx5_0 (100 Gbit/s) on rank 1"),
    ],
)
def test_facts_of_the_ranks_are_judged(check, change, status, message):
    found = getattr(ranks, f"check_{check}")([facts(**change), facts(host="host2")])
    results = [found] if isinstance(found, Result) else list(found)
    assert message in "\n".join(map(str, results))
    assert {result.status for result in results} - {"OK"} == {status} - {"OK"}


def test_tested_versions_are_those_in_constraints():
    pins = [path.stem.split("-tensorflow") for path in (ROOT / "constraints").glob("*.txt")]
    assert {tensorflow for _, tensorflow in pins} == set(ranks.TENSORFLOWS)
    assert {python for python, _ in pins} == {f"python3.{minor}" for minor in range(10, 14)}
