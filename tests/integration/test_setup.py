"""run_scripts/setup.sh: what it refuses, what it trusts, and that once finished it does nothing.

No test here builds anything: a build takes minutes, and test.sh, which runs these tests, has just
been through one. Where a step would start, a missing compiler stops it and shows that it was due.
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL_PYTHON = os.path.realpath(sys.executable)
# What setup.sh may take for granted on a bare host, up to the first step.
HOST_TOOLS = "bash cat cksum dirname flock readlink rm sed sort tail uname".split()
NO_COMPILER = "setup: no C++ compiler (g++): install g++"


@pytest.fixture
def project(tmp_path):
    """A fresh checkout: the files that the set-up reads, and no .venv."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "run_scripts", root / "run_scripts")
    shutil.copytree(ROOT / "constraints", root / "constraints")
    shutil.copy(ROOT / "setup.py", root)
    return root


@pytest.fixture
def host(tmp_path):
    """A PATH directory of a host without compiler, Python and MPI."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for tool in HOST_TOOLS:
        if shutil.which(tool):
            (bin_dir / tool).symlink_to(shutil.which(tool))
    return bin_dir


def add_python(host, name, patch):
    """Put a Python on the host that runs `patch` before what it is asked to run by -c."""
    script = f'#!/bin/sh\nexec "{REAL_PYTHON}" -c "import sys; {patch}; exec(sys.argv[1])" "$2"\n'
    (host / name).write_text(script)
    (host / name).chmod(0o755)


def run_setup(root, host, *args, **environment):
    return subprocess.run(
        ["bash", str(root / "run_scripts/setup.sh"), *args],
        env={"PATH": str(host), "USE_GPU": "0", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(result, *words):
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


def test_a_missing_compiler_is_one_line_before_anything_is_made(project, host):
    assert_refused(run_setup(project, host, PYTHON=REAL_PYTHON), NO_COMPILER)
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    "patch",
    [
        "sys.version_info = (3, 8, 20)",
        "sys.version_info = (3, 14, 0)",
        "sys.modules['ensurepip'] = None",
        "sys.exit(1)",
    ],
)
def test_an_unfit_python_is_one_line(project, host, patch):
    add_python(host, "python3", patch)
    assert_refused(run_setup(project, host), "install Python 3.9 to 3.13 with venv")


def test_no_python_at_all_is_one_line(project, host):
    assert_refused(run_setup(project, host), "install Python 3.9 to 3.13 with venv")
    named = run_setup(project, host, PYTHON="/no/such/python")
    assert_refused(named, "PYTHON=/no/such/python does not fit")


def test_a_fit_python_is_found_behind_an_unfit_python3(project, host):
    add_python(host, "python3", "sys.version_info = (3, 14, 0)")
    add_python(host, "python3.11", "sys.version_info = (3, 11, 0)")
    assert_refused(run_setup(project, host), NO_COMPILER)


@pytest.fixture
def chosen(project, host):
    """Set up with a Python of some version, up to the line that says what is installed."""
    (host / "g++").symlink_to("/bin/true")

    def choose(python, **environment):
        # What would make the virtual environment fails.
        patch = f"sys.version_info = {python}; sys.executable = '/bin/false'"
        add_python(host, "python3", patch)
        return run_setup(project, host, **environment)

    return choose


@pytest.mark.parametrize(
    "python, environment, version",
    [
        ((3, 9, 2), {}, "2.20.0"),
        ((3, 13, 1), {}, "2.21.0"),
        ((3, 12, 1), {"TENSORFLOW_VERSION": "2.18.1"}, "2.18.1"),
    ],
)
def test_the_newest_tensorflow_that_fits_or_the_one_named(chosen, python, environment, version):
    said = chosen(python, **environment).stdout
    assert said.startswith(f"setup: installing tensorflow-cpu {version} into .venv")


def test_a_tensorflow_once_named_stays_until_its_python_goes(project, chosen):
    (project / ".venv").mkdir()
    stamp = project / ".venv/.done-packages"
    stamp.write_text("1 | / | tensorflow-cpu | horovod==0.28.1 tensorflow==2.18.1\n")
    assert "installing tensorflow-cpu 2.18.1" in chosen((3, 11, 0)).stdout
    (project / ".venv").mkdir()
    stamp.write_text("1 | / | tensorflow-cpu | horovod==0.28.1 tensorflow==2.18.1\n")
    assert "installing tensorflow-cpu 2.21.0" in chosen((3, 13, 0)).stdout


def test_gpus_once_asked_for_stay_also_where_the_host_has_none(project, chosen):
    for environment, said in (
        ({"USE_GPU": "1"}, "installing tensorflow[and-cuda] 2.18.1"),
        ({"USE_GPU": ""}, "installing tensorflow[and-cuda] 2.21.0"),
        ({"USE_GPU": "0"}, "installing tensorflow-cpu 2.21.0"),
    ):
        assert said in chosen((3, 11, 0), **environment).stdout
        (project / ".venv").mkdir()
        stamp = "1 | / | tensorflow[and-cuda] | horovod==0.28.1 tensorflow==2.21.0\n"
        (project / ".venv/.done-packages").write_text(stamp)


def test_a_cuda_home_without_a_compiler_is_one_line(project, host, tmp_path):
    (host / "g++").symlink_to("/bin/true")
    refused = run_setup(project, host, PYTHON=REAL_PYTHON, USE_GPU="1", CUDA_HOME=str(tmp_path))
    assert_refused(refused, f"CUDA_HOME has no bin/nvcc ({tmp_path})")


@pytest.mark.skipif(
    shutil.which("nvcc", path="/usr/local/cuda/bin") is not None, reason="has a CUDA toolkit"
)
def test_a_driver_too_old_for_what_would_be_built_is_one_line(project, host):
    (host / "g++").symlink_to("/bin/true")
    (host / "nvidia-smi").write_text("#!/bin/sh\necho 550.54.15\n")
    (host / "nvidia-smi").chmod(0o755)
    refused = run_setup(project, host, PYTHON=REAL_PYTHON, USE_GPU="1")
    assert_refused(refused, "the NVIDIA driver 550 is too old for PyPI's CUDA 13")


@pytest.mark.parametrize("python, version", [((3, 13, 0), "2.18.1"), ((3, 11, 0), "2.17.0")])
def test_a_tensorflow_that_does_not_fit_is_one_line(chosen, python, version):
    refused = chosen(python, TENSORFLOW_VERSION=version)
    assert_refused(refused, f"TENSORFLOW_VERSION={version}", "constraints/")


def test_a_path_with_a_space_is_refused(project, host, tmp_path):
    spaced = project.rename(tmp_path / "my project")
    assert_refused(run_setup(spaced, host, PYTHON=REAL_PYTHON), "has a space in it")


@pytest.mark.parametrize("script", ["run_scripts/setup.sh", ".ci/run"])
def test_an_exported_cdpath_leads_to_no_other_directory(project, host, tmp_path, script):
    """`cd run_scripts/..` then goes to another checkout, where the set-up would delete .venv."""
    shutil.copytree(ROOT / ".ci", project / ".ci")
    other = tmp_path / "other"
    for name in (".ci", "run_scripts", ".venv"):
        (other / name).mkdir(parents=True)
    (other / ".venv/.installing").touch()
    result = subprocess.run(
        ["bash", script],
        cwd=project,
        env={"PATH": str(host), "USE_GPU": "0", "PYTHON": REAL_PYTHON, "CDPATH": str(other)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (other / ".venv/.installing").exists()
    assert_refused(result, NO_COMPILER)


def test_a_pip_set_to_install_for_the_user_installs_into_the_environment(project, host, tmp_path):
    """The real pip in a real .venv, where it refuses --user; without an index it ends."""
    (host / "g++").symlink_to("/bin/true")
    (host / "touch").symlink_to(shutil.which("touch"))
    config = tmp_path / "pip.conf"
    config.write_text("[install]\nuser = true\n")
    traps = {"PIP_CONFIG_FILE": str(config), "PIP_USER": "1", "PIP_NO_INDEX": "1"}
    result = run_setup(project, host, PYTHON=REAL_PYTHON, **traps)
    assert "setup: pip could not install" in result.stderr
    assert "--user" not in result.stderr


@pytest.fixture
def made_for_another_mpi(project, host):
    """A finished .venv that is to be made anew, on a host that could."""
    (host / "g++").symlink_to("/bin/true")
    for tool in ("touch", "mv"):
        (host / tool).symlink_to(shutil.which(tool))
    (project / ".venv").mkdir()
    for step in ("packages", "horovod", "package"):
        (project / f".venv/.done-{step}").write_text("another Open MPI\n")


@pytest.mark.usefixtures("made_for_another_mpi")
def test_a_venv_that_works_is_kept_until_there_is_another(project, host):
    """Made for another MPI, on a host without a network."""
    result = run_setup(project, host, PYTHON=REAL_PYTHON, PIP_NO_INDEX="1")
    assert result.returncode == 1 and "setup: pip could not install" in result.stderr
    assert "(.venv was made for: another Open MPI)" in result.stdout
    assert {path.name for path in (project / ".venv").iterdir()} == {
        ".done-packages", ".done-horovod", ".done-package"
    }  # fmt: skip
    # As it is after a kill in the middle of it.
    (project / ".venv").rename(project / ".venv.before")
    (project / "run_scripts/setup_cuda.sh").write_text("exit 3\n")
    (project / ".venv").mkdir()  # not yet whole
    assert run_setup(project, host, PYTHON=REAL_PYTHON).returncode == 3
    assert (project / ".venv/.done-package").exists()
    # And after one when the new one was whole, and the old one half removed.
    (project / ".venv.before").mkdir()
    assert run_setup(project, host, PYTHON=REAL_PYTHON).returncode == 3
    assert (project / ".venv/.done-package").exists() and not (project / ".venv.before").exists()


@pytest.mark.usefixtures("made_for_another_mpi")
def test_a_run_script_makes_no_finished_venv_anew(project, host):
    result = run_setup(project, host, "--keep", PYTHON=REAL_PYTHON)
    assert_refused(
        result, "and it was for another Open MPI: load the modules that were loaded then"
    )
    assert (project / ".venv/.done-package").exists()


def test_an_unknown_argument_is_refused(project, host):
    assert_refused(run_setup(project, host, "--devel", PYTHON=REAL_PYTHON), "usage:")


def test_an_outdated_stamp_is_not_trusted(project, host):
    (project / ".venv").mkdir()
    for step in ("packages", "horovod", "package"):
        (project / f".venv/.done-{step}").write_text("built from something else\n")
    assert_refused(run_setup(project, host, PYTHON=REAL_PYTHON), NO_COMPILER)


def test_a_venv_whose_installation_was_cut_off_is_removed(project, host):
    (project / ".venv").mkdir()
    (project / ".venv/.installing").touch()
    assert_refused(run_setup(project, host, PYTHON=REAL_PYTHON), NO_COMPILER)
    assert not (project / ".venv").exists()


def test_a_venv_that_was_being_removed_does_not_pass_for_a_finished_one(project, host):
    (project / ".venv").mkdir()
    for name in (".installing", ".done-packages", ".done-horovod", ".done-package"):
        (project / ".venv" / name).touch()
    real_rm = (host / "rm").resolve()
    (host / "rm").unlink()
    killed = 'if [ "$1" = -rf ]; then rm .venv/.installing; kill -KILL $PPID; exit; fi'
    (host / "rm").write_text(f'#!/bin/sh\n{killed}\nexec {real_rm} "$@"\n')
    (host / "rm").chmod(0o755)
    assert run_setup(project, host, PYTHON=REAL_PYTHON).returncode == -signal.SIGKILL
    assert list((project / ".venv").iterdir()) == []


@pytest.mark.usefixtures("made_for_another_mpi")
def test_a_setup_that_is_told_to_stop_brings_nothing_back_under_a_running_pip(project, host):
    with socket.create_server(("127.0.0.1", 0)) as index:
        address = f"http://127.0.0.1:{index.getsockname()[1]}/"
        environment = {"PATH": str(host), "USE_GPU": "0", "PYTHON": REAL_PYTHON}
        setup = subprocess.Popen(
            ["bash", str(project / "run_scripts/setup.sh")],
            env={**environment, "PIP_INDEX_URL": address, "PIP_RETRIES": "0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        index.settimeout(60)
        connection, _ = index.accept()  # pip waits for what there is
        setup.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            setup.wait(1)
        (project / ".venv/horovod-build.log").write_text("why")
        connection.close()
    assert setup.wait(60) == 128 + signal.SIGTERM
    assert not (project / ".venv.before").exists()
    assert {path.name for path in (project / ".venv").iterdir()} == {
        ".done-packages", ".done-horovod", ".done-package", "horovod-build.log"
    }  # fmt: skip


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock, and so does the lock")
def test_a_second_setup_waits_for_the_first(project, host):
    with open(project / ".setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            ["bash", str(project / "run_scripts/setup.sh")],
            env={"PATH": str(host), "USE_GPU": "0", "PYTHON": REAL_PYTHON},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "waiting for another set-up" in second.stdout.readline()
        assert second.poll() is None
    assert NO_COMPILER in second.communicate(timeout=60)[1]


@pytest.mark.skipif(
    not (ROOT / ".venv/.done-dev").exists(), reason=".venv was not made by setup.sh --dev"
)
@pytest.mark.parametrize("active", ["", f"{ROOT}/.venv/bin:" * 2, ".venv/bin:"])
def test_a_finished_setup_does_nothing_and_says_nothing(active):
    def stamps():
        return {path: path.stat().st_mtime_ns for path in (ROOT / ".venv").glob(".done-*")}

    before = stamps()
    result = subprocess.run(
        [str(ROOT / "run_scripts/setup.sh"), "--dev"],
        # Should a build be due after all, it must fail here rather than run for minutes.
        env={**os.environ, "CXX": "/no/such/compiler", "PATH": active + os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # The tests of the run scripts set up too, perhaps at this moment.
    said = result.stdout.replace("setup: waiting for another set-up in this directory\n", "")
    assert (result.returncode, said, result.stderr) == (0, "", "")
    assert stamps() == before
