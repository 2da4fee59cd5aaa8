"""Ranks on different CPUs train together if they build the same graph."""

import re

import pytest

from lm import kernels
from tests import fork_server, machine
from tests.commands import environment, mpirun, run_command, without_repetition

UNLIKE = ("LM_KERNELS_ISA=avx2", "LM_KERNELS_ISA=generic")


@pytest.fixture(autouse=True, scope="module")
def _isas():
    if not kernels.available():
        pytest.skip(kernels.description())


def train(settings, tmp_path, corpora, *flags):
    """Train on one rank per environment, and return the exit code and the output."""
    flags += ("--config", "config_test", "--hidden_size", 16, "--data_path", corpora, "--noeval")
    flags += ("--max_steps", 40, "--checkpoint_every_steps", 10, "--output_dir", tmp_path / "run")
    launcher, python = mpirun(1), fork_server.python()
    command = []
    for setting in settings:
        command += [*(launcher[1:] if command else launcher), "env", setting]
        command += [*python, "-m", "lm.train", *flags, ":"]
    result = run_command(command[:-1], environment(), timeout=140)
    return result.returncode, result.stdout + result.stderr


def test_different_instruction_sets_work_together_and_are_named(tmp_path, corpora):
    if not machine.has("avx2"):
        pytest.skip("this CPU has one instruction set only")
    code, output = train(UNLIKE, tmp_path, corpora, "--precision", "bfloat16")
    assert code == 0, output
    arithmetic = (
        r"bfloat16 \(not faster than float32: the CPU or the compiler lacks bfloat16\),"
        r" compiled ops for avx2\b.* on rank 0; compiled ops for generic\b.* on rank 1"
    )
    assert re.search(f"arithmetic  {arithmetic}: results depend on which rank has", output)


@pytest.mark.soak
def test_float32_is_exact_on_ranks_with_and_without_avx512(tmp_path, corpora):
    if not machine.has("avx512"):
        pytest.skip("this CPU does not have AVX-512")
    results = []
    for number, isas in enumerate((["avx2"], ["avx2", "avx512"])):
        settings = [f"LM_KERNELS_ISA={isa}" for isa in isas]
        code, output = train(settings, tmp_path / str(number), corpora)
        assert code == 0 and "exact       yes: bitwise identical" in output, output
        checkpoint = tmp_path / str(number) / "run/checkpoints/step-00000040"
        results.append((checkpoint / "model.data-00000-of-00001").read_bytes())
    assert results[0] == results[1]


def test_fusion_on_only_one_host_is_rejected_before_horovod_crashes(tmp_path, corpora):
    fusion = "HOROVOD_FUSION_THRESHOLD"
    code, output = train((f"{fusion}=1000000", f"{fusion}=0"), tmp_path, corpora)
    assert code == 2
    assert f"the ranks disagree on {fusion}: 1000000 on rank 0; 0 on rank 1" in output


def test_a_rank_without_the_compiled_ops_is_rejected(tmp_path, corpora):
    code, output = train(("LM_KERNELS=1", "LM_KERNELS=0"), tmp_path, corpora)
    found = "the ranks disagree on compiled_ops: true on rank 0; false on rank 1"
    assert code == 2 and without_repetition(output).count(f"lm: error: {found}") == 1
