"""Jobs with 32 ranks, many more than cores: results are exact and messages stay short."""

import os
import signal
import socket

import pytest

from tests.commands import train_here
from tests.faults.jobs import check_same_run, config_flags, last_step, losses, saved_steps, start

__all__ = ["start"]

RANKS = 32
START_SECONDS = 900  # importing TensorFlow 32 times takes long on a few cores
END_SECONDS = 60
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3 * START_SECONDS),
    pytest.mark.skipif(MEMORY_BYTES < 12e9, reason="needs 12 GB of memory"),
]

FLAGS = ("--batch_size", 64, "--virtual_ranks", RANKS, "--noeval", "--log_every_steps", 1)


def test_a_run_stopped_on_32_ranks_and_resumed_on_16_is_bitwise_identical_to_one_rank(
    start, corpora, tmp_path
):
    together, alone = tmp_path / "together", tmp_path / "alone"
    flags = (*FLAGS, "--mpi_log", "collect")
    job = start(together, *flags, "--checkpoint_every_steps", 50, num_ranks=RANKS)
    job.wait_for(lambda: last_step(together) >= 100, timeout=START_SECONDS)
    assert saved_steps(together)[0] == 50
    job.process.send_signal(signal.SIGUSR2)
    code, output = job.finish(END_SECONDS)
    stopped = last_step(together)
    assert code == 128 + signal.SIGTERM
    assert output.count(f"stopped by SIGTERM after step {stopped}") == 1
    assert saved_steps(together)[-1] == stopped
    places = f"{socket.gethostname()} CPU on ranks 0 to {RANKS - 1}"
    assert f"ranks       {places} (this is rank 0)\n" in output

    flags += ("--max_steps", stopped + 50)
    code, output = start(together, *flags, "--resume", num_ranks=RANKS // 2).finish(START_SECONDS)
    assert code == 0, output
    # Rank 0 collects the summary of each rank. Its lines stay short on many ranks.
    text = (together / "log.txt").read_text()
    assert text.count(f"{RANKS // 2} ranks") >= RANKS // 2
    assert max(map(len, text.splitlines())) < 1000

    train_here(alone, *config_flags(corpora), *flags)
    check_same_run(together, alone)
    assert len(losses(alone)) == stopped + 50


def test_an_error_on_one_rank_ends_all_ranks_with_one_message(start, tmp_path):
    job = start(tmp_path, *FLAGS, num_ranks=RANKS, fault="fail:17:30:before")
    job.wait_for(lambda: last_step(tmp_path) >= 29, timeout=START_SECONDS)
    code, output = job.ends()
    assert code != 0
    assert output.count("lm: error: ") == output.count("lm: error: rank 17 on ") == 1
    assert output.count("RuntimeError: the injected cause\n") == 1
