"""Runs with random weights, for tests that need the files of a run but no training."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint import store
from lm.checkpoint.manifest import MANIFEST, checksum
from lm.checkpoint.progress import TrainProgress
from lm.checkpoint.tensors import whole
from lm.config import Config
from lm.config_file import load_config_file
from lm.data.batches import Rows
from lm.data.corpus import load_corpus
from lm.functions import BUILT_IN, NetworkFunctions
from lm.model.network import Network
from lm.model.windows import build_window_graph
from lm.record import CorpusRecord, FileRecord, RunRecord
from lm.tokens.tokenizers import Tokenizer

CORPUS = CorpusRecord(kind="text", path="/nowhere", sha256="")


def make_run(directory: os.PathLike, data_path: os.PathLike, **fields) -> Config:
    """Write a run of config_test with its corpus record and large random weights.

    Large weights give words clearly different probabilities.

    Args:
      directory: Run directory to create.
      data_path: Data directory. If it lacks the synthetic corpus, the corpus is generated.
      **fields: Config fields that replace the values of config_test.
    """
    config = dataclasses.replace(
        load_config_file("config_test").config, hidden_size=24, init_scale=0.7
    )
    config = dataclasses.replace(config, **fields)
    corpus = load_corpus(str(data_path), config)
    write_run(directory, config, corpus.tokenizer, corpus.record)
    return config


def write_run(
    directory: os.PathLike,
    config: Config,
    tokenizer: Tokenizer,
    corpus: CorpusRecord = CORPUS,
    functions: NetworkFunctions = BUILT_IN,
) -> None:
    """Write a run of any config and tokenizer with random weights, at step 7."""
    os.makedirs(directory)
    tokenizer.save(str(directory))
    file = FileRecord(functions.where, functions.sha256) if functions.sha256 else None
    record = RunRecord(dataclasses.asdict(config), tokenizer.sha256, corpus, config_file=file)
    record.write(str(directory), has_checkpoints=True)
    with tf.Graph().as_default(), tf.Session() as session:
        build_window_graph(Network(config, len(tokenizer), functions), Rows(0, 1), "eval")
        session.run(tf.global_variables_initializer())
        weights = {variable.op.name: session.run(variable) for variable in tf.global_variables()}
    biases = np.random.default_rng(0)
    for name in weights:
        if name.endswith("bias"):  # zero initially, which would hide mistakes
            weights[name] = biases.normal(size=weights[name].shape).astype(np.float32)
    facts = store.Manifest(
        world_size=1, record=record, progress=TrainProgress(step=7, valid_perplexity=100.0),
        weights=tuple(weights),
    )  # fmt: skip
    store.save(str(directory), [whole(weights)], facts)


def rewrite_manifest(checkpoint_dir: os.PathLike, change: Callable[[dict], object]) -> None:
    """Change the manifest of a checkpoint with a function, and update its checksum."""
    path = pathlib.Path(checkpoint_dir, MANIFEST)
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    path.write_text(json.dumps({**content, "checksum": checksum(content)}))
