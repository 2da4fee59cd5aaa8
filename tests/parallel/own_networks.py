"""Train user-defined networks, one after another, in the ranks of one job.

Usage on each rank: python -m tests.parallel.own_networks DATA_PATH PARENT THREADS MAX_STEPS
The run of a network is the directory PARENT/NAME. It continues if it exists.
"""

import dataclasses
import pathlib
import sys

from lm.config import RunOptions
from lm.config_file import load_config_file
from lm.distributed.launch import connect

ROOT = pathlib.Path(__file__).parents[2]
# The results of a GRU with 200 units depend on the size of TensorFlow's intra-op pool.
NETWORKS = [*sorted(ROOT.glob("tests/networks/[a-z]*.py")), ROOT / "configs/config_gru.py"]


def main(data_path, parent, threads, max_steps):
    comm = connect()
    from lm.training.run import train  # after `connect`, which imports TensorFlow faster

    for path in NETWORKS:
        file = load_config_file(str(path))
        options = RunOptions(
            data_path=data_path, output_dir=f"{parent}/{path.stem}", resume=True,
            max_steps=int(max_steps), intra_op_threads=int(threads), log_every_steps=1,
            checkpoint_every_steps=10, distributed_eval=True, check_network=False,
        )  # fmt: skip
        config = dataclasses.replace(file.config, corpus="embedded")
        train(config, options, comm, file.functions)


if __name__ == "__main__":
    main(*sys.argv[1:])
