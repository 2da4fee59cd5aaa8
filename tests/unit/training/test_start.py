"""The summary and the advice at the start of a run."""

import types

import numpy as np

from lm.config import Config, RunOptions
from lm.training import start


def test_a_warning_names_validations_that_take_a_large_part_of_the_time(caplog):
    def is_warned(num_ranks=1, num_tokens=2_000_000, config=None, **options):
        caplog.clear()
        job = types.SimpleNamespace(
            config=Config(batch_size=100, num_steps=100, **(config or {})),
            options=RunOptions(**options),
            comm=types.SimpleNamespace(size=num_ranks),
            corpus=types.SimpleNamespace(valid=np.broadcast_to(np.int32(0), num_tokens)),
            batches=types.SimpleNamespace(steps_per_epoch=1000),  # 10,000,000 tokens
        )
        start.warn_of_long_validation(job)
        return "each validation evaluates 2,000,000 tokens on " in caplog.text

    assert not is_warned() and is_warned(num_ranks=4)
    assert not is_warned(num_ranks=4, distributed_eval=True)
    assert is_warned(config={"eval_every_steps": 100}) and is_warned(max_steps=100)
    assert not is_warned(max_steps=100, eval=False)
    assert not is_warned(max_steps=1, num_tokens=900_000)
