"""How the compiled ops are built, and which of them a CPU and its system get."""

import ctypes
import os
import struct
import subprocess
import sys

import pytest

from lm import kernels
from lm.kernels import build
from tests import machine
from tests.commands import ROOT


@pytest.fixture(scope="module", autouse=True)
def _built():
    build.build()
    if not kernels.available():
        pytest.skip(kernels.description())


@pytest.mark.parametrize(
    "isa", ["generic", "avx2", pytest.param("avx512", marks=pytest.mark.soak), "avx512bf16"]
)
def test_other_instruction_sets(isa):
    """The tests of the ops once more, in a process told to use a lesser CPU."""
    if f" {isa} " in kernels.description():
        pytest.skip("what this process uses")
    if not machine.has(isa):
        pytest.skip("not on this CPU")
    assert f" {isa} " in description_in_new_process(env={**os.environ, "LM_KERNELS_ISA": isa})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/unit/kernels"],
        cwd=ROOT,
        env={**os.environ, "LM_KERNELS_ISA": isa},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:]


# As a program starts, which is cheaper than a plain import of TensorFlow.
START = "from lm.system import import_tensorflow; import_tensorflow()\n"


def description_in_new_process(**options):
    code = START + "from lm import kernels; print(kernels.available(), kernels.description())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, **options
    )
    return done.stdout.strip()


def test_switched_off():
    said = description_in_new_process(env={**os.environ, "LM_KERNELS": "0"})
    assert said == "False no compiled ops: disabled by LM_KERNELS=0"


def test_without_amx_where_the_system_refuses_it():
    """As an old kernel or a sandbox does: without permission the first tile kills the process."""
    if not kernels.description().startswith("compiled ops for amx "):
        pytest.skip(kernels.description())
    said = description_in_new_process(preexec_fn=refuse_amx)
    assert said.startswith("True compiled ops for avx512bf16 (")


def refuse_amx():
    """Have seccomp answer EPERM to arch_prctl(ARCH_REQ_XCOMP_PERM) in this process, for good."""
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    instructions = [  # code, jump if true, jump if false, operand
        (load, 0, 0, 0),  # the number of the system call
        (jump_if_equal, 0, 3, 158),  # arch_prctl
        (load, 0, 0, 16),  # its first argument
        (jump_if_equal, 0, 1, 0x1023),  # ARCH_REQ_XCOMP_PERM
        (answer, 0, 0, 0x50001),  # EPERM
        (answer, 0, 0, 0x7FFF0000),  # allowed
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in instructions))
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    for arguments in (no_new_privileges, 1, 0, 0, 0), (set_seccomp, filter_mode, program, 0, 0):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def test_build_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "BUILD_DIR", tmp_path)
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        build.build()
    assert list(tmp_path.iterdir()) == []  # nothing half-made


def test_every_instruction_set_that_the_compiler_knows_is_built():
    """One left out for a mistake in our own sources would only be a warning."""
    library = build.build().read_bytes()
    for isa, flags in build._isas().items():
        probe = [build._compiler(), *flags, "-E", "-x", "c++", os.devnull]
        if subprocess.run(probe, capture_output=True, timeout=60).returncode == 0:
            assert f"\0{isa}\0".encode() in library, isa


def test_a_compiler_too_old_for_some_instruction_sets_builds_the_others(tmp_path):
    """A g++ that knows neither AVX-512 nor AMX, as of long ago; unoptimized, to be quick."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-mavx512*|*-mamx*) echo "g++: error: too new" >&2; exit 1; esac\n'
        'exec g++ "$@" -O0\n'
    )
    compiler.chmod(0o755)
    code = START + (
        "import pathlib, sys, tensorflow.compat.v1 as tf\n"
        "from lm import kernels; from lm.kernels import build\n"
        "build.BUILD_DIR = pathlib.Path(sys.argv[1], 'built'); build.build()\n"
        "print(kernels.description())\n"
        "with tf.Graph().as_default(), tf.Session() as session:\n"
        " shapes = ([1, 1, 4], [1, 4], [1, 1], [1, 1])\n"
        " print('%.3f' % session.run(kernels.lstm_recurrence(*map(tf.ones, shapes)))[0][0, 0, 0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env={**os.environ, "CXX": str(compiler), "LM_KERNELS_ISA": "avx512bf16"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "warning: omitted avx512: g++: error: too new" in done.stderr.splitlines()
    assert done.stdout.startswith(("compiled ops for avx2", "compiled ops for generic"))
    # sigmoid(2) tanh(sigmoid(2) (1 + tanh(2))), as both gates and inputs are 1.
    assert done.stdout.endswith("\n0.827\n"), done.stderr
