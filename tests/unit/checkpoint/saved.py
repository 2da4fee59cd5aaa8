"""Small checkpoints, and helpers to damage them."""

import pathlib

import numpy as np

from lm.checkpoint import store
from lm.checkpoint.progress import TrainProgress
from lm.checkpoint.pruning import Pruner
from lm.checkpoint.tensors import whole
from lm.record import CorpusRecord, RunRecord

RECORD = RunRecord(config={"seed": 1}, vocabulary="v", corpus=CorpusRecord("text", "/", "c"))
ARRAYS = {
    "embedding": np.arange(600, dtype="f").reshape(30, 20),
    "global_step": np.int64(7),
    "state/0/h": np.ones([4, 20], "f"),
}


def manifest(step, perplexity=None, weights=("embedding",), **progress):
    progress = {"valid_steps": (step,) if perplexity else (), **progress}
    progress = TrainProgress(step, valid_perplexity=perplexity, **progress)
    return store.Manifest(2, RECORD, progress, weights)


def save(run_dir, step, perplexity=None, keep=None, arrays=ARRAYS, **fields):
    saved = store.save(str(run_dir), [whole(arrays)], manifest(step, perplexity, **fields))
    if keep:
        Pruner(str(run_dir), keep).prune(saved)
    return pathlib.Path(saved.path)


def steps(run_dir):
    return [int(path.rpartition("-")[2]) for path in store.list_checkpoints(str(run_dir))]


def truncate(path, name="model.data-00000-of-00001"):
    data = path / name
    data.write_bytes(data.read_bytes()[:-2])
