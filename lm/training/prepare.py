"""The preparation of a run: everything that can fail before the graph is built."""

import contextlib
import dataclasses
import os
from typing import Any

from lm import logger
from lm.checkpoint.run_dir import RunDir, open_run_dir
from lm.config import Config, RunOptions
from lm.data.batches import TrainBatches, rows_of_rank
from lm.data.corpus import Corpus, load_corpus_to_train
from lm.distributed.agreement import check_agreement, on_all_ranks, platform_facts
from lm.distributed.communicator import Communicator
from lm.distributed.devices import Device, start_tensorflow
from lm.distributed.provenance import find_provenance
from lm.distributed.supervisor import Supervisor
from lm.errors import UserError
from lm.functions import NetworkFunctions
from lm.record import InitRecord, RunRecord, settings_that_follow_validation
from lm.tokens.selection import with_absolute_paths
from lm.training.initialize import Source, find_source


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that is ready to start on this rank."""

    config: Config
    options: RunOptions
    comm: Communicator
    functions: NetworkFunctions
    corpus: Corpus
    batches: TrainBatches  # batches with the rows of this rank
    record: RunRecord
    device: Device  # device of this rank
    run_dir: RunDir | None  # None except on rank 0
    output_dir: str  # the path of the run directory, which other hosts may not see
    source: Source | None = None  # the checkpoint of --init_from; None except on rank 0

    @property
    def test_on(self) -> str:
        """The weights to test: "last", "best" or "none"."""
        has_test = self.options.eval and self.corpus.test is not None
        return self.options.test_on if has_test else "none"


def prepare(
    config: Config,
    options: RunOptions,
    comm: Communicator,
    stack: contextlib.ExitStack,
    functions: NetworkFunctions,
    supervisor: Supervisor,
) -> Job:
    """Check and load everything that a run needs; all ranks call this together.

    Closing `stack` releases the run directory.
    """
    threads = options.intra_op_threads, options.inter_op_threads
    device = start_tensorflow(comm, *threads, divides_operations=functions.is_built_in)
    with on_all_ranks(comm):
        config = functions.resolve(with_absolute_paths(config))
        _check_options(config, options, comm.size)
        rows = rows_of_rank(config.batch_size, comm.rank, comm.size, config.virtual_ranks)
    # Load the corpus on one rank per host first. Otherwise, a failing download would fail on each
    # rank in turn, and each rank would read all files to verify them.
    corpus = verified = None
    for is_first in (True, False):
        with supervisor.preparing("the reading of the corpus"), on_all_ranks(comm):
            if is_first == (comm.local_rank == 0):
                corpus = load_corpus_to_train(config, options, verified)
        found = [sha256 for sha256 in comm.gather(corpus and corpus.sha256) if sha256]
        verified = found[0] if all(sha256 == found[0] for sha256 in found) else None
    provenance = find_provenance(comm)
    with on_all_ranks(comm):
        shuffle_seed = config.seed if config.window_order == "shuffled" else None
        record = RunRecord(
            config=dataclasses.asdict(config),
            vocabulary=corpus.tokenizer.sha256,
            corpus=corpus.record,
            config_file=functions.file_record,
            provenance=provenance,
        )
        sizes = config.batch_size, config.num_steps
        batches = TrainBatches(corpus.train, *sizes, rows, shuffle_seed)
        # An invalid option must not create a directory.
        run_dir = source = init = None
        if comm.is_rank_0:
            run_dir = open_run_dir(options, record, functions.config_class, stack)
            _check_rate(config, is_new=not run_dir.checkpoint)
            if run_dir.checkpoint:
                init = run_dir.checkpoint.manifest.record.init_from
                _check_init(options, init)
            elif options.init_from:
                source = find_source(options)
                init = source.record
            record = dataclasses.replace(record, init_from=init)
    job = Job(
        config=config,
        options=options,
        comm=comm,
        functions=functions,
        corpus=corpus,
        batches=batches,
        record=record,
        device=device,
        run_dir=run_dir,
        output_dir=comm.gather(run_dir and run_dir.path)[0],
        source=source,
    )
    check_agreement(comm, _facts(job))
    return job


def _check_options(config: Config, options: RunOptions, num_ranks: int) -> None:
    for name in ("init_partly", "init_rename", "new_vocabulary", "checkpoint"):
        is_given = getattr(options, name) != getattr(RunOptions(), name)
        if is_given and not options.init_from:
            raise UserError(f"--{name} needs --init_from, the checkpoint to load weights from")
    if options.resume and not options.output_dir:
        raise UserError("--resume needs --output_dir, the directory of the run to continue")
    if options.timeline and num_ranks == 1:
        raise UserError("--timeline shows the exchange between ranks: start at least 2 ranks")
    for setting in settings_that_follow_validation(dataclasses.asdict(config), options):
        if not options.eval:
            raise UserError(f"{setting} needs the validation perplexity: remove --noeval")


def _check_rate(config: Config, is_new: bool) -> None:
    """Reject a schedule that starts with its highest rate; older versions accepted it."""
    if is_new and config.lr_schedule == "inverse_sqrt" and not config.warmup_steps:
        raise UserError("lr_schedule inverse_sqrt needs warmup_steps, such as 4000")


def _check_init(options: RunOptions, recorded: InitRecord | None) -> None:
    """Reject --init_from for a run that did not start with it; a restarted job repeats the flag."""
    path = options.init_from and os.path.abspath(options.init_from)
    if path and recorded is None:
        raise UserError(
            f"{options.output_dir} started without --init_from, which has no effect on a run that"
            " is resumed: remove it, or start a new run in a different directory"
        )
    if path and not recorded.path.startswith(path):
        logger.warning(f"--init_from has no effect: the run started from {recorded.path}")


def _facts(job: Job) -> dict[str, Any]:
    """Return the named facts that must be equal on all ranks."""
    options_of_all = {
        field.name: getattr(job.options, field.name)
        for field in dataclasses.fields(job.options)
        if not field.metadata["per_host"]
    }
    return {
        **job.record.facts,
        **{f"{name} (SHA-256)": sha256 for name, sha256 in job.record.files.items()},
        **options_of_all,
        # mpirun passes variables only to the ranks on its own host. If this one differs, Horovod
        # crashes with signal 11.
        "HOROVOD_FUSION_THRESHOLD": job.comm.settings.get("HOROVOD_FUSION_THRESHOLD"),
        **platform_facts(),
    }
