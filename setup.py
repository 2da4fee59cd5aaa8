"""Package metadata. To install everything at known-good versions, run run_scripts/setup.sh."""

import pathlib
import re

from setuptools import find_packages, setup

_PACKAGE = pathlib.Path(__file__).parent / "lm/__init__.py"

setup(
    name="ptb-lm-horovod",
    version=re.search(r'__version__ = "(.*)"', _PACKAGE.read_text())[1],
    description="Distributed training of language models, TF1-style graphs, with Horovod",
    packages=find_packages(include=["lm", "lm.*", "configs", "configs.*"]),
    # The sources of the compiled operations, which are built on the host that runs them, and the
    # settings of Open MPI.
    package_data={"": ["*.cc", "*.h", "*.conf"]},
    python_requires=">=3.10,<3.14",
    install_requires=[
        "absl-py",
        "numpy",
        "requests",
        # lm/events/tensorboard.py uses its RecordWriter, which has no stable API.
        "tensorboard>=2.18,<2.22",
        "tqdm",
    ],
    # Horovod is missing from these lists on purpose. It must be compiled against the installed
    # TensorFlow, without pip's build isolation. Otherwise it silently lacks TensorFlow support.
    extras_require={
        "cpu": ["tensorflow-cpu>=2.18.1,<2.22"],
        "gpu": ["tensorflow[and-cuda]>=2.18.1,<2.22"],
        # lm.search. It uses experimental features of Optuna.
        "search": ["optuna>=5.0,<6", "sqlalchemy>=2.0,<2.1"],
        # Subword tokenizers.
        "tokenizers": ["sentencepiece", "tokenizers"],
        # The plots of lm.report.
        "report": ["matplotlib"],
        # TF 1.x cells and layers, for config files that use them. tf_keras must have the version of
        # TensorFlow. Next to tensorflow-cpu, install it as docs/own_graph.md describes. tf_slim
        # contains the layers of tf.contrib.
        "legacy": ["tf_keras>=2.18,<2.22", "tf_slim==1.1.0"],
        # The programs that lm.benchmark compares with. Training does not use them.
        "bench": ["jax>=0.6.2,<0.11", "torch==2.13.0"],
        "dev": ["hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "ruff"],
    },
)
