"""A process that measures when it is told to; `process.Worker` starts it and talks to it.

It reads JSON lines on stdin: first its server and that one's arguments, then one request per line.
It answers each with one JSON line on stdout, the list of all ranks' results.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Optional

from lm.benchmark.workers import servers
from lm.distributed import launch
from lm.distributed.communicator import Communicator


def main() -> None:
    """Serve until stdin ends."""
    # Libraries print to stdout too: their lines must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    comm = launch.connect()
    request = _next_request(comm)
    server = None
    while request is not None:
        do = request.pop("do")
        if do == "serve":
            server = getattr(servers, request.pop("server"))(comm, **request)
            result = None
        else:
            result = getattr(server, do)(**request)
        results = comm.gather(result)
        if comm.is_rank_0:
            answers.write(json.dumps(results) + "\n")
        request = _next_request(comm)
    comm.barrier()


def _next_request(comm: Communicator) -> Optional[dict[str, Any]]:
    """Read a request on rank 0, for all ranks; None at the end."""
    line = sys.stdin.readline() if comm.is_rank_0 else ""
    line = comm.gather(line)[0]
    return json.loads(line) if line else None


if __name__ == "__main__":
    main()
