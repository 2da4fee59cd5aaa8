"""Events and log lines, read back from the files."""

import contextlib
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lm import logger
from lm.errors import RunError, Stopped, UserError
from lm.events.logs import LogFiles
from lm.events.observer import Observer
from lm.events.reporter import Heartbeat, Progress, Reporter
from tests.commands import ROOT
from tests.limits import file_size_limit


def test_events_are_json_lines_without_nonfinite_numbers(tmp_path):
    reporter = Reporter(str(tmp_path))
    reporter.event("step", step=1, loss=math.inf)
    reporter.event("epoch", train_perplexity=math.nan, note="ok")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # still open, as in a killed run
    parsed = [json.loads(line) for line in lines]
    assert parsed == [{"event": "step", "step": 1}, {"event": "epoch", "note": "ok"}]


@pytest.mark.parametrize("end", [None, Stopped("stopped", 15)])
def test_a_full_disk_is_one_error_line_that_names_the_file(tmp_path, caplog, end):
    message = r"cannot write .*metrics.jsonl: File too large"
    with file_size_limit(0), pytest.raises(RunError, match=message):
        with Reporter(str(tmp_path)) as reporter:
            for step in (1, 2):  # the first failure does not stop the run
                reporter.event("step", step=step)
            if end:
                raise end
    assert len(caplog.records) == 1 and "metrics.jsonl: File too large" in caplog.text


@pytest.mark.parametrize("command", ["cat", "cat >&2"])
def test_an_observer_receives_all_events(tmp_path, command):
    with Reporter(str(tmp_path), on_event=command) as reporter:
        reporter.event("step", step=1, loss=math.inf)
    received = (tmp_path / "observer.txt").read_bytes()
    assert received == (tmp_path / "metrics.jsonl").read_bytes() and b'"end"' in received


def test_the_output_of_an_observer_does_not_follow_a_link(tmp_path):
    (tmp_path / "output").symlink_to("victim")
    with pytest.raises(UserError, match="output: output is a link; replace it by its target"):
        Observer("echo theirs", str(tmp_path / "output"))


def test_an_observer_does_not_belong_to_the_job(tmp_path, monkeypatch):
    """Otherwise, commands of this project would wait for the other ranks."""
    names = "OMPI_COMM_WORLD_SIZE PMIX_RANK HOROVOD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS".split()
    for name in names:
        monkeypatch.setenv(name, "2")
    Observer("env", str(tmp_path / "output")).close()
    received = (tmp_path / "output").read_text()
    assert "PATH=" in received and not any(f"{name}=" in received for name in names)


# Replaces the packages mlflow and wandb, which the tests do not install, and prints their ends.
PACKAGE = """
run = None

def start_run(**_):
    global run
    run = object()

def end_run(status=None, exit_code=None):
    global run
    run = None
    print(status, exit_code)

init, finish, active_run = start_run, end_run, lambda: run
set_tracking_uri = log_params = set_tags = log_metrics = log = lambda *_, **options: None
"""


@pytest.mark.parametrize(
    "package, ends",
    [
        ("mlflow", {"finished": "FINISHED None", "failed": "FAILED None", None: "KILLED None"}),
        ("wandb", {"finished": "None 0", "failed": "None 1", None: "None 1"}),
    ],
)
def test_the_observers_in_the_documents_report_the_end_of_the_job(tmp_path, package, ends):
    (tmp_path / f"{package}.py").write_text(PACKAGE)
    (tmp_path / "run.json").write_text('{"config": {}, "provenance": {}}')
    for outcome, end in ends.items():
        events = [{"event": "start", "output_dir": str(tmp_path)}, {"event": "step", "step": 1}]
        if outcome:  # a job that is killed writes no "end" event
            events.append({"event": "end", "outcome": outcome})
        result = subprocess.run(
            [sys.executable, ROOT / f"docs/{package}_observer.py"],
            input="".join(json.dumps(event) + "\n" for event in events), text=True, check=True,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=30,
        )  # fmt: skip
        assert result.stdout == f"{end}\n"


@pytest.mark.parametrize(
    "command, reason, lines",
    [
        ("no_such_command", "ended with exit code 127", 1),
        ("head -n 1 >/dev/null", "ended with exit code 0", 100),
        ("sleep 2", "is still running 1 s after the end of the run", 1),
        ("sleep 2", "has not read 1,000 events", 2000),
    ],
)
def test_an_observer_that_fails_causes_one_warning(caplog, tmp_path, command, reason, lines):
    observer = Observer(command, str(tmp_path / "output"), end_seconds=1)
    for _ in range(lines):
        observer.send(b"x" * 1000 + b"\n")  # 100 lines do not fit into a pipe
    observer.close()
    (record,) = caplog.records
    assert f"the command of --on_event {reason}" in record.message


