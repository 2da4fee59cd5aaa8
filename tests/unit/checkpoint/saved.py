"""Checkpoints of a few numbers, and what may become of them."""

import pathlib

import numpy as np

from lm.checkpoint import choice
from lm.checkpoint import format as checkpoint
from lm.checkpoint.manifest import Manifest
from lm.record import CorpusRecord, RunRecord

RECORD = RunRecord(config={"seed": 1}, vocabulary="v", corpus=CorpusRecord("text", "/", "c"))
ARRAYS = {
    "embedding": np.arange(600, dtype="f").reshape(30, 20),
    "global_step": np.int64(7),
    "state/0/h": np.ones([4, 20], "f"),
}


def manifest(step, perplexity=None, **fields):
    return Manifest(
        step=step, epoch=1, steps_per_epoch=100, world_size=2, record=RECORD,
        position={"step": step}, weights=("embedding",), valid_perplexity=perplexity, **fields,
    )  # fmt: skip


def save(run_dir, step, perplexity=None, keep=None, **fields):
    path = checkpoint.save(str(run_dir), ARRAYS, manifest(step, perplexity, **fields))
    if keep:
        choice.prune(str(run_dir), keep)
    return pathlib.Path(path)


def steps(run_dir):
    return [int(path.rpartition("-")[2]) for path in checkpoint.list_checkpoints(str(run_dir))]


def truncate(path):
    data = path / "model.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-2])
