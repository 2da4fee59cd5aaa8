"""The advice in the summary of a run."""

import types

from lm.config import Config
from lm.data.batches import rows_of_rank
from lm.distributed.devices import Device
from lm.training.summary import describe_micro_batches


def advice(num_threads, num_ranks=1, num_steps=Config.num_steps):
    """Return the size of the micro-batches of a user-defined network, and the advice."""
    config = Config(batch_size=20, virtual_ranks=4, num_steps=num_steps)
    job = types.SimpleNamespace(
        functions=types.SimpleNamespace(is_built_in=False),
        device=Device(1, num_threads, None),
        batches=types.SimpleNamespace(rows=rows_of_rank(20, 0, num_ranks, 4)),
        comm=types.SimpleNamespace(size=num_ranks),
        config=config,
    )
    return describe_micro_batches(job)


def test_the_summary_names_threads_without_a_micro_batch():
    fix = "raise --virtual_ranks (all ranks have {} threads), and use a multiple of it"
    text = "; only {} of 8 threads have a micro-batch: "
    found = advice(8)
    assert found == f", 5 per micro-batch{text.format(4)}{fix.format(8)} as --batch_size"
    assert text.format(2) + fix.format(16) in advice(8, num_ranks=2)
    assert advice(4) == ", 5 per micro-batch"


def test_the_summary_names_micro_batches_that_are_too_small():
    assert advice(2, num_steps=26) == ", 5 per micro-batch"
    assert "; fewer --virtual_ranks are faster" in advice(2, num_steps=25)
