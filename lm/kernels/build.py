"""Compiles the TensorFlow ops of this package: ``python -m lm.kernels.build``.

One library serves every CPU of its architecture: the arithmetic is compiled once per instruction
set and chosen when the library is loaded, so that a home directory may be shared by unlike nodes.
An instruction set that the compiler is too old for is left out, with a warning; the library's name
does not tell, so remove ``_build`` to build it again with a newer compiler.
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

# -fwrapv: the bit tricks on vectors of integers may overflow. No -ffast-math: it hides NaN.
_FLAGS = ["-O3", "-fPIC", "-fwrapv", "-ffp-contract=fast", "-fvisibility=hidden", "-Wall"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
# Of each instruction set, the compiler's flags; all but the first are of x86-64.
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
    """Return the path of the library for these sources and this TensorFlow, built or not.

    It does not depend on the compiler, so that a node without one can load what another built.
    """
    import tensorflow as tf

    digest = hashlib.sha256()
    for source in sorted([*_HERE.glob("*.cc"), *_HERE.glob("*.h"), _HERE / "build.py"]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(f"{tf.__version__} {platform.machine()}".encode())
    return BUILD_DIR / f"{digest.hexdigest()[:16]}.so"


def build():
    """Compile the library unless it is up to date.

    Returns:
      The path of the library.

    Raises:
      RuntimeError: The compiler is missing or cannot compile what every CPU needs; the message
        ends with what it said.
    """
    import tensorflow as tf

    path = library_path()
    if path.exists():
        return path
    BUILD_DIR.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD_DIR) as work:
        compile_flags = ["-w", *tf.sysconfig.get_compile_flags()]
        jobs = {"ops": ["ops.cc", *_FLAGS, "-ffp-contract=off", *compile_flags]}
        for isa, flags in _isas().items():
            jobs[isa] = ["isa.cc", *_FLAGS, "-std=c++17", *flags, f"-DLM_ISA={isa}"]
        running = [
            _start([*arguments, "-c", "-o", f"{work}/{name}.o"]) for name, arguments in jobs.items()
        ]
        complaints = {name: _finish(process) for name, process in zip(jobs, running)}
        # What serves every CPU must compile; ops.cc does without the other instruction sets.
        for name in ("ops", "generic"):
            if complaints[name]:
                raise RuntimeError(complaints[name])
        for name, complaint in complaints.items():
            if complaint:
                print(f"warning: left out {name}: {_gist(complaint)}", file=sys.stderr)
        objects = [f"{work}/{name}.o" for name, complaint in complaints.items() if not complaint]
        library = f"{work}/library.so"
        link = ["-shared", *objects, "-o", library, *tf.sysconfig.get_link_flags()]
        if complaint := _finish(_start(link)):
            raise RuntimeError(complaint)
        # Renamed into place at once: another process never loads half a library. But not over one
        # that another node has made meanwhile: where it has loaded that, it would lose it.
        if not path.exists():
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
    """Wait for a compiler; return "", or its command and what it said if it has failed."""
    said = process.communicate()[0].decode(errors="replace").strip()
    return f"{' '.join(map(str, process.args))} failed:\n{said}" if process.returncode else ""


def _gist(complaint):
    """Return the line of a compiler's output that says what it refuses."""
    lines = complaint.splitlines()
    return next((line for line in lines if "error:" in line), lines[-1])


def main():
    """Build the library and print its path; exit with 1 and one line if that fails."""
    try:
        print(build())
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
