"""The wheel, which contains everything that a run needs, and the recipes of images."""

import configparser
import os
import re
import sys
import zipfile

from tests.commands import ROOT, run_code, run_command

SOURCES = ("ops.cc", "isa.cc", "gemm.h")

CHECK = """
import importlib, sys
from lm.config_file import load_config_file
file = load_config_file("config_test")
assert file.path.startswith(sys.argv[1]), file.path
for target in sys.argv[2:]:
    module, name = target.split(":")
    assert callable(getattr(importlib.import_module(module), name)), target
"""


def test_a_wheel_has_the_configs_the_sources_and_working_commands(tmp_path):
    settings = tmp_path / "setup.cfg"  # keeps the files of setuptools out of the project
    settings.write_text(f"[egg_info]\negg_base = {tmp_path}\n[build]\nbuild_base = {tmp_path}/b\n")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    env = {**os.environ, "DIST_EXTRA_CONFIG": str(settings)}
    result = run_command([*pip, "--wheel-dir", tmp_path, ROOT], env, timeout=120)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"lm"}
    names = ("py.typed", "configs/config_small.py", *(f"kernels/{name}" for name in SOURCES))
    assert all((site / "lm" / name).exists() for name in names)
    commands = configparser.ConfigParser()
    commands.read(next(site.glob("*.dist-info/entry_points.txt")))
    targets = commands["console_scripts"].values()
    result = run_code(CHECK, site, *targets, env={"PYTHONPATH": str(site)}, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_both_images_pass_the_same_settings_to_the_setup():
    build, _ = (ROOT / "Dockerfile").read_text().split("\nFROM $BASE\n")
    settings = re.search(r"^ARG (USE_GPU .*)", build, re.MULTILINE)[1].split()
    recipe = (ROOT / "apptainer.def").read_text()
    assert re.findall(r"^    ([A-Z_]+)=$", recipe, re.MULTILINE) == settings
    for name in settings:  # an argument that is not exported has no effect
        assert f" {name}='{{{{ {name} }}}}'" in recipe
    for text in (build, recipe):  # other users can read the files of a checkout with umask 077
        assert text.index("chmod -R a+rX /opt/lm") < text.index("run_scripts/setup.sh")
