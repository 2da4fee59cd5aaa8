"""The perplexity of a run on texts, computed by one process or by several ranks."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

from lm import kernels
from lm.checkpoint import store
from lm.config_file import BUILT_IN, NetworkFunctions
from lm.distributed.agreement import check_agreement, platform_facts, raise_on_all_ranks
from lm.distributed.communicator import Communicator, OneProcess
from lm.distributed.devices import start_tensorflow
from lm.errors import EveryRankError
from lm.inference.run import Run, open_run, open_session
from lm.inference.texts import Text, load_text
from lm.model.user_errors import one_line_errors
from lm.model.windows import Evaluator
from lm.options import replaced
from lm.perplexity import NllSum

logger = logging.getLogger("lm")


def evaluate(
    directory: str,
    splits: Sequence[str],
    checkpoint: str = "last",
    comm: Communicator | None = None,
    data_path: str | None = None,
    eval_batch_size: int | None = None,
    functions: NetworkFunctions = BUILT_IN,
    allow_changed_config_file: bool = False,
) -> list[dict[str, Any]]:
    """Evaluate a run on texts. All ranks must call it together.

    Args:
      directory: The run directory.
      splits: Splits of the run's corpus, or paths of text files; see `load_text`.
      checkpoint: See `open_run`.
      comm: The ranks, which divide the rows among themselves; None for a single process.
      data_path: Directory of the corpus; None for the corpus of the run.
      eval_batch_size: Rows to cut each text into; None for the value of the run's config.
      functions: See `open_run`.
      allow_changed_config_file: See `open_run`.

    Returns:
      For each text, the fields that `lm/evaluate.py` documents. All ranks return the same values.

    Raises:
      UserError, RunError: If the run or a text is invalid, or differs between the ranks.
    """
    comm = comm or OneProcess()
    device = start_tensorflow(comm)

    def prepare():
        run = open_run(directory, checkpoint, functions, allow_changed_config_file)
        if eval_batch_size is not None:
            run = run._replace(config=replaced(run.config, eval_batch_size=eval_batch_size))
        texts = [load_text(run, split, data_path) for split in splits]
        session, evaluator = open_session(
            run,
            lambda network: Evaluator(network, run.vocabulary.eos_id, comm.rank, comm.size, True),
            device,
        )
        return run, texts, session, evaluator

    run, texts, session, evaluator = raise_on_all_ranks(comm, prepare)
    with session, one_line_errors(run.functions, running=True):
        check_agreement(comm, _facts(run, texts))
        if len(set(comm.gather(kernels.description()))) > 1:
            logger.warning(
                "the compiled ops of the ranks differ: the last digits of the result depend on the"
                " number of ranks"
            )
        sums = [evaluator.run(session, text.name, text.ids, comm.gather) for text in texts]
    return [_describe(run, text, nll, comm.size) for text, nll in zip(texts, sums)]


def _facts(run: Run, texts: Sequence[Text]) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks."""
    return {
        **dataclasses.asdict(run.config),
        "checkpoint": store.read_manifest(run.checkpoint).files,
        "config file (SHA-256)": run.functions.sha256,
        "vocabulary": run.vocabulary.sha256,
        "tokens": [len(text.ids) for text in texts],
        **platform_facts(),
    }


def _describe(run: Run, text: Text, nll: NllSum, world_size: int) -> dict[str, Any]:
    if not math.isfinite(nll.perplexity):
        raise EveryRankError(
            f"the loss of {text.name} is {nll.mean:.4g}, so its perplexity is not finite: this run"
            " has diverged; evaluate an older checkpoint"
        )
    bits = nll.nats / math.log(2)
    return {
        "run": run.directory,
        "checkpoint": run.checkpoint,
        "split": text.name,
        "nll": nll.mean,
        "perplexity": nll.perplexity,
        "bits_per_word": bits / nll.tokens,
        # A text that consists of empty lines has no characters.
        "bits_per_character": bits / text.characters if text.characters else None,
        "tokens": nll.tokens,
        "characters": text.characters,
        "unknown": text.unknown,
        "eval_batch_size": run.config.eval_batch_size,
        "world_size": world_size,
    }
