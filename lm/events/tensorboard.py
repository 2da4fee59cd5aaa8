"""TensorBoard event files with the numbers of a run."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from tensorboard.summary.writer.record_writer import RecordWriter

from lm.events.append import RetryingAppend
from lm.perplexity import NllSum

_METRICS = "perplexity", "bits_per_byte", "bits_per_character", "word_perplexity"


def _evaluation_tags(split: str) -> dict[str, str]:
    return {f"{split}_{metric}": f"{metric}/{split}" for metric in _METRICS}


# The tag for each number of an event. Tags with the same prefix share a section.
_TAGS = {
    "step": {
        "loss": "loss/train",
        "learning_rate": "learning_rate",
        "tokens_per_second": "tokens_per_second",
        "gradient_norm": "gradient_norm",
        "exchange_share": "exchange_share",
        "share_of_gemm_peak": "share_of_gemm_peak",
    },
    "validation": _evaluation_tags("valid"),
    "epoch": {
        "train_loss": "loss/epoch",
        "train_perplexity": "perplexity/train",
        **_evaluation_tags("valid"),
        "epoch_seconds": "epoch_seconds",
    },
    "test": _evaluation_tags("test"),
}


class TensorBoardWriter:
    """Writes events immediately, so that they survive if the run is killed.

    tf.summary.FileWriter would buffer events, and it does not retry if the disk is full.
    """

    def __init__(self, log_dir: str, has_perplexity: bool = True):
        self._has_perplexity = has_perplexity
        os.makedirs(log_dir, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._file = RetryingAppend(os.path.join(log_dir, name))
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write the numbers of an event of `metrics.jsonl`."""
        if kind == "start":  # TensorBoard removes the steps that a resumed run repeats
            session = tf.SessionLog(status=tf.SessionLog.START)
            self._add(session_log=session, step=fields["resumed_from_step"] + 1)
        summary = tf.Summary()
        for name, tag in _TAGS.get(kind, {}).items():
            value = fields.get(name)
            if value is not None:
                summary.value.add(tag=tag, simple_value=value)
        if kind == "step" and self._has_perplexity:
            perplexity = NllSum(fields["loss"], 1).perplexity
            summary.value.add(tag="perplexity/step", simple_value=perplexity)
        if summary.value:
            self._add(summary=summary, step=fields["step"])

    def close(self) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(tf.Event(wall_time=time.time(), **fields).SerializeToString())
