"""Exceptions that end a program with one line instead of a stack trace."""

import contextlib
import errno
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator, Sequence

ERROR = "lm: error: "  # the start of an error line
# scheme://user:password@host/path?signature; a shell writes ' inside '...' as '"'"'
_ADDRESS = re.compile(r"""(\w+://)(?:(?:[^/\s'"]|'"'"')*@)?([^\s'"?]*)(?:\?[^\s'"]*)?""")
# --api_key VALUE, PASSWORD='VALUE', "Authorization: Bearer VALUE"
_SECRET = re.compile(
    r"(?i)((?:password|passwd|secret|token|(?<!/)key|credentials?|authorization)['\"]?[=:\s]\s*"
    r"(?:bearer\s+|basic\s+)?)(?:'[^']*'|\"[^\"]*\"|[^\s'\"]+)"
)
_CONTROL = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories: controls, surrogates and separators
_REORDERING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # change the order
_MAX_NAMES = 5  # that a message lists
_MAX_CHARACTERS = 300  # per message; some messages of TensorFlow continue with the whole graph


class ProgramExit(Exception):
    """The end of a program. The user sees only the message."""

    exit_code = 1
    on_every_rank = False  # If all ranks raise the error at the same point, only rank 0 reports it.


class InfoRequested(ProgramExit):
    """The answer to a flag such as `--help`."""

    exit_code = 0


class UserError(ProgramExit, ValueError):
    """The user's input is invalid."""

    exit_code = 2


class RunError(ProgramExit, RuntimeError):
    """A run failed for a reason outside the program, such as a full disk."""


class EveryRankError(RunError):
    """A failure that all ranks detect at the same step."""

    on_every_rank = True


class Diverged(EveryRankError):
    """The training has diverged. A restart would fail at the same step."""

    exit_code = UserError.exit_code


class Stopped(EveryRankError):
    """All ranks stopped at the same step after a signal."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


_PATH_ERRORS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EEXIST,
}  # fmt: skip


def error_class(error: OSError) -> type[ProgramExit]:
    """Return UserError if the path is wrong, and RunError if the disk or the network failed.

    Jobs are restarted after a RunError, because disks and networks may recover. If a file system
    fails, Linux makes it read-only (EROFS).
    """
    return UserError if error.errno in _PATH_ERRORS else RunError


def printable(text: str, kept: str = "") -> str:
    """Replace control characters, such as the escapes that control a terminal.

    File names, run files and the replies of servers may contain them.
    """
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if _is_control(c) and c not in kept else c for c in text
    )


def _is_control(character: str) -> bool:
    """Return whether a character may change the terminal, the line or the order of other texts."""
    return unicodedata.category(character) in _CONTROL or character in _REORDERING


def without_secrets(text: str) -> str:
    """Remove secrets from a text: passwords and queries of addresses, and values of secret flags.

    The names of these flags or variables end with a word such as password, token or key.
    """
    return _SECRET.sub(r"\1...", _ADDRESS.sub(r"\1\2", text))


def first_line(error: BaseException) -> str:
    """Return the line of the message that states the problem of an error from another library."""
    # A TensorFlow operation reports a stack, the problem, and the node. Other messages start with
    # the problem.
    text, node, _ = str(error).partition("\n\t [[")
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return lines[-1 if node else 0]


def short_message(error: BaseException) -> str:
    """Return the class of an error, and the line of its message that states the problem."""
    rewritten = getattr(error, "ag_error_metadata", None)
    if rewritten:  # TensorFlow rewrote the Python code: the message begins with a stack
        return rewritten.cause_message.partition("\n")[0][:_MAX_CHARACTERS]
    return f"{type(error).__name__}: {first_line(error)[:_MAX_CHARACTERS]}"


def first_names(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of the other names."""
    more = [f"{len(names) - _MAX_NAMES:,} more"] if len(names) > _MAX_NAMES else []
    return ", ".join([*names[:_MAX_NAMES], *more])


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Raise UserError if a package that an extra of this project installs is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        is_checkout = os.path.exists(os.path.join(root, "pyproject.toml"))
        # Without -e, pip would replace an editable installation with a copy of the checkout.
        what = f"-e {shlex.quote(f'{root}[{extra}]')}" if is_checkout else package
        raise UserError(f"{package} is not installed; run pip install {what}") from error
