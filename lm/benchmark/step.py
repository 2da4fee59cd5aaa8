"""`step`: the speed of one process, compared with the GEMM peak and with other programs."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lm.benchmark.turns import paired_ratio, print_table, speeds, take_turns
from lm.benchmark.worker import Options, Task, run
from lm.config import Config
from lm.errors import RunError, UserError
from lm.options import option

# The variants of each peer by precision. The first word of a variant is the Python package that
# it needs, and the name of its module: peer_torch.py builds "torch" and "torch-compile".
PEERS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "tensorflow": {"float32": ["tensorflow"]},
    "torch": {
        "float32": ["torch", "torch-compile"],
        "bfloat16": [
            "torch-autocast", "torch-autocast-compile", "torch-bfloat16", "torch-bfloat16-compile",
        ],
    },
    "jax": {"float32": ["jax"], "bfloat16": ["jax-autocast"]},
}  # fmt: skip

_COLUMNS = [
    ("", "{name}"),
    ("words/s", "{words_per_second:.0f}"),
    ("best", "{best:.0f}"),
    ("std", "{std:.0f}"),
    ("ms/step", "{ms_per_step:.1f}"),
    ("time/ours [95 %]", "{time_over_ours}"),
    ("peak MB", "{peak_mb:.0f}"),
    ("first step s", "{first_step_seconds:.1f}"),
    ("first loss", "{first_losses[0]:.4f}"),
]

_NOT_IN_PEERS = (  # fields of Config that the peers do not implement
    "embedding_init_scale", "embedding_size", "tie_weights", "embedding_keep_prob",
    "output_keep_prob", "locked_dropout", "recurrent_keep_prob", "forget_bias",
    "activation_penalty", "temporal_activation_penalty", "optimizer", "weight_decay",
    "asgd_trigger_epochs",
)  # fmt: skip

logger = logging.getLogger("lm")


@dataclasses.dataclass(frozen=True)
class StepOptions(Options):
    """Measure a training step of one process: words/s, GFLOP/s, share of the GEMM peak.

    python -m lm.benchmark step --config config_small --peers
    """

    peers: bool = option(False, "measure PyTorch, JAX and the TensorFlow tutorial too")

    def check(self, config: Config) -> None:
        super().check(config)
        plain = Config()
        changed = [name for name in _NOT_IN_PEERS if getattr(config, name) != getattr(plain, name)]
        if self.peers and changed:
            raise UserError(f"the peers do not support {', '.join(changed)}: leave out --peers")


def measure(config: Config, options: StepOptions) -> dict[str, Any]:
    """Measure all implementations and the GEMM peak in turn."""
    tasks = {"ours": Task(config), "gemm": Task(config, "gemm")}
    if options.peers and config.precision == "bfloat16":
        tasks["ours-float32"] = Task(dataclasses.replace(config, precision="float32"))
    for name in _variants(config.precision) if options.peers else []:
        try:
            run(Task(config, name), options)  # this run also fills the caches of torch.compile
            tasks[name] = Task(config, name)
        except RunError as error:
            logger.warning("left out: %s", error)
    results = take_turns(tasks, options)
    peaks = results.pop("gemm")["flops_per_second"]
    ours = results["ours"]
    words = config.batch_size * config.num_steps
    record = {
        "kernels": ours["kernels"][0],
        "vocab_size": ours["vocab_size"][0],
        "gemm_gflops": median(peaks) / 1e9,
        "implementations": {
            name: _row(result, ours["seconds"], words) for name, result in results.items()
        },
    }
    shapes = ours["shapes"][0]
    if shapes:
        flops = _step_flops(config, shapes)
        shares = [flops / each / peak for each, peak in zip(ours["seconds"], peaks)]
        record["mflops_per_word"] = flops / words / 1e6
        record["gflops"] = flops / median(ours["seconds"]) / 1e9
        record["share_of_gemm_peak"] = median(shares)
    return record


def _row(result: dict[str, list], seconds_of_ours: Sequence[float], words: int) -> dict[str, Any]:
    """Return the results of an implementation whose step has `words` words."""
    seconds = result["seconds"]
    return {
        **speeds(words, seconds),
        "ms_per_step": 1000 * median(seconds),
        "time_over_ours": paired_ratio(seconds, seconds_of_ours),
        "peak_mb": median(result["peak_mb"]),
        "first_step_seconds": median(result["first_step_seconds"]),
        "first_losses": result["losses"][0],
        "first_grad_norms": result["grad_norms"][0],
        "seconds_per_step": seconds,
    }


def _variants(precision: str) -> list[str]:
    """Return the variants of all peers whose package is installed."""
    found = []
    for package, variants in PEERS.items():
        if importlib.util.find_spec(package):
            found += variants.get(precision, [])
        else:
            logger.warning("%s is missing and left out: pip install -e '.[bench]'", package)
    return found


def _step_flops(config: Config, shapes: Mapping[str, Sequence[int]]) -> int:
    """Count the operations in the matrix products of a step; a multiply-add counts as two.

    Each weight matrix has three products per token: the forward product, the gradient of its input
    and its own gradient. An embedding that is not tied has no products. Other operations do not
    count, as in Chowdhery et al. 2022, "PaLM", appendix B.
    """
    weights = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and (name != "embedding" or config.tie_weights)
    )
    return 6 * config.num_steps * config.batch_size * weights


def show(config: Config, options: StepOptions, record: dict[str, Any]) -> None:
    """Print a table of the implementations, and the GEMM peak."""
    print(
        f"\n{config.name}, {config.precision}, {options.threads} thread(s), batch"
        f" {config.batch_size} x {config.num_steps}, {options.repeats} repeats; ours:"
        f" {record['kernels']}"
    )
    rows = [{"name": name, **found} for name, found in record["implementations"].items()]
    print_table(_COLUMNS, rows)
    print(f"GEMM peak {record['gemm_gflops']:.1f} GFLOP/s")
    if "gflops" in record:  # the products of a user-defined network are unknown
        print(
            f"{record['mflops_per_word']:.1f} MFLOP per word: ours computes"
            f" {record['gflops']:.1f} GFLOP/s, {record['share_of_gemm_peak']:.1%} of the peak"
        )
