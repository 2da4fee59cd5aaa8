"""A user-defined network, configs/config_gru.py, with all commands."""

import json
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf2

from lm.config import Config
from lm.config_file import load_config_file
from lm.errors import Diverged, UserError
from lm.inference.generator import Generator
from lm.inference.saved_model import export
from lm.inference.scorer import Scorer
from lm.inference.trained_run import open_run
from lm.tokens.symbols import Bytes
from tests.commands import ROOT, events, run_module, train, train_here
from tests.untrained import write_run
from tests.using_a_run import check_commands_agree

GRU = ROOT / "configs/config_gru.py"


def gru_flags(corpora, max_steps, file=GRU):
    return (
        "--config", file, "--corpus", "embedded", "--data_path", corpora, "--noeval",
        "--hidden_size", 32, "--max_steps", max_steps,
    )  # fmt: skip


TRIGRAM = """
import tensorflow.compat.v1 as tf
from lm.config import Config

def get_config():
    return Config(name="trigram", corpus="embedded", num_steps=60, hidden_size=8)

def reads_words(config):
    return 2

def build_outputs(inputs_TB, state, context):
    x_TBH = context.embed(inputs_TB)
    before_TBH = tf.pad(x_TBH, [[1, 0], [0, 0], [0, 0]])[:-1]
    return tf.concat([x_TBH, before_TBH], axis=2), {}
"""


SMOOTHED = """
def build_losses(inputs_TB, targets_TB, state, context):
    outputs_TBH, state = build_outputs(inputs_TB, state, context)
    weights_HV, bias_V = context.output_layer(16)
    logits_TBV = tf.tensordot(outputs_TBH, weights_HV, 1) + bias_V
    losses_TB = tf.nn.sparse_softmax_cross_entropy_with_logits(targets_TB, logits_TBV)
    if context.training:
        losses_TB += 800 - 0.1 * tf.reduce_mean(tf.nn.log_softmax(logits_TBV), axis=2)
    return losses_TB, state
"""


def change_record(run, **fields):
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, **fields}))


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpora):
    """A short run on one rank."""
    directory = tmp_path_factory.mktemp("gru") / "run"
    train_here(directory, *gru_flags(corpora, 20))
    return directory


def test_a_run_resumes_with_a_changed_config_file_only_if_allowed(run, tmp_path, corpora):
    changed = tmp_path / "changed.py"
    changed.write_text(GRU.read_text() + "# another comment\n")
    shutil.copytree(run, tmp_path / "run")
    flags = (*gru_flags(corpora, 21, changed), "--resume")
    with pytest.raises(UserError, match="add --allow_changed_config_file"):
        train_here(tmp_path / "run", *flags)
    train_here(tmp_path / "run", *flags, "--allow_changed_config_file")
    assert events(tmp_path / "run", "start")[1]["resumed_from_step"] == 20


def test_commands_need_the_config_file_of_the_run(run, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(GRU.read_text() + "# changed\n")
    with pytest.raises(UserError, match=f"config file: add --config {re.escape(str(GRU))}$"):
        open_run(run)
    # Each checkpoint records its config file, because a resume may have changed it.
    changed = load_config_file(str(other)).functions
    with pytest.raises(UserError, match=r"differs from the config file of .*step-00000020"):
        open_run(run, functions=changed)
    assert open_run(run, functions=changed, allow_changed_config_file=True)
    write_run(tmp_path / "built_in", Config(hidden_size=3), Bytes())
    with pytest.raises(UserError, match="leave out --config"):
        open_run(tmp_path / "built_in", functions=changed)


BIGRAM = """
import tensorflow.compat.v1 as tf
from lm.config import Config

def get_config():
    return Config(name="bigram", corpus="embedded", virtual_ranks=4)

def build_logits(inputs_TB, state, context):
    for name in ("eval", "state", "split", "const", "identity"):  # as operations
        tf.get_variable(name, [1], trainable=False)
    start = tf.random_uniform([context.vocab_size, context.vocab_size])
    return tf.gather(tf.get_variable("table", initializer=start), inputs_TB), {}
"""


@pytest.fixture
def bigram(tmp_path, corpora):
    """A run with build_logits, without a state, and with a tensor as initial value."""
    (tmp_path / "bigram.py").write_text(BIGRAM)
    flags = ("--config", tmp_path / "bigram.py", "--data_path", corpora, "--max_steps", 3)
    train_here(tmp_path / "bigram", *flags, "--noeval")
    return tmp_path / "bigram"


@pytest.fixture
def trigram(tmp_path, corpora, request):
    """A run of a network that reads two words at a time."""
    (tmp_path / "trigram.py").write_text(getattr(request, "param", TRIGRAM))
    flags = ("--config", tmp_path / "trigram.py", "--data_path", corpora, "--max_steps", 3)
    train_here(tmp_path / "trigram", *flags, "--log_every_steps", 1, "--test_on", "none")
    return tmp_path / "trigram"


@pytest.mark.parametrize("trigram", [TRIGRAM + SMOOTHED], indirect=True)
def test_smoothed_losses_have_no_training_perplexity(trigram):
    (epoch,), steps = events(trigram, "epoch"), events(trigram, "step")
    assert epoch["train_loss"] == pytest.approx(np.mean([step["loss"] for step in steps]))
    assert epoch["train_loss"] > 800  # the exponential would overflow
    assert "train_perplexity" not in epoch and epoch["valid_perplexity"] > 1


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path, corpora):
    (tmp_path / "nan.py").write_text(TRIGRAM + SMOOTHED.replace("800", "tf.sqrt(0 * losses_TB)"))
    flags = ("--config", tmp_path / "nan.py", "--data_path", corpora, "--max_steps", 3)
    with pytest.raises(Diverged, match="the gradient is nan at step 1, learning rate"):
        train_here(tmp_path / "run", *flags)


