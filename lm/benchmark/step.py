"""`step`: the speed of one process, compared with the GEMM peak and with other programs."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lm.benchmark import worker
from lm.benchmark.turns import paired_ratio, print_table, summarize, take_turns
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
}  # fmt: skip

_COLUMNS = [
    ("", "{name}"),
    ("words/s", "{words_per_second.median:.0f}"),
    ("best", "{words_per_second.best:.0f}"),
    ("std", "{words_per_second.std:.0f}"),
    ("ms/step", "{ms_per_step.median:.1f}"),
    ("GFLOP/s", "{gflops:.1f}"),
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
class StepOptions(worker.Options):
    """Measure a training step of one process: words/s, GFLOP/s, share of the GEMM peak.

    python -m lm.benchmark step --config config_small --peers
    """

    peers: bool = option(False, "measure PyTorch and the TensorFlow tutorial too")

    def check(self, config: Config) -> None:
        super().check(config)
        plain = Config()
        changed = [name for name in _NOT_IN_PEERS if getattr(config, name) != getattr(plain, name)]
        if self.peers and changed:
            raise UserError(f"the peers do not support {', '.join(changed)}: leave out --peers")


def measure(config: Config, options: StepOptions) -> dict[str, Any]:
    """Measure all implementations and the GEMM peak in turn."""
    measurements = {"ours": partial(worker.run, config, options)}
    if options.peers and config.precision == "bfloat16":
        float32 = dataclasses.replace(config, precision="float32")
        measurements["ours-float32"] = partial(worker.run, float32, options)
    peers = _variants(config.precision) if options.peers else []
    for name in peers:
        run = partial(worker.run, config, options, name)
        try:
            run()  # this run also fills the caches of torch.compile
        except RunError as error:
            logger.warning("left out: %s", error)
        else:
            measurements[name] = run
    measurements["gemm"] = partial(worker.run, config, options, "gemm")
    results = take_turns(options.repeats, measurements)
    peaks = [result["flops_per_second"] for result in results.pop("gemm")]
    ours = results["ours"][0]
    flops = _step_flops(config, ours["shapes"]) if ours["shapes"] else None
    words = config.batch_size * config.num_steps
    times = [run["seconds"] for run in results["ours"]]
    return {
        "kernels": ours["kernels"],
        "vocab_size": ours["vocab_size"],
        "mflops_per_word": flops and flops / words / 1e6,
        "gemm_gflops": summarize([peak / 1e9 for peak in peaks], max),
        "share_of_gemm_peak": flops
        and summarize([flops / each / peak for each, peak in zip(times, peaks)], max),
        "implementations": {
            name: _row(runs, times, words, flops) for name, runs in results.items()
        },
    }


def _row(
    runs: Sequence[dict[str, Any]], times_of_ours: Sequence[float], words: int, flops: int | None
) -> dict[str, Any]:
    """Return the results of an implementation whose step has `words` words and `flops` FLOPs."""
    times = [run["seconds"] for run in runs]
    return {
        "words_per_second": summarize([words / each for each in times], max),
        "ms_per_step": summarize([1000 * each for each in times]),
        "gflops": flops and flops / statistics.median(times) / 1e9,
        "time_over_ours": paired_ratio(times, times_of_ours),
        "peak_mb": statistics.median(run["peak_mb"] for run in runs),
        "first_step_seconds": statistics.median(run["first_step_seconds"] for run in runs),
        "first_losses": runs[0]["losses"],
        "first_grad_norms": runs[0]["grad_norms"],
        "seconds_per_step": times,
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
    counted = record["mflops_per_word"] is not None
    print_table([each for each in _COLUMNS if counted or each[0] != "GFLOP/s"], rows)
    peak = record["gemm_gflops"]
    print(f"GEMM peak {peak.median:.1f} GFLOP/s (best {peak.best:.1f})")
    if counted:
        share = record["share_of_gemm_peak"]
        print(
            f"{record['mflops_per_word']:.1f} MFLOP per word: ours reaches"
            f" {share.median:.1%} of the peak (best {share.best:.1%})"
        )
