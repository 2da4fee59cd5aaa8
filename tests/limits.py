"""Temporary system limits."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let writes fail after the first num_bytes of each file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
