"""docs/python.md: its examples run as written, and other programs can use them."""

import concurrent.futures
import contextlib
import io
import logging
import math
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import threading
import types

import numpy as np
import pytest

from lm import api, kernels
from lm.errors import UserError
from lm.model.evaluator import Evaluator
from tests.commands import ROOT, run_code

SHORT = dict(
    corpus="embedded", output_dir="runs/short", batch_size=200, num_steps=100, hidden_size=8,
    num_epochs=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Run the examples in a new directory, and return the names that they define."""
    document = (ROOT / "docs/python.md").read_text()
    assert len(document.split()) <= 600
    blocks = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)
    names, shown = {}, io.StringIO()  # without a file descriptor, as in a notebook
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("examples"))
        with contextlib.redirect_stderr(shown):
            exec("\n".join(blocks), names)
        assert "test perplexity" in shown.getvalue()
        yield types.SimpleNamespace(**names)


def test_the_results_are_those_of_the_events_and_of_an_evaluation(examples):
    results, run = examples.results, examples.run
    (tested,), (*_, epoch) = (
        [event for event in run.metrics() if event["event"] == kind] for kind in ("test", "epoch")
    )
    assert results["test_perplexity"] == tested["test_perplexity"]
    assert results["valid_perplexity"] == epoch["valid_perplexity"] and results["step"] == 200
    assert run.evaluate("valid")["perplexity"] == results["valid_perplexity"]


def test_a_finished_run_has_the_same_results_again(examples):
    finished = examples.train("config_test", **SHORT)
    assert "epoch_seconds" in finished
    assert examples.train("config_test", **SHORT, resume=True) == finished
    assert examples.train(output_dir=pathlib.Path("runs/short"), resume=True) == finished


def test_the_log_file_contains_the_lines_before_the_start(examples):
    flags = {**SHORT, "output_dir": "runs/new", "learning_rate": np.float64(0.5)}
    examples.train("config_test", **flags, max_steps=1, resume=True)
    assert "starting a new run" in pathlib.Path("runs/new/log.txt").read_text()


def test_the_same_seed_generates_the_same_text(examples):
    run, text = examples.run, examples.text
    assert [each.prompt for each in examples.texts] == ["ba", "ba", "ta be", "ta be"]
    assert len(examples.likely) == 1
    assert run.generate("ba", num_words=20, seed=1)[0] == text
    assert run.generate("ba", batch_size=2, num_words=20, seed=1)[0] == text
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        drawn = run.generate("ba", num_words=20)
    seed = shown.getvalue().removeprefix("seed ")
    assert run.generate("ba", num_words=20, seed=int(seed)) == drawn


def test_batches_of_other_sizes_need_no_checkpoint(examples, tmp_path):
    """A run that is still training removes the checkpoint that a service uses."""
    shutil.copytree("runs/python", tmp_path / "run")
    run = examples.open_run(tmp_path / "run")
    text, (score,) = run.generate("ba", num_words=3, seed=1), run.score("ba")
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert len(run.generate("ba", num_words=3, beam_size=40, num_samples=2)) == 2
    assert run.generate("ba", num_words=3, seed=1, batch_size=7) == text
    if kernels.available():  # Otherwise, each batch size has its own graph.
        assert [str(each) for each in run.score(["ba", "ba"], batch_size=2)] == [str(score)] * 2
    for call in (run.generate, run.score):
        with pytest.raises(UserError, match="batch_size must be at least 1, not 0"):
            call("ba", batch_size=0)


def test_a_fork_that_inherits_a_started_tensorflow_is_an_error(examples):
    """TensorFlow's threads do not exist in the fork, so TensorFlow would wait forever."""
    context = multiprocessing.get_context("fork")
    for call in (examples.run.score, examples.open_run("runs/python").generate):
        found, end = context.Pipe(duplex=False)

        def use_run(call=call, end=end):
            try:
                call("ba")
            except UserError as error:
                end.send(str(error))

        process = context.Process(target=use_run)
        process.start()
        try:
            assert found.poll(30), "the fork waits"
            assert "this process was forked after TensorFlow had started" in found.recv()
        finally:
            process.kill()
            process.join()


def test_a_run_works_after_it_was_closed(examples):
    examples.run.close()
    assert examples.run.evaluate(pathlib.Path("my.txt"))["tokens"] > 0


def test_two_runs_generate_at_the_same_time_in_another_directory(examples, monkeypatch):
    runs = [examples.open_run("runs/python") for _ in range(2)]
    monkeypatch.chdir("runs")
    random.seed(3)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda run: run.generate("ba", num_words=1), runs))
    assert random.random() == random.Random(3).random()


