"""Stands for `python` in a command whose process is forked by tests/fork_server.py.

Usage: python -IS fork_client.py ADDRESS (-m MODULE | -c CODE) [ARGUMENT...]. This process passes
its arguments, environment, directory and standard streams to the server, forwards signals, and ends
in the same way as the forked process. The server kills the forked process if this process is
killed.
"""

import marshal
import os
import signal
import socket
import sys

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def main(address: str, *arguments: str) -> None:
    request = marshal.dumps((os.getpid(), arguments, dict(os.environ), os.getcwd()))
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(b"\0" + address.encode())
        socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(request)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        code = int(server.recv(16) or 1)  # nothing if the server was killed
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main(*sys.argv[1:])
