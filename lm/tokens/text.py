"""Read the files of a text, one block at a time.

A text may consist of several files, some of which may be compressed. The text is the concatenation
of their uncompressed contents.
"""

import codecs
import contextlib
import gzip
import hashlib
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import tqdm

from lm import logger
from lm.errors import UserError, error_class
from lm.perplexity import TextSize

BLOCK_BYTES = 1 << 18


class Part(NamedTuple):
    """A file of a text, or a range of its bytes. The range counts uncompressed bytes."""

    path: str
    start: int = 0
    stop: int | None = None
    line: int = 1  # the number of the line at which the range starts


class Block(NamedTuple):
    """Some bytes of a text, or the characters that they encode."""

    part: Part
    line: int  # the number of the line at which the block starts
    data: bytes | str
    is_first: bool = False  # whether it is the first block of its file


class ReadProgress(tqdm.tqdm):
    """Shows the number of bytes read so far, if stderr is a terminal."""

    monitor_interval = 0  # tqdm's monitor thread would outlive the run

    def __init__(self, activity: str, total: int | None):
        options = dict(unit="B", unit_scale=True, leave=False)
        super().__init__(desc=activity, total=total or None, disable=None, **options)

    def show(self, done: int) -> None:
        with contextlib.suppress(OSError):  # A closed terminal must not end a job.
            self.update(done - self.n)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def read_blocks(
    parts: Sequence[Part], activity: str, block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """Read a text in blocks of at most `block_bytes` bytes.

    Args:
      activity: A verb for the progress bar, such as "reading".
    """
    for part in parts:
        line, is_first = part.line, part.start == 0
        for data in _read_file(part, activity, block_bytes):
            yield Block(part, line, data, is_first)
            line += data.count(b"\n")
            is_first = False
        if is_first:
            yield Block(part, line, b"")  # Errors about an empty text then contain the path.


def _read_file(part: Part, activity: str, block_bytes: int) -> Iterator[bytes]:
    # This is a separate generator, so that `except` does not catch errors
    # that the caller raises while it writes its output.
    path, rest = part.path, sys.maxsize if part.stop is None else part.stop - part.start
    try:
        name = f"{activity} {os.path.basename(path)}"
        with open(path, "rb") as file, ReadProgress(name, os.path.getsize(path)) as progress:
            text = gzip.open(file) if path.endswith(".gz") else file
            if part.start:
                text.seek(part.start)
            while block := text.read(min(block_bytes, rest)):
                progress.show(file.tell())
                yield block
                rest -= len(block)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"{path} is not a complete .gz file ({error}); compress it again"
        ) from error
    except OSError as error:
        raise error_class(error)(f"cannot read {path}: {error.strerror}") from error


def sha256_of_text(parts: Sequence[Part]) -> str:
    """Return the SHA-256 of a text, regardless of how the text is divided into files."""
    for path in (part.path for part in parts):
        # A named pipe would block forever, and can be read only once.
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"{path} is not a file")
    digest = hashlib.sha256()
    for part in parts:
        for data in _read_file(part, "verifying", BLOCK_BYTES):  # lines need not be counted
            digest.update(data)
    return digest.hexdigest()


def measured(blocks: Iterable[Block], size: TextSize) -> Iterator[Block]:
    """Yield blocks of bytes, and add their sizes to `size`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = "\n"
    for block in blocks:
        text = decoder.decode(block.data)
        size.bytes += len(block.data)
        size.characters += len(text)
        size.words += len(text.split()) + text.count("\n")
        if text:
            # A word that continues in this block has already been counted.
            size.words -= not (last.isspace() or text[0].isspace())
            last = text[-1]
        yield block
    size.words += last != "\n"


def decode_blocks(blocks: Iterable[Block]) -> Iterator[Block]:
    """Decode blocks of UTF-8 into blocks of characters.

    Raises:
      UserError: If the text is not valid UTF-8, or if it contains only white space. The message
        contains the path and usually the line.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    has_words, last, is_warned = False, "", False
    for block in blocks:
        data = block.data.removeprefix(codecs.BOM_UTF8) if block.is_first else block.data
        if block.is_first and last and not last.isspace() and not is_warned:
            is_warned = True
            logger.warning(
                "the file before %s does not end with a line end, so its last word is joined to"
                " the first word of this file",
                block.part.path,
            )
        with _located(block):
            check_nul(data)
            text = decoder.decode(data)
        has_words, last = has_words or bool(text and not text.isspace()), text[-1:] or last
        yield block._replace(data=text)
    path, line = block.part.path, block.line + block.data.count(b"\n")
    with _located(block._replace(line=line)):
        decoder.decode(b"", final=True)
    if not has_words:
        raise UserError(f"{path}, line {line}: the file does not contain any words")


@contextlib.contextmanager
def _located(block: Block) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        line = block.line + error.object.count(b"\n", 0, error.start)
        found = error.object[error.start]
        advice = f"byte 0x{found:02x} is not valid UTF-8, so convert the file to UTF-8"
        if not found:
            advice = (
                "the file contains NUL: convert UTF-16 to UTF-8, or save a document of a word"
                " processor as plain text in UTF-8"
            )
        raise UserError(f"{block.part.path}, line {line}: {advice}") from error


def check_nul(data: bytes) -> None:
    """Raise UnicodeDecodeError if the data contains NUL, as most UTF-16 texts do."""
    nul = data.find(b"\0")
    if nul >= 0:
        raise UnicodeDecodeError("utf-8", data, nul, nul + 1, "NUL")
