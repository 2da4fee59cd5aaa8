"""What ranks must have in common, and what they need not."""

import shutil
from pathlib import Path

import pytest

import lm
from lm.distributed.agreement import check_agreement, code_checksum
from lm.errors import UserError

PACKAGE = Path(lm.__file__).parent


def test_the_code_is_all_that_a_step_is_made_of(tmp_path):
    package = tmp_path / "lm"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("_build", "__pycache__"))
    assert code_checksum(package) == code_checksum()
    for name in ("softmax.py", "kernels/ops.cc", "kernels/gemm.h", "open_mpi_rules.conf"):
        before = code_checksum(package)
        with open(package / name, "a") as file:
            file.write("\n")
        assert code_checksum(package) != before, name
    before = code_checksum(package)
    (package / "kernels" / "c0de.so").touch()
    assert code_checksum(package) == before


def test_a_disagreement_is_named_with_its_ranks():
    facts = [{"seed": 1, "corpus": "a"}, {"seed": 1, "corpus": "b"}, {"seed": 1, "corpus": "a"}]
    with pytest.raises(UserError, match="on corpus: a on ranks 0, 2; b on rank 1: start all with"):
        check_agreement(facts)
    check_agreement(facts[::2])
