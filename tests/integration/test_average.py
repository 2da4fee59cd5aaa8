"""lm.average: the mean of the weights of several checkpoints."""

import dataclasses

import numpy as np
import pytest

from lm.average import average
from lm.checkpoint import store
from lm.checkpoint.tensors import load_arrays, tensor_shapes, whole
from lm.errors import UserError
from lm.inference.evaluation import evaluate
from lm.inference.trained_run import open_run
from tests.commands import one_error, run_module, train_here
from tests.unit.checkpoint.saved import save, truncate
from tests.untrained import make_run


def weights(run, name):
    path = open_run(run, name).checkpoint.path
    return load_arrays(path, tensor_shapes(path))


def test_the_mean_of_the_weights_can_be_used_but_not_resumed(tmp_path, corpora):
    run, random = str(tmp_path / "run"), np.random.default_rng(0)
    make_run(run, corpora)
    first = store.find(run)
    arrays = {"step-00000007": load_arrays(first.path, first.manifest.weights)}
    for step in (8, 9):
        changed = {
            name: random.normal(size=array.shape).astype("f")
            for name, array in arrays["step-00000007"].items()
        }
        progress = dataclasses.replace(first.manifest.progress, step=step)
        manifest = dataclasses.replace(first.manifest, progress=progress)
        store.save(run, [whole(changed)], manifest)
        arrays[f"step-{step:08d}"] = changed
    result = run_module("lm.average", run, "--last", 2)
    assert result.returncode == 0 and "average-00000008-00000009" in result.stderr, result.stderr
    average(run, ["step-00000009", "step-00000007", "step-00000008"])
    for name, averaged in (
        ("average-00000008-00000009", list(arrays)[1:]), ("average-00000007-00000009", arrays),
    ):  # fmt: skip
        for weight, value in weights(run, name).items():
            mean = np.mean([arrays[of][weight] for of in averaged], axis=0, dtype=np.float64)
            np.testing.assert_array_equal(value, mean.astype(np.float32))
    mean = "average-00000007-00000009"
    text = [str(corpora / "embedded/valid.txt")]
    (of_mean,), (of_last,) = (evaluate(open_run(run, name), text) for name in (mean, "last"))
    assert of_mean["perplexity"] != of_last["perplexity"]
    further = tmp_path / "further"
    train_here(
        further, "--config", "config_test", "--hidden_size", 24, "--data_path", corpora,
        "--init_from", run, "--checkpoint", mean, "--max_steps", 1, "--learning_rate", 1e-30,
        "--noeval",
    )  # fmt: skip
    loaded = weights(further, "last")
    for weight, value in weights(run, mean).items():
        np.testing.assert_array_equal(loaded[weight], value)
    assert open_run(run).checkpoint.path.endswith("step-00000009")  # the last weights
    with pytest.raises(UserError, match="already exists"):
        average(run, [], 3)
    error = one_error(run_module("lm.average", run, "--last", 9), 2)
    assert "has only 3 checkpoints, not 9" in error
    with pytest.raises(UserError, match=r"--checkpoints names .*step-00000009 twice"):
        average(run, ["last", "step-00000008", "step-00000009"])


def test_only_the_last_checkpoints_are_read(tmp_path, caplog):
    """A training run removes the oldest checkpoints, and they may have many GB."""
    truncate(save(tmp_path, 1))
    for step in (2, 3):
        save(tmp_path, step)
    assert average(str(tmp_path), [], 2).endswith("average-00000002-00000003")
    assert not caplog.records
