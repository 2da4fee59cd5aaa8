"""Train user-defined networks, one after another, in the ranks of one job.

Usage on each rank: python -m tests.parallel.own_networks DATA_PATH PARENT THREADS MAX_STEPS
The run of a network is the directory PARENT/NAME. It continues if it exists.
"""

import pathlib
import sys

from lm.config import RunOptions
from lm.config_file import load_config_file
from lm.distributed.launch import connect

NETWORKS = sorted((pathlib.Path(__file__).parent.parent / "networks").glob("[a-z]*.py"))


def main(data_path, parent, threads, max_steps):
    comm = connect()
    from lm.training.run import train  # after `connect`, which imports TensorFlow faster

    for path in NETWORKS:
        file = load_config_file(str(path))
        options = RunOptions(
            data_path=data_path, output_dir=f"{parent}/{path.stem}", resume=True,
            max_steps=int(max_steps), intra_op_threads=int(threads), log_every_steps=1,
            checkpoint_every_steps=10, distributed_eval=True,
        )  # fmt: skip
        train(file.config, options, comm, file.functions)


if __name__ == "__main__":
    main(*sys.argv[1:])
