"""The settings of a run: `Config` determines the result, and `RunOptions` controls the execution.

The command-line flags are generated from these fields.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection

from lm import logger
from lm.errors import UserError
from lm.options import MAX_SEED, Checked, defaults, option

_MAX_UNITS = 100_000
# T * B tokens must be a valid tensor dimension.
MAX_ROWS, _MAX_STEPS = 200_000, 10_000
MAX_THREADS = 4096  # A process with many more threads fails.


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """The model, its schedule, its data and its seed.

    The same Config gives the same run on any number of ranks.
    """

    name: str = option(
        "custom", "short name of the config, for run directories and tables", affects="nothing"
    )

    # Data.
    corpus: str = option(
        "files", "files (PTB or your own text in --data_path) or embedded (a synthetic corpus)",
        choices=("files", "embedded"), affects="data",
    )  # fmt: skip
    tokenizer: str = option(
        "words", "words, characters, bytes, or the path of a tokenizer.json, of a SentencePiece"
        " model, or of a directory with GPT-2's files", affects="data",
    )  # fmt: skip
    vocab_size: int | None = option(
        None, "size of the vocabulary, including <eos> and <unk>; <unk> replaces the rarest words"
        " or characters (default: keep all). Required for a corpus of token IDs if neither"
        " --tokenizer nor --vocabulary is given",
        low=3, affects="data",
    )  # fmt: skip
    min_count: int = option(
        1, "replace words that occur fewer than N times in the training text by <unk>", low=1,
        affects="data",
    )  # fmt: skip
    vocabulary: str | None = option(
        None, "file with the words of the vocabulary, one per line in the order of their IDs"
        " (default: the words of the training text)", affects="data",
    )  # fmt: skip
    split: str = option(
        "5,5", "percentages of the lines for valid and test if --data_path is a single file",
        affects="data",
    )  # fmt: skip
    token_dtype: str = option(
        "uint16", "type of the integers of .bin files", affects="data",
        choices=("uint8", "uint16", "int32", "uint32", "int64"),
    )  # fmt: skip

    # Model: Zaremba, Sutskever, Vinyals (2014), https://arxiv.org/abs/1409.2329.
    init_scale: float = option(0.1, "weights start uniformly in +-init_scale", above=0, high=10)
    embedding_init_scale: float | None = option(
        None, "init_scale of the embedding (default: init_scale)", above=0, high=10
    )
    hidden_size: int = option(200, "units of each LSTM layer", low=1, high=_MAX_UNITS)
    embedding_size: int | None = option(
        None, "size of the embedding (default: hidden_size)", low=1, high=_MAX_UNITS
    )
    tie_weights: bool = option(
        False, "use the embedding as the weights of the output layer; outputs of a different size"
        " are projected to the size of the embedding. adaptive_input: ties the tables, but not the"
        " projections, like fairseq by default",
    )  # fmt: skip
    adaptive_softmax_cutoffs: str = option(
        "", "predict rare words with fewer units: the first word (by frequency) of each cluster,"
        " such as 2000,20000,100000 (default: full softmax)",
    )  # fmt: skip
    adaptive_softmax_factor: int = option(
        4, "adaptive softmax: each cluster has N times fewer units than the previous", low=2
    )
    adaptive_input: bool = option(
        False, "divide the embedding into the bands of the adaptive softmax, each with N times"
        " fewer units, which are projected to embedding_size",
    )  # fmt: skip
    num_layers: int = option(2, "number of LSTM layers", low=1, high=100)
    num_steps: int = option(20, "time steps of truncated backpropagation", low=1, high=_MAX_STEPS)
    keep_prob: float = option(
        1.0, "probability of keeping a unit in dropout (1: no dropout)", above=0, high=1
    )
    embedding_keep_prob: float | None = option(
        None, "keep_prob of the embedding's outputs (default: keep_prob)", above=0, high=1
    )
    output_keep_prob: float | None = option(
        None, "keep_prob of the top layer's outputs (default: keep_prob)", above=0, high=1
    )
    recurrent_keep_prob: float = option(
        1.0, "probability of keeping a recurrent weight in a step (weight-drop)", above=0, high=1
    )
    locked_dropout: bool = option(
        False, "drop the same units of a row in all time steps of a window (variational dropout)"
    )
    forget_bias: float = option(
        0.0, "added to the forget gates (1 in TensorFlow's BasicLSTMCell)", low=-100, high=100
    )
    reset_state: str = option(
        "never", "tokens at which the recurrent state starts at zero: never, line (line ends) or"
        " document (separators such as <|endoftext|>)", choices=("never", "line", "document"),
    )  # fmt: skip
    activation_penalty: float = option(
        0.0, "alpha of AR: penalty on the top layer's squared outputs after dropout", low=0
    )
    temporal_activation_penalty: float = option(
        0.0, "beta of TAR: penalty on the top layer's squared changes from step to step", low=0
    )

    precision: str = option(
        "float32", "bfloat16 rounds the factors of matrix products; everything else uses float32."
        " bfloat16 is faster only on CPUs with AVX512_BF16 or AMX", choices=("float32", "bfloat16"),
    )  # fmt: skip

    # Optimization. docs/optimization.md lists the published recipe of each field.
    batch_size: int = option(
        20, "rows of the GLOBAL batch, which the ranks divide", low=1, high=MAX_ROWS
    )
    num_epochs: int = option(13, "passes over the training split", low=1, affects="length")
    num_steps_total: int | None = option(
        None, "length of the training and of the schedules in steps, instead of num_epochs; 0 for"
        " num_epochs", low=0, affects="length",
    )  # fmt: skip
    window_order: str = option(
        "sequential", "sequential, or shuffled: each epoch visits the windows in a different order"
        " (only for networks without recurrent state)", choices=("sequential", "shuffled"),
    )  # fmt: skip
    optimizer: str = option(
        "sgd", "sgd, momentum (classic, without Nesterov's change), adam (bias-corrected), adagrad"
        " or rmsprop", choices=("sgd", "momentum", "adam", "adagrad", "rmsprop"),
    )  # fmt: skip
    momentum: float = option(
        0.9, "factor on the velocity at each step", used_by="optimizer momentum", low=0, below=1
    )
    adam_beta1: float = option(
        0.9, "decay of the running mean of gradients", used_by="optimizer adam", low=0, below=1
    )
    adam_beta2: float = option(
        0.999, "decay of the running mean of squared gradients", used_by="optimizer adam", low=0,
        below=1,
    )  # fmt: skip
    adam_epsilon: float = option(
        1e-8, "added to the root of the squared gradient's mean", used_by="optimizer adam", above=0
    )
    adagrad_initial_value: float = option(
        0.1, "initial value of the sums of squared gradients", used_by="optimizer adagrad", above=0
    )
    rmsprop_decay: float = option(
        0.9, "decay of the running mean of squared gradients", used_by="optimizer rmsprop", low=0,
        below=1,
    )  # fmt: skip
    rmsprop_epsilon: float = option(
        1e-10, "added to the squared gradient's mean", used_by="optimizer rmsprop", above=0
    )
    weight_decay: float = option(
        0.0, "add N times the weights to the gradient (adam: decoupled, as AdamW)", low=0
    )
    asgd_trigger_epochs: int | None = option(
        None, "start to average the weights when the validation perplexity is worse than the best"
        " one from more than N epochs ago (NT-ASGD); 0 for no average", low=0,
    )  # fmt: skip
    ema_decay: float = option(
        0.0, "validate, test and use an exponential moving average of the weights with this decay;"
        " 0 for no average", low=0, below=1,
    )  # fmt: skip
    learning_rate: float = option(1.0, "learning rate before decay", above=0, high=1e38)
    lr_schedule: str = option(
        "decay", "decay multiplies the rate by lr_decay per epoch; plateau by lr_plateau_factor"
        " after each validation without a new best perplexity; linear and cosine reach lr_min_ratio"
        " at the end of the training; inverse_sqrt by sqrt(warmup_steps / step)",
        choices=("decay", "plateau", "linear", "cosine", "inverse_sqrt"),
    )  # fmt: skip
    lr_min_ratio: float = option(
        0.0, "the last learning rate, divided by learning_rate",
        used_by="lr_schedule linear or cosine", low=0, high=1,
    )  # fmt: skip
    lr_plateau_factor: float = option(
        0.25, "factor on the learning rate", used_by="lr_schedule plateau", above=0, below=1
    )
    lr_decay: float = option(
        0.5, "factor on the learning rate per epoch", used_by="lr_schedule decay", above=0, high=1
    )
    lr_decay_start_epoch: int = option(
        5, "first epoch (counted from 1) with a decayed learning rate", used_by="lr_schedule decay",
        low=1,
    )  # fmt: skip
    max_grad_norm: float = option(
        5.0, "clip the gradient's global norm to this (inf: no clipping)", above=0
    )
    trainable: str = option(
        "", "train only the weights whose name matches this regular expression, and freeze all"
        " other weights (default: train all weights)",
    )  # fmt: skip
    scale_lr_by_worker: str = option(
        "none", "multiply the learning rate by 1, sqrt(ranks) or ranks; use none unless batch_size"
        " grows with the number of ranks", choices=("none", "sqrt", "linear"),
    )  # fmt: skip
    warmup_steps: int = option(0, "increase the learning rate linearly from 0 over N steps", low=0)
    seed: int = option(
        1, "seed of the weights, the dropout masks and the order of windows", low=0, high=MAX_SEED
    )

    # Evaluation.
    eval_batch_size: int = option(
        20, "rows in validation and test", low=1, high=MAX_ROWS, affects="evaluation"
    )
    eval_every_steps: int | None = option(
        None, "validate every N steps, in addition to the end of each epoch", low=1,
        affects="evaluation",
    )  # fmt: skip

    # The summation order of a step.
    virtual_ranks: int | None = option(
        None, "number of micro-batches in the global batch: runs on 1, 2, 4, ..., N ranks are"
        " bitwise identical (default: 8; for the network of a config file, the largest power of two"
        " up to 8 that divides batch_size). A thread computes one micro-batch of such a"
        " network at a time. A larger number needs less memory for activations, but up to two more"
        " copies of the gradients",
        choices=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(first >= second for first, second in itertools.pairwise([0, *self.cutoffs])):
            raise UserError(
                "adaptive_softmax_cutoffs must be increasing positive integers, such as"
                f" 2000,20000, not {self.adaptive_softmax_cutoffs!r}"
            )
        try:
            re.compile(self.trainable)
        except re.error as error:
            raise UserError(
                f"trainable {self.trainable!r} is not a regular expression: {error}"
            ) from error
        if self.ema_decay and self.asgd_trigger_epochs:
            raise UserError(
                "ema_decay and asgd_trigger_epochs are two averages: set one of them to 0"
            )
        if self.adaptive_input and not self.cutoffs:
            raise UserError("adaptive_input needs adaptive_softmax_cutoffs, such as 2000,20000")

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The token ID of the first word of each cluster, or () for a full softmax."""
        text = self.adaptive_softmax_cutoffs
        return tuple(int(n) if n.isdecimal() else 0 for n in text.split(",") if text)

    @property
    def unused(self) -> dict[str, str]:
        """The settings that have no effect, and the settings that are the reason."""
        found = {}
        if self.num_steps_total:
            total = f"num_steps_total {self.num_steps_total}"
            found["num_epochs"] = f"{total}: set num_steps_total to 0"
        if not self.adaptive_softmax_cutoffs:
            found["adaptive_softmax_factor"] = "a full softmax: also set adaptive_softmax_cutoffs"
        for field in dataclasses.fields(self):
            kind, _, users = field.metadata["used_by"].partition(" ")
            if kind and (chosen := getattr(self, kind)) not in users.split(" or "):
                found[field.name] = f"{kind} {chosen}: remove it, or choose {kind} {users}"
        return found

    def check_used(self, given: Collection[str], of_file: "Config") -> None:
        """Raise UserError if a given flag has no effect.

        If a setting of the config file, `of_file`, has no effect, log a warning: a momentum without
        `optimizer="momentum"`, for example.
        """
        default = defaults(type(of_file))
        for name, reason in self.unused.items():
            if name in given:
                raise UserError(f"{name} has no effect with {reason}")
            if name in of_file.unused and getattr(of_file, name) != default[name]:
                logger.warning("%s of the config file has no effect with %s", name, reason)


