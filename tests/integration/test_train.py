"""`python -m lm.train` as a user runs it: the files of a run, and the errors for bad input."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lm import kernels
from lm.errors import RunError, UserError
from lm.kernels import library
from tests import fork_server
from tests.commands import (
    ROOT,
    environment,
    events,
    mpirun,
    one_error,
    run_command,
    run_module,
    train,
    train_here,
)

TINY = ("--config", "config_test", "--hidden_size", 8, "--max_steps", 30)


def test_a_run_writes_its_config_log_and_metrics(tmp_path, corpora):
    output_dir = tmp_path / "run"
    flags = (*TINY, "--data_path", corpora, "--log_every_steps", 10, "--seed", 5)
    flags += ("--sample_every_steps", 15)
    result = train(output_dir, *flags, "--log_path", output_dir / "mine.log")
    record = json.loads((output_dir / "run.json").read_text())
    assert record["config"]["seed"] == 5 and record["has_checkpoints"]
    assert (record["corpus"]["kind"], record["corpus"]["path"]) == ("embedded", str(corpora))
    assert "test perplexity" in result.stderr
    log = (output_dir / "log.txt").read_text()
    assert "epoch 1" in (output_dir / "mine.log").read_text()
    (start,) = events(output_dir, "start")
    assert (
        start["world_size"] == 1 and start["hosts"] and start["provenance"] == record["provenance"]
    )
    steps = events(output_dir, "step")
    assert [event["step"] for event in steps] == [10, 20, 30]
    assert set(steps[0]) >= {
        "event", "step", "epoch", "loss", "learning_rate", "tokens_per_second"
    }  # fmt: skip
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [event["step"] for event in events(output_dir, "sample")] == [15, 30]
    assert all(0 <= event["exchange_share"] < 1 for event in steps)
    (epoch,) = events(output_dir, "epoch")
    assert set(epoch) >= {
        "event", "epoch", "train_perplexity", "valid_perplexity", "learning_rate",
        "tokens_per_second", "epoch_seconds", "world_size",
    }  # fmt: skip
    total = start["steps_per_epoch"]
    assert epoch["epochs"] == 30 / total < 1
    assert f"epoch 1  step 30/{total}  train perplexity {epoch['train_perplexity']:.2f}" in (
        result.stderr
    )
    seconds = f"{epoch['epoch_seconds'] / 30 * total:.1f}"
    assert f"mean time per epoch: {seconds} s, from 30 of its {total} steps" in result.stderr
    assert epoch["valid_word_perplexity"] == epoch["valid_perplexity"]
    (test,) = events(output_dir, "test")
    assert 1 < test["test_perplexity"] < 300 and test["test_unknown"] == 0
    bits = test["test_bits_per_byte"]
    assert re.search(rf"test perplexity [\d.]+ \(true: [\d.]+\), {bits:.3f} bits/byte$", log, re.M)
    board = EventAccumulator(str(output_dir / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss/train")] == [10, 20, 30]
    for tag, value in [
        ("perplexity/valid", epoch["valid_perplexity"]),
        ("perplexity/test", test["test_perplexity"]),
        ("bits_per_byte/test", bits),
    ]:
        (last,) = board.Scalars(tag)
        assert last.step == 30 and last.value == pytest.approx(value)


def test_noeval_skips_evaluation_and_a_second_run_is_rejected(tmp_path, corpora):
    arguments = (*TINY, "--data_path", corpora, "--noeval")
    train_here(tmp_path, *arguments)
    (epoch,) = events(tmp_path, "epoch")
    assert "valid_perplexity" not in epoch and epoch["step"] == 30
    assert events(tmp_path, "test") == []
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for flags, words in [
        ((), "already contains a run: add --resume"),
        (("--resume", "--seed", 9), "cannot resume: seed was 1 in this run and is 9 now"),
    ]:
        with pytest.raises(UserError, match=words):
            train_here(tmp_path, *arguments, *flags)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    # Without --config, the run keeps its settings, which only rank 0 can read.
    resume = "lm.train", "--resume", "--output_dir", tmp_path, "--noeval", "--max_steps", 32
    result = run_module(*resume, "--hidden_size", 9)
    message = "cannot resume: hidden_size was 8 in this run and is 9 now; leave out --hidden_size"
    assert message in one_error(result, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("damaged\n")
    result = run_module(*resume, num_ranks=2, env={"LM_KERNELS": "0"})
    assert result.returncode == 0, result.stderr
    assert "metrics.jsonl has 1 damaged line, the first is line" in result.stderr
    warning = "the run was exact up to step 30 and will no longer be: no compiled ops: disabled"
    assert f"{warning} by LM_KERNELS=0\n" in result.stderr
    assert [epoch["step"] for epoch in events(tmp_path, "epoch")] == [32]


@pytest.mark.skipif(not kernels.available(), reason="a run without compiled ops is not exact")
def test_an_exact_run_does_not_resume_if_the_compiled_ops_are_missing(
    tmp_path, corpora, monkeypatch
):
    flags = (*TINY, "--data_path", corpora, "--noeval", "--max_steps")
    train_here(tmp_path / "run", *flags, 2)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    monkeypatch.setattr("lm.kernels.build.BUILD_DIR", tmp_path / "not_built")
    monkeypatch.setattr("lm.kernels.library.load", library.load.__wrapped__)
    monkeypatch.setattr("lm.kernels.library._path", library._path.__wrapped__)
    fix = "not built; run `python -m lm.kernels.build`"
    with pytest.raises(RunError, match=fix):
        train_here(tmp_path / "run", *flags, 3, "--resume")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_only_one_rank_prints_the_help_and_none_imports_tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('help imports TensorFlow')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    result = run_module("lm.train", "--help", num_ranks=2, env=env)
    assert result.returncode == 0 and result.stdout.count("--max_steps") == 1
    assert "--batch_size" in result.stdout and "--data_url" in result.stdout


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, corpora):
    flags = ("--data_path", corpora, "--output_dir", tmp_path / "run")
    result = run_module("lm.train", *TINY, *flags, "--log_path", "/proc/no/x.log")
    assert "(No such file or directory); check --log_path" in one_error(result, 2)
    # The corrected command can use the directory.
    assert not os.path.exists(tmp_path / "run" / "run.json")
    train(tmp_path / "run", *TINY, "--data_path", corpora, "--max_steps", 2)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    log = ("--log_path", "/proc/no/x")
    result = run_module("lm.train", *TINY, *flags, "--max_steps", 3, "--resume", *log)
    assert "check --log_path" in one_error(result, 2)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_timeline_that_horovod_could_not_write_is_an_error(tmp_path):
    flags = [*TINY, "--output_dir", tmp_path / "run", "--timeline", tmp_path / "missing/t.json"]
    error = one_error(run_module("lm.train", *flags, num_ranks=2), 2, num_ranks=2)
    assert "cannot be written: it must be a file in a directory" in error


def test_another_python_is_one_line():
    command = [sys.executable, "-S", "-m", "lm.generate"]  # -S hides the installed packages
    error = one_error(run_command(command, environment(), 60), 2)
    assert f"{sys.executable} on {socket.gethostname()} has no package numpy" in error
    assert "source .venv/bin/activate" in error


def test_an_interrupt_during_the_imports_prints_no_stack_trace(tmp_path):
    (tmp_path / "tqdm.py").write_text("print('importing', flush=True); import time; time.sleep(30)")
    command, env = [sys.executable, "-m", "lm.train"], environment(PYTHONPATH=str(tmp_path))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, env=env, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num_steps", 10000, "--batch_size", 100], "the training split has"),
        (["--data_url", "/no/such/file.tgz", "--config", "config_small"], "/no/such/file.tgz"),
        (["--noeval", "--test_on", "best"], "test_on best needs the validation perplexity"),
        (["--window_order", "shuffled"], "the built-in network carries state"),
        (["--output_dir", "/proc/no_such_dir"], "/proc/no_such_dir"),
    ],
)
def test_invalid_flags_do_not_create_a_run(tmp_path, corpora, arguments, message):
    data_path = tmp_path if "--data_url" in arguments else corpora
    with pytest.raises(UserError, match=message):
        train_here(tmp_path / "run", *TINY, "--data_path", data_path, *arguments)
    assert not os.path.exists(tmp_path / "run")


# Each additional rank has one more variable.
RANKS = """
import os
import tensorflow.compat.v1 as tf
from lm.config import Config

