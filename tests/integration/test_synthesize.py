"""The command that writes a synthetic corpus, and a run on this corpus."""

import contextlib
import functools
import gzip
import resource
import subprocess
import sys
import time

import pytest

from tests.commands import ROOT, environment, one_error, run_command, run_module

pytestmark = pytest.mark.timeout(120)


def test_a_run_on_a_synthetic_corpus_reports_the_true_perplexity(tmp_path):
    directory = tmp_path / "corpus"
    flags = ["--num_words", 2000, "--num_tokens", "3_000", "--eval_tokens", 300]
    result = run_module("lm.synthesize", "--output_dir", directory, *flags)
    assert result.returncode == 0, result.stderr
    true = result.stdout.split(" (test)")[0].split()[-1]
    train = directory / "train.txt"
    assert len(set(train.read_text().split())) == 2000
    (directory / "train.txt.gz").write_bytes(gzip.compress(train.read_bytes()))
    train.unlink()
    result = run_module(
        "lm.train", "--config", "config_test", "--corpus", "files", "--data_path", directory,
        "--output_dir", tmp_path / "run", "--max_steps", 1,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert f"(true: {true})" in result.stdout + result.stderr
    assert "vocabulary of 2,001" in result.stderr


def test_a_text_of_the_user_is_not_overwritten(tmp_path):
    (tmp_path / "test.txt").write_text("my own\n")
    result = run_module("lm.synthesize", "--output_dir", tmp_path)
    assert result.returncode == 2
    assert "exists, but does not contain the synthetic corpus of" in result.stderr


def test_a_stop_signal_removes_the_unfinished_corpus(tmp_path):
    flags = ["--output_dir", tmp_path / "d", "--num_tokens", 10**9]
    command = [sys.executable, "-m", "lm.synthesize", *map(str, flags)]
    with (
        subprocess.Popen(
            command, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as job,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(job.kill)  # before the end of Popen, which waits for the job
        while not list(tmp_path.glob(".corpus-*/corpus/*")) and job.poll() is None:
            time.sleep(0.01)
        job.terminate()
        _, lines = job.communicate(timeout=20)
    assert job.returncode == 143 and lines.endswith("lm: stopped by SIGTERM\n"), lines
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_one_line(tmp_path):
    flags = ["--output_dir", tmp_path / "d", "--num_words", 1_000_000, "--num_successors", 256]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (2 << 30, 2 << 30))
    command = [sys.executable, "-m", "lm.synthesize", *flags]
    result = run_command(command, environment(), 60, preexec_fn=limit)
    assert "out of memory (Unable to allocate 1.91 GiB" in one_error(result, 1)
