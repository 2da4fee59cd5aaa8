"""A long test: a run is killed at random moments and resumed on random numbers of ranks. It ends
like a run of one rank that was never stopped."""

import os
import random
import signal
import time

import pytest

from tests.faults.jobs import check_same_run, events, last_step, run

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "50"))
NUM_RANKS = (1, 2, 4, 8)  # each round chooses one
FLAGS = (
    "--hidden_size", 16, "--keep_prob", 0.7, "--batch_size", 50, "--num_epochs", 10,
    "--checkpoint_every_steps", 40,
)  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_kill_and_resume_many_times(start, tmp_path):
    run(start, tmp_path / "whole", *FLAGS)
    seed = int(os.environ.get("SOAK_SEED", time.time()))
    print(f"SOAK_SEED={seed}")
    chance, last = random.Random(seed), last_step(tmp_path / "whole")
    resumed, slowest = tmp_path / "resumed", 0.0
    for turn in range(ROUNDS):
        num_ranks = chance.choice(NUM_RANKS)
        job = start(resumed, *FLAGS, "--resume", num_ranks=num_ranks)
        # Spread the rounds evenly over the run.
        target = min(last * (turn + 1) // (ROUNDS + 1), last - 1)
        job.wait_for_step(max(target, 1))
        time.sleep(chance.uniform(0, 0.3))  # between steps, in a save, in an evaluation
        # A rank, or mpirun. With one rank, they are the same process.
        pid = chance.choice([*job.ranks(), job.process.pid])
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        code, output = job.ends()
        slowest = max(slowest, time.monotonic() - started)
        assert code != 0, output
    run(start, resumed, *FLAGS, "--resume", num_ranks=chance.choice(NUM_RANKS))
    print(f"{ROUNDS} kills; the job was gone after at most {slowest:.1f} s")
    check_same_run(resumed, tmp_path / "whole")
    assert events(resumed, "test")
