"""Read text files as words, one block at a time."""

import codecs
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator

from lm import logger
from lm.data.progress import ReadProgress
from lm.data.vocabulary import EOS
from lm.errors import UserError, error_class

_BLOCK_BYTES = 1 << 18
_MAX_WORD_BYTES = 1 << 20
_MOST_RETURNS = 100  # in a text without any line end
_NEWLINE = b"\n"
_SPACES = (_NEWLINE, b" ", b"\t", b"\r")


def read_words(path: str, block_bytes: int = _BLOCK_BYTES) -> Iterator[list[str]]:
    """Read the words of a text file, with `<eos>` after each line, one block at a time.

    Blocks end between words, not between lines, because some corpora are one line of a gigabyte.
    """
    line, has_words, rest, last, num_eos, num_returns = 1, False, b"", b"", 0, 0
    activity = f"encoding {os.path.basename(path)}"
    for block in _read_blocks(path, activity, block_bytes):
        if not last:
            block = block.removeprefix(codecs.BOM_UTF8)
        last = block[-1:] or last
        block = rest + block
        # These bytes never occur inside a UTF-8 character, so that no character is split.
        end = max(map(block.rfind, _SPACES)) + 1
        block, rest = block[:end], block[end:]
        if len(rest) > _MAX_WORD_BYTES:
            raise UserError(
                f"{path}, line {line + block.count(_NEWLINE)}: a word has more than"
                f" {_MAX_WORD_BYTES} bytes, so this is probably not a text file"
            )
        text = _decode(block, path, line)
        num_eos, num_returns = num_eos + text.count(EOS), num_returns + text.count("\r")
        line += block.count(_NEWLINE)
        has_words = has_words or bool(text.strip())
        yield text.replace("\n", f" {EOS} ").split()
    text = _decode(rest, path, line)
    num_eos += text.count(EOS)
    if not has_words and not text.strip():
        raise UserError(f"{path}, line {line}: the file does not contain any words")
    if line == 1 and num_returns > _MOST_RETURNS:
        raise UserError(f"{path} has line ends of CR only: convert it with tr '\\r' '\\n'")
    if num_eos:
        logger.warning(f"{path} contains {EOS} {num_eos} times, and each line end adds another")
    yield text.split() + ([] if last == _NEWLINE else [EOS])


def sha256_of_text(path: str) -> str:
    """Return the SHA-256 of a text. A .gz file has the checksum of the text that it contains."""
    # A named pipe would block forever, and can be read only once.
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is not a file")
    digest = hashlib.sha256()
    for block in _read_blocks(path, f"verifying {os.path.basename(path)}"):
        digest.update(block)
    return digest.hexdigest()


def _read_blocks(path: str, activity: str, block_bytes: int = _BLOCK_BYTES) -> Iterator[bytes]:
    # This is a separate generator, so that `except` does not catch errors of the caller's output.
    try:
        with open(path, "rb") as file, ReadProgress(activity, os.path.getsize(path)) as progress:
            text = gzip.open(file) if path.endswith(".gz") else file
            while block := text.read(block_bytes):
                progress.show(file.tell())
                yield block
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"{path} is not a complete .gz file ({error}); compress it again"
        ) from error
    except OSError as error:
        raise error_class(error)(f"cannot read {path}: {error.strerror}") from error


def _decode(block: bytes, path: str, line: int) -> str:
    try:
        return decode_text(block)
    except UnicodeDecodeError as error:
        line += block.count(_NEWLINE, 0, error.start)
        raise UserError(
            f"{path}, line {line}: byte 0x{block[error.start]:02x} is not valid UTF-8, so convert"
            " the file to UTF-8"
        ) from error


def decode_text(block: bytes, encoding: str = "utf-8") -> str:
    """Decode UTF-8. NUL is an error too, because UTF-16 without a byte order mark contains it."""
    nul = block.find(b"\0")
    if nul >= 0:
        raise UnicodeDecodeError(encoding, block, nul, nul + 1, "NUL")
    return block.decode(encoding)
