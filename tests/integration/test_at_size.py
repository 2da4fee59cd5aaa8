"""Models above the sizes at which the code takes a different path, and the documented commands.

The variables of a medium model have more bytes than one group of a save or of a load. The commands
of the documents run as written, with limits appended.
"""

import math
import re
import shlex

import numpy as np
import pytest
import tokenizers

from lm.average import average
from lm.checkpoint.tensors import tensor_shapes
from lm.checkpoint.transfer import LOADED_BYTES, READ_BYTES
from lm.config_file import load_config_file
from lm.functions import BUILT_IN
from tests import fork_server
from tests.commands import ROOT, environment, events, mpirun, run_command, train, train_here
from tests.using_a_run import check_commands_agree

pytestmark = pytest.mark.timeout(240)

SMALL = ("--batch_size", 4, "--num_steps", 5, "--eval_batch_size", 4)
_TINY = " ".join(map(str, (*SMALL, "--hidden_size", 8)))
LIMITS = {
    "lm.train": _TINY,
    "lm.search": f"--config config_medium --data_path data {_TINY} --max_steps 1 --trials 2",
    "lm.benchmark": "--batch_size 4 --num_steps 5 --vocab_size 100 --hidden_size 8 --repeats 1",
    "lm.synthesize": "--num_tokens 1000",
    "lm.average": "--last 2",
}
# These need hosts or a file of the user, or have a test that also checks their output.
ELSEWHERE = ("host1", "./mine.py", "lm.flags", "lm.check", "on_event")


def documented_commands():
    """Return the commands of the three documents for users that this test can run."""
    found = []
    for name in ("README.md", "docs/tutorial.md", "data/README.md"):
        for block in re.findall(r"^```\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.sub(r"\s+#.*", "", line).strip()
                if "python -m lm." in command and not any(part in command for part in ELSEWHERE):
                    found.append(command)
    assert len(found) > 12
    return found


def normalized(command):
    """Return a command for the run of this test, with small limits."""
    command = re.sub(r"runs/small-(\.\.\.|<time>)", "runs/medium", command)
    command = re.sub(r"runs/other-(\.\.\.|run)", "runs/other", command)
    command = re.sub(r"config_(small|test|large)", "config_medium", command)
    command = re.sub(r"the company said", "w8 w7", command)
    module = re.search(r"-m (lm\.\w+)", command).group(1)
    limits = LIMITS.get(module, "")
    if module == "lm.train":
        command = re.sub(r"--(max_steps|num_epochs) \d+", "", command)
        limits += "" if "--data_path" in command else " --data_path data"
        limits += " --max_steps 4" if "--resume" in command else " --max_steps 2"
        limits += " --num_layers 1 --nocheck_network" * ("config_transformer" in command)
    start, redirect, source = command.partition("<")
    return " ".join(f"{start} {limits} {redirect}{source}".split())


COMMANDS = [*dict.fromkeys(map(normalized, documented_commands()))]


def write_corpus(directory, num_words):
    """Write a text in which each word occurs once in train.txt."""
    directory.mkdir()
    words = [f"w{number}" for number in range(num_words - 1)]
    lines = [" ".join(words[i : i + 20]) + "\n" for i in range(0, len(words), 20)]
    (directory / "train.txt").write_text("".join(lines))
    for split in ("valid", "test"):
        (directory / f"{split}.txt").write_text("".join(lines[:4]))


def write_documented_corpora(path):
    """Write the texts, token IDs and tokenizer that data/README.md uses."""
    text = "In the beginning, God created the heaven and the earth.\n" * 60
    for name in ("my_text.txt", "novel.txt"):
        (path / name).write_text(text)
    for name in ("book", "text8"):
        (path / "data" / name).mkdir()
        for split in ("train", "valid", "test"):
            (path / f"data/{name}/{split}.txt").write_text(text)
    (path / "gpt2").mkdir()
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], special_tokens=["<|endoftext|>"])
    tokenizer.save_model(str(path / "gpt2"))
    ids = np.array(tokenizer.encode(text * 5).ids, np.uint16)
    (path / "nanoGPT/data/shakespeare").mkdir(parents=True)
    for name in ("train", "val"):
        ids.tofile(path / f"nanoGPT/data/shakespeare/{name}.bin")


