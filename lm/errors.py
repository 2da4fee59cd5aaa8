"""The failures that end a program with one line instead of a stack trace."""


class UserError(ValueError):
    """What a user gave cannot be used; the program ends with exit code 2."""


class RunError(RuntimeError):
    """A run failed for a reason outside the program; it ends with exit code 1."""


class EveryRankError(RunError):
    """A failure that all ranks see at the same step, so that one of them speaks for all."""

    exit_code = 1


class Stopped(EveryRankError):
    """A signal has asked the ranks to stop, and all have, at the same step.

    Args:
      message: What the user reads.
      number: The signal's.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.exit_code = 128 + number
