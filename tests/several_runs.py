"""Train several runs in one job, because starting the ranks takes longer than a short run.

Usage on each rank: python -m tests.several_runs FLAGS. FLAGS is a JSON list with the flags of each
run.
"""

import json
import sys

from lm.distributed.launch import connect
from tests.commands import parse_flags


def main(runs):
    comm = connect()
    from lm.training.run import train  # after `connect`, which imports TensorFlow faster

    for flags in json.loads(runs):
        config, options, functions = parse_flags(["lm.train", *flags])
        train(config, options, comm, functions)


if __name__ == "__main__":
    main(*sys.argv[1:])