def train_and_resume(tmp_path, *flags):
    """Train two steps, two more on two ranks, and two in a new run with these weights."""
    flags = (*flags, *SMALL, "--data_path", tmp_path / "data")
    train(tmp_path / "runs/medium", *flags, "--max_steps", 2)
    resume = ("--resume", "--test_on", "best", "--max_steps", 4)
    train(tmp_path / "runs/medium", *flags, *resume, num_ranks=2)
    init = ("--init_from", tmp_path / "runs/medium/checkpoints/step-00000004")
    train(tmp_path / "runs/other", *flags, *init, "--max_steps", 1, num_ranks=2)
    (tested,) = events(tmp_path / "runs/medium", "test")
    assert tested["step"] == 4 and tested["test_on"] == "best"


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """A directory with a corpus and two runs of config_medium."""
    path = tmp_path_factory.mktemp("medium")
    write_corpus(path / "data", 22_000)
    train_and_resume(path, "--config", "config_medium")
    return path


def test_the_model_is_larger_than_the_groups_of_a_save_and_of_a_load(medium):
    checkpoint = medium / "runs/medium/checkpoints/step-00000004"
    sizes = [path.stat().st_size for path in checkpoint.glob("model.data-*")]
    assert len(sizes) > 1 and sum(sizes) > READ_BYTES
    shapes = tensor_shapes(str(checkpoint)).values()
    assert max(map(math.prod, shapes)) * 4 > LOADED_BYTES


def test_the_commands_agree_on_the_average_of_a_medium_model(medium, tmp_path):
    run = medium / "runs/medium"
    average(str(run), [], 2)
    mean = run / "checkpoints/average-00000002-00000004"
    check_commands_agree(mean, BUILT_IN, medium, tmp_path, "data/test.txt")


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    """A directory with the texts of the documents and two runs of a small model."""
    path = tmp_path_factory.mktemp("documented")
    write_corpus(path / "data", 2000)
    write_documented_corpora(path)
    (path / "sentences.txt").write_text("w1 w2\nw3\n")
    flags = ("--config", "config_medium", "--hidden_size", 8, *SMALL, "--data_path", path / "data")
    train_here(path / "runs/medium", *flags, "--max_steps", 4, "--checkpoint_every_steps", 2)
    train_here(path / "runs/other", *flags, "--max_steps", 1)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_work(documented, command):
    ranks, python = shlex.join(mpirun(2)), shlex.join(fork_server.python())
    command = command.replace("mpirun -np 2", ranks).replace("python", python)
    env = environment(XDG_CACHE_HOME=f"{documented}/cache")  # lm.benchmark writes into it
    result = run_command(["bash", "-c", command], env, 120, cwd=documented)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags, num_words",
    [
        (("config_large",), 10_000),
        (("config_large", "--precision", "bfloat16"), 10_000),
        (("config_medium_tied",), 40_000),
        (("config_wikitext103",), 267_735),
        (("config_wikitext103", "--adaptive_input", "--tie_weights"), 267_735),
        ((ROOT / "configs/config_transformer.py", "--hidden_size", 512), 10_000),
    ],
)
def test_the_commands_agree_on_large_models(tmp_path, flags, num_words):
    write_corpus(tmp_path / "data", num_words)
    train_and_resume(tmp_path, "--config", *flags, "--virtual_ranks", 2)
    functions = load_config_file(str(flags[0])).functions
    check_commands_agree(tmp_path / "runs/medium", functions, tmp_path, tmp_path, "data/test.txt")


@pytest.mark.soak
@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/config_*.py")), ids=lambda p: p.stem)
def test_every_config_trains(tmp_path, corpora, path):
    flags = ("--corpus", "embedded", "--data_path", corpora, "--max_steps", 3)
    if "wikitext103" in path.name:
        flags += ("--adaptive_softmax_cutoffs", "10,30")
    train(tmp_path / "run", "--config", path, *flags, timeout=200)