def test_the_last_log_line_is_the_reason_for_the_end_of_the_run(tmp_path):
    with contextlib.closing(LogFiles([str(tmp_path / "log.txt")], "master", 0)) as logs:
        with pytest.raises(Stopped), Reporter(str(tmp_path)) as reporter:
            reporter.logs = logs
            raise Stopped("stopped by SIGTERM", 15)
    assert (tmp_path / "log.txt").read_text().endswith(" ERROR stopped by SIGTERM\n")


@pytest.mark.parametrize(
    "error, end",
    [
        (None, {"outcome": "finished"}),
        (Stopped("stopped by SIGTERM", 15), {"outcome": "stopped"}),
        (KeyboardInterrupt(15), {"outcome": "stopped"}),
        (RunError("the loss is nan"), {"outcome": "failed", "reason": "the loss is nan"}),
        (KeyError("a"), {"outcome": "failed", "reason": "KeyError: 'a'"}),
    ],
)
def test_the_last_event_is_the_outcome_of_the_run(tmp_path, error, end):
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        with Reporter(str(tmp_path)):
            if error:
                raise error
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"event": "end", **end}


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Reporter(None, tensorboard=True) as reporter:
        reporter.event("step", step=1, loss=1.0)
    assert list(tmp_path.iterdir()) == []


def test_progress_shows_the_remaining_time_of_the_epoch_and_of_the_run(caplog):
    caplog.set_level("INFO", "lm")
    bar = Progress(False, 2, 3, 40, (40, 48_000))
    bar.update(("loss", 5.0), 0.5, tokens=2000, seconds=2.22)
    (line,) = caplog.messages
    assert line.startswith("epoch 2  step 4/40  train loss 5.00  learning rate 0.5  901 tokens/s")
    assert line.endswith("  left 01:19, run 29:35:51")
    bar = Progress(False, 2, 3, 40, (40, 48_000), peak_speed=1802)
    bar.update(("loss", 5.0), 0.5, tokens=2000, seconds=2.22)
    assert "901 tokens/s (50% of GEMM peak)  left" in caplog.messages[-1]


def test_a_line_names_the_activity_whenever_the_log_is_silent(tmp_path, monkeypatch):
    log = LogFiles([str(tmp_path / "log.txt")], "master", 0)
    asked = threading.Semaphore(0)

    def activity():
        asked.release()
        return "step 7, for 60 s"

    with contextlib.closing(log), contextlib.closing(Heartbeat(activity, seconds=0.1)):
        assert asked.acquire(timeout=10) and asked.acquire(timeout=10)
        logger.info("a line of the run")
    assert (tmp_path / "log.txt").read_text().count("INFO still in step 7, for 60 s\n") >= 2
    monkeypatch.setattr(logging.getLogger("lm"), "disabled", True)
    asked = threading.Semaphore(0)
    with contextlib.closing(Heartbeat(activity, seconds=0.1)):
        started = time.monotonic()
        assert all(asked.acquire(timeout=10) for _ in range(4))
        assert time.monotonic() - started > 0.3
    before = len(logger.handlers)
    with contextlib.closing(Heartbeat(activity, seconds=60)):
        assert len(logger.handlers) == before + 1
    assert len(logger.handlers) == before


def read_scalars(directory):
    read = EventAccumulator(str(directory / "tensorboard"))
    read.Reload()
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def test_tensorboard_shows_repeated_steps_once(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", iter(["a", "b"]).__next__)  # file names have seconds
    for resumed_from, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with Reporter(str(tmp_path), tensorboard=True) as reporter:
            reporter.event("start", resumed_from_step=resumed_from)
            for step in steps:
                reporter.event("step", step=step, loss=float(resumed_from))
    found = read_scalars(tmp_path)["loss/train"]
    assert found == [(1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0)]


def test_tensorboard_shows_no_perplexity_of_a_sampled_loss(tmp_path):
    reporter = Reporter(str(tmp_path), tensorboard=True, has_perplexity=False)
    reporter.event("step", step=100, epoch=1, loss=2.0)
    reporter.event("epoch", step=130, epoch=1, train_loss=3.0)
    assert read_scalars(tmp_path) == {"loss/train": [(100, 2.0)], "loss/epoch": [(130, 3.0)]}
