"""Threads that meet as ranks do."""

import threading
from concurrent.futures import ThreadPoolExecutor


def on_ranks(num_ranks, work):
    """Return what work(rank, gather) returns on each of some ranks, by rank."""
    barrier = threading.Barrier(num_ranks, timeout=30)
    values = [None] * num_ranks

    def run(rank):
        def gather(value):
            values[rank] = value
            barrier.wait()
            every = list(values)
            barrier.wait()  # nobody writes the next before all have read
            return every

        return work(rank, gather)

    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(run, range(num_ranks)))
