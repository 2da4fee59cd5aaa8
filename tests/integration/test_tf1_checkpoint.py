"""Training with the checkpoint of a TF 1.x program, and back into the program."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.checkpoint.tensors import load_arrays, tensor_shapes
from lm.config_file import load_config_file
from lm.inference import tf1_checkpoint
from lm.inference.scorer import Scorer
from lm.inference.trained_run import open_run
from tests.commands import events, run_module, train
from tests.tf1_program import NAMES, NETWORK, log_probs, save

WORDS, STEPS = 50, 10


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a program's float16 checkpoint, a corpus, and runs on 1 and 2 ranks."""
    path = tmp_path_factory.mktemp("program")
    save(path / "save/model.ckpt-7", WORDS, dtype=tf.float16)
    (path / "mine.py").write_text(NETWORK.replace("UNITS", "4") + NAMES)
    (path / "data").mkdir()
    for split in ("train", "valid"):
        words = np.random.default_rng(0).integers(0, WORDS, 2000)
        np.save(path / f"data/{split}.npy", words)
    for ranks, flags in {1: (), 2: ("--timeline", path / "timeline.json")}.items():
        train(
            path / f"run-{ranks}", "--config", path / "mine.py", "--data_path", path / "data",
            "--vocab_size", WORDS, "--init_from", path / "save", "--trainable", "wte|out",
            "--max_steps", STEPS, "--log_every_steps", 1, *flags, num_ranks=ranks,
        )  # fmt: skip
    return path


def checkpoint_of(run):
    return run / f"checkpoints/step-{STEPS:08}"


def test_training_starts_with_the_loss_of_the_program_on_any_number_of_ranks(place):
    words = np.load(place / "data/train.npy")[:2000].reshape(4, -1)
    log_probs_NV = log_probs(place / "save", words[:, :5], WORDS, tf.float16)
    targets_N = words[:, 1:6].reshape(-1)
    nats = -log_probs_NV[np.arange(len(targets_N)), targets_N].mean()
    one, two = (events(place / f"run-{ranks}", "step") for ranks in (1, 2))
    assert one[0]["loss"] == pytest.approx(nats, abs=1e-5)
    assert [event["loss"] for event in one] == [event["loss"] for event in two]
    files = [checkpoint_of(place / run) / "model.data-00000-of-00001" for run in ("run-1", "run-2")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_frozen_weights_do_not_change_and_are_not_exchanged(place):
    with tf.Graph().as_default():
        before = load_arrays(str(place / "save/model.ckpt-7"), ["model/w", "model/out"])
        after = load_arrays(str(checkpoint_of(place / "run-2")), ["net/w", "net/out"])
    np.testing.assert_array_equal(after["net/w"], before["model/w"])
    assert np.all(after["net/out"] != before["model/out"])
    names = {event["args"].get("name", "") for event in timeline(place) if "args" in event}
    # The rows of the table and their indices, and the output layer.
    assert sum("LocalGradients" in name for name in names) == 3


def timeline(place):
    text = (place / "timeline.json").read_text().rstrip().rstrip(",").rstrip("]")
    return json.loads(text + "]")


def test_the_record_identifies_the_checkpoint(place):
    record = json.loads((place / "run-2/run.json").read_text())["init_from"]
    (start,) = events(place / "run-2", "start")
    assert start["init_from"] == record
    assert record["path"] == record["tf1_checkpoint"] == str(place / "save/model.ckpt-7")
    assert record["sha256"].keys() == {"model.ckpt-7.data-00000-of-00001", "model.ckpt-7.index"}


def test_the_program_restores_an_export(place, tmp_path):
    """The program restores its float16 table, its optimizer slots, and averages of weights."""
    run = ("--run", place / "run-2", "--config", place / "mine.py")
    to = tmp_path / "export"
    result = run_module("lm.export", *run, "--checkpoint", "best", "--to", to, "--format", "tf1")
    assert result.returncode == 0, result.stderr
    assert f"with 3 weights and 9 other variables of {place}/save/model.ckpt-7" in result.stderr
    opened = open_run(place / "run-2", functions=load_config_file(str(place / "mine.py")).functions)
    (score,) = Scorer(opened, 1).score(["3 8 2"])
    ids = np.array([opened.tokenizer.eos_id, 3, 8, 2])
    log_probs_NV = log_probs(to, ids[:-1], WORDS, tf.float16)
    rounding = 2e-3  # the table is in float16
    np.testing.assert_allclose(score.log_probs, log_probs_NV[range(3), ids[1:]], atol=rounding)
    weights = [f"model/{name}" for name in ("wte", "w", "out")]
    with tf.Graph().as_default():
        exported = load_arrays(
            tf.train.latest_checkpoint(str(to)),
            [*weights, *(f"{name}/ExponentialMovingAverage" for name in weights)],
        )
    for name in weights:
        average = exported[f"{name}/ExponentialMovingAverage"]
        np.testing.assert_array_equal(average, exported[name])


def test_a_run_that_started_from_the_averages_exports_the_weights_too(place, tmp_path):
    run = open_run(place / "run-1", functions=load_config_file(str(place / "mine.py")).functions)
    manifest = run.checkpoint.manifest
    init_from = dataclasses.replace(manifest.record.init_from, rename="$=/ExponentialMovingAverage")
    record = dataclasses.replace(manifest.record, init_from=init_from)
    manifest = dataclasses.replace(manifest, record=record)
    checkpoint = run.checkpoint._replace(manifest=manifest)
    tf1_checkpoint.export(run._replace(checkpoint=checkpoint), str(tmp_path / "export"))
    names = ["model/out", "model/out/ExponentialMovingAverage"]
    with tf.Graph().as_default():
        tuned = load_arrays(str(checkpoint_of(place / "run-1")), ["net/out"])["net/out"]
        exported = load_arrays(str(tmp_path / f"export/model.ckpt-{STEPS}"), names)
    for name in names:
        np.testing.assert_array_equal(exported[name], tuned)


def test_an_export_does_not_depend_on_a_checkpoint_that_has_changed(place, tmp_path, caplog):
    index = place / "save/model.ckpt-7.index"
    content = index.read_bytes()
    index.write_bytes(content[:100])
    run = open_run(place / "run-1", functions=load_config_file(str(place / "mine.py")).functions)
    tf1_checkpoint.export(run, str(tmp_path / "export"))
    index.write_bytes(content)
    assert f"{place}/save/model.ckpt-7 is missing or has changed" in caplog.text
    names = tensor_shapes(str(tmp_path / f"export/model.ckpt-{STEPS}"))
    assert names.keys() == {"model/wte", "model/w", "model/out"}
