"""Lines of text from a file, a pipe or a terminal, as soon as they are complete."""

import codecs
import os
from collections.abc import Iterable, Iterator

from lm.data.splits import Source
from lm.errors import UserError, error_class
from lm.tokens.text import check_nul, read_blocks

_BLOCK_BYTES, _MAX_LINE_BYTES = 1 << 16, 1 << 24
STDIN = "-"  # the path of the standard input


def name_of(path: str) -> str:
    """Return the name of a file or of the standard input in messages."""
    return "the standard input" if path == STDIN else path


def read_lines(path: str) -> Iterator[list[str]]:
    """Yield the available complete lines without line ends, and wait if no line is complete."""
    try:
        with open(0 if path == STDIN else path, "rb", closefd=path != STDIN) as file:
            blocks = iter(lambda: os.read(file.fileno(), _BLOCK_BYTES), b"")
            yield from split_lines(blocks, name_of(path))
    except OSError as error:
        raise error_class(error)(f"cannot read {name_of(path)}: {error.strerror}") from error


def read_source(source: Source) -> Iterator[str]:
    """Yield the lines of a split of a corpus."""
    blocks = (
        block.data.removeprefix(codecs.BOM_UTF8) if block.is_first else block.data
        for block in read_blocks(source.parts, "scoring")
    )
    return (line for lines in split_lines(blocks, source.path) for line in lines)


def split_lines(
    blocks: Iterable[bytes], name: str, max_bytes: int = _MAX_LINE_BYTES
) -> Iterator[list[str]]:
    """Yield the complete lines of each block, without line ends."""
    rest, num_bytes, number = [], 0, 1
    for block in blocks:
        rest.append(block)
        num_bytes += len(block)
        if b"\n" in block:  # Do not join the blocks of a long line before it ends.
            *lines, last = b"".join(rest).split(b"\n")
            rest, num_bytes = [last], len(last)
            yield from _decode_lines(lines, name, number)
            number += len(lines)
        elif num_bytes > max_bytes:
            raise UserError(
                f"{name}, line {number}: the line has more than {max_bytes} bytes: divide it"
                " into sentences"
            )
    if last := b"".join(rest):
        yield from _decode_lines([last], name, number)


def _decode_lines(lines: Iterable[bytes], name: str, first: int) -> Iterator[list[str]]:
    """Yield the texts of lines, and also the texts before an error. `first` is a line number."""
    texts = []
    for number, line in enumerate(lines, first):
        try:
            check_nul(line)
            # The text may start with a byte order mark.
            texts.append(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            yield texts
            byte = line[error.start]
            problem = f"not UTF-8: byte 0x{byte:02x}" if byte else "it contains NUL"
            raise UserError(f"{name}, line {number}: {problem}") from error
    yield texts
