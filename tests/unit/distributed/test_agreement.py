"""Facts that must agree on all ranks."""

import shutil
import socket
from pathlib import Path

import pytest
import tensorflow.compat.v1 as tf

import lm
from lm.distributed.agreement import (
    by_rank,
    check_agreement,
    code_checksum,
    graph_facts,
    name_ranks,
    on_all_ranks,
)
from lm.distributed.communicator import Communicator
from lm.errors import RunError, UserError
from tests.meeting import on_ranks

PACKAGE = Path(lm.__file__).parent


def test_the_code_checksum_covers_all_sources_but_no_build_products(tmp_path):
    package = tmp_path / "lm"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("_build", "__pycache__"))
    assert code_checksum(package) == code_checksum()
    rules = "distributed/open_mpi_rules.conf"
    for name in ("model/lstm.py", "kernels/ops.cc", "kernels/gemm.h", rules):
        before = code_checksum(package)
        (package / name).write_text((package / name).read_text() + "\n")
        assert code_checksum(package) != before, name
    before = code_checksum(package)
    (package / "kernels" / "c0de.so").touch()
    (package / ".#loop.py").symlink_to("user@host.123")  # an Emacs lock file
    assert code_checksum(package) == before


def agree(facts_by_rank):
    """Let ranks compare facts; return the errors by rank, and the values that rank 0 sends."""
    told = []

    def work(rank, gather):
        def tell(value):
            told.extend([value] if rank == 0 else [])
            return gather(value)

        comm = Communicator()
        comm.gather = tell
        try:
            check_agreement(comm, facts_by_rank[rank])
        except UserError as error:
            return str(error)

    return on_ranks(len(facts_by_rank), work), told


def test_all_ranks_report_a_disagreement_with_the_ranks():
    facts = [{"seed": 1, "corpus": "a"}, {"seed": 1, "corpus": "b"}, {"seed": 1, "corpus": "a"}]
    errors, _ = agree(facts)
    assert len(set(errors)) == 1
    assert "disagree on corpus: a on ranks 0, 2; b on rank 1: start all with" in errors[0]


def test_ranks_that_agree_exchange_only_a_checksum():
    errors, told = agree([{"weights": "x" * 10_000, "clip": float("nan")}] * 3)
    assert errors == [None] * 3
    assert [len(value) for value in told] == [64]


def test_the_order_of_the_variables_must_agree():
    def facts(names):
        with tf.Graph().as_default():
            for name in names:
                tf.get_variable(name, [2])
            return graph_facts()

    assert agree([facts("ab"), facts("ab")])[0] == [None, None]
    (error, _), _ = agree([facts("ab"), facts("ba")])
    assert 'variable 0 in the order of creation: ["a", [2]] on rank 0; ["b", [2]] on' in error


@pytest.mark.parametrize(
    "failures, local_size, message",
    [
        ([UserError("a"), UserError("b")], 2, "a"),
        ([UserError("a"), None], 2, "a"),
        ([UserError("a"), None], 1, "rank 0 on HOST: a"),
        ([None, OSError("b")], 2, "rank 1 on HOST: b"),
        ([None, None], 2, None),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_ranks(failures, local_size, message):
    def work(rank, gather):
        comm = Communicator()
        comm.gather, comm.size, comm.local_size = gather, len(failures), local_size
        try:
            with on_all_ranks(comm):
                if failures[rank]:
                    raise failures[rank]
        except (UserError, RunError) as error:
            assert error.on_every_rank
            return type(error), str(error)

    kind = UserError if failures[0] else RunError
    message = message and (kind, message.replace("HOST", socket.gethostname()))
    assert on_ranks(len(failures), work) == [message] * len(failures)


@pytest.mark.parametrize(
    "ranks, name",
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([*range(15), 16], "ranks 0 to 14, 16"),
        ([2, 3, 5, 7, 8, 9], "ranks 2, 3, 5, 7 to 9"),
        (range(0, 1000, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others, 500 in total"),
    ],
)
def test_consecutive_ranks_are_named_as_ranges(ranks, name):
    assert name_ranks(ranks) == name


def test_values_are_listed_with_their_ranks():
    assert by_rank(["a", None, "a", 2]) == "a on ranks 0, 2; null on rank 1; 2 on rank 3"
    assert by_rank([1] * 700 + [2] + [1] * 299) == "1 on ranks 0 to 699, 701 to 999; 2 on rank 700"
    assert by_rank(range(1000)).endswith("; 7 on rank 7; 992 more values")
