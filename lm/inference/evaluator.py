"""Perplexity of a run on texts, on one process or on many ranks together."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any, Optional

from lm import kernels
from lm.checkpoint import store
from lm.config_file import BUILT_IN, NetworkFunctions
from lm.distributed.agreement import check_agreement, platform_facts, raise_on_all_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.devices import start_tensorflow
from lm.errors import EveryRankError
from lm.inference.run import Run, open_run
from lm.inference.session import ALONE, open_session
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
    comm: Communicator = ALONE,
    data_path: Optional[str] = None,
    eval_batch_size: Optional[int] = None,
    functions: NetworkFunctions = BUILT_IN,
    allow_changed_config_file: bool = False,
) -> list[dict[str, Any]]:
    """Evaluate a run on texts; all ranks call it together.

    Args:
      directory: Of the run.
      splits: Splits of the run's corpus, or text files; as `load_text`.
      checkpoint: As `open_run`.
      comm: The ranks, which divide the rows among themselves.
      data_path: Directory of the corpus; None for the one that the run remembers.
      eval_batch_size: Rows that each text is cut into; None for as many as the config says.
      functions: As `open_run`.
      allow_changed_config_file: As `open_run`.

    Returns:
      For each text, the fields that `lm/evaluate.py` explains; the same on all ranks.

    Raises:
      UserError, RunError: A text or the run cannot be used, or the ranks disagree on them.
    """

    device = start_tensorflow(comm)

    def prepare():
        run = open_run(directory, checkpoint, functions, allow_changed_config_file)
        changes = {} if eval_batch_size is None else {"eval_batch_size": eval_batch_size}
        config = replaced(run.config, **changes)
        run = run._replace(config=config)
        texts = [load_text(run, split, data_path) for split in splits]
        ranks = comm.rank, comm.size, True
        session, evaluator = open_session(
            run, lambda network: Evaluator(network, run.vocabulary.eos_id, *ranks), device
        )
        return run, texts, session, evaluator

    run, texts, session, evaluator = raise_on_all_ranks(comm, prepare)
    check_agreement(comm, _facts(run, texts))
    if len(set(comm.gather(kernels.description()))) > 1:
        logger.warning(
            "the ranks' compiled ops differ: the result depends on which rank has which rows"
        )
    results = []
    with session, one_line_errors(run.functions, running=True):
        for text in texts:
            nll = evaluator.run(session, text.name, text.ids, comm.gather)
            if not math.isfinite(nll.perplexity):
                raise EveryRankError(
                    f"the loss of {text.name} is {nll.mean:.4g}, of which no perplexity can be"
                    " made: this run has diverged; evaluate an older checkpoint"
                )
            results.append(_describe(run, text, nll, comm.size))
    return results


def _facts(run: Run, texts: Sequence[Text]) -> dict[str, Any]:
    """Return what must be the same on all ranks, by name."""
    return {
        **dataclasses.asdict(run.config),
        "checkpoint": store.read_manifest(run.checkpoint).files,
        "config file (SHA-256)": run.functions.sha256,
        "vocabulary": run.vocabulary.checksum,
        "tokens": [len(text.ids) for text in texts],
        **platform_facts(),
    }


def _describe(run: Run, text: Text, nll: NllSum, world_size: int) -> dict[str, Any]:
    bits = nll.nats / math.log(2)
    return {
        "run": run.directory,
        "checkpoint": run.checkpoint,
        "split": text.name,
        "nll": nll.mean,
        "perplexity": nll.perplexity,
        "bits_per_word": bits / nll.tokens,
        # A text of nothing but empty lines has no characters.
        "bits_per_character": bits / text.characters if text.characters else None,
        "tokens": nll.tokens,
        "characters": text.characters,
        "unknown": text.unknown,
        "eval_batch_size": run.config.eval_batch_size,
        "world_size": world_size,
    }
