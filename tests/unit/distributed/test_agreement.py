"""What ranks must have in common, and what they need not."""

import shutil
from pathlib import Path

import lm
from lm.distributed.agreement import check_agreement, code_checksum
from lm.errors import UserError
from tests.meeting import on_ranks

PACKAGE = Path(lm.__file__).parent


def test_the_code_is_all_that_a_step_is_made_of(tmp_path):
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
    (package / ".#loop.py").symlink_to("user@host.123")  # of Emacs, while a buffer is not saved
    assert code_checksum(package) == before


def agree(facts_by_rank):
    """Let ranks compare facts; returns what went wrong on each, and what the first one told."""
    told = []

    def work(rank, gather):
        def tell(value):
            told.extend([value] if rank == 0 else [])
            return gather(value)

        try:
            check_agreement(facts_by_rank[rank], tell)
        except UserError as error:
            return str(error)

    return on_ranks(len(facts_by_rank), work), told


def test_a_disagreement_is_named_with_its_ranks_on_all_of_them():
    facts = [{"seed": 1, "corpus": "a"}, {"seed": 1, "corpus": "b"}, {"seed": 1, "corpus": "a"}]
    errors, _ = agree(facts)
    assert len(set(errors)) == 1
    assert "disagree on corpus: a on ranks 0, 2; b on rank 1: start all with" in errors[0]


def test_ranks_that_agree_exchange_a_checksum_alone():
    errors, told = agree([{"weights": "x" * 10_000, "clip": float("nan")}] * 3)
    assert errors == [None] * 3
    assert [len(value) for value in told] == [64]
