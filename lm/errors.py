"""The failures that end a program with one line instead of a stack trace."""


class UserError(ValueError):
    """What a user gave cannot be used; the program ends with exit code 2."""


class RunError(RuntimeError):
    """A run failed for a reason outside the program; it ends with exit code 1."""


class EveryRankError(RunError):
    """A failure that all ranks see at the same step, so that one of them speaks for all."""
