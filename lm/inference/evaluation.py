"""Perplexity of a run on its corpus or on text files, computed by one or several ranks."""

import contextlib
import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.data.advice import check_known
from lm.data.corpus import checksums, corpus_record
from lm.data.encoding import Encoded, encode_source, map_ids
from lm.data.location import find_data_path, find_sources
from lm.data.splits import SPLITS, Source, source_of
from lm.distributed.agreement import check_agreement, on_all_ranks, platform_facts
from lm.distributed.communicator import Communicator
from lm.distributed.devices import start_tensorflow
from lm.distributed.supervisor import Supervisor
from lm.errors import EveryRankError, RunError, UserError
from lm.inference.lines import read_source
from lm.inference.scorer import Scorer
from lm.inference.trained_run import Run, open_session
from lm.model.evaluator import Evaluator, sum_of_units, units_of
from lm.options import replaced
from lm.perplexity import NllSum, text_metrics
from lm.tokens.symbols import Characters


def evaluate(
    run: Run,
    splits: Sequence[str],
    comm: Communicator | None = None,
    data_path: str | None = None,
    eval_batch_size: int | None = None,
    token_dtype: str | None = None,
    lines: bool = False,
    supervisor: Supervisor | None = None,
    opening: contextlib.AbstractContextManager | None = None,
) -> list[dict[str, Any]]:
    """Evaluate a run on splits or text files. All ranks must call this function together.

    Args:
      splits: Splits of the run's corpus, or paths of text files; see `load_text`.
      comm: The ranks, which divide the rows among themselves; None for a single process.
      data_path: Directory of the corpus; None for the corpus of the run.
      eval_batch_size: Number of rows; None for the value of the run's config.
      token_dtype: Type of the integers in .bin files; None for the value of the run's config.
      lines: Whether each line starts with an empty state, as in `Scorer`. The ranks divide the
        lines among themselves.
      supervisor: Ends this rank if another rank hangs; None for a new supervisor.
      opening: A context manager, such as a lock, that is held until the graph is built, or None.

    Returns:
      For each split, the fields that `lm/evaluate.py` documents. All ranks return the same values.
    """
    comm = comm or Communicator()
    given = {"eval_batch_size": eval_batch_size, "token_dtype": token_dtype}
    given = {name: value for name, value in given.items() if value is not None}
    with opening or contextlib.nullcontext():
        device = start_tensorflow(comm, divides_operations=run.functions.is_built_in)
        with on_all_ranks(comm):
            run = run._replace(config=replaced(run.config, **given))
            texts = [load_text(run, split, data_path) for split in splits]
            if lines:
                if ids := [text.source.path for text in texts if text.source.reads_ids]:
                    raise UserError(f"--lines needs text, but {ids[0]} contains token IDs")
                scorer = Scorer(run, run.config.eval_batch_size, device=device)
                session: Any = contextlib.closing(scorer)
            else:
                num_threads = 1 if run.functions.is_built_in else device.inter_op
                ranks = comm.rank, comm.size, True, num_threads
                session, evaluator = open_session(
                    run, lambda network: Evaluator(network, run.tokenizer.eos_id, *ranks), device
                )

    def sum_up(text: Text) -> NllSum:
        # A stop signal ends an evaluation immediately, because there is nothing to save.
        with supervisor.waiting(f"the evaluation of {text.name}", stoppable=False) as waiting:
            if lines:
                return _sum_of_lines(scorer, comm, text, waiting)
            return evaluator.run(session.run, text.name, text.ids, waiting.gather, waiting.poll)

    with contextlib.ExitStack() as stack, session, run.functions.one_line_errors(running=True):
        supervisor = supervisor or stack.enter_context(Supervisor(comm, 0))
        check_agreement(comm, _facts(run, texts))
        sums = [sum_up(text) for text in texts]
    return [_describe(run, text, nll, comm.size) for text, nll in zip(texts, sums)]


