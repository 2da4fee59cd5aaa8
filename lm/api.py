"""Train and use runs from Python and from notebooks. docs/python.md shows examples."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lm import logger
from lm.cli.parser import ConfigChoice
from lm.config import Config, RunOptions
from lm.config_file import load_config_file
from lm.distributed.agreement import from_rank_0
from lm.distributed.devices import check_process
from lm.distributed.launch import connect, launched_rank
from lm.errors import Stopped, UserError
from lm.events.logs import keep_early_lines, start_console
from lm.events.read import iterate_events, read_events
from lm.functions import BUILT_IN
from lm.options import replaced
from lm.record import recorded_config
from lm.tensorflow_import import import_tensorflow

if TYPE_CHECKING:
    from lm.inference.generator import Generated
    from lm.inference.scorer import Score
    from lm.inference.trained_run import Run
    from lm.tokens.tokenizers import Tokenizer

_connect = functools.cache(connect)  # at most one connection per process
# Only one thread may open a run at a time, because opening temporarily changes the stderr, random
# numbers and TensorFlow modules of the process.
_opening = threading.RLock()
_training = threading.Lock()  # held during a training, which has the log of the process


def train(config: str | os.PathLike | None = None, **settings: Any) -> dict[str, Any]:
    """Train a model, and return the final results.

    The log and a progress bar appear on stderr or in the notebook. Under mpirun, all ranks call
    this function together.

    Args:
      config: A config in `configs/`, or the path of a config file. The default is config_small, or
        the config of the run to resume.
      **settings: Fields of `Config` and `RunOptions`, which are the flags of `lm.train`.

    Returns:
      The fields of the last epoch and of the test in `metrics.jsonl`, and `output_dir`.
    """
    _start()
    from lm.training.run import train as run_training

    keep_early_lines()
    file = load_config_file(_path(config or ConfigChoice.config))
    options, fields = {}, {}
    for name, value in settings.items():
        if name == "timeline":  # must be known before the first connection of this process
            raise UserError("timeline is only possible with python -m lm.train")
        if name in RunOptions.__dataclass_fields__:
            is_path = RunOptions.__dataclass_fields__[name].metadata["is_path"]
            is_text = isinstance(value, str | os.PathLike)
            options[name] = _path(value) if is_path and is_text else value
        elif name in file.config.__dataclass_fields__:
            fields[name] = value
        else:
            raise UserError(f"{name} is not a field of Config or RunOptions (see docs/flags.md)")
    how, comm, before = RunOptions(**options), _connect(), None
    if config is None and how.resume and how.output_dir:
        before = from_rank_0(comm, lambda: recorded_config(how.output_dir))
    kept = file.config if before is None else Config(**before)
    changed = replaced(kept, **fields)
    changed.check_used(fields, file.config)
    if not _training.acquire(blocking=False):
        raise UserError("another thread of this process is training: use one process per run")
    try:
        results = run_training(changed, how, comm, file.functions)
    except Stopped as error:
        if error.exit_code != 128 + signal.SIGINT:
            raise
        # A loop over several runs must not start the next run.
        raise KeyboardInterrupt(str(error)) from None
    finally:
        _training.release()
    if "epoch" in results:
        return results
    # A finished run that is resumed trains no epoch.
    recorded = from_rank_0(comm, lambda: _recorded_results(results["output_dir"]))
    return {**recorded, **results}


def _start() -> None:
    import_tensorflow()
    if not logger.handlers:
        start_console(launched_rank())


def _path(path: str | os.PathLike) -> str:
    return os.path.expanduser(os.fspath(path))


def _recorded_results(run_dir: str) -> dict[str, Any]:
    """Return the fields of the last epoch in metrics.jsonl."""
    epoch: dict[str, Any] = {}
    for event in iterate_events(run_dir, {}):
        if event["event"] == "epoch":
            epoch = event
    return {name: value for name, value in epoch.items() if name != "event"}


def open_run(
    directory: str | os.PathLike,
    checkpoint: str = "last",
    config: str | os.PathLike | None = None,
    allow_changed_config_file: bool = False,
) -> "TrainedRun":
    """Open a run at one of its checkpoints.

    Args:
      directory: The directory of the run, or of one of its checkpoints.
      checkpoint: "last", "best", or the name or the directory of a checkpoint.
      config: The config file of the run, if it defines a network or config fields.
      allow_changed_config_file: Whether the config file may have changed since the training.
    """
    _start()
    from lm.inference import trained_run

    # A program may change its working directory before it uses the run.
    directory, checkpoint = os.path.abspath(_path(directory)), _path(checkpoint)
    if os.sep in checkpoint:
        checkpoint = os.path.abspath(checkpoint)
    with _opening:
        functions = load_config_file(_path(config)).functions if config else BUILT_IN
        run = trained_run.open_run(directory, checkpoint, functions, allow_changed_config_file)
    return TrainedRun(run)


class TrainedRun:
    """A trained run. It keeps the last generator and scorer, so that later calls are fast."""

    def __init__(self, run: "Run"):
        self._run = run
        self._opened: dict[type, Any] = {}  # the last generator and scorer
        self._lock = threading.Lock()  # a call may close the session of an earlier call

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the run. `tokenizer.tokens[i]` is the name of the token with ID i."""
        return self._run.tokenizer

    @contextlib.contextmanager
    def _open(self, kind: type, rows: int) -> Iterator[Any]:
        """Lend the generator or the scorer to this thread, for batches with this many rows."""
        check_process()
        if rows < 1:
            raise UserError(f"batch_size must be at least 1, not {rows}")
        with self._lock:
            before = self._opened.get(kind)
            if not before or not (before.any_rows or before.rows == rows):
                with _opening:
                    self._opened[kind] = kind(self._run, rows)
                if before:
                    before.close()  # Each one has a copy of the weights.
            self._opened[kind].rows = rows
            yield self._opened[kind]

    def close(self) -> None:
        """Free the memory of the sessions."""
        with self._lock:
            while self._opened:
                self._opened.popitem()[1].close()

    def generate(
        self, prompts: str | Iterable[str] = "", batch_size: int = 32, **sampling: Any
    ) -> "list[Generated]":
        """Continue a prompt or several prompts. Returns prompts, texts and log-probabilities.

        `sampling` are the flags of `lm.generate`, such as `num_words`, `seed` and `beam_size`.
        """
        from lm.inference.generator import Generator
        from lm.inference.sampling import Sampling

        how = Sampling(**sampling)
        if sampling.get("seed") is None and not how.beam_size:
            logger.info("seed %d", how.seed)  # for generating the texts again
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        rows = max(batch_size, how.beam_size)
        if not self._run.functions.is_built_in:  # It computes all rows, needed or not.
            rows = how.beam_size or max(1, min(batch_size, len(prompts) * how.num_samples))
        with self._open(Generator, rows) as generator:
            encoded, error = generator.encode(prompts)
            if error:  # before the texts of the other prompts are generated
                raise error
            return list(generator.continue_all(encoded, how))

    def score(self, lines: str | Iterable[str], batch_size: int = 16) -> "list[Score]":
        """Return the log-probabilities of texts. Each text starts with an empty state."""
        from lm.inference.scorer import Scorer

        lines = [lines] if isinstance(lines, str) else lines
        lines = [line.removesuffix("\n") for line in lines]
        with self._open(Scorer, batch_size) as scorer:
            return list(scorer.score(lines, "line"))

    def evaluate(self, split: str | os.PathLike = "valid", **options: Any) -> dict[str, Any]:
        """Return the perplexity of a split or of a text file, with the fields of `lm.evaluate`.

        `options` are `data_path`, `eval_batch_size`, `token_dtype` and `lines`.
        """
        from lm.inference.evaluation import evaluate

        if options.get("data_path") is not None:
            options["data_path"] = _path(options["data_path"])
        return evaluate(self._run, [_path(split)], opening=_opening, **options)[0]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the events of the training, for example for `pandas.DataFrame`."""
        events, damage = read_events(self._run.directory)
        if damage:
            logger.warning(damage)
        return [dict(event) for event in events]
