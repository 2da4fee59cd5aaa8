"""From a config to a run that is ready to start: all that can fail before step 1."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from typing import Any, NamedTuple, Optional

from lm.checkpoint.run_dir import RunDir, open_run_dir
from lm.config import Config, RunOptions
from lm.config_file import NetworkFunctions
from lm.data.batches import Rows, TrainBatches, rows_of_rank
from lm.data.corpus import Corpus, load_corpus_to_train
from lm.distributed.agreement import platform_facts, raise_on_all_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.devices import Device, session_config, start_tensorflow
from lm.errors import UserError, error_class
from lm.events.logs import worker_path
from lm.events.tracing import parse_steps
from lm.files import check_writable
from lm.model.network_check import check_network
from lm.record import RunRecord

logger = logging.getLogger("lm")

_FUSION = "HOROVOD_FUSION_THRESHOLD"


class Prepared(NamedTuple):
    """A run that is ready to start on this rank."""

    config: Config
    options: RunOptions
    comm: Communicator
    functions: NetworkFunctions
    corpus: Corpus
    record: RunRecord
    batches: TrainBatches
    device: Device
    profile_steps: range
    run_dir: Optional[RunDir]  # of rank 0, which alone reads and writes it


def prepare(
    config: Config,
    options: RunOptions,
    comm: Communicator,
    stack: contextlib.ExitStack,
    functions: NetworkFunctions,
) -> Prepared:
    """Check and load what a run needs, on all ranks together.

    Args:
      config: What is trained.
      options: How and where.
      comm: The ranks.
      stack: Frees the run's directory when it is closed.
      functions: The functions of the network.

    Raises:
      UserError, RunError: A rank cannot start, and why.
    """
    device = start_tensorflow(comm, options.intra_op_threads, options.inter_op_threads)
    rows = raise_on_all_ranks(comm, lambda: _start(config, options, comm))
    # One rank of each host first: a download that fails does so once, not on one after the other.
    is_first = comm.local_rank == 0
    early = raise_on_all_ranks(
        comm, lambda: load_corpus_to_train(config, options), takes_part=is_first
    )

    def rest() -> Prepared:
        corpus = early or load_corpus_to_train(config, options)
        record = RunRecord(
            config=dataclasses.asdict(config),
            vocabulary=corpus.vocabulary.checksum,
            corpus=corpus.record,
            config_file=functions.file_record,
        )
        _check_files(options, comm)
        if options.check_network:
            check_network(config, len(corpus.vocabulary), functions, session_config(device))
        return Prepared(
            config=config,
            options=options,
            comm=comm,
            functions=functions,
            corpus=corpus,
            record=record,
            batches=TrainBatches(corpus.train, config.batch_size, config.num_steps, rows),
            device=device,
            profile_steps=parse_steps(options.profile_steps),
            # Last: what cannot start makes no directory.
            run_dir=open_run_dir(config, options, record, stack) if comm.is_rank_0 else None,
        )

    return raise_on_all_ranks(comm, rest)


def _start(config: Config, options: RunOptions, comm: Communicator) -> Rows:
    _check_options(config, options)
    return rows_of_rank(config.batch_size, comm.rank, comm.size, config.virtual_ranks)


def _check_options(config: Config, options: RunOptions) -> None:
    if options.init_partly and not options.init_from:
        raise UserError("--init_partly needs --init_from, the checkpoint to take weights of")
    wanted = {
        "lr_schedule plateau": config.lr_schedule == "plateau",
        "asgd_trigger_epochs": config.asgd_trigger_epochs,
        "early_stopping_epochs": options.early_stopping_epochs,
        "test_on best": options.test_on == "best",
    }
    for name, is_wanted in wanted.items():
        if is_wanted and not options.eval:
            raise UserError(f"{name} goes by the validation perplexity: leave out --noeval")


def _check_files(options: RunOptions, comm: Communicator) -> None:
    paths = {}
    if options.timeline and comm.size == 1:
        logger.warning("--timeline: one process exchanges nothing; no timeline is written")
    elif options.timeline and comm.is_rank_0:
        paths["timeline"] = options.timeline
    if options.log_path and (comm.is_rank_0 or options.mpi_log == "workers"):
        paths["log_path"] = worker_path(options.log_path, comm.rank)
    for name, path in paths.items():
        directory = os.path.dirname(os.path.abspath(path))
        if options.output_dir and directory == os.path.abspath(options.output_dir):
            continue  # which need not be there yet
        try:
            check_writable(path)
        except OSError as error:
            raise error_class(error)(
                f"cannot write --{name} {path}: {error.strerror}; choose another file"
            ) from error


def facts_of(run: Prepared) -> dict[str, Any]:
    """Return what must be the same on all ranks, by name."""
    options_of_all = {
        field.name: getattr(run.options, field.name)
        for field in dataclasses.fields(run.options)
        if not field.metadata["per_host"]
    }
    return {
        **run.record.facts,
        **options_of_all,
        # mpirun hands it to the ranks of its own host alone, and Horovod would crash (signal 11).
        _FUSION: run.comm.settings.get(_FUSION),
        **platform_facts(),
    }
