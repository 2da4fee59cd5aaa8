"""NaN, diverging losses, ranks whose weights diverge, and ranks that differ from the start."""

import shutil
import sys

import pytest

from lm import kernels
from lm.checkpoint import store
from lm.data import embedded
from lm.errors import EveryRankError
from lm.inference.evaluation import evaluate
from lm.inference.trained_run import open_run
from tests import fork_server
from tests.commands import ROOT, environment, events, mpirun, run_command, train_here
from tests.faults.jobs import config_flags, last_step, saved_steps

FLAGS = ("--hidden_size", 8, "--max_steps", 60, "--noeval")


def test_nan_on_one_rank_stops_all_ranks_at_that_step(start, tmp_path):
    flags = (*FLAGS, "--checkpoint_every_steps", 20)
    code, output = start(tmp_path, *flags, num_ranks=2, fault="nan:1:30", forked=True).finish()
    assert code == 2 and "Traceback" not in output
    assert output.count("lm: error: the loss is nan at step 30, learning") == 1
    assert last_step(tmp_path) == 29 and saved_steps(tmp_path) == [20]


def test_a_model_that_is_too_large_causes_a_one_line_error(start, tmp_path):
    flags = ("--hidden_size", 4000, "--max_steps", 2)  # four matrices of 256 MB
    # Two matrices fit. The rest of the limit is for small allocations, which must not fail.
    # oneDNN would wait for memory for ten seconds.
    env = {"TF_ENABLE_ONEDNN_OPTS": "0"}
    code, output = start(tmp_path, *flags, fault="little_memory:740", env=env).finish()
    assert code == 1 and "Traceback" not in output
    assert output.count("lm: error: out of memory (ResourceExhaustedError: ") == 1
    assert "for a network of a config file, lower --micro_batches_at_once, or raise" in output


def test_a_diverged_run_fails(start, tmp_path, corpora):
    """Its losses are finite, but its perplexities overflow."""
    flags = (*FLAGS, "--learning_rate", 1e30, "--checkpoint_every_steps", 1)
    code, output = start(tmp_path, *flags, forked=True).finish()
    assert code == 2 and output.count("lm: error: ") == 1 and "Traceback" not in output
    assert output.count("e+29 at step 2, learning rate 1e+30: lower") == 1
    assert last_step(tmp_path) == 1 and saved_steps(tmp_path) == [1]
    with pytest.raises(EveryRankError, match="This run has diverged"):
        evaluate(open_run(tmp_path), ["valid"], data_path=str(corpora))


def test_weights_that_are_not_finite_are_never_saved(start, tmp_path):
    # The last save always happens. On a slow disk, earlier saves may be postponed by some steps.
    flags = (*FLAGS, "--checkpoint_every_steps", 25, "--max_steps", 50)
    code, output = start(tmp_path, *flags, num_ranks=2, fault="spoil:50", forked=True).finish()
    assert code == 2 and output.count("lm: error: ") == 1
    assert output.count("embedding is not finite after step 50, which is not saved") == 1
    assert saved_steps(tmp_path) == [25]
    store.verify(store.list_checkpoints(str(tmp_path))[0])


def test_a_run_with_out_of_sync_ranks_continues_from_the_last_checkpoint(start, tmp_path, corpora):
    flags = (*FLAGS, "--checkpoint_every_steps", 25)
    run, alone = tmp_path / "run", tmp_path / "alone"
    ends = ("--max_steps", 50)  # the last save always happens
    code, output = start(run, *flags, *ends, num_ranks=2, fault="flip:1:30", forked=True).finish()
    assert code == 1
    assert "at step 50 the ranks disagree on the weights" in output
    assert "on rank 0;" in output and "on rank 1" in output
    assert saved_steps(run) == [25]
    for directory in (run, alone):
        flags_here = (*config_flags(corpora), *flags, "--log_every_steps", 1)
        train_here(directory, *flags_here, "--resume")
    losses, expected = (
        [event["loss"] for event in events(directory, "step")] for directory in (run, alone)
    )
    assert len(losses) == 60
    if kernels.available():
        assert losses == expected
        assert {event["exact"][:5] for event in events(run, "start")} == {"yes: "}


