"""The work of `lm.evaluate`: texts, graph and weights to a table."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from lm.checkpoint.variables import restore_weights
from lm.cli.flags import Flags
from lm.cli.tables import markdown_table
from lm.data.batches import Rows, eval_rows_of_rank
from lm.distributed import agreement
from lm.distributed.communicator import Communicator
from lm.distributed.cores import unbind_from_core
from lm.distributed.devices import choose_threads, session_config, start_tensorflow
from lm.errors import EveryRankError
from lm.inference.run import Run, open_run
from lm.inference.texts import Text, load_text
from lm.model.evaluation import evaluate
from lm.model.network import build_weights
from lm.model.perplexity import NllSum
from lm.model.windows import build_model

logger = logging.getLogger("lm")


class EvaluateJob(NamedTuple):
    """An evaluation that is ready to start on this rank."""

    run: Run
    texts: Sequence[Text]
    rows: Rows
    session_config: tf.ConfigProto
    as_json: bool

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name."""
        return {
            **dataclasses.asdict(self.run.config),
            "checkpoint": self.run.checkpoint,
            "vocabulary": self.run.vocabulary.checksum,
            "tokens": [len(text.ids) for text in self.texts],
            **agreement.platform_facts(),
        }


def prepare(flags: Flags, comm: Communicator) -> EvaluateJob:
    """Check and load everything that an evaluation needs.

    Args:
      flags: Those of `lm.evaluate`, parsed.
      comm: The ranks.

    Raises:
      UserError, RunError: This rank cannot start, and why.
    """
    unbind_from_core()
    threads = choose_threads(None, None, comm.local_size)
    start_tensorflow(threads)
    run = open_run(flags)
    config = run.config
    if flags["eval_batch_size"] is not None:
        config = dataclasses.replace(config, eval_batch_size=flags["eval_batch_size"])
    texts = [load_text(run, split, flags["data_path"]) for split in flags["split"].split(",")]
    return EvaluateJob(
        run=run._replace(config=config),
        texts=texts,
        rows=eval_rows_of_rank(config.eval_batch_size, comm.rank, comm.size, flags["distributed"]),
        session_config=session_config(threads, comm.local_rank, comm.local_size),
        as_json=flags["json"],
    )


def run_job(job: EvaluateJob, comm: Communicator) -> None:
    """Evaluate the texts and print the results on rank 0."""
    run, records = job.run, []
    with tf.Graph().as_default():
        weights = build_weights(run.config, len(run.vocabulary))
        # A rank without rows builds the smallest model: it only waits for the others.
        rows = job.rows if job.rows.count else Rows(0, 1)
        model = build_model(run.config, weights, rows, "eval")
        with tf.Session(config=job.session_config) as session:
            session.run(tf.local_variables_initializer())
            restore_weights(session, run.load_weights())
            for text in job.texts:
                logger.info("evaluating %s: %s tokens", text.name, f"{len(text.ids):,}")
                nll = evaluate(
                    session, model, text.ids, run.config, run.vocabulary.eos_id, job.rows,
                    comm.gather,
                )  # fmt: skip
                if not math.isfinite(nll.perplexity):
                    raise EveryRankError(
                        f"the loss of {text.name} is {nll.mean:.4g}, of which no perplexity can be"
                        " made: this run has diverged; evaluate an older checkpoint"
                    )
                records.append(describe(run, text, nll, comm.size))
    if comm.is_rank_0:
        _print(records, job.as_json)


def describe(run: Run, text: Text, nll: NllSum, world_size: int) -> dict[str, Any]:
    """Return the result as `lm.evaluate --json` prints it."""
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


def _print(records: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print(*map(json.dumps, records), sep="\n")
        return
    columns = {
        "split": "{}", "perplexity": "{:.4f}", "nll": "{:.6f}", "bits_per_word": "{:.6f}",
        "bits_per_character": "{:.6f}", "tokens": "{:,}", "characters": "{:,}", "unknown": "{:,}",
    }  # fmt: skip
    rows = [
        [
            "-" if record[name] is None else form.format(record[name])
            for name, form in columns.items()
        ]
        for record in records
    ]
    print(f"{records[0]['checkpoint']}, {records[0]['eval_batch_size']} row(s)\n")
    print(markdown_table([name.replace("_", " ") for name in columns], rows))
