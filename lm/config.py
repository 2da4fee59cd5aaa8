"""The settings of a run: what is trained (`Config`) and how (`RunOptions`).

Each field is declared once, with its default, its help text and its allowed range; the
command-line flags and their `--help` are generated from here (`lm/cli/flags.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Optional

from lm.options import Checked, option

_INT32 = 2**31 - 1  # more than that is no size of a tensor
_MOST_THREADS = 4096  # far beyond, the process ends when they are started


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """What is trained: the model, its schedule, its data and its seed.

    The same Config gives the same run on any number of ranks. Raises UserError, naming the
    field, for a value of the wrong type or out of range.
    """

    name: str = option(
        "custom", "short name of the config, for run directories and tables", may_change=["resume"]
    )

    # Data.
    corpus: str = option(
        "files",
        "files: PTB or own text in --data_path; embedded: a small generated language",
        choices=("files", "embedded"), may_change=(),
    )  # fmt: skip
    vocab_size: Optional[int] = option(
        None, "keep at most this many words; the others become <unk> (default: all)", low=3,
        may_change=(),
    )  # fmt: skip

    # Model: Zaremba, Sutskever, Vinyals (2014), https://arxiv.org/abs/1409.2329.
    init_scale: float = option(0.1, "weights start uniform in +-init_scale", above=0, high=10)
    embedding_init_scale: Optional[float] = option(
        None, "the embedding starts uniform in +-embedding_init_scale (default: init_scale)",
        above=0, high=10,
    )  # fmt: skip
    hidden_size: int = option(200, "units of each LSTM layer", low=1, high=_INT32)
    embedding_size: Optional[int] = option(
        None, "units of the embedding (default: hidden_size)", low=1, high=_INT32
    )
    tie_weights: bool = option(
        False, "let the embedding be the output layer's weights too; outputs of another size are"
        " projected down to it",
    )  # fmt: skip
    num_layers: int = option(2, "number of LSTM layers", low=1, high=1000)
    num_steps: int = option(20, "time steps of truncated back-propagation", low=1, high=_INT32)
    keep_prob: float = option(
        1.0, "probability of keeping a unit in dropout (1: no dropout)", above=0, high=1
    )
    embedding_keep_prob: Optional[float] = option(
        None, "keep_prob of the embedding's outputs (default: keep_prob)", above=0, high=1
    )
    output_keep_prob: Optional[float] = option(
        None, "keep_prob of the top layer's outputs (default: keep_prob)", above=0, high=1
    )
    recurrent_keep_prob: float = option(
        1.0, "probability of keeping a recurrent weight in a training step (weight-drop)",
        above=0, high=1,
    )  # fmt: skip
    locked_dropout: bool = option(
        False, "drop the same units of a row at all time steps of a window (variational dropout)"
    )
    forget_bias: float = option(
        0.0, "added to the LSTM's forget gates; TensorFlow's BasicLSTMCell adds 1",
        low=-100, high=100,
    )  # fmt: skip
    activation_penalty: float = option(
        0.0, "alpha of AR: penalty on the top layer's squared outputs after dropout",
        low=0, high=1e38,
    )  # fmt: skip
    temporal_activation_penalty: float = option(
        0.0, "beta of TAR: penalty on the top layer's squared changes from step to step",
        low=0, high=1e38,
    )  # fmt: skip

    precision: str = option(
        "float32",
        "bfloat16: the factors of matrix products are rounded to it; all else is float32. Faster on"
        " CPUs that multiply it (AVX512_BF16, AMX), not on others",
        choices=("float32", "bfloat16"),
    )

    # Optimization; docs/optimization.md says which published recipe each field is for.
    batch_size: int = option(
        20, "rows of the GLOBAL batch, shared out over all ranks", low=1, high=_INT32
    )
    num_epochs: int = option(
        13, "passes over the training split", low=1, high=_INT32, may_change=["resume", "search"]
    )
    optimizer: str = option(
        "sgd", "sgd; momentum: classic, not Nesterov's; adam: bias-corrected",
        choices=("sgd", "momentum", "adam"),
    )  # fmt: skip
    momentum: float = option(
        0.9, "momentum: share of the velocity that is kept at each step", low=0, below=1
    )
    adam_beta1: float = option(0.9, "adam: decay of the running mean of gradients", low=0, below=1)
    adam_beta2: float = option(
        0.999, "adam: decay of the running mean of squared gradients", low=0, below=1
    )
    adam_epsilon: float = option(
        1e-8, "adam: added to the root of the squared gradient's mean", above=0, high=1e38
    )
    weight_decay: float = option(
        0.0, "added to the gradient, times the weights; adam: decoupled, as AdamW", low=0, high=1e38
    )
    asgd_trigger_epochs: Optional[int] = option(
        None, "use the weights' average from when an epoch's validation perplexity is worse than"
        " the best of those more than so many epochs ago (NT-ASGD)", low=1,
    )  # fmt: skip
    learning_rate: float = option(1.0, "learning rate before decay", above=0, high=1e38)
    lr_schedule: str = option(
        "decay", "decay: by lr_decay per epoch; plateau: by lr_plateau_factor after each epoch"
        " without a new best validation perplexity", choices=("decay", "plateau"),
    )  # fmt: skip
    lr_plateau_factor: float = option(
        0.25, "plateau: factor on the learning rate", above=0, below=1
    )
    lr_decay: float = option(0.5, "decay: factor on the learning rate per epoch", above=0, high=1)
    lr_decay_start_epoch: int = option(
        5, "decay: first epoch (counted from 1) with a decayed learning rate", low=1
    )
    max_grad_norm: float = option(
        5.0, "clip the gradient's global norm to this (inf: no clipping)", above=0
    )
    scale_lr_by_worker: str = option(
        "none",
        "multiply the learning rate by 1, sqrt(ranks) or ranks; the global batch does not"
        " grow with the ranks, so none is right unless you raise batch_size too",
        choices=("none", "sqrt", "linear"),
    )
    warmup_steps: int = option(0, "raise the learning rate linearly from 0 over these steps", low=0)
    seed: int = option(1, "seed of the weights and the dropout masks", low=0, high=2**62)

    # Evaluation.
    eval_batch_size: int = option(
        20, "rows in validation and test", low=1, high=_INT32, may_change=["evaluate", "search"]
    )

    # How the sums of a step are made.
    virtual_ranks: int = option(
        8,
        "add up over rows as this many ranks would: runs on 1, 2, 4, ... up to so many ranks are"
        " equal, bit for bit",
        choices=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    )

    @property
    def follows_validation(self) -> bool:
        """Whether what is trained depends on the validation perplexities."""
        return self.lr_schedule == "plateau" or self.asgd_trigger_epochs is not None


@dataclasses.dataclass(frozen=True)
class RunOptions(Checked):
    """How and where a Config is trained.

    Only these options change the trained weights: `data_path`, `init_from`,
    `allow_changed_config_file`, `max_steps` and `early_stopping_epochs`.
    Raises UserError, naming the field, for a value of the wrong type or out of range.
    """

    data_path: Optional[str] = option(
        None, "directory of the corpus (default: that of the run that --resume or --init_from"
        " names, else data)", per_host=True, is_path=True, may_change=["resume", "search"],
    )  # fmt: skip
    data_url: Optional[str] = option(
        None, "address or path of the PTB .tgz (default: the public ones)", per_host=True,
        is_path=True, may_change=["resume", "search"],
    )  # fmt: skip
    output_dir: Optional[str] = option(
        None, "directory of the run (default: runs/<config>-<time>)", per_host=True, is_path=True,
        may_change=(),
    )  # fmt: skip
    resume: bool = option(
        False, "resume from the newest checkpoint in --output_dir, or start if it has none",
        may_change=(),
    )  # fmt: skip
    init_from: Optional[str] = option(
        None,
        "start with the weights, and only the weights, of this checkpoint directory",
        per_host=True,
        is_path=True,
    )
    init_partly: bool = option(
        False, "--init_from: take the weights that fit the model and the vocabulary, and start the"
        " others afresh, instead of refusing",
    )  # fmt: skip
    checkpoint_every_steps: Optional[int] = option(
        None, "save every so many steps, besides at the end of each epoch", low=1
    )
    checkpoint_every_minutes: float = option(
        10.0, "save when this many minutes have passed since the last save (inf: never)", above=0
    )
    keep_checkpoints: int = option(
        3, "how many of the last checkpoints to keep, besides the best", low=1
    )
    test_on: str = option(
        "last", "weights to test at the end: the last weights, the weights with the best validation"
        " perplexity, or none", choices=("last", "best", "none"), may_change=(),
    )  # fmt: skip
    allow_changed_config_file: bool = option(
        False, "resume although the config file, which defines a network or fields, has changed"
    )
    check_network: bool = option(
        False, "first check the network of a config file: no row of the batch must depend on"
        " another one, nor a time step on a later one",
    )  # fmt: skip
    step_timeout_seconds: float = option(
        600.0,
        "end the job when a rank has waited for the others, or rank 0 for the disk, for so long"
        " (0: never)",
        low=0,
    )
    max_steps: Optional[int] = option(None, "stop training after so many steps", low=1)
    early_stopping_epochs: Optional[int] = option(
        None, "stop training after so many epochs without a new best validation perplexity", low=1
    )
    eval: bool = option(True, "validate after each epoch and test at the end", may_change=())
    distributed_eval: bool = option(
        False, "share the rows of validation and test over the ranks, instead of rank 0 alone"
    )
    log_every_steps: int = option(100, "steps between two step events in metrics.jsonl", low=1)
    log_path: Optional[str] = option(
        None, "write the log to this file too, besides log.txt in the run's directory",
        per_host=True, is_path=True, may_change=(),
    )  # fmt: skip
    mpi_log: str = option(
        "master",
        "whose log lines go to the files: master: rank 0's; collect: all ranks', in rank 0's file"
        " after each epoch, each line with its rank; workers: each rank's, in a file of its own",
        choices=("master", "collect", "workers"), may_change=(),
    )  # fmt: skip
    timeline: Optional[str] = option(
        None, "write Horovod's timeline of the exchanges to this file, for chrome://tracing",
        per_host=True, is_path=True, may_change=(),
    )  # fmt: skip
    profile_steps: Optional[str] = option(
        None, "FIRST:LAST: write TensorFlow's trace of these steps into the run's directory",
        may_change=(),
    )  # fmt: skip
    tensorboard: bool = option(True, "write event files for TensorBoard into the run's directory")
    intra_op_threads: Optional[int] = option(
        None, "threads inside an operation (default: cores / ranks of the host)", low=1,
        high=_MOST_THREADS, per_host=True, may_change=["resume", "search"],
    )  # fmt: skip
    inter_op_threads: Optional[int] = option(
        None, "operations run at the same time (default: 1)", low=1, high=_MOST_THREADS,
        per_host=True, may_change=["resume", "search"],
    )  # fmt: skip

    @property
    def follows_validation(self) -> bool:
        """Whether validation perplexities decide when training ends or which weights are tested."""
        return self.early_stopping_epochs is not None or self.test_on == "best"
