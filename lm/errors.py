"""What ends a program with one line instead of a stack trace."""

from __future__ import annotations

import errno

ERROR = "lm: error: "  # what the line begins with


class Ending(Exception):
    """The end of a program; its message is all that the user reads."""

    exit_code = 1
    on_every_rank = False  # whether all ranks raise it at the same point: one speaks for all


class HelpRequested(Ending):
    """The user asked for `--help`; the text is the message."""

    exit_code = 0


class UserError(Ending, ValueError):
    """What a user gave cannot be used."""

    exit_code = 2


class RunError(Ending, RuntimeError):
    """A run failed for a reason outside the program."""


class EveryRankError(RunError):
    """A failure that all ranks see at the same step."""

    on_every_rank = True


class Stopped(EveryRankError):
    """A signal has asked the ranks to stop, and all have, at the same step.

    Args:
      message: What the user reads.
      number: The signal's.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.exit_code = 128 + number


_OF_A_PATH = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EEXIST,
}  # fmt: skip


def kind_of(error: OSError) -> type[Ending]:
    """Return UserError where the path that a user gave is at fault, else RunError.

    A job that starts itself again does so unless the fault is the user's, which stays: a disk or a
    network that fails, or has no room, may do so for a moment.
    """
    return UserError if error.errno in _OF_A_PATH else RunError


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error that is not ours, and may have several."""
    return str(error).partition("\n")[0]
