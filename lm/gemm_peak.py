"""The speed of matrix products: the peak of this host, and the products of a training step.

`python -m lm.benchmark` measures the peak and saves it in the user's cache. The runs on this host
then report their share of the peak.
"""

import contextlib
import math
import os
import socket
from collections.abc import Mapping, Sequence

from lm.json_files import parse_object, write_json
from lm.system import cpu_model


def save_peak(precision: str, threads: int, flops_per_second: float) -> None:
    """Save the peak of a process with this number of threads. The cache may be read-only."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(_path()), exist_ok=True)
        write_json(_path(), {**_saved(), _key(precision, threads): flops_per_second})


def load_peak(precision: str, threads: int) -> float | None:
    """Return the saved peak in floating-point operations per second, or None."""
    peak = _saved().get(_key(precision, threads))
    return peak if isinstance(peak, float) and peak > 0 else None


def flops_per_token(shapes: Mapping[str, Sequence[int]], tie_weights: bool) -> int:
    """Count the operations in the products of a training step of the built-in network.

    A multiply-add counts as two. Each weight matrix has three products per token: the forward
    product, the gradient of its input and its own gradient. An embedding that is not tied has no
    products. Other operations do not count, as in Chowdhery et al. 2022, "PaLM", appendix B.
    """
    return 6 * sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and (name != "embedding" or tie_weights)
    )


def _path() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "lm", "gemm_peaks.json")


def _key(precision: str, threads: int) -> str:
    return f"{socket.gethostname()}, {cpu_model()}, {precision}, {threads} threads"


def _saved() -> dict:
    with contextlib.suppress(OSError, ValueError), open(_path(), "rb") as file:
        return parse_object(file.read())
    return {}
