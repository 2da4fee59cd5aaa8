"""The commands lm.generate, lm.score and lm.export."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from lm.config import Config
from lm.errors import UserError
from lm.functions import BUILT_IN
from lm.inference.saved_model import export
from lm.inference.trained_run import open_run
from lm.inference.weights import export_weights
from lm.tokens.symbols import Bytes
from tests import fork_server
from tests.commands import ROOT, environment, run_command, run_module
from tests.untrained import make_run, write_run
from tests.using_a_run import check_commands_agree

PROMPT = "ba ta"


def score(run, text, *arguments):
    command = [*fork_server.python(), "-m", "lm.score", "--run", run, *arguments]
    result = run_command(command, environment(), 60, input=text)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sentences(corpora):
    return (corpora / "embedded/test.txt").read_text().splitlines()[:20]


@pytest.fixture(scope="module")
def scores(trained, sentences):
    """Return log-probability, number of tokens, sentence and log-probabilities of its tokens."""
    lines = score(trained, "\n".join(sentences) + "\n", "--per_word").splitlines()
    cells = [line.split("\t") for line in lines]
    return [(float(c[0]), int(c[1]), c[3], [*map(float, c[4].split())]) for c in cells]


def test_the_logged_seed_generates_the_same_text_again(trained):
    arguments = ("--run", trained, "--num_words", 30, "--temperature", 0.9, "--num_samples", 2)
    printed = run_module("lm.generate", *arguments, "--prompt", PROMPT)
    seed = re.search(r"^seed (\d+)$", printed.stderr, re.MULTILINE).group(1)
    command = [*fork_server.python(), "-m", "lm.generate", *arguments, "--seed", seed]
    again = run_command(command, environment(), 60, input=PROMPT)  # the prompt comes from a pipe
    assert again.returncode == 0, again.stderr
    assert "reading one prompt per line from the standard input" in again.stderr
    piped = again.stdout.replace("== prompt 1, ", "== ")
    assert printed.stdout == piped and "<unk>" not in piped
    title, one, two = re.split(r"== \d of 2\n", piped)
    assert title == "" and one != two
    assert all(re.match(rf"{PROMPT}\s", text) for text in (one, two))  # a space or a line end


def test_all_commands_agree_with_an_adaptive_input(tmp_path, corpora):
    fields = dict(adaptive_softmax_cutoffs="10,30", adaptive_input=True, tie_weights=True)
    make_run(tmp_path / "run", corpora, **fields)
    check_commands_agree(tmp_path / "run", BUILT_IN, corpora, tmp_path)


def test_commands_that_are_a_single_process_are_rejected_under_mpirun(trained):
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    result = run_module("lm.generate", "--run", trained, env=env)
    assert result.returncode == 2 and result.stdout == ""
    assert "this command is a single process: start it without mpirun" in result.stderr


def test_files_of_windows_are_explained(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=3), Bytes())
    command = [*fork_server.python(), "-m", "lm.score", "--run", f"{tmp_path}/run"]
    process = subprocess.run(
        command, env=environment(), input=b"a\r\nb\r\n", stdout=-1, stderr=-1, timeout=60, cwd=ROOT
    )
    assert "the lines end in \\r, as in Windows files" in process.stderr.decode()
    assert process.returncode == 0


def test_each_line_is_scored_before_the_next_line_arrives(trained, scores):
    process = subprocess.Popen(
        [*fork_server.python(), "-m", "lm.score", "--run", str(trained)],
        cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for line in ["ba be", "", scores[0][2]]:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer.endswith(f"\t{line}\n")
        assert float(answer.split("\t")[0]) == scores[0][0]
        last, _ = process.communicate(scores[1][2], timeout=30)  # the last line has no line end
        assert float(last.split("\t")[0]) == scores[1][0]
        assert last.endswith(f"\t{scores[1][2]}\n") and process.returncode == 0
    finally:
        process.kill()


def test_head_stops_the_command_silently(trained, sentences):
    (python,) = fork_server.python()
    command = f"yes ba be | {python} -m lm.score --run {trained} | head -n 2"
    result = run_command(["bash", "-c", command], environment(), 60)
    assert len(result.stdout.splitlines()) == 2 and result.stderr == ""


LOAD = """
import json, sys
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
assert not any(name.split(".")[0] in ("lm", "horovod") for name in sys.modules)
sentences = [line.split() for line in json.loads(sys.argv[2])]
longest = max(map(len, sentences))
words = tf.constant([s + [""] * (longest - len(s)) for s in sentences])
score = model.signatures["serving_default"](words=words)
(asset,) = [a for a in tf.io.gfile.glob(sys.argv[1] + "/assets/*")]
vocabulary = open(asset).read().split()
step = model.signatures["next_word"]
out = step(words=tf.constant(["<eos>", vocabulary[1]]), state=tf.zeros([2, 2 * 2 * 24]))
sums = tf.reduce_sum(tf.exp(out["log_probabilities"]), axis=1).numpy().tolist()
print(json.dumps({
    "sentences": score["log_probability"].numpy().tolist(), "sums": sums,
    "words": score["log_probabilities"].numpy().tolist()}))
"""


def test_tensorflow_loads_the_export_and_computes_the_same_numbers(
    trained, tmp_path, sentences, scores
):
    exported = tmp_path / "exported"
    result = run_module("lm.export", "--run", trained, "--to", exported)
    assert result.returncode == 0, result.stderr
    with pytest.raises(UserError, match="already exists"):
        export(open_run(trained), str(exported))
    # Isolated, in a different directory: importing this project would fail.
    command = [sys.executable, "-I", "-c", LOAD, exported, json.dumps(sentences)]
    loaded = run_command(command, environment(), 90, cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    found = json.loads(loaded.stdout)
    np.testing.assert_allclose(found["sentences"], [total for total, *_ in scores], rtol=1e-5)
    first = scores[0][3]
    np.testing.assert_allclose(found["words"][0][: len(first)], first, rtol=1e-4, atol=1e-5)
    assert not any(found["words"][0][len(first) :])  # zeros after the closing <eos>
    np.testing.assert_allclose(found["sums"], 1, rtol=1e-5)


@pytest.mark.parametrize("file_format", ["npz", "safetensors"])
def test_the_weights_are_exported_for_other_frameworks(trained, tmp_path, file_format):
    if file_format == "safetensors":
        load = pytest.importorskip("safetensors.numpy").load_file
    else:
        load = np.load
    path = str(tmp_path / "new/weights")
    run = open_run(trained)
    export_weights(run, path, file_format)
    found, reader = load(path), tf.train.load_checkpoint(f"{run.checkpoint.path}/model")
    assert sorted(found.keys()) == sorted(run.checkpoint.manifest.weights)
    for name in found:
        np.testing.assert_array_equal(found[name], reader.get_tensor(name))
    with pytest.raises(UserError, match="already exists"):
        export_weights(run, path, file_format)
