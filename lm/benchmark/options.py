"""The options of the benchmarks: one dataclass for each command.

The fields become the flags of the command, and `--help` prints the docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence

from lm.cli.flags import parse as parse_flags
from lm.config import Config
from lm.distributed import launch
from lm.distributed.devices import count_cores
from lm.errors import UserError
from lm.options import Checked, option

_NOT_IN_PEERS = (  # fields of Config that the peers do not implement
    "embedding_init_scale", "embedding_size", "tie_weights", "embedding_keep_prob",
    "output_keep_prob", "locked_dropout", "recurrent_keep_prob", "forget_bias",
    "activation_penalty", "temporal_activation_penalty", "optimizer", "weight_decay",
    "asgd_trigger_epochs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    """The options that all commands share."""

    config: str = option(
        "config_small", "a config in configs/, or a path to a .py file", is_path=True
    )
    data_path: str | None = option(
        None,
        "directory of a corpus (default: random words of a 10,000-word vocabulary)",
        is_path=True,
    )
    repeats: int = option(8, "measurements of each kind", low=1)
    intra_op_threads: int | None = option(
        None, "threads of each rank (default: cores / ranks of a host)", low=1
    )
    out: str = option("benchmarks", "directory of the JSON file with the results", is_path=True)

    # The flags of the commands with several ranks replace these two.
    ranks = "1"
    hosts = None

    @property
    def rank_counts(self) -> list[int]:
        """The rank counts in ascending order.

        Raises:
          UserError: If `ranks` is not a list of positive integers.
        """
        try:
            counts = sorted({int(part) for part in self.ranks.split(",")})
        except ValueError:
            counts = []
        if not counts or counts[0] < 1:
            raise UserError(f"ranks must be positive integers like 1,2,4, not {self.ranks!r}")
        return counts

    @property
    def threads(self) -> int:
        """Threads of each rank: the user's choice, or the cores divided by the ranks of a host."""
        ranks = self.rank_counts[-1]
        if self.hosts:
            ranks = min(ranks, max(launch.slots_of_hosts(self.hosts)))
        return self.intra_op_threads or max(count_cores() // ranks, 1)

    def check(self, config: Config) -> None:
        """Raise a UserError if options contradict each other or the config."""
        if self.data_path and not os.path.isdir(self.data_path):
            raise UserError(f"data_path {self.data_path} is not a directory")
        if self.rank_counts[-1] > config.batch_size:
            raise UserError(
                f"batch_size is {config.batch_size} but there are {self.rank_counts[-1]} ranks"
            )
        _ = self.threads  # raises if hosts is invalid


@dataclasses.dataclass(frozen=True)
class StepOptions(Options):
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


@dataclasses.dataclass(frozen=True)
class ScalingOptions(Options):
    """Compare several ranks with one rank: strong and weak scaling, and the parts of a step.

    Strong scaling keeps the global batch. Weak scaling keeps the rows of each rank. Each rank has
    the same number of threads. The exchange is the time that no computation hides.

    python -m lm.benchmark scaling --config config_small --ranks 1,2,4
    python -m lm.benchmark scaling --ranks 1,2 --hosts host1:1,host2:1
    """

    ranks: str = option("1,2", "comma-separated rank counts")
    hosts: str | None = option(None, "like mpirun -H: host1:1,host2:1 (default: this host)")


@dataclasses.dataclass(frozen=True)
class AdviceOptions(Options):
    """Predict the speedup of more ranks, on this host and on a cluster.

    The prediction is based on the step of one rank and on the gradient exchange, both measured on
    this host. It is compared with measurements of --ranks, and extended to a cluster with one rank
    per host.

    python -m lm.benchmark advise --config config_small --ranks 1,2 --link_gbps 25
    """

    repeats: int = option(4, "measurements of each kind", low=1)
    ranks: str = option("1,2", "comma-separated rank counts to measure on this host")
    link_latency_us: float = option(25.0, "latency between hosts in microseconds", low=0)
    link_gbps: float = option(10.0, "bandwidth between hosts in 10^9 bit/s", above=0)

    def check(self, config: Config) -> None:
        super().check(config)
        if self.rank_counts[-1] < 2:
            raise UserError("the largest of ranks must be at least 2, not 1")


def parse(argv: Sequence[str], kind: type[Options]) -> tuple[Config, Options]:
    """Parse the command line of a benchmark.

    Args:
      argv: The command line, starting with the name of the command.
      kind: The options of the command.

    Returns:
      The config with the given flags applied, and the options.

    Raises:
      UserError: If a flag, the config or a value is invalid.
      OSError: If the directory --out cannot be created.
      InfoRequested: See `lm.cli.flags.parse`.
    """
    arguments = parse_flags(argv, inspect.cleandoc(kind.__doc__), kind, Config)
    config, options, file = arguments[Config], arguments[kind], arguments.config_file
    if not file.functions.is_built_in and (kind is not StepOptions or options.peers):
        raise UserError(
            f"{file.path} defines a network: only `step` without --peers can measure it"
        )
    options.check(config)
    os.makedirs(options.out, exist_ok=True)  # fail before hours of measurements
    return config, options
