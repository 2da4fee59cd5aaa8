"""Find the files of the splits of a corpus in a data directory, or divide a single file.

A split consists of text or of token IDs. It is stored in one file or in a directory of files.
"""

import bisect
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm.errors import UserError, error_class
from lm.tokens.text import Part, read_blocks

SPLITS = ("train", "valid", "test")
TEXT_ENDS, ID_ENDS = (".txt", ".txt.gz"), (".npy", ".npz", ".bin")
_NO_TEXT_ENDS = (
    ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".tar.gz", ".7z", ".parquet", ".pdf", ".docx",
    ".odt", ".epub",
)  # fmt: skip
_JSON_ENDS = tuple(end + zipped for end in (".json", ".jsonl", ".ndjson") for zipped in ("", ".gz"))
_STEMS = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}


class Source(NamedTuple):
    """The files of a split."""

    path: str  # a file or a directory
    parts: tuple[Part, ...]
    reads_ids: bool  # whether the files contain token IDs instead of text


def find_splits(data_path: str) -> dict[str, Source]:
    """Return the files of each split in a directory, or {} if there is no `train` split.

    Raises:
      UserError: If two files or directories contain the same split.
    """
    found = {}
    for split in SPLITS:
        paths = [os.path.join(data_path, stem) for stem in _STEMS[split]]
        files = [path + end for path in paths for end in (*TEXT_ENDS, *ID_ENDS)]
        exist = [*filter(os.path.isdir, paths), *filter(os.path.lexists, files)]
        if len(exist) > 1:
            raise UserError(f"{exist[0]} and {exist[1]} both exist; remove one of them")
        if exist:
            found[split] = source_of(exist[0])
        elif split == "train":
            return {}  # A directory `test` may contain the tests of a program.
    if len({source.reads_ids for source in found.values()}) > 1:
        raise UserError(f"{data_path} contains texts and token IDs: put them into two directories")
    return found


def source_of(path: str, any_text: bool = False) -> Source:
    """Return the files of a split, given its file or directory.

    Args:
      any_text: Whether to read files with unknown endings as texts.
    """
    paths = [path]
    if os.path.isdir(path):
        try:
            names = sorted(name for name in os.listdir(path) if not name.startswith("."))
        except OSError as error:
            raise error_class(error)(f"cannot read {path}: {error.strerror}") from error
        if not names:
            raise UserError(f"{path} is empty: put the files of this split into it")
        paths = [os.path.join(path, name) for name in names]
    kinds = {_reads_ids(path, any_text) for path in paths}
    if len(kinds) > 1:
        raise UserError(f"{path} contains texts and token IDs: remove one of the kinds")
    return Source(path, tuple(map(Part, paths)), kinds.pop())


def _reads_ids(path: str, any_text: bool) -> bool:
    if path.endswith(ID_ENDS):
        return True
    if path.endswith(TEXT_ENDS):
        return False
    _check_is_text(path)
    if any_text:
        return False
    _check_no_json(path)
    known = ", ".join(TEXT_ENDS + ID_ENDS)
    raise UserError(f"{path} has an unknown ending: the files of a corpus end in {known}")


def _check_is_text(path: str) -> None:
    if path.endswith(_NO_TEXT_ENDS):
        raise UserError(
            f"{path} is not a text: convert it to a .txt file, which may be compressed to .txt.gz,"
            " or rename it to .txt to train on its bytes"
        )


def _check_no_json(path: str) -> None:
    """Reject JSON, whose syntax and escapes would become a part of the text."""
    if path.endswith(_JSON_ENDS):
        raise UserError(
            f"{path} contains JSON: write its texts into a .txt file (data/README.md, Examples), or"
            " rename it to .txt to train on the JSON itself"
        )


def divide_file(path: str, percentages: str) -> dict[str, Source]:
    """Divide the lines of a text file into splits.

    Args:
      percentages: The percentages of lines for valid and for test, such as "5,5". These lines are
        at the end of the file, and the lines of test are the last lines.
    """
    try:
        shares = [float(share) for share in percentages.split(",")]
        if not (len(shares) == 2 and min(shares) >= 0 and sum(shares) < 100):
            raise ValueError
    except ValueError as error:
        raise UserError(
            f"split must be the percentages of valid and test, such as 5,5, not {percentages!r}"
        ) from error
    if path.endswith(ID_ENDS):
        raise UserError(f"{path} has no lines: put train and valid files into a directory")
    _check_is_text(path)
    _check_no_json(path)
    num_lines, num_bytes, last, blocks = 0, 0, b"\n", []
    for block in read_blocks([Part(path)], "counting"):
        blocks.append((num_lines, num_bytes))
        num_lines += block.data.count(b"\n")
        num_bytes += len(block.data)
        last = block.data[-1:] or last
    num_lines += last != b"\n"  # the last line may have no line end
    sizes = [int(num_lines * share / 100) for share in shares]
    valid, test = num_lines - sum(sizes), num_lines - sizes[1]
    bounds = [0, _offset(path, blocks, valid), _offset(path, blocks, test), num_bytes]
    return {
        split: Source(path, (Part(path, start, stop, line + 1),), False)
        for split, line, start, stop in zip(SPLITS, (0, valid, test), bounds, bounds[1:])
        if start != stop
    }


def _offset(path: str, blocks: Sequence[tuple[int, int]], line: int) -> int:
    """Return the byte position at which a line starts, or the file size if no such line exists.

    Lines are counted from 0.

    Args:
      blocks: The numbers of line ends and bytes in front of each block of the file.
    """
    if not line:
        return 0
    ends_before, start = blocks[bisect.bisect_left(blocks, (line, 0)) - 1]
    data = next(read_blocks([Part(path, start)], "dividing")).data
    line_ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    index = line - ends_before - 1
    return start + (int(line_ends[index]) + 1 if index < len(line_ends) else len(data))
