"""What ends a program with one line instead of a stack trace."""


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


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error that is not ours, and may have several."""
    return str(error).partition("\n")[0]
