"""Two calls of `train` in one process, as in a notebook, on one rank and on two."""

import json
import logging
import pathlib
import signal
import sys
import threading

from lm.config import Config, RunOptions
from lm.distributed.launch import connect
from lm.errors import UserError
from lm.events.logs import worker_path
from tests.commands import run_module

CONFIG = Config(name="twice", corpus="embedded", hidden_size=8, init_scale=0.3, keep_prob=0.7)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def traces():
    """Return the threads, signal handlers and log handlers of this process."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    return {t.name for t in threading.enumerate()}, handlers, list(logging.getLogger("lm").handlers)


def main(data_path, parent):
    comm = connect()
    from lm.training.run import train  # after `connect`, which imports TensorFlow faster

    comm.barrier()  # by now, Horovod has started its threads
    before = traces()
    for name in ("first", "second"):
        options = RunOptions(
            data_path=data_path, output_dir=f"{parent}/{name}", max_steps=12, log_every_steps=1,
            eval=False, log_path=f"{parent}/{name}.log", mpi_log="workers",
        )  # fmt: skip
        train(CONFIG, options, comm)
        assert traces() == before
        own_log = pathlib.Path(worker_path(options.log_path, comm.rank)).read_text()
        assert f"(this is rank {comm.rank})" in own_log
    # The lock was released, and all ranks raise the same error.
    try:
        train(CONFIG, options, comm)
        raise AssertionError("a run over a run")
    except UserError as error:
        assert "already contains a run" in str(error) and error.on_every_rank
    assert traces() == before
    if comm.is_rank_0:
        losses = [
            [json.loads(line).get("loss") for line in path.read_text().splitlines()]
            for path in sorted(pathlib.Path(parent).glob("*/metrics.jsonl"))
        ]
        assert len(losses) == 2 and losses[0] == losses[1]
    comm.barrier()


def test_two_runs_in_one_process_leave_nothing_behind(tmp_path, corpora):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    main(str(corpora), one)
    result = run_module("tests.parallel.test_train_in_python", corpora, two, num_ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
