"""NaN, ranks that part in silence, and ranks that never agreed."""

import shutil
import sys

import pytest

from lm import synthetic
from tests.commands import ROOT, mpirun
from tests.faults.jobs import last_step, run, saved_steps

FLAGS = ("--hidden_size", 8, "--max_steps", 60, "--noeval")


def test_nan_on_one_rank_stops_all_at_that_step(start, tmp_path):
    flags = (*FLAGS, "--checkpoint_every_steps", 20)
    code, output = start(tmp_path, *flags, num_ranks=2, fault="nan:1:30").finish()
    assert code == 1 and output.count("lm: error: the loss is nan at step 30, learning") == 1
    assert last_step(tmp_path) == 29 and saved_steps(tmp_path) == [20]


def test_nan_on_one_rank_is_skipped_by_all(start, tmp_path):
    skip = ("--on_nan", "skip", "--check_sync_steps", 1)
    job = run(start, tmp_path / "run", *FLAGS, *skip, num_ranks=2, fault="nan:1:30")
    assert job.output.count("step 30, learning rate 1: this update is skipped") == 1
    assert last_step(tmp_path / "run") == 60
    code, output = start(
        tmp_path / "none", *FLAGS, *skip, "--max_skipped_updates", 0, num_ranks=2, fault="nan:1:30"
    ).finish()
    assert code == 1 and "skipped update" in output


def test_a_flipped_bit_on_one_rank_is_found(start, tmp_path):
    flags = (*FLAGS, "--check_sync_steps", 25)
    code, output = start(tmp_path, *flags, num_ranks=3, fault="flip:1:20").finish()
    assert code == 1
    assert "at step 25 the ranks disagree on the weights" in output
    assert "on ranks 0, 2;" in output and "on rank 1" in output
    assert saved_steps(tmp_path) == []


def different(tmp_path, corpora, name):
    """The flags and the environment of a second rank that differs in one thing."""
    if name == "seed":
        return ("--seed", 2), {}
    if name == "corpus":
        shutil.copytree(corpora / "embedded", tmp_path / "own", ignore=lambda *_: [".cache"])
        text = (tmp_path / "own" / "train.txt").read_text()
        (tmp_path / "own" / "train.txt").write_text(text + text.splitlines()[0] + "\n")
        return ("--corpus", "files", "--data_path", tmp_path / "own"), {}
    shutil.copytree(ROOT / "lm", tmp_path / "code" / "lm")
    with open(tmp_path / "code" / "lm" / "softmax.py", "a") as file:
        file.write("# another version\n")
    return (), {"PYTHONPATH": str(tmp_path / "code")}


@pytest.mark.parametrize(
    "name",
    [
        "seed",
        pytest.param("corpus", marks=pytest.mark.soak),
        pytest.param("code", marks=pytest.mark.soak),
    ],
)
def test_ranks_that_differ_are_refused(start, tmp_path, corpora, name):
    synthetic.write_corpus(corpora / "embedded")
    flags, env = different(tmp_path, corpora, name)
    own = ["--config", "config_test", "--log_every_steps", 1, *FLAGS]
    if name == "corpus":
        own += ["--corpus", "files", "--data_path", corpora / "embedded"]
    else:
        own += ["--data_path", corpora]
    # The code: from PYTHONPATH, not from the current directory, which `python -m` puts before it.
    main = "import sys; sys.path.remove(''); from lm.train import main; main()"
    program = [sys.executable, "-c", main, "--output_dir", tmp_path / "run", *own]
    envs = [["env", f"PYTHONPATH={path}"] for path in (ROOT, env.get("PYTHONPATH", ROOT))]
    one = mpirun(1)
    launcher = [*one, *envs[0], *program, ":", *one[1:], *envs[1], *program, *flags, ":", *one[1:]]
    job = start(tmp_path / "run", *own, config=False, launcher=[str(word) for word in launcher])
    code, output = job.finish()
    assert code == 2, output
    assert output.count(f"lm: error: the ranks disagree on {name}: ") == 1
