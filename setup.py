"""The packages of the wheel. All other metadata is in pyproject.toml."""

import shutil

from setuptools import find_packages, setup

shutil.rmtree("build/lib", ignore_errors=True)  # may contain modules that no longer exist

# Other projects have a top-level package named configs too, so the wheel contains lm.configs.
setup(
    packages=[*find_packages(include=["lm", "lm.*"]), "lm.configs"],
    package_dir={"lm.configs": "configs"},
)
