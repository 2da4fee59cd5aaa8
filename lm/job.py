"""From a command line to a run that is ready to start: all that can fail before step 1."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any, NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf

from lm import agreement, flags, synthetic
from lm.batches import Rows, TrainBatches, rows_of_rank
from lm.config import Config, RunOptions
from lm.corpus import Corpus, load_corpus
from lm.distributed import Communicator
from lm.errors import UserError
from lm.reporting import Reporter
from lm.session import Threads, choose_threads, session_config, silence_banner, unbind_from_core


class Job(NamedTuple):
    """A run that is ready to start on this rank."""

    config: Config
    options: RunOptions
    corpus: Corpus
    truth: Optional[synthetic.Truth]  # of the embedded corpus
    rows: Rows
    batches: TrainBatches
    threads: Threads
    session_config: tf.ConfigProto
    reporter: Reporter

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name."""
        options = {
            field.name: getattr(self.options, field.name)
            for field in dataclasses.fields(self.options)
            if not field.metadata["per_host"]
        }
        return {
            **dataclasses.asdict(self.config),
            **options,
            "vocabulary": self.corpus.vocabulary.checksum,
            "corpus": self.corpus.checksum,
            "code": agreement.code_checksum(),
            "tensorflow": tf.__version__,
        }


def prepare(argv: Sequence[str], comm: Communicator) -> Job:
    """Check and load everything that a run needs.

    Args:
      argv: The command line, program name first.
      comm: The ranks.

    Returns:
      The job of this rank.

    Raises:
      UserError, RunError: This rank cannot start, and why.
    """
    config, options = flags.parse_training_flags(argv)
    unbind_from_core()
    silence_banner()
    threads = choose_threads(options.intra_op_threads, options.inter_op_threads, comm.local_size)
    rows = rows_of_rank(config.batch_size, comm.rank, comm.size)
    corpus, truth = _load_corpus(config, options)
    return Job(
        config=config,
        options=options,
        corpus=corpus,
        truth=truth,
        rows=rows,
        batches=TrainBatches(corpus.train, config.batch_size, config.num_steps, rows),
        threads=threads,
        session_config=session_config(threads, comm.local_rank, comm.local_size),
        reporter=Reporter(_make_output_dir(config, options) if comm.is_chief else None),
    )


def _load_corpus(config: Config, options: RunOptions) -> tuple[Corpus, Optional[synthetic.Truth]]:
    if config.corpus == "files":
        return load_corpus(options.data_path, config.vocab_size, options.data_url), None
    directory = os.path.join(options.data_path, "embedded")
    try:
        truth = synthetic.write_corpus(directory)
    except OSError as error:
        raise UserError(f"cannot write the embedded corpus to {directory}: {error}") from error
    return load_corpus(directory, config.vocab_size), truth


def _make_output_dir(config: Config, options: RunOptions) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output_dir = options.output_dir or os.path.join("runs", f"{config.name}-{stamp}")
    if os.path.exists(os.path.join(output_dir, "metrics.jsonl")):
        raise UserError(f"output_dir {output_dir} already holds a run: choose another one")
    try:
        os.makedirs(output_dir, exist_ok=True)
        # Found out now, not after the first epoch.
        probe = os.path.join(output_dir, ".writable")
        with open(probe, "w"):
            os.remove(probe)
    except OSError as error:
        raise UserError(f"cannot write to output_dir {output_dir}: {error}") from error
    return output_dir
