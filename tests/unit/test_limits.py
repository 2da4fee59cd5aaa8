"""The upper limits of all integer options, and runs with options at their limits."""

import dataclasses
import importlib

import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.config import Config, RunOptions
from lm.data.batches import Rows
from lm.data.embedded import LanguageOptions, random_language
from lm.errors import UserError
from lm.model.network import Network
from lm.model.windows import build_window_graph
from lm.options import Checked, field_type, limits_of
from tests.commands import ROOT, train_here

TOO_MANY = 10**400


def option_classes():
    """Return all option classes of all commands."""
    for path in sorted((ROOT / "lm").rglob("*.py")):
        if "= option(" in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    found = [Checked]
    for cls in found:  # the list grows
        found += cls.__subclasses__()
    return [cls for cls in found if cls.__module__.startswith("lm.")]


def limit(cls, name):
    return limits_of(cls.__dataclass_fields__[name], int)["high"]


def test_every_integer_option_has_an_upper_limit():
    checked = set()
    for cls in option_classes():
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            if field_type(cls, field.name)[0] is not int or field.metadata["choices"]:
                continue
            name, most = field.name, limit(cls, field.name)
            others = {"num_words": most} if name == "num_successors" else {}
            assert getattr(cls(**{name: most}, **others), name) == most
            for value, shown in ((most + 1, str(most + 1)), (TOO_MANY, str(TOO_MANY))):
                with pytest.raises(UserError) as error:
                    cls(**{name: value})
                assert str(error.value) == f"{name} must be at most {most}, not {shown}"
            with pytest.raises(UserError, match=f"{name} must be at least [0-9]+, not -10+$"):
                cls(**{name: -TOO_MANY})
            checked.add((cls.__name__, name))
    assert checked >= {
        ("SearchOptions", "trials"),
        ("Sampling", "num_words"),
        ("ScoreOptions", "batch_size"),
        ("EvaluateOptions", "eval_batch_size"),
        ("RepeatedOptions", "repeats"),
    }
    assert len(checked) > 40


UNLIMITED_WORK = (
    "vocab_size num_epochs asgd_trigger_epochs lr_decay_start_epoch warmup_steps seed"
    " eval_every_steps adaptive_softmax_factor checkpoint_every_steps keep_checkpoints"
    " early_stopping_epochs log_every_steps micro_batches_at_once"
).split()


@pytest.mark.parametrize(
    "names, flags",
    [
        (UNLIMITED_WORK, ["--adaptive_softmax_cutoffs=50"]),
        (["batch_size", "eval_batch_size", "min_count"], ["--num_steps=1"]),
        (["num_steps"], ["--batch_size=1", "--noeval"]),
    ],
    ids=["no work", "rows", "time steps"],
)
def test_a_run_with_options_at_their_limits(tmp_path, corpora, names, flags):
    if "num_steps" in names and not kernels.available():
        pytest.skip("plain TensorFlow has a copy of the LSTM for each time step")
    classes = {name: cls for cls in (Config, RunOptions) for name in cls.__dataclass_fields__}
    flags = [*flags, *(f"--{name}={limit(classes[name], name)}" for name in names)]
    common = ["--config=config_test", f"--data_path={corpora}", "--hidden_size=2"]
    train_here(tmp_path / "run", *common, *flags, "--max_steps=1", "--intra_op_threads=1")
    assert (tmp_path / "run/checkpoints/step-00000001").exists()


@pytest.mark.timeout(60)
def test_the_largest_number_of_layers_is_built_within_seconds():
    layers = limit(Config, "num_layers")
    with tf.Graph().as_default():
        network = Network(Config(num_layers=layers, hidden_size=2), 11)
        build_window_graph(network, Rows(0, 1), "eval")
        assert len(tf.trainable_variables()) == 3 * layers + 3


def test_a_language_at_its_limit_can_be_generated():
    most = limit(LanguageOptions, "num_successors")
    assert random_language(1, most, most).successors.shape == (most + 1, most)