@pytest.mark.parametrize("compiled", ["1", pytest.param("0", marks=pytest.mark.soak)])
def test_ranks_with_different_thread_counts_stay_identical(
    tmp_path, corpora, monkeypatch, compiled
):
    """All ranks clip by the same norm. Rank 0 computes the norm if compiled ops are unavailable."""
    flags = (*config_flags(corpora), "--noeval")
    # With a norm that each rank computes in TensorFlow, these ranks diverged within 30 steps.
    flags += ("--hidden_size", 300, "--init_scale", 1, "--num_steps", 4, "--max_steps", 30)
    flags += ("--checkpoint_every_steps", 1, "--log_every_steps", 1)
    program = [*fork_server.python(), "-m", "lm.train", "--output_dir", tmp_path / "run", *flags]
    command = [*mpirun(1), *program, "--intra_op_threads", 2]
    command += [":", "-np", 1, *program, "--intra_op_threads", 4]
    result = run_command(command, environment(LM_KERNELS=compiled), timeout=90)
    assert result.returncode == 0, result.stderr
    ((exact,),) = [[event["exact"] for event in events(tmp_path / "run", "start")]]
    if compiled == "0":
        assert exact.startswith("no: sums of plain TensorFlow")
        monkeypatch.setattr(kernels, "available", lambda: False)
    elif kernels.available():
        assert exact.startswith("yes: ")
    train_here(tmp_path / "alone", *flags, "--max_steps", 5)
    alone, together = (
        [event["loss"] for event in events(tmp_path / name, "step")] for name in ("alone", "run")
    )
    # Only five steps: with these weights, a rounding error grows to 5 % within 10 steps.
    assert together[:5] == pytest.approx(alone, rel=1e-4)


def different(tmp_path, corpora, name):
    """Return flags and environment of a second rank with a different seed, corpus or code."""
    if name == "seed":
        return ("--seed", 2), {}
    if name == "corpus":
        shutil.copytree(corpora / "embedded", tmp_path / "own", ignore=lambda *_: [".cache"])
        text = (tmp_path / "own" / "train.txt").read_text()
        (tmp_path / "own" / "train.txt").write_text(text + text.splitlines()[0] + "\n")
        return ("--corpus", "files", "--data_path", tmp_path / "own"), {}
    for folder in ("lm", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / "code" / folder)
    # The other version has one more exchange, before the facts of the training are compared.
    path, work = tmp_path / "code/lm/cli/program.py", "        work(parsed, comm, supervisor)"
    assert work in path.read_text()
    path.write_text(path.read_text().replace(work, f"        comm.gather(None)\n{work}"))
    return (), {"PYTHONPATH": str(tmp_path / "code")}


@pytest.mark.soak  # tests/integration/test_train.py tests different flags
@pytest.mark.parametrize("name", ["seed", "corpus", "code"])
def test_ranks_that_differ_are_rejected(start, tmp_path, corpora, name):
    embedded.write_corpus(corpora / "embedded")
    flags, env = different(tmp_path, corpora, name)
    own = ["--config", "config_test", "--log_every_steps", 1, *FLAGS]
    if name == "corpus":
        own += ["--corpus", "files", "--data_path", corpora / "embedded"]
    else:
        own += ["--data_path", corpora]
    # Import lm from PYTHONPATH. `python -m` would import it from the current directory.
    main = "import sys; sys.path.remove(''); from lm.train import main; main()"
    program = [sys.executable, "-c", main, "--output_dir", tmp_path / "run", *own]
    envs = [["env", f"PYTHONPATH={path}"] for path in (ROOT, env.get("PYTHONPATH", ROOT))]
    one = mpirun(1)
    launcher = [*one, *envs[0], *program, ":", *one[1:], *envs[1], *program, *flags, ":", *one[1:]]
    job = start(tmp_path / "run", *own, config=False, launcher=[str(word) for word in launcher])
    code, output = job.finish()
    assert code == 2, output
    assert output.count(f"lm: error: the ranks disagree on {name}: ") == 1
