"""Compile the TensorFlow ops of this package: ``python -m lm.kernels.build``.

One library serves all CPUs of an architecture, so nodes with different CPUs may share a home
directory. The arithmetic is compiled once per instruction set, and loading the library selects one.
If the sources are read-only, the library is built in the Python environment instead of ``_build``.
If the compiler is too old for an instruction set, the build omits it with a warning. After
installing a newer compiler, remove ``_build`` to build the library again.

A library ends with the checksum of its other bytes. Loading a truncated library would end the
process with SIGBUS.
"""

import hashlib
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

_HERE = pathlib.Path(__file__).resolve().parent
BUILD_DIR = _HERE / "_build"
_IN_ENVIRONMENT = pathlib.Path(sys.prefix, "lib", "lm-kernels")

# -fwrapv: bit manipulation of integer vectors may overflow. -ffp-contract=off: see simd.h.
# -ffast-math would hide NaN. -fno-math-errno: otherwise, loops with a square root use no vectors.
_FLAGS = [
    "-O3",
    "-fPIC",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
# The compiler flags of each instruction set. All except the first are for x86-64.
INSTRUCTION_SETS = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": _AVX512,
    "avx512bf16": [*_AVX512, "-mavx512bf16"],
    "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


def _compiler():
    return os.environ.get("CXX") or "g++"


def _isas():
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return INSTRUCTION_SETS if x86 else {"generic": []}


def library_path():
    """Return the path of the library for these sources and this TensorFlow version.

    The path does not depend on the compiler, so a node without a compiler can use the library.
    """
    import tensorflow as tf

    digest = hashlib.sha256()
    for source in sorted([*_HERE.glob("*.cc"), *_HERE.glob("*.h"), _HERE / "build.py"]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(f"{tf.__version__} {platform.machine()}".encode())
    name = f"{digest.hexdigest()[:16]}.so"
    is_beside = (BUILD_DIR / name).exists() or os.access(_HERE, os.W_OK)
    return (BUILD_DIR if is_beside else _IN_ENVIRONMENT) / name


def is_complete(library):
    """Return whether the file exists and ends with the checksum of its other bytes."""
    content = library.read_bytes() if library.exists() else b""
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def build():
    """Compile the library if it is missing or incomplete, and return its path.

    Raises:
      RuntimeError: If the compiler is missing or fails.
    """
    import tensorflow as tf

    path = library_path()
    if is_complete(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        compile_flags = ["-w", *tf.sysconfig.get_compile_flags()]
        jobs = {"ops": ["ops.cc", *_FLAGS, *compile_flags]}
        for isa, flags in _isas().items():
            jobs[isa] = ["isa.cc", *_FLAGS, "-std=c++17", *flags, f"-DLM_ISA={isa}"]
        running = [
            _start([*arguments, "-c", "-o", f"{work}/{name}.o"]) for name, arguments in jobs.items()
        ]
        errors = {name: _finish(process) for name, process in zip(jobs, running)}
        for name in (name for name, error in errors.items() if error):
            # Together, the compilers may have run out of memory.
            errors[name] = _finish(_start([*jobs[name], "-c", "-o", f"{work}/{name}.o"]))
        for name in ("ops", "generic"):  # ops.cc works without the other instruction sets
            if errors[name]:
                raise RuntimeError(errors[name])
        for name, error in errors.items():
            if error:
                lines = error.splitlines()
                reason = next((line for line in lines if "error:" in line), lines[-1])
                print(f"warning: omitted {name}: {reason}", file=sys.stderr)
        objects = [f"{work}/{name}.o" for name, error in errors.items() if not error]
        library = pathlib.Path(work, "library.so")
        link = ["-shared", *objects, "-o", library, *tf.sysconfig.get_link_flags()]
        if error := _finish(_start(link)):
            raise RuntimeError(error)
        with library.open("ab") as file:
            file.write(hashlib.sha256(library.read_bytes()).digest())
        # Rename atomically, so that no process loads a partial library. Do not replace a library
        # that another node has built in the meantime, because that node may have loaded it.
        if not is_complete(path):
            os.replace(library, path)
    return path


def _start(arguments):
    try:
        return subprocess.Popen(
            [_compiler(), *arguments], cwd=_HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise RuntimeError(f"cannot run the C++ compiler {_compiler()}: {error}") from error


def _finish(process):
    """Wait for the compiler, and return its command and output if it failed, otherwise ""."""
    output = process.communicate()[0].decode(errors="replace").strip()
    return f"{' '.join(map(str, process.args))} failed:\n{output}" if process.returncode else ""


def _load(path):
    import tensorflow as tf

    try:
        tf.load_op_library(str(path))
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"cannot load {path}: {error}; delete it, and build it on this host with a compiler"
            " that is not newer than the libstdc++ of this Python (CXX)"
        ) from error


def main():
    """Build and load the library and print its path, or print the error and exit with code 1."""
    try:
        path = build()
        _load(path)
        print(path)
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
