"""Lines of text from a file, a pipe or a terminal, as soon as they are complete."""

import contextlib
import os
from collections.abc import Iterable, Iterator

from lm.data.splits import Source
from lm.data.text import check_nul, read_blocks
from lm.data.vocabulary import EOS
from lm.errors import UserError, error_class

_BLOCK_BYTES, _MAX_LINE_BYTES = 1 << 16, 1 << 24


def read_texts(path: str) -> Iterator[list[str]]:
    """Yield the available lines of a file, or of the standard input if the path is -."""
    first = 0
    try:
        with contextlib.ExitStack() as stack:
            descriptor = 0
            if path != "-":
                descriptor = stack.enter_context(open(path, "rb")).fileno()
            for lines in read_lines(descriptor):
                yield [decode_line(line, index) for index, line in enumerate(lines, first)]
                first += len(lines)
    except OSError as error:
        raise error_class(error)(f"cannot read {path}: {error.strerror}") from error


def read_source(source: Source) -> Iterator[str]:
    """Yield the lines of a split of a corpus."""
    blocks = (block.data for block in read_blocks(source.parts, "scoring"))
    lines = (line for lines in split_lines(blocks) for line in lines)
    for index, line in enumerate(lines):
        yield decode_line(line, index)


def read_lines(descriptor: int, max_bytes: int = _MAX_LINE_BYTES) -> Iterator[list[bytes]]:
    """Yield the available complete lines without line ends, and wait if no line is complete."""
    return split_lines(iter(lambda: os.read(descriptor, _BLOCK_BYTES), b""), max_bytes)


def split_lines(blocks: Iterable[bytes], max_bytes: int = _MAX_LINE_BYTES) -> Iterator[list[bytes]]:
    """Yield the complete lines of each block, without line ends."""
    rest, num_bytes = [], 0
    for block in blocks:
        rest.append(block)
        if b"\n" in block:  # Do not join the blocks of a long line before it ends.
            *lines, last = b"".join(rest).split(b"\n")
            rest, num_bytes = [last], len(last)
            yield lines
            continue
        num_bytes += len(block)
        if num_bytes > max_bytes:
            raise UserError(f"a line has more than {max_bytes} bytes: divide it into sentences")
    if last := b"".join(rest):
        yield [last]


def decode_line(line: bytes, index: int) -> str:
    """Return the text of the line with this index, which starts at 0."""
    try:
        check_nul(line)
        # The first line may start with a byte order mark.
        text = line.decode("utf-8" if index else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: byte 0x{line[error.start]:02x}") from error
    text = text.rstrip("\r")
    if "\r" in text:
        raise UserError("line ends of CR only: convert the text with tr '\\r' '\\n'")
    if EOS in text.split():
        raise UserError(f"contains {EOS}, which each line end adds: remove it")
    return text
