"""Exceptions that end a program with one line instead of a stack trace."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

ERROR = "lm: error: "  # the start of an error line


class ProgramExit(Exception):
    """The end of a program. The user sees only the message."""

    exit_code = 1
    on_every_rank = False  # whether all ranks raise it at the same point, so that one rank reports


class InfoRequested(ProgramExit):
    """The command line asks for information, such as `--help`. The message is the answer."""

    exit_code = 0


class UserError(ProgramExit, ValueError):
    """The user's input is invalid."""

    exit_code = 2


class RunError(ProgramExit, RuntimeError):
    """A run failed for a reason outside the program."""


class EveryRankError(RunError):
    """A failure that all ranks see at the same step."""

    on_every_rank = True


class Stopped(EveryRankError):
    """A signal asked the ranks to stop, and all ranks stopped at the same step.

    Args:
      message: The line for the user.
      number: The number of the signal.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.exit_code = 128 + number


_PATH_ERRORS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EEXIST,
}  # fmt: skip


def error_class(error: OSError) -> type[ProgramExit]:
    """Return UserError if the path is wrong, and RunError if the disk or network failed.

    A job restarts itself after a RunError, because disks and networks may recover.
    """
    return UserError if error.errno in _PATH_ERRORS else RunError


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error from another library."""
    return str(error).partition("\n")[0]


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a missing package into one line.

    Args:
      extra: The extra of this project that installs the packages.

    Raises:
      UserError: If a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise UserError(
            f"{package} is not installed; install the extra: pip install '.[{extra}]'"
        ) from error
