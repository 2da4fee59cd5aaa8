"""The build of the compiled ops, and the selection of an instruction set."""

import ctypes
import os
import struct
import subprocess

import pytest

from lm import kernels
from lm.kernels import build, library
from tests.commands import run_code, run_module
from tests.machine import NEEDED, has


@pytest.fixture(scope="module", autouse=True)
def _built():
    build.build()
    if not kernels.available():
        pytest.skip(kernels.description())


@pytest.mark.soak
@pytest.mark.parametrize("isa", NEEDED)
def test_the_tests_of_the_ops_pass_with_each_instruction_set(isa):
    if f" {isa} " in kernels.description():
        pytest.skip("this process already uses this instruction set")
    if not has(isa):
        pytest.skip("this CPU does not have this instruction set")
    assert f" {isa} " in description_in_new_process(env={"LM_KERNELS_ISA": isa})
    options = ("-q", "-x", "-p", "no:cacheprovider", "tests/unit/kernels")
    done = run_module("pytest", *options, env={"LM_KERNELS_ISA": isa}, timeout=250)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:]


# Commands import TensorFlow this way, which is faster than a plain import.
START = "from lm.tensorflow_import import import_tensorflow; import_tensorflow()\n"


def description_in_new_process(**options):
    code = START + "from lm import kernels; print(kernels.available(), kernels.description())"
    return run_code(code, **options).stdout.strip()


def test_an_environment_variable_disables_the_ops(monkeypatch):
    monkeypatch.setenv("LM_KERNELS", "0")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    assert kernels.description() == "no compiled ops: disabled by LM_KERNELS=0"


def test_amx_is_not_used_if_the_system_does_not_allow_it():
    """An old kernel or a sandbox may not allow AMX. The first tile would then kill the process."""
    if not kernels.description().startswith("compiled ops for amx "):
        pytest.skip(kernels.description())
    description = description_in_new_process(preexec_fn=forbid_amx)
    assert description.startswith("True compiled ops for avx512bf16 (")


def forbid_amx():
    """Make arch_prctl(ARCH_REQ_XCOMP_PERM) fail with EPERM in this process, with seccomp."""
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    instructions = [  # code, jump if true, jump if false, operand
        (load, 0, 0, 0),  # the number of the system call
        (jump_if_equal, 0, 3, 158),  # arch_prctl
        (load, 0, 0, 16),  # the first argument of the system call
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
    library, before = build.library_path(), []
    for content in (None, b"", b"\x7fELF"):  # an incomplete library is not a library
        if content is not None:
            library.write_bytes(content)
            before = [library]
        with pytest.raises(RuntimeError, match="no-such-compiler"):
            build.build()
        assert list(tmp_path.iterdir()) == before  # no partial library remains


def test_a_damaged_or_different_library_is_not_loaded(tmp_path):
    """Loading a truncated library would end the process with SIGBUS."""
    code = START + (
        "import hashlib, pathlib, subprocess, sys\n"
        "from lm import kernels; from lm.kernels import build\n"
        "content = build.build().read_bytes()\n"
        "build.BUILD_DIR = pathlib.Path(sys.argv[1])\n"
        "link = ['g++', '-shared', '-x', 'c', '/dev/null', '-o', sys.argv[2]]\n"
        "subprocess.run(link, check=True)\n"
        "other = pathlib.Path(sys.argv[2]).read_bytes()\n"
        "for x in (content[: 1 << 19], other + hashlib.sha256(other).digest()):\n"
        " build.library_path().write_bytes(x)\n"
        " print(kernels.load.__wrapped__().reason)"
    )
    done = run_code(code, tmp_path, tmp_path / "other.so", forked=True)
    assert done.returncode == 0, done.stderr
    damaged, other = done.stdout.splitlines()
    advice = "; run `python -m lm.kernels.build` with g++ 9 or later (CXX=...) and start again"
    assert damaged.endswith(f".so: it is damaged{advice}")
    assert other.endswith(f"undefined symbol: lm_kernels_isa{advice}")


def test_all_instruction_sets_that_the_compiler_supports_are_built():
    """The build only prints a warning if a mistake in the sources prevents an instruction set."""
    library = build.build().read_bytes()
    for isa, flags in build.INSTRUCTION_SETS.items():
        probe = [os.environ.get("CXX", "g++"), *flags, "-E", "-x", "c++", os.devnull]
        if subprocess.run(probe, capture_output=True, timeout=60).returncode == 0:
            assert f"\0{isa}\0".encode() in library, isa


@pytest.mark.soak
def test_an_old_compiler_builds_the_instruction_sets_that_it_supports(tmp_path):
    """The compiler is a g++ without AVX-512 and AMX. It does not optimize, to save time."""
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
        " shapes = ([1, 1, 4], [4], [1, 4], [1, 1], [1, 1])\n"
        " print('%.3f' % session.run(kernels.lstm_recurrence(*map(tf.ones, shapes)))[0][0, 0, 0])"
    )
    env = {"CXX": str(compiler), "LM_KERNELS_ISA": "avx512bf16"}
    done = run_code(code, tmp_path, env=env, timeout=250)
    assert "warning: omitted avx512: g++: error: too new" in done.stderr.splitlines()
    assert done.stdout.startswith(("compiled ops for avx2", "compiled ops for generic"))
    # sigmoid(2) tanh(sigmoid(2) (1 + tanh(2))), as both gates and inputs are 1.
    assert done.stdout.endswith("\n0.911\n"), done.stderr
