"""From a config to a run that is ready to start: all that can fail before step 1."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from lm.checkpoint.run_dir import RunDir, open_run_dir
from lm.config import Config, RunOptions
from lm.data import embedded as synthetic
from lm.data.batches import Rows, TrainBatches, rows_of_rank
from lm.data.corpus import Corpus
from lm.data.run_corpus import CorpusRecord, find_data_path, load_run_corpus, record_of
from lm.distributed import agreement
from lm.distributed.communicator import Communicator
from lm.distributed.cores import unbind_from_core
from lm.distributed.devices import Threads, choose_threads, session_config, start_tensorflow
from lm.events.reporter import Reporter
from lm.training.tracing import parse_steps


class Job(NamedTuple):
    """A run that is ready to start on this rank."""

    config: Config
    options: RunOptions
    corpus: Corpus
    corpus_record: CorpusRecord
    truth: Optional[synthetic.Truth]  # of the embedded corpus
    rows: Rows
    batches: TrainBatches
    threads: Threads
    session_config: tf.ConfigProto
    profile_steps: range
    reporter: Reporter
    run_dir: Optional[RunDir]  # of rank 0, which alone reads and writes it

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
            **agreement.platform_facts(),
        }


def prepare(config: Config, options: RunOptions, comm: Communicator) -> Job:
    """Check and load everything that a run needs.

    Args:
      config: What is trained.
      options: How.
      comm: The ranks.

    Returns:
      The job of this rank.

    Raises:
      UserError, RunError: This rank cannot start, and why.
    """
    unbind_from_core()
    threads = choose_threads(options.intra_op_threads, options.inter_op_threads, comm.local_size)
    start_tensorflow(threads)
    rows = rows_of_rank(config.batch_size, comm.rank, comm.size)
    data_path = options.data_path or find_data_path(config, _earlier_runs(options))
    corpus, truth = load_run_corpus(config, data_path, options.data_url)
    batches = TrainBatches(corpus.train, config.batch_size, config.num_steps, rows)
    tf_config = session_config(threads, comm.local_rank, comm.local_size)
    profile_steps = parse_steps(options.profile_steps)
    # Last, so that a run that cannot start leaves nothing behind.
    run_dir = open_run_dir(config, options, corpus) if comm.is_rank_0 else None
    return Job(
        config=config,
        options=options,
        corpus=corpus,
        corpus_record=record_of(config, data_path, corpus),
        truth=truth,
        rows=rows,
        batches=batches,
        threads=threads,
        session_config=tf_config,
        profile_steps=profile_steps,
        reporter=Reporter(run_dir.path if run_dir else None, options.tensorboard),
        run_dir=run_dir,
    )


def _earlier_runs(options: RunOptions) -> list[str]:
    """Return the directories of the runs that this one goes on from."""
    directories = []
    if options.resume and options.output_dir:
        directories.append(options.output_dir)
    if options.init_from:  # RUN/checkpoints/step-00001000
        directories.append(os.path.dirname(os.path.dirname(os.path.abspath(options.init_from))))
    return directories
