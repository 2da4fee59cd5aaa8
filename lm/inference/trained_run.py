"""Opening a trained run at one of its checkpoints."""

import dataclasses
import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import tensorflow.compat.v1 as tf

from lm.checkpoint import store
from lm.checkpoint.manifest import MANIFEST, Checkpoint
from lm.checkpoint.transfer import VariableLoader, weight_variables
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.distributed.devices import Device, session_config, start_tensorflow
from lm.errors import RunError, UserError
from lm.functions import BUILT_IN, NetworkFunctions
from lm.json_files import from_json
from lm.model.network import Network
from lm.record import first_difference, load_existing_record, missing_config_file, run_with
from lm.tokens.selection import saved_tokenizer
from lm.tokens.tokenizers import Tokenizer
from lm.user.network_check import NetworkCheck

Built = TypeVar("Built")


class Run(NamedTuple):
    """A run, which may still be training, at one of its checkpoints."""

    directory: str
    config: Config
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    functions: NetworkFunctions = BUILT_IN


def open_run(
    directory: str,
    checkpoint: str = "last",
    functions: NetworkFunctions = BUILT_IN,
    allow_changed_config_file: bool = False,
) -> Run:
    """Open a run at one of its checkpoints.

    Args:
      directory: The run directory (`--output_dir` of the training), or one of its checkpoints.
      checkpoint: "last", "best" (by validation perplexity), or the name or the directory of a
        checkpoint.
      functions: The functions of the config file that the run was trained with.
      allow_changed_config_file: Whether the config file may have changed since the training.
    """
    if checkpoint == "last" and os.path.exists(os.path.join(directory, MANIFEST)):
        checkpoint, directory = directory, run_with(directory)
    load_existing_record(directory)  # raises an error if the directory is not a run
    found = store.find(directory, checkpoint)
    record = found.manifest.record
    if record.config_file and functions.sha256 is None:
        raise missing_config_file(directory, record)
    if functions.sha256 and not record.config_file:
        raise UserError(
            f"{directory} was trained without a network or fields of a config file: leave out"
            f" --config {functions.where}"
        )
    tokenizer = saved_tokenizer(directory)
    used = dataclasses.replace(
        record, vocabulary=tokenizer.sha256, config_file=functions.file_record
    )
    difference = first_difference(record, used, files_may_differ=allow_changed_config_file)
    if difference in record.files:
        raise UserError(
            f"{functions.where}: {difference} differs from {difference} of {found.path}:"
            " restore the file, or add --allow_changed_config_file"
        )
    if difference:
        raise UserError(
            f"{found.path} was trained with a different vocabulary than {directory}: restore"
            " the vocabulary, or give the run of the checkpoint with --run"
        )
    # Use the settings of the weights: the checkpoint may belong to a different run.
    config = from_json(functions.config_class, record.config, os.path.join(found.path, MANIFEST))
    return Run(directory, config, tokenizer, found, functions)


def open_session(
    run: Run, build: Callable[[Network], Built], device: Device | None = None
) -> tuple[tf.Session, Built]:
    """Build a graph with the network of a run, and open a session with its weights.

    `build` builds the rest of the graph for the network, and its result is returned too.
    """
    if not os.path.isdir(run.checkpoint.path):
        raise RunError(
            f"{run.checkpoint.path} no longer exists, because a run that is training removes old"
            " checkpoints: open the run again"
        )
    device = device or start_tensorflow(Communicator())
    with tf.Graph().as_default():
        # The scope keeps operations from taking the name of a variable and renaming it.
        with run.functions.one_line_errors(), tf.name_scope("lm_use"):
            tokens = run.tokenizer.tokens
            built = build(Network(run.config, len(tokens), run.functions, tokens))
            loader = VariableLoader()
        # Variables that the network creates but does not need are not in the checkpoint.
        weights = weight_variables(tf.get_default_graph())
        unused = [v for v in tf.global_variables() if v.op.name not in weights]
        session = tf.Session(config=session_config(device))
        try:
            initial_ops = [tf.local_variables_initializer(), tf.variables_initializer(unused)]
            session.run([*initial_ops, loader.create_op])
            # The other functions of a network with losses may use further variables, and training
            # may use variables that this graph does not need.
            is_part = run.functions.has_losses or bool(unused)
            loader.load_weights(session, run.checkpoint, is_part)
        except BaseException:
            session.close()
            raise
    return session, built


def check_words(run: Run, device: Device | None = None) -> None:
    """Check that a user-defined network gives the same results for single words and for windows."""
    if run.functions.is_built_in:
        return
    session, check = open_session(run, NetworkCheck, device)
    with session, run.functions.one_line_errors(running=True):
        if disagreement := check.find_disagreement(session):
            raise UserError(disagreement)
