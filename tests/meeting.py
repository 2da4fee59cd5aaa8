"""Threads that exchange values like ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor


def on_ranks(num_ranks, work):
    """Run work(rank, gather) on one thread per rank and return the results in rank order."""
    barrier = threading.Barrier(num_ranks, timeout=30)
    values = [None] * num_ranks

    def run(rank):
        def gather(value):
            values[rank] = value
            barrier.wait()
            every = list(values)
            barrier.wait()  # every rank reads the values before the next call overwrites them
            return every

        return work(rank, gather)

    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(run, range(num_ranks)))