def test_commands_reject_a_network_that_forgets_words(trigram, tmp_path):
    (tmp_path / "trigram.py").write_text(TRIGRAM.replace("return 2", "return 1"))
    functions = load_config_file(str(tmp_path / "trigram.py")).functions
    run = open_run(trigram, functions=functions, allow_changed_config_file=True)
    for use in (Scorer, Generator, lambda run: export(run, str(tmp_path / "exported"))):
        with pytest.raises(UserError, match="results for single words and for windows of 60"):
            use(run)


def test_check_network_fails_before_the_run_directory_is_created(tmp_path, corpora):
    ahead = BIGRAM.replace("inputs_TB), {}", "tf.reverse(inputs_TB, [0])), {}")
    (tmp_path / "ahead.py").write_text(ahead)
    flags = ("--config", tmp_path / "ahead.py", "--data_path", corpora, "--max_steps", 3)
    with pytest.raises(UserError, match="depend on later words"):
        train_here(tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()
    train_here(tmp_path / "run", *flags, "--noeval", "--nocheck_network")


def test_disable_v2_behavior_changes_nothing(tmp_path, corpora):
    old = BIGRAM.replace("as tf\n", "as tf\ntf.disable_v2_behavior()\n")
    flags = ("--data_path", corpora, "--max_steps", 3, "--noeval")
    text = old.replace("return tf", "x = tf").replace("inputs_TB), {}", "inputs_TB)\n")
    (tmp_path / "good.py").write_text(text + "    return context.dropout(x, 0.9), {}\n")
    good = ("--config", tmp_path / "good.py")
    train(tmp_path / "good", *good, *flags, num_ranks=2)
    result = run_module("lm.generate", *good, "--run", tmp_path / "good", "--num_words", 2)
    assert result.returncode == 0, result.stderr
    text += "    x *= tf.cast(tf.train.get_or_create_global_step(), tf.float32)\n"
    (tmp_path / "bad.py").write_text(text + "    return x, {}\n")
    bad = ("--config", tmp_path / "bad.py", *flags, "--output_dir", tmp_path / "bad")
    result = run_module("lm.train", *bad)
    assert result.returncode == 2
    assert "bad.py, line 15: build_logits uses the global step" in result.stderr


def test_a_run_that_starts_over_without_its_config_file_does_not_need_it(bigram, corpora):
    shutil.rmtree(bigram / "checkpoints")  # simulate a kill before the first checkpoint
    change_record(bigram, has_checkpoints=False)
    flags = ("--config", "config_test", "--hidden_size", 8, "--max_steps", 2, "--noeval")
    train_here(bigram, *flags, "--data_path", corpora, "--resume")
    assert open_run(bigram).config.name == "test"


def test_a_failed_resume_does_not_change_a_run(bigram, tmp_path, corpora):
    (tmp_path / "misspelt.py").write_text(BIGRAM.replace("build_logits", "own_logits"))
    flags = ("--config", tmp_path / "misspelt.py", "--data_path", corpora, "--noeval")
    before = (bigram / "metrics.jsonl").read_bytes()
    with open(bigram / "metrics.jsonl", "a") as file:
        file.write('{"event": "test", "step": 3, "test_perplexity": 9.0}\n')
    with pytest.raises(UserError, match="this network does not use table"):
        train_here(bigram, *flags, "--resume", "--allow_changed_config_file", "--max_steps", 4)
    assert (bigram / "metrics.jsonl").read_bytes().startswith(before + b'{"event": "test", ')
    assert open_run(bigram, functions=load_config_file(str(tmp_path / "bigram.py")).functions)


def test_all_commands_agree_for_a_network_without_state(bigram, tmp_path, corpora):
    functions = load_config_file(str(tmp_path / "bigram.py")).functions
    check_commands_agree(bigram, functions, corpora, tmp_path)


FIXED_ROWS = """
import tensorflow.compat.v1 as tf
from lm.config import Config

def get_config():
    return Config(name="fixed", corpus="embedded", num_steps=5, hidden_size=8)

def state_shapes(config):
    return {"h": [8]}

def build_outputs(inputs_TB, state, context):
    x_TBH = context.embed(inputs_TB)
    return tf.reshape(x_TBH, x_TBH.get_shape().as_list()), {"h": x_TBH[-1]}
"""


def test_an_export_can_have_a_fixed_number_of_rows(tmp_path, corpora):
    file, run, to = tmp_path / "fixed.py", tmp_path / "run", tmp_path / "exported"
    file.write_text(FIXED_ROWS)
    train_here(run, "--config", file, "--data_path", corpora, "--max_steps", 1, "--noeval")
    functions = load_config_file(str(file)).functions
    with pytest.raises(UserError, match=r"and an unknown B \(lm.export --rows sets B\)"):
        export(open_run(run, functions=functions), str(to))
    flags = ("--run", run, "--config", file)
    run_module("lm.export", *flags, "--to", to, "--rows", 2)
    score = tf2.saved_model.load(str(to)).signatures["score_ids"]
    assert score.structured_input_signature[1]["ids"].shape[0] == 2
    found = score(ids=tf2.constant([[4, 5, 6], [7, 8, -1]]))["log_probability"]
    words = (run / "vocabulary.txt").read_text().split()
    sentences = [" ".join(words[4:7]), " ".join(words[7:9])]
    expected = Scorer(open_run(run, functions=functions), 2).score(sentences)
    np.testing.assert_allclose(found, [score.log_prob for score in expected], rtol=1e-5)


def test_a_network_with_python_is_not_exported(tmp_path, corpora):
    file, run, to = tmp_path / "python.py", tmp_path / "run", tmp_path / "exported"
    python = "tf.ensure_shape(tf.py_func(lambda x: x, [inputs_TB], tf.int32), inputs_TB.shape)"
    file.write_text(GRU.read_text().replace("embed(inputs_TB)", f"embed({python})"))
    flags = ("--config", file, "--corpus", "embedded", "--data_path", corpora, "--max_steps", 1)
    train_here(run, *flags, "--noeval")
    with pytest.raises(UserError, match=r"python\.py calls Python code \(PyFunc\), which a Saved"):
        export(open_run(run, functions=load_config_file(str(file)).functions), str(to))
    assert not to.exists()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("gates/bias", "softmax/bias", "line {}: build_outputs has the variable softmax/bias"),
        ("embed(inputs_TB)", "embed(inputs_TB + 9999)", "line {}: InvalidArgumentError: indices"),
        # TensorFlow treats this error as the end of the data.
        (
            "embed(inputs_TB)",
            "embed(inputs_TB + tf.reshape(tf.py_func(lambda: next(iter([])), [], tf.int32), []))",
            "line {}: OutOfRangeError: ",
        ),
    ],
    ids=["built", "run", "run out"],
)
def test_errors_of_a_network_in_a_run_are_one_line(tmp_path, corpora, old, new, message):
    file = tmp_path / "broken.py"
    text = GRU.read_text().replace(old, new)
    file.write_text(text)
    line = text[: text.index(new)].count("\n") + 1
    flags = ("--config", file, "--corpus", "embedded", "--data_path", corpora, "--max_steps", 1)
    with pytest.raises(UserError, match=message.format(line)) as error:
        train_here(tmp_path / "run", *flags, "--nocheck_network")
    assert "\n" not in str(error.value)
    # A network that cannot be built leaves no run behind.
    assert (tmp_path / "run/metrics.jsonl").exists() == ("Error" in message)


@pytest.mark.soak
def test_the_benchmark_measures_a_user_defined_network(tmp_path, corpora):
    result = run_module(
        "lm.benchmark", "step", "--config", GRU, "--hidden_size", 16, "--vocab_size", 50,
        "--repeats", 1, "--out", tmp_path, env={"XDG_CACHE_HOME": f"{tmp_path}/cache"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "step-gru-float32.json").read_text())
    assert "mflops_per_word" not in record and "nan" not in result.stdout
    assert record["implementations"][0]["tokens_per_second"] > 0
