"""Package metadata. To install everything at known-good versions, run run_scripts/setup.sh."""

from setuptools import find_packages, setup

setup(
    name="ptb-lm-horovod",
    version="0.1.0",
    description="Distributed training of language models, TF1-style graphs, with Horovod",
    packages=find_packages(include=["lm", "lm.*", "configs", "configs.*"]),
    # Sources of the compiled operations, which are built on the host that runs them, and the rules
    # that Open MPI reads.
    package_data={"": ["*.cc", "*.h", "*.conf"]},
    python_requires=">=3.9,<3.14",
    install_requires=[
        "absl-py",
        "cmaes",
        "matplotlib",
        "numpy",
        "optuna",
        "requests",
        "sqlalchemy",
        "tensorboard",
        "tqdm",
        "urllib3",
    ],
    # Horovod is in none of these lists: it must be compiled against the installed TensorFlow,
    # outside pip's build isolation, or it builds without TensorFlow support and says nothing.
    extras_require={
        "cpu": ["tensorflow-cpu>=2.18.1,<2.22"],
        "gpu": ["tensorflow[and-cuda]>=2.18.1,<2.22"],
        # Cells and layers of the TF 1.x days, for config files that use them; of the version of
        # TensorFlow, and beside tensorflow-cpu not by this extra (docs/own_graph.md).
        "legacy": ["tf_keras>=2.18,<2.22"],
        # The rival that lm.benchmark measures itself against; it has no part in training.
        "bench": ["torch==2.13.0"],
        # Of lm.search, to share a study between several drivers.
        "postgresql": ["psycopg2-binary"],
        "dev": [
            "hypothesis",
            "psycopg2-binary",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
        ],
    },
)