def get_config():
    return Config(name="ranks", corpus="embedded")

def build_logits(inputs_TB, state, context):
    for number in range(1 + int(os.environ["OMPI_COMM_WORLD_RANK"])):
        tf.get_variable(f"v{number}", [1], trainable=False)
    return tf.gather(tf.get_variable("table", [context.vocab_size] * 2), inputs_TB), {}
"""


@pytest.mark.parametrize(
    "by_rank, message",
    [
        ([(), ("--max_steps", 31)], "disagree on max_steps: 30 on rank 0; 31 on rank 1"),
        ([(), ("--config", "broken.py")], "rank 1.*broken.py"),
        (
            [("--config", "ranks.py", "--nocheck_network")] * 2,
            r'disagree on variable 2 in the order of creation: .* on rank 0; \["v1", \[1\]\]',
        ),
    ],
)
def test_bad_or_different_flags_end_all_ranks_with_one_line(tmp_path, corpora, by_rank, message):
    (tmp_path / "broken.py").write_text("def get_config(:\n")
    (tmp_path / "ranks.py").write_text(RANKS)
    command = mpirun(1)
    for number, flags in enumerate(by_rank):
        command += [":", "-np", 1] * number
        command += [*fork_server.python(), "-m", "lm.train", *TINY, "--data_path", corpora]
        command += ["--output_dir", tmp_path / "run", *flags]
    result = run_command(command, environment(), 120, cwd=tmp_path)
    assert re.search(message, one_error(result, 2, num_ranks=2))
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not events(tmp_path / "run", "step")


def test_speeds_are_those_of_this_job_without_saves_and_validations(
    tmp_path, corpora, monkeypatch, caplog
):
    from lm.model.evaluator import Evaluator
    from lm.training.checkpointer import Checkpointer
    from lm.training.loop import Loop

    caplog.set_level("INFO", "lm")
    flags = (*TINY[:-2], "--data_path", corpora, "--batch_size", 200, "--num_steps", 100)
    flags += ("--num_epochs", 1, "--test_on", "none", "--log_every_steps", 1)  # 19 steps
    clock, late = time.perf_counter, [0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])

    def delay(patch, owner, name):
        original = getattr(owner, name)

        def delayed(*args, **kwargs):
            late[0] += 100_000
            return original(*args, **kwargs)

        patch.setattr(owner, name, delayed)

    with monkeypatch.context() as patch:  # the first job is slow
        delay(patch, Loop, "take_step")
        train_here(tmp_path, *flags, "--max_steps", 6)
    assert re.search(r" 0 tokens/s.*  left 111:\d\d:\d\d", caplog.text)  # 4 steps
    caplog.clear()
    delay(monkeypatch, Checkpointer, "save")
    delay(monkeypatch, Evaluator, "run")
    train_here(tmp_path, *flags, "--resume", "--eval_every_steps", 3, "--checkpoint_every_steps", 1)
    lines = [line for line in caplog.messages if re.search(r" tokens/s.*  left ", line)]
    assert len(lines) >= 5 and not any(" 0 tokens/s" in line for line in lines)
    assert all(re.search(r"left \d\d:\d\d, run \d\d:\d\d$", line) for line in lines)
    speeds = [event["tokens_per_second"] for event in events(tmp_path, "step")]
    assert max(speeds[:6]) < 1 and min(speeds[6:]) > 20


# After one epoch, the factor is 1.28, or 1.42 with half of the learning rate.
@pytest.mark.parametrize(
    "num_epochs, factor", [(1, 1.3), pytest.param(4, 1.06, marks=pytest.mark.soak)]
)
def test_the_embedded_corpus_is_learned(tmp_path, corpora, num_epochs, factor):
    # One rank with one thread uses the least CPU time. Other numbers give the same result.
    result = train(
        tmp_path / "run", "--config", "config_test", "--data_path", corpora,
        "--intra_op_threads", 1, "--num_epochs", num_epochs, timeout=300,
    )  # fmt: skip
    known = json.loads((corpora / "embedded" / "truth.json").read_text())
    perplexity = events(tmp_path / "run", "test")[0]["test_perplexity"]
    assert known["test_perplexity"] < perplexity < factor * known["test_perplexity"]
    assert f"(true: {known['test_perplexity']:.2f})" in result.stderr


def test_a_resume_needs_no_more_memory_than_the_start(tmp_path):
    """A resume loads 32 MB at a time. A second copy of the embedding would need 96 MB."""
    words = [f"w{number}" for number in range(40_000)]
    for split in ("train", "valid", "test"):
        lines = [" ".join(words[i : i + 20]) for i in range(0, len(words), 20)]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines if split == "train" else lines[:5]))
    flags = (
        "--data_path", tmp_path, "--embedding_size", 600, "--hidden_size", 8, "--num_steps", 35,
        "--adaptive_softmax_cutoffs", 1000,
    )  # fmt: skip
    peaks = []
    for max_steps in (2, 4):
        train(tmp_path / "run", *flags, "--max_steps", max_steps, "--resume")
        peaks += [event["memory_mb"] for event in events(tmp_path / "run", "epoch")]
    assert peaks[1] < peaks[0] + 48


def test_a_training_uses_huge_pages_unless_the_user_decides(tmp_path, corpora):
    config = tmp_path / "config.py"
    config.write_text("import os\ndef get_config(): raise ValueError(os.environ['GLIBC_TUNABLES'])")
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("this kernel does not offer huge pages to programs that ask")
    env = {name: value for name, value in environment().items() if name != "GLIBC_TUNABLES"}
    for given, expected in ({}, "glibc.malloc.hugetlb=1"), ({"GLIBC_TUNABLES": "a=1"}, "a=1"):
        command = [sys.executable, "-m", "lm.train", "--config", config]
        result = subprocess.run(
            command, env=env | given, capture_output=True, text=True, timeout=60
        )
        assert result.stderr.strip().endswith(expected)
    flags = (*TINY, "--noeval", "--output_dir", tmp_path / "run", "--data_path", corpora)
    result = run_command([*mpirun(2), sys.executable, "-m", "lm.train", *flags], env, timeout=60)
    assert result.returncode == 0, result.stderr
    # A program that runs the command is not started again.
    code = "import sys, lm.train; print('FIRST'); sys.argv = [lm.train.__file__, '--help']; "
    code += "lm.train.main()"
    result = run_command([sys.executable, "-c", code], env, timeout=60)
    assert result.stdout.count("FIRST") == 1
