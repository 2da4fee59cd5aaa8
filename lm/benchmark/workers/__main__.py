"""A process that measures when it is told to; `process.Worker` starts it and talks to it.

It reads JSON lines on stdin: first its server and that one's arguments, then one request per line.
It answers each with one JSON line on stdout, the list of all ranks' results.
"""

from __future__ import annotations

import json
import os
import sys

from lm.benchmark.workers import servers
from lm.distributed import launch


def main() -> None:
    """Serve until stdin ends."""
    # Libraries print to stdout too: their lines must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    comm = launch.connect()
    server = None
    # Rank 0 reads for all ranks.
    while line := comm.gather(sys.stdin.readline() if comm.is_rank_0 else "")[0]:
        request = json.loads(line)
        do = request.pop("do")
        if server is None:
            server, result = getattr(servers, do)(comm, **request), None
        else:
            result = getattr(server, do)(**request)
        results = comm.gather(result)
        if comm.is_rank_0:
            answers.write(json.dumps(results) + "\n")
    comm.barrier()


if __name__ == "__main__":
    main()