@dataclasses.dataclass(frozen=True)
class RunOptions(Checked):
    """Options of one job of a run."""

    affects_by_default = "nothing"

    data_path: str | None = option(
        None, "text file or directory of the corpus (default: the recorded one if the run resumes"
        " or uses --init_from, otherwise data)", is_path=True,
    )  # fmt: skip
    data_url: str | None = option(
        None, "address or path of the PTB .tgz (default: public addresses)", is_path=True,
    )  # fmt: skip
    output_dir: str | None = option(
        None, "directory of the run (default: runs/<name>-<time>)", is_path=True
    )
    resume: bool = option(
        False, "resume from the newest checkpoint in --output_dir if there is one, otherwise start",
    )  # fmt: skip
    init_from: str | None = option(
        None, "initialize the weights from this run or checkpoint, and use its tokenizer; or from a"
        " TF 1.x checkpoint: a prefix such as model.ckpt-4100, or a directory with a file named"
        " checkpoint", is_path=True, affects="weights",
    )  # fmt: skip
    checkpoint: str = option(
        "last", "--init_from RUN: the checkpoint of the run: last, best or a name",
        affects="weights",
    )  # fmt: skip
    init_partly: bool = option(
        False, "--init_from: load only the weights, and the rows of a TF 1.x program's tables, that"
        " fit a changed model", affects="weights",
    )  # fmt: skip
    init_rename: str = option(
        "", "--init_from of a TF 1.x checkpoint: regex=replacement turns the name of a weight into"
        " its name in the checkpoint (repeatable)", repeatable=True, affects="weights",
    )  # fmt: skip
    new_vocabulary: bool = option(
        False, "--init_from: build the vocabulary of this text instead of using the earlier run's."
        " Words of both vocabularies keep their weights, and other words are initialized",
        affects="weights",
    )  # fmt: skip
    checkpoint_every_steps: int | None = option(
        None, "save every N steps, in addition to the end of each epoch", low=1
    )
    checkpoint_every_minutes: float = option(
        10.0, "save when the last save is N minutes old (inf: never)", above=0
    )
    keep_checkpoints: int = option(
        3, "number of recent checkpoints to keep, in addition to the best", low=1
    )
    test_on: str = option(
        "last", "weights to test at the end: last, best (by validation perplexity) or none",
        choices=("last", "best", "none"), affects="evaluation",
    )  # fmt: skip
    allow_changed_config_file: bool = option(
        False, "resume although the config file, which defines a network or fields, has changed",
        affects="weights",
    )  # fmt: skip
    check_network: bool = option(
        True, "check the network of a config file when a run starts: results must be finite, and"
        " outputs must not depend on later words",
    )  # fmt: skip
    step_timeout_seconds: float = option(
        600.0, "end a job of several ranks if a rank waits this long for other ranks, or if rank 0"
        " waits this long for a save (0: never)", low=0,
    )  # fmt: skip
    max_steps: int | None = option(None, "stop training after N steps", low=1, affects="length")
    early_stopping_epochs: int | None = option(
        None, "stop training after N epochs without a new best validation perplexity", low=1,
        affects="length",
    )  # fmt: skip
    eval: bool = option(True, "validate after each epoch and test at the end", affects="evaluation")
    distributed_eval: bool = option(False, "evaluate on all ranks instead of only on rank 0")
    sample_every_steps: int | None = option(
        None, "draw a short text every N steps, for the log and metrics.jsonl", low=1
    )
    log_every_steps: int = option(100, "steps between two step events in metrics.jsonl", low=1)
    log_path: str | None = option(
        None, "write the log to this file in addition to log.txt", is_path=True
    )
    mpi_log: str = option(
        "master", "ranks that write log files: only rank 0 (master), all ranks (workers), or rank 0"
        " for all ranks after each epoch (collect)",
        choices=("master", "collect", "workers"),
    )  # fmt: skip
    timeline: str | None = option(
        None, "write Horovod's timeline to this file in an existing directory, for chrome://tracing",
        is_path=True,
    )  # fmt: skip
    on_event: str | None = option(
        None, "shell command on rank 0 that receives each event of metrics.jsonl as a line"
    )
    tensorboard: bool = option(True, "write event files for TensorBoard to the run directory")
    micro_batches_at_once: int | None = option(
        None, "micro-batches to compute at the same time (default: all; for the network of a config"
        " file, one per thread); fewer need less memory, with the same results", low=1,
        high=MAX_THREADS,
    )  # fmt: skip
    intra_op_threads: int | None = option(
        None, "threads of this rank (default: cores of the host / its ranks)", low=1,
        high=MAX_THREADS, per_host=True,
    )  # fmt: skip
    inter_op_threads: int | None = option(
        None, "operations, or micro-batches of the network of a config file, to compute at the same"
        " time (default: 1, or the threads of this rank)", low=1, high=MAX_THREADS, per_host=True,
    )  # fmt: skip
