"""The summary and the advice at the start of a run."""

import types

import numpy as np

from lm.config import Config, RunOptions
from lm.data.batches import rows_of_rank
from lm.distributed.devices import Device
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

    assert not is_warned() and not is_warned(num_ranks=4, distributed_eval=True)
    assert is_warned(config={"eval_every_steps": 100})
    assert not is_warned(max_steps=100, eval=False)
    assert not is_warned(max_steps=1, num_tokens=900_000)
    assert is_warned(num_ranks=4) and "add --distributed_eval" in caplog.text
    assert is_warned(max_steps=100) and "add --distributed_eval" not in caplog.text


def advice(num_threads, config, num_ranks=1, **options):
    """Return the size of the micro-batches of a user-defined network, and the advice."""
    rows = rows_of_rank(config.batch_size, 0, num_ranks, config.virtual_ranks)
    job = types.SimpleNamespace(
        functions=types.SimpleNamespace(is_built_in=False),
        device=Device(1, num_threads, None),
        batches=types.SimpleNamespace(rows=rows),
        comm=types.SimpleNamespace(size=num_ranks),
        config=config,
        options=RunOptions(**options),
    )
    return start.describe_micro_batches(job)


def test_the_summary_names_threads_without_a_micro_batch():
    config = Config(batch_size=20, virtual_ranks=4)
    fix = "use --virtual_ranks 8 and a --batch_size that is a multiple of 8"
    found = advice(8, config, eval=False)
    assert found == f", 5 per micro-batch; only 4 of 8 threads have a micro-batch: {fix}"
    assert "of 8 threads have a micro-batch: use --virtual_ranks 16 " in advice(8, config, 2)
    assert advice(4, config) == ", 5 per micro-batch"


def test_the_summary_names_threads_that_validations_do_not_use():
    config = Config(batch_size=64, virtual_ranks=8)  # 20 rows are three micro-batches
    text = "; a validation uses only 3 of 8 threads: raise --eval_batch_size to 64"
    assert advice(8, config) == f", 8 per micro-batch{text}"
    assert advice(3, config) == advice(8, config, eval=False) == ", 8 per micro-batch"
    shared = advice(4, config, num_ranks=2, distributed_eval=True)
    assert shared.endswith("a validation uses only 2 of 4 threads: raise --eval_batch_size to 64")
