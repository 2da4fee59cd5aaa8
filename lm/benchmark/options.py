"""What the benchmarks can be told: one dataclass for each command.

Its fields become the command's flags, and its docstring what `--help` says.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence
from typing import Optional

from lm.cli.flags import Flags
from lm.config import Config
from lm.config_file import load_config_file
from lm.distributed import mpirun
from lm.distributed.cores import count_cores
from lm.errors import UserError
from lm.options import Checked, option, replaced


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    """How it is measured. Raises UserError, naming the flag, for a value out of range."""

    out: str = option("benchmarks", "directory of the JSON file and the plots")
    repeats: int = option(10, "measurements of each kind", low=1)
    intra_op_threads: Optional[int] = option(
        None, "threads of each rank (default: cores / ranks of a host)", low=1
    )

    # No fields, so no flags, except where a command can have several ranks.
    ranks = 1
    hosts = None

    @property
    def rank_counts(self) -> list[int]:
        """The numbers of ranks, ascending."""
        return parse_ranks(str(self.ranks))

    @property
    def threads(self) -> int:
        """Threads of each rank: the user's choice, or this host's cores shared out."""
        ranks = self.rank_counts[-1]
        if self.hosts:
            ranks = min(ranks, max(mpirun.slots(self.hosts)))
        return self.intra_op_threads or max(count_cores() // ranks, 1)

    def check(self, config: Config) -> None:
        """Raise a UserError if flags do not fit together."""
        _ = self.threads  # fails where ranks or hosts cannot be read


@dataclasses.dataclass(frozen=True)
class TrainingOptions(Options):
    """Options of the commands that measure training steps."""

    config: str = option("config_small", "a config in configs/, or a .py file, which is run")
    data_path: Optional[str] = option(
        None, "directory of a corpus (default: 10,000 random words, Zipf's law)"
    )
    steps_per_repeat: Optional[int] = option(
        None, "steps of a measurement (default: as many as fit into 2 s)", low=1
    )
    untimed_steps: int = option(2, "steps before each measurement that are not timed", low=0)

    def check(self, config: Config) -> None:
        super().check(config)
        if self.data_path and not os.path.isdir(self.data_path):
            raise UserError(f"data_path {self.data_path} is not a directory")


_OURS_ALONE = (  # fields that the peers' programs have not
    "embedding_init_scale", "embedding_size", "tie_weights", "embedding_keep_prob",
    "output_keep_prob", "locked_dropout", "recurrent_keep_prob", "forget_bias",
    "activation_penalty", "temporal_activation_penalty", "optimizer", "weight_decay",
    "asgd_trigger_epochs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StepOptions(TrainingOptions):
    """Measure a training step of one process: words/s, GFLOP/s, share of the GEMM peak.

    python -m lm.benchmark step --config config_small --peers
    """

    peers: bool = option(False, "measure PyTorch and the TF tutorial's graph, in turn")
    gemm_size: int = option(
        2048, "rows and columns of the matrices whose product is the GEMM peak", low=1
    )

    def check(self, config: Config) -> None:
        super().check(config)
        plain = Config()
        unlike = [name for name in _OURS_ALONE if getattr(config, name) != getattr(plain, name)]
        if self.peers and unlike:
            raise UserError(f"the peers compute without {', '.join(unlike)}: leave out --peers")


@dataclasses.dataclass(frozen=True)
class ScalingOptions(TrainingOptions):
    """Measure several ranks against one: strong and weak scaling, and where the time goes.

    Strong: the same global batch. Weak: the same rows per rank. Each rank has the same threads.

    python -m lm.benchmark scaling --config config_small --ranks 1,2,4
    python -m lm.benchmark scaling --ranks 1,2 --hosts host1:1,host2:1
    """

    ranks: str = option("1,2", "numbers of ranks")
    hosts: Optional[str] = option(None, "as mpirun's -H: host1:1,host2:1 (default: this host)")

    def check(self, config: Config) -> None:
        super().check(config)
        if self.rank_counts[-1] > config.batch_size:
            raise UserError(
                f"batch_size is {config.batch_size} but there are {self.rank_counts[-1]} ranks"
            )


@dataclasses.dataclass(frozen=True)
class AdviceOptions(ScalingOptions):
    """Predict what more ranks will bring, here and on a cluster.

    The prediction is made from one rank's step and the exchange, measured here. It is checked
    against the measured --ranks, and continued for a cluster with one rank per host.

    python -m lm.benchmark advise --config config_small --ranks 1,2 --link_gbps 25
    """

    repeats: int = option(5, "measurements of each kind", low=1)
    hosts: Optional[str] = option(None, "as mpirun's -H, one host: host1:2 (default: this host)")
    link_latency_us: float = option(25.0, "latency between hosts", low=0)
    link_gbps: float = option(10.0, "bandwidth between hosts, 10^9 bit/s", above=0)
    max_ranks: int = option(4096, "largest cluster to predict", low=1)

    def check(self, config: Config) -> None:
        super().check(config)
        if self.rank_counts[-1] < 2:
            raise UserError("the largest of ranks must be at least 2, not 1")
        if self.hosts and len(mpirun.slots(self.hosts)) > 1:  # the network would be counted twice
            raise UserError(
                f"advise measures one host, not {self.hosts}: say with --link_gbps and"
                " --link_latency_us what is between hosts"
            )


@dataclasses.dataclass(frozen=True)
class ExchangeOptions(Options):
    """Measure an allreduce of float32 over sizes: Horovod as training configures it, and MPI.

    python -m lm.benchmark exchange --ranks 2 --max_mb 64
    """

    repeats: int = option(5, "measurements of each kind", low=1)
    ranks: int = option(2, "number of ranks", low=2)
    hosts: Optional[str] = option(None, "as mpirun's -H: host1:1,host2:1 (default: this host)")
    max_mb: float = option(64.0, "largest message, in 2^20 bytes", low=0.001, high=4096)


def parse(argv: Sequence[str], kind: type[Options]) -> tuple[Config, Options]:
    """Turn a command line into a config, the default one where nothing is trained, and options.

    Args:
      argv: The command line, the command's name first.
      kind: The command's options.

    Raises:
      UserError: Bad flags, config or values; or the directory of the results cannot be made.
      InfoRequested: The command line has `--help`.
    """
    flags = Flags(inspect.cleandoc(kind.__doc__))
    trains = issubclass(kind, TrainingOptions)
    flags.define_fields(kind)
    file = None
    if trains:
        file = load_config_file(flags.peek(argv, "config") or kind.config)
        flags.define_fields(type(file.config), show_defaults=False)
    flags.parse(argv)
    config = Config()
    if file:
        config = replaced(file.config, **flags.given(type(file.config)))
    options = kind(**flags.given(kind))
    if file and not file.functions.is_built_in and (kind is not StepOptions or options.peers):
        raise UserError(f"{file.path} brings a network: only `step`, without --peers, measures it")
    options.check(config)
    try:
        os.makedirs(options.out, exist_ok=True)  # now, not after hours of measurements
    except OSError as error:
        raise UserError(f"cannot make the directory {options.out}: {error.strerror}") from error
    if not os.access(options.out, os.W_OK):
        raise UserError(f"cannot write to the directory {options.out}")
    return config, options


def parse_ranks(text: str) -> list[int]:
    """Turn "1,2,4" into numbers of ranks, ascending, each once.

    Raises:
      UserError: It is something else.
    """
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise UserError(f"ranks must be numbers of at least 1 like 1,2,4, not {text!r}")
    return ranks
