"""Measure a training step of one process: tokens/s, GFLOP/s, share of the GEMM peak.

  python -m lm.benchmark step --config config_small --peers

The peers are other programs that train the same model: the built-in network, or the network of
configs/config_gru.py or configs/config_transformer.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lm import logger
from lm.benchmark.turns import RepeatedOptions, paired_ratio, speeds, take_turns
from lm.benchmark.worker import Task, run
from lm.config import Config
from lm.errors import RunError, UserError
from lm.gemm_peak import flops_per_token, save_peak
from lm.options import option

# The variants of the peers by precision. The first word of a variant is the name of its module:
# peer_torch.py builds "torch" and "torch-compile".
PEERS = {
    "float32": ["tensorflow", "torch", "torch-compile", "jax"],
    "bfloat16": [
        "torch-autocast", "torch-autocast-compile", "torch-bfloat16", "torch-bfloat16-compile",
        "jax-autocast",
    ],
}  # fmt: skip

NOT_IN_PEERS = (  # fields of Config that the peers do not implement
    "embedding_size", "embedding_keep_prob", "adaptive_input",
    "output_keep_prob", "locked_dropout", "recurrent_keep_prob", "forget_bias",
    "activation_penalty", "temporal_activation_penalty", "weight_decay", "asgd_trigger_epochs",
    "ema_decay", "trainable", "reset_state",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StepOptions(RepeatedOptions):
    """Options of `step`."""

    peers: bool = option(False, "measure PyTorch, JAX and the TensorFlow tutorial too")

    def check(self, config: Config) -> None:
        super().check(config)
        plain = Config()
        changed = [name for name in NOT_IN_PEERS if getattr(config, name) != getattr(plain, name)]
        if config.optimizer not in ("sgd", "adam"):
            changed.append("optimizer")
        if self.peers and changed:
            raise UserError(
                f"the peers do not support {', '.join(changed)}: leave out --peers, or use the"
                " default values of these fields"
            )


def measure(config: Config, options: StepOptions) -> dict[str, Any]:
    """Measure all implementations and the GEMM peak in turn."""
    tasks = {"ours": Task(config), "gemm": Task(config, "gemm")}
    if options.peers:
        tasks |= _peer_tasks(config, options)
    results = take_turns([{name: task} for name, task in tasks.items()], options)
    peaks = results.pop("gemm")["flops_per_second"]
    ours = results["ours"]
    if ours["device"][0].startswith("CPU"):
        save_peak(config.precision, options.threads, max(peaks))
    return {
        "kernels": ours["kernels"][0],
        "vocab_size": ours["vocab_size"][0],
        "gemm_gflops": median(peaks) / 1e9,
        "implementations": [_row(name, config, results[name], ours, peaks) for name in results],
    }


def _peer_tasks(config: Config, options: StepOptions) -> dict[str, Task]:
    """Return the tasks of the peers that work on this machine."""
    tasks = {}
    if config.precision == "bfloat16":
        tasks["ours-float32"] = Task(dataclasses.replace(config, precision="float32"))
    (ours,) = run([Task(config)], options)
    peers = PEERS[config.precision]
    if not ours["network"]:
        raise UserError(
            f"no peer implements a network with the weights {', '.join(ours['shapes'])}: leave out"
            " --peers"
        )
    if config.adaptive_softmax_cutoffs:
        peers = ["torch"]  # Only PyTorch has an adaptive softmax. It fails with autocast.
    elif ours["network"] != "lstm" or config.tie_weights or config.optimizer != "sgd":
        peers = [name for name in peers if name != "tensorflow"]  # untied LSTMs with SGD
    for name in peers:
        task = Task(config, name, shapes=ours["shapes"])
        try:
            (found,) = run([task], options)  # this run also fills the caches of torch.compile
        except RunError as error:
            logger.warning("left out: %s", error)
            continue
        if found["device"][:3] != ours["device"][:3]:
            devices = found["device"], ours["device"]
            logger.warning("left out: %s runs on %s, and this program on %s", name, *devices)
            continue
        tasks[name] = task
    return tasks


def _row(
    name: str,
    config: Config,
    result: Mapping[str, list],
    ours: Mapping[str, list],
    peaks: Sequence[float],
) -> dict[str, Any]:
    """Return the results of an implementation, compared with ours and with the GEMM peaks."""
    seconds = result["seconds"]
    row = {
        "implementation": name,
        **speeds(config.batch_size * config.num_steps, seconds),
        "ms_per_step": 1000 * median(seconds),
        "time_over_ours": paired_ratio(seconds, ours["seconds"]),
        "peak_mb": median(result["peak_mb"]),
        "first_losses": result["losses"][0],
        "first_grad_norms": result["grad_norms"][0],
        "seconds_per_step": seconds,
    }
    # The products of user-defined networks are unknown. The products of clusters depend on the
    # words. The peaks are those of the config's precision.
    is_known = ours["network"][0] == "lstm" and not config.adaptive_softmax_cutoffs
    if not is_known or name == "ours-float32":
        return row
    num_tokens = config.num_steps * config.batch_size
    flops = num_tokens * flops_per_token(ours["shapes"][0], config.tie_weights)
    shares = [flops / each / peak for each, peak in zip(seconds, peaks)]
    return {**row, "gflops": flops / median(seconds) / 1e9, "share_of_gemm_peak": median(shares)}
