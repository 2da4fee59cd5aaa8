"""Divide the time of a training step among its operations.

  python -m lm.benchmark trace --config config_small --intra_op_threads 1

The time of each operation is its median over the steps that TensorFlow traces. Traced steps take
turns with steps without a trace, which show how long a step takes. Tracing slows operations down.
The remainder, "session", is therefore too small, and can be negative if the operations are short.
"""

import re
from collections import defaultdict
from typing import Any

from lm.benchmark.worker import Options, Task, run
from lm.config import Config

_LEAST_SHARE = 0.002  # operations with a smaller share of all operations share a row


def measure(config: Config, options: Options) -> dict[str, Any]:
    """Return the time of each part of a step. The parts add up to the step."""
    (result,) = run([Task(config, "trace")], options)
    step, session = result["step_seconds"], result["session_seconds"]
    groups = defaultdict(list)
    for name, kind, seconds in result["operations"]:
        groups[_part_of(name), kind].append(seconds)
    total = sum(seconds for _, _, seconds in result["operations"])
    rows, others = [], []
    for (part, kind), seconds in sorted(groups.items(), key=lambda group: -sum(group[1])):
        if sum(seconds) < _LEAST_SHARE * total:
            others += seconds
        else:
            rows.append((part, f"{kind} x {len(seconds)}", sum(seconds)))
    rows += [
        ("all parts", f"{len(others)} other operations", sum(others)),
        ("session", "", session - total),
        ("Python", "", step - session),
    ]
    return {
        "kernels": result["kernels"],
        "ms_per_step": 1000 * step,
        "parts": [
            {"part": part, "operations": name, "ms": 1000 * seconds, "share": seconds / step}
            for part, name, seconds in rows
        ],
    }


def _part_of(name: str) -> str:
    """Return the part of the step to which an operation belongs, from the scopes in its name."""
    forward = re.sub(r"^gradients(_\d+)?/", "", name)
    if not forward.startswith("train/"):
        return "update"
    part = "network" if "/lm_network/" in name else "output layer"
    return f"{part}, {'forward' if forward == name else 'backward'}"