def test_an_evaluation_does_not_block_other_threads(examples, monkeypatch):
    has_started, may_end, compute = threading.Event(), threading.Event(), Evaluator.run

    def run_later(*arguments):
        has_started.set()
        assert may_end.wait(60), "the evaluation blocks other threads"
        return compute(*arguments)

    monkeypatch.setattr(Evaluator, "run", run_later)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        evaluation = threads.submit(examples.run.evaluate, "test")
        assert has_started.wait(60)
        examples.open_run("runs/python").generate("ba", num_words=1)
        may_end.set()
    assert evaluation.result()["perplexity"] == examples.results["test_perplexity"]


def test_a_score_is_the_log_probability_of_an_evaluation(examples):
    (score,) = examples.run.score(["ba ta be"])
    nll = examples.run.evaluate("my.txt", lines=True)["nll"]
    assert math.isclose(-nll * len(score.log_probs), score.log_prob, rel_tol=1e-9)


def test_an_empty_line_at_the_end_of_a_text_is_scored(examples):
    lengths = [len(score.ids) for score in examples.run.score(["ba", "ba\n", "ba\n\n"])]
    assert lengths == [2, 2, 3]


@pytest.fixture
def stop_button():
    """Interrupts this process once, after the first epoch."""

    class StopButton(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("epoch 1 "):
                os.kill(os.getpid(), signal.SIGINT)
                logging.getLogger("lm").removeHandler(self)

    button = StopButton()
    logging.getLogger("lm").addHandler(button)
    yield
    logging.getLogger("lm").removeHandler(button)


@pytest.mark.usefixtures("stop_button")
def test_the_stop_button_saves_the_run(examples):
    flags = {**SHORT, "output_dir": "runs/stopped", "num_epochs": 9}
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        with pytest.raises(KeyboardInterrupt, match="which is saved; continue with"):
            examples.train("config_test", **flags)
    assert "stopping after this step and saving" in shown.getvalue()


def test_a_process_trains_one_run_at_a_time(examples):
    with api._training, pytest.raises(UserError, match="another thread of this process"):
        examples.train("config_test", **SHORT)


def test_an_unknown_field_is_an_error(examples):
    with pytest.raises(ValueError, match="hiden_size is not a field of Config or RunOptions"):
        examples.train("config_test", hiden_size=3)
    with pytest.raises(ValueError, match="momentum has no effect with optimizer sgd"):
        examples.train("config_test", momentum=0.5)


LATE = """
import os, pathlib, sys
os.environ.pop("TF_OVERRIDE_GLOBAL_THREADPOOL", None)  # of the process that runs the tests
import tensorflow as tf
tf.constant(1.0)
from lm.api import train
pathlib.Path("mine.py").write_text(sys.argv[2])
train("mine.py", data_path=sys.argv[1], max_steps=1, eval=False)
"""
NETWORK = """
from lm.config import Config

def get_config():
    return Config(corpus="embedded", num_steps=4, batch_size=4, hidden_size=8)

def state_shapes(config):
    return {}

def build_outputs(inputs_TB, state, context):
    return context.embed(inputs_TB), {}
"""


def test_a_network_is_not_exact_if_tensorflow_was_used_before(tmp_path, corpora):
    """Threads that TensorFlow starts first divide operations, whose results then differ."""
    environment = {"PYTHONPATH": str(ROOT)}
    result = run_code(LATE, corpora, NETWORK, env=environment, cwd=tmp_path)
    assert re.search(r"exact +no: TensorFlow was used before", result.stderr), result.stderr
