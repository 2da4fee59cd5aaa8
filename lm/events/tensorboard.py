"""A run's numbers for TensorBoard, made from the events of `metrics.jsonl`."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from tensorboard.plugins.hparams import summary as hparams
from tensorboard.summary.writer.record_writer import RecordWriter

from lm.files import PatientFile
from lm.perplexity import MAX_MEAN_NLL

# The tag that each number of an event is shown under; perplexities share a chart's name.
_TAGS = {
    "step": {
        "loss": "loss/train",
        "learning_rate": "learning_rate",
        "words_per_second": "words_per_second",
        "gradient_norm": "gradient_norm",
        "exchange_share": "exchange_share",
    },
    "epoch": {
        "train_perplexity": "perplexity/train",
        "valid_perplexity": "perplexity/valid",
        "epoch_seconds": "epoch_seconds",
    },
    "test": {"test_perplexity": "perplexity/test"},
}


class TensorBoardWriter:
    """Writes an event file, each event at once: a run that is killed keeps its numbers.

    Not tf.summary.FileWriter: it keeps them for a while, and has its own ways to fail.

    Args:
      log_dir: Its directory, for `tensorboard --logdir`.
    """

    def __init__(self, log_dir: str):
        os.makedirs(log_dir, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._file = PatientFile(os.path.join(log_dir, name))
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write the numbers of an event at its step; an event without numbers is left out."""
        summary = tf.Summary()
        for name, tag in _TAGS.get(kind, {}).items():
            value = fields.get(name)
            if value is not None:
                summary.value.add(tag=tag, simple_value=value)
        if kind == "step":
            perplexity = math.exp(min(fields["loss"], MAX_MEAN_NLL))
            summary.value.add(tag="perplexity/step", simple_value=perplexity)
        if summary.value:
            self._add(summary=summary, step=fields["step"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Write a run's settings, as text and for the hparams dashboard."""
        plain = {name: value for name, value in settings.items() if value is not None}
        rows = "".join(f"|{name}|{value}|\n" for name, value in plain.items())
        text = tf.make_tensor_proto(f"|setting|value|\n|---|---|\n{rows}")
        summary = tf.Summary()
        value = summary.value.add(tag="config", tensor=text)
        value.metadata.plugin_data.plugin_name = "text"
        self._add(summary=summary)
        self._add(summary=hparams.session_start_pb(plain))

    def _add(self, **fields: Any) -> None:
        self._records.write(tf.Event(wall_time=time.time(), **fields).SerializeToString())
