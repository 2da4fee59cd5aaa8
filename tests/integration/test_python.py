"""docs/python.md, run as written."""

import re

from tests.commands import ROOT, run_code

CHECK = """
import math, pathlib
import numpy as np
events = run.metrics()
(tested,), (*_, epoch) = ([e for e in events if e["event"] == kind] for kind in ("test", "epoch"))
assert results["test_perplexity"] == tested["test_perplexity"]
assert results["valid_perplexity"] == epoch["valid_perplexity"] and results["step"] == 200
assert run.evaluate("valid")["perplexity"] == results["valid_perplexity"]
short = dict(corpus="embedded", output_dir="runs/short", batch_size=200, num_steps=100,
             hidden_size=8, num_epochs=1)
finished = train("config_test", **short)
assert "epoch_seconds" in finished and train("config_test", **short, resume=True) == finished
assert train(output_dir=pathlib.Path("runs/short"), resume=True) == finished
train("config_test", **{**short, "output_dir": "runs/new"}, max_steps=1, resume=True,
      learning_rate=np.float64(0.5))
assert "starting a new run" in open("runs/new/log.txt").read()  # lines before the start too
assert [t.prompt for t in texts] == ["ba", "ba", "ta be", "ta be"] and len(likely) == 1
assert run.generate("ba", num_words=20, seed=1)[0] == text
assert run.generate("ba", batch_size=2, num_words=20, seed=1)[0] == text
import contextlib, io
shown = io.StringIO()  # without a file descriptor, as in a notebook
with contextlib.redirect_stderr(shown):
    drawn = run.generate("ba", num_words=20)
seed = shown.getvalue().removeprefix("seed ")
assert run.generate("ba", num_words=20, seed=int(seed)) == drawn
run.close()
import concurrent.futures, os, random
others = [open_run("runs/short"), open_run("runs/new")]
os.chdir("runs")
random.seed(3)
with concurrent.futures.ThreadPoolExecutor(2) as threads:
    list(threads.map(lambda each: each.generate("ba", num_words=1), others))
assert random.random() == random.Random(3).random()
os.chdir("..")
assert run.evaluate(pathlib.Path("my.txt"))["tokens"] > 0
(score,) = run.score(["ba ta be"])
nll = run.evaluate("my.txt", lines=True)["nll"]
assert math.isclose(-nll * len(score.log_probs), score.log_prob, rel_tol=1e-9)
import logging, signal
class StopButton(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("epoch 1 "):
            os.kill(os.getpid(), signal.SIGINT)
            logging.getLogger("lm").removeHandler(self)
logging.getLogger("lm").addHandler(StopButton())
try:
    with contextlib.redirect_stderr(shown):
        train("config_test", **{**short, "output_dir": "runs/stopped", "num_epochs": 9})
    raise AssertionError("not stopped")
except KeyboardInterrupt as interrupt:
    assert "which is saved; continue with" in str(interrupt)
assert "stopping after this step and saving" in shown.getvalue()
try:
    train("config_test", hiden_size=3)
    raise AssertionError("no error")
except ValueError as error:
    assert "hiden_size is not a field of Config or RunOptions" in str(error)
"""


def test_the_examples_for_python_run_as_written(tmp_path):
    document = (ROOT / "docs/python.md").read_text()
    assert len(document.split()) <= 600
    blocks = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)
    code = "\n".join([*blocks, CHECK])
    result = run_code(code, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "test perplexity" in result.stderr


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