class Text(NamedTuple):
    """A text in the vocabulary of a run."""

    name: str  # name of the split, or path of the file
    ids: np.ndarray  # int32 [tokens]
    encoded: Encoded
    source: Source


def load_text(run: Run, split: str, data_path: str | None = None) -> Text:
    """Load a split of the run's corpus, or a file or directory in one of the forms of a split."""
    if split in SPLITS:
        return _load_split(run, split, data_path)
    if os.path.isfile(split) or os.path.isdir(split):  # A pipe has no file position.
        return _encode(run, split, source_of(split, any_text=True))
    raise UserError(f"--split {split} must be {', '.join(SPLITS)} or the path of a text file")


def _load_split(run: Run, split: str, data_path: str | None) -> Text:
    is_given = data_path is not None
    data_path = find_data_path(run.config.corpus, [run.directory], data_path)
    kind, _, sources = find_sources(data_path, run.config)
    if split not in sources:
        raise UserError(f"the corpus in {data_path} has no {split} split")
    hashed = {split: sources[split]} if is_given else sources
    record = corpus_record(kind, data_path, checksums(kind, hashed), run.tokenizer)
    if not is_given and record.sha256 != run.checkpoint.manifest.record.corpus.sha256:
        raise UserError(
            f"the corpus in {data_path} has changed since the training of {run.directory}: to use"
            f" the changed corpus anyway, add --data_path {data_path}"
        )
    return _encode(run, split, sources[split])


def _encode(run: Run, name: str, source: Source) -> Text:
    try:
        # The file has no name, so it ends with its last use. The mapping keeps its contents.
        with tempfile.TemporaryFile() as file:
            path = f"/proc/self/fd/{file.fileno()}"
            encoded = encode_source(source, run.tokenizer, path, run.config.token_dtype)
            ids = map_ids(path)
    except OSError as error:  # The error does not contain the path if the disk is full.
        raise RunError(
            f"cannot write to {tempfile.gettempdir()} ({error.strerror}): free some space, or set"
            " TMPDIR to a different directory"
        ) from error
    check_known(source.path, encoded, run.tokenizer)
    return Text(name, ids, encoded, source)


def _sum_of_lines(scorer: Scorer, comm: Communicator, text: Text, waiting: Any) -> NllSum:
    """Score blocks of lines, which the ranks take in turn."""
    units, tokens, place = 0, 0, f"{text.source.path}, line"
    lines, scorer.poll = read_source(text.source), waiting.poll
    # Large blocks would leave ranks idle.
    size = scorer.rows * max(1, scorer.num_sorted // scorer.rows // comm.size)
    for block in itertools.count():
        if not (of_block := list(itertools.islice(lines, size))):
            break
        if block % comm.size == comm.rank:
            for score in scorer.score(of_block, place, block * size + 1):
                units += units_of(-score.log_probs)
                tokens += len(score.ids)
    return sum_of_units(*map(sum, zip(*waiting.gather((units, tokens)))))


def _facts(run: Run, texts: Sequence[Text]) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks."""
    return {
        **dataclasses.asdict(run.config),
        "checkpoint": run.checkpoint.manifest.files,
        "config file (SHA-256)": run.functions.sha256,
        "vocabulary": run.tokenizer.sha256,
        "tokens": [len(text.ids) for text in texts],
        **platform_facts(),
    }


def _describe(run: Run, text: Text, nll: NllSum, world_size: int) -> dict[str, Any]:
    if not math.isfinite(nll.perplexity):
        raise EveryRankError(
            f"the loss of {text.name} is {nll.mean:.4g}, so its perplexity is not finite. This run"
            " has diverged; evaluate an older checkpoint"
        )
    has_characters = isinstance(run.tokenizer, Characters)
    return {
        "run": run.directory,
        "checkpoint": run.checkpoint.path,
        "split": text.name,
        "nll": nll.mean,
        "tokens": nll.tokens,
        **text_metrics(nll, text.encoded.size, text.encoded.unknown, has_characters),
        "eval_batch_size": run.config.eval_batch_size,
        "world_size": world_size,
    }
