"""Start Python programs as forks of a process that has imported TensorFlow and Horovod.

These imports take most of the CPU time of a short run. A forked program behaves as if it was
started directly, except that all programs share the seed of Python's hashes. The programs that it
starts with `sys.executable` are forked too.
"""

import atexit
import contextlib
import functools
import importlib
import marshal
import os
import pathlib
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from typing import NoReturn

ROOT = pathlib.Path(__file__).parent.parent
CLIENT = pathlib.Path(__file__).with_name("fork_client.py")
# The program reads these variables late. Other variables may affect an import.
_READ_LATE = ("LM_", "HOROVOD_", "OMPI_", "PMI_", "PYTHONIOENCODING", "XDG_CACHE_HOME", "INJECT_")
# Not the modules of commands, because each of them runs as __main__.
_IMPORTED_EARLY = (
    "lm.cli.parser", "lm.cli.program", "lm.inference.evaluation", "lm.inference.generator",
    "lm.inference.saved_model", "lm.inference.scorer", "lm.training.run",
)  # fmt: skip


def python(**env: str) -> list[str]:
    """Return a command that runs a module or code like Python, but starts faster if possible.

    Args:
      **env: The environment variables that differ from the environment of this process.
    """
    if all(name.startswith(_READ_LATE) for name in env):
        return [start()]
    return [sys.executable]


@functools.cache
def start() -> str:
    """Start the server of this process; return the path of a script that stands for Python."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    script = pathlib.Path(directory.name, "python")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # Linux chooses an unused abstract address.
        listener.listen(100)
        address = listener.getsockname()[1:].decode()
        client = shlex.join([sys.executable, "-IS", str(CLIENT), address])
        script.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
        script.chmod(0o755)
        descriptor = str(listener.fileno())
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", descriptor, str(script)],
            cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches only this process.
        )  # fmt: skip
    atexit.register(server.communicate)  # closes its stdin
    return str(script)


def _serve(listener: socket.socket) -> socket.socket:
    """Return the connection to a client in a new process for each client."""
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # Remove processes that ended.
                pass
        if sys.stdin in ready:  # The process that started this server ended, even if by SIGKILL.
            os._exit(0)
        connection, _ = listener.accept()
        if _fork() == 0:
            listener.close()
            return connection
        connection.close()


def _fork() -> int:
    """Fork this process. Linux kills the new process when this process ends."""
    from lm.system import ends_with_this_process

    follow = ends_with_this_process(signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        follow()
    return pid


def _receive(connection: socket.socket) -> tuple[list[str], int]:
    """Take over the streams, environment and directory of a client.

    Returns:
      The client's arguments and process ID.
    """
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    received = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    client, arguments, env, directory = marshal.loads(received)
    for target, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        os.dup2(streams[target], target)
        os.close(streams[target])
        given, buffering = getattr(sys, name), 1 if name == "stderr" else -1
        encoding = env.get("PYTHONIOENCODING", given.encoding)
        file = open(target, mode, buffering, encoding, given.errors, closefd=False)
        setattr(sys, name, file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    return arguments, client


def _watch(pid: int, connection: socket.socket) -> NoReturn:
    """Forward the client's signals to a process. Kill it if the client is killed."""
    ended = os.pidfd_open(pid)
    while ended not in select.select([connection, ended], [], [])[0]:
        for number in connection.recv(64) or [signal.SIGKILL]:
            os.kill(pid, number)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(str(code).encode())
    os._exit(0)


def _imitate(client: int) -> None:
    """Let this process see the parent of its client, which may be mpirun, as its own parent."""
    from lm.system import stat_fields

    own, getppid = os.getpid(), os.getppid
    os.getppid = lambda: int(stat_fields(client)[1]) if os.getpid() == own else getppid()


def main(descriptor: str, script: str) -> None:
    from lm.system import keep_freed_memory
    from lm.tensorflow_import import import_tensorflow

    keep_freed_memory()
    import_tensorflow()
    from lm.distributed.horovod import import_horovod  # imports TensorFlow

    import_horovod()
    for name in _IMPORTED_EARLY:
        importlib.import_module(name)
    from lm.benchmark import worker

    worker._REPEAT_SECONDS = 0.1  # tests do not check times
    connection = _serve(socket.socket(fileno=int(descriptor)))
    arguments, client = _receive(connection)
    if pid := _fork():
        _watch(pid, connection)
    connection.close()
    _imitate(client)
    option, program, *others = arguments
    sys.path[0], sys.executable = os.getcwd(), script
    if option == "-m":
        sys.argv = [program, *others]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *others]
        exec(program, {"__name__": "__main__"})


if __name__ == "__main__":
    main(*sys.argv[1:])
