"""Read token IDs from NumPy files and from files of plain integers."""

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lm.errors import UserError, error_class, first_line
from lm.tokens.text import Part

_BLOCK = 1 << 20  # token IDs
_ENOUGH = 100  # token IDs; a shorter text may have zeros at all odd positions by chance
_MAX_NAME = 32  # characters of a member's name in messages


def read_id_files(parts: Sequence[Part], dtype: str, vocab_size: int) -> Iterator[np.ndarray]:
    """Read files in order, and yield an array of some of their token IDs at a time.

    Args:
      dtype: The type of the integers in `.bin` files.

    Raises:
      UserError: If a file does not consist of one-dimensional integer arrays, or if a token ID is
        outside the vocabulary.
    """
    for path in (part.path for part in parts):
        if path.endswith(".bin") and dtype == "uint16" and vocab_size > 1 << 16:
            raise UserError(
                f"{path}: uint16 is too small for a vocabulary of {vocab_size:,} IDs: set"
                " --token_dtype, for example to uint32"
            )
        position = 0
        try:
            for ids in _blocks(path, dtype):
                outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
                if outside.size:
                    place = int(outside[0])
                    raise UserError(
                        f"{path}: token ID {ids[place]} at position {position + place:,} is outside"
                        f" the vocabulary of {vocab_size:,} IDs: check --vocab_size, --tokenizer"
                        " and --token_dtype"
                    )
                position += len(ids)
                yield ids
        except OSError as error:
            raise error_class(error)(f"cannot read {path}: {error.strerror or error}") from error
        if not position:
            raise UserError(f"{path} does not contain any token IDs")


def _blocks(path: str, dtype: str) -> Iterator[np.ndarray]:
    if path.endswith(".bin"):
        yield from _read_integers(path, np.dtype(dtype).newbyteorder("<"))
    elif path.endswith(".npy"):
        with open(path, "rb") as file:
            yield from _read_array(path, file)
    else:
        try:
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    with archive.open(name) as file:
                        yield from _read_array(f"{path}, {name[:_MAX_NAME]}", file)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise UserError(f"{path} is not an .npz file: {first_line(error)}") from error


def _read_integers(path: str, dtype: np.dtype) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        if file.peek().startswith(np.lib.format.MAGIC_PREFIX):
            raise UserError(f"{path} is a NumPy array: rename it to .npy")
        while data := file.read(_BLOCK * dtype.itemsize):
            if len(data) % dtype.itemsize:
                raise UserError(
                    f"{path} does not consist of integers of {dtype.itemsize} bytes: check"
                    " --token_dtype"
                )
            ids = np.frombuffer(data, dtype)
            is_start = file.tell() == len(data) and len(ids) > _ENOUGH
            if is_start and dtype.itemsize == 2 and ids.any() and not ids[1::2].any():
                raise UserError(
                    f"every second value of {path} is 0, as if its integers had 4 bytes: set"
                    " --token_dtype uint32"
                )
            yield ids


def _read_array(name: str, file: Any) -> Iterator[np.ndarray]:
    """Yield the values of an array in NumPy's format. Objects are never unpickled."""
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    except ValueError as error:
        raise UserError(f"{name} is not a NumPy array: {first_line(error)}") from error
    if dtype.kind not in "iu" or len(shape) != 1 or shape[0] < 0:
        raise UserError(
            f"{name} is an array of {dtype} of shape {shape}: token IDs must be a one-dimensional"
            " array of integers"
        )
    rest = shape[0]
    while rest:
        count = min(rest, _BLOCK)
        data = file.read(count * dtype.itemsize)
        if len(data) < count * dtype.itemsize:
            raise UserError(f"{name} is truncated: copy it again")
        yield np.frombuffer(data, dtype)
        rest -= count
