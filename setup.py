"""The packages of the wheel. All other metadata is in pyproject.toml."""

from setuptools import find_packages, setup

# Other projects have a top-level package named configs too, so the wheel contains lm.configs.
setup(
    packages=[*find_packages(include=["lm", "lm.*"]), "lm.configs"],
    package_dir={"lm.configs": "configs"},
)
