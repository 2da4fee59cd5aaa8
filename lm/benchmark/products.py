"""Compare the matrix products of the output layer with TensorFlow's own (oneDNN).

  python -m lm.benchmark products --config config_small --intra_op_threads 1

Both products take turns in one process.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from lm.benchmark.worker import Options, Task, run
from lm.config import Config


def measure(config: Config, options: Options) -> dict[str, Any]:
    """Measure each product in turn with TensorFlow's product."""
    (results,) = run([Task(config, "products")], options)
    return {"products": [_row(name, *result) for name, result in results.items()]}


def _row(
    name: str, sizes: Sequence[int], ours: Sequence[float], onednn: Sequence[float]
) -> dict[str, Any]:
    """Return the speed of a product, M x K times K x N, as the best and the median of all runs."""
    m, k, n = sizes
    return {
        "product": name,
        "sizes": f"{m} x {k} x {n}",
        "ms": 1000 * min(ours),
        "gflops": 2e-9 * m * k * n / min(ours),
        "onednn_ms": 1000 * min(onednn),
        "speed_over_onednn": min(onednn) / min(ours),
        "median_speed_over_onednn": median(onednn) / median(ours),
    }
