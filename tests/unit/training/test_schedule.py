"""Learning rates, averaging and early stopping."""

import contextlib
import dataclasses
import math

import pytest

from lm.checkpoint.progress import TrainProgress
from lm.config import Config, RunOptions
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Supervisor
from lm.errors import UserError
from lm.functions import BUILT_IN
from lm.schedule import SCHEDULES, has_stalled, learning_rate_at
from lm.training.prepare import prepare


def test_each_schedule_is_a_choice():
    assert Config.__dataclass_fields__["lr_schedule"].metadata["choices"] == (*SCHEDULES,)


def test_decay_depends_on_epochs_and_warmup_on_steps():
    config = Config(learning_rate=8, lr_decay=0.5, lr_decay_start_epoch=3, warmup_steps=20)
    rates = [learning_rate_at(config, step, 10) for step in (0, 5, 19, 20, 29, 30)]
    assert rates == [0, 2, 8 * 19 / 20, 4, 4, 2]


@pytest.mark.parametrize("scale, rate", [("none", 8), ("sqrt", 16), ("linear", 32)])
def test_the_rate_scales_with_the_ranks(scale, rate):
    config = Config(learning_rate=8, scale_lr_by_worker=scale)
    assert learning_rate_at(config, 0, 10, num_ranks=4) == rate


def test_plateau_lowers_the_rate_after_each_epoch_without_improvement():
    config = Config(learning_rate=8, lr_schedule="plateau", lr_plateau_factor=0.25)
    perplexities = [9, 7, 7, 8, 6, 6.5]  # an equal perplexity is not an improvement
    rates = [learning_rate_at(config, 10 * n, 10, 1, perplexities[:n]) for n in range(7)]
    assert rates == [8, 8, 8, 2, 0.5, 0.5, 0.125]


@pytest.mark.parametrize(
    "schedule, factor",
    [
        ("linear", lambda t: 1 - t),
        ("cosine", lambda t: 0.5 * (1 + math.cos(math.pi * t))),  # arXiv:1608.03983, equation 5
    ],
)
def test_linear_and_cosine_fall_from_the_end_of_the_warmup_to_the_last_epoch(schedule, factor):
    config = Config(learning_rate=8, lr_schedule=schedule, num_epochs=3, warmup_steps=6)
    rates = [learning_rate_at(config, step, 10) for step in range(30)]
    warmup, rest = [8 * step / 6 for step in range(6)], [8 * factor(n / 24) for n in range(24)]
    assert rates == pytest.approx(warmup + rest, rel=1e-12)
    assert rates[6] == 8 and rates[18] == pytest.approx(4)  # the peak, and the middle
    assert learning_rate_at(config, 18, 10, num_ranks=4) == rates[18]
    # The other fields of the learning rate multiply the peak, or do not apply.
    scaled = dataclasses.replace(config, scale_lr_by_worker="linear", lr_decay=0.1)
    assert learning_rate_at(scaled, 18, 10, num_ranks=4) == 4 * rates[18]
    longer = dataclasses.replace(config, warmup_steps=90)  # the run ends during the warmup
    assert learning_rate_at(longer, 29, 10) == pytest.approx(8 * 29 / 90)


def test_the_length_may_be_given_in_steps_and_the_rate_may_end_above_zero():
    config = Config(
        learning_rate=8, lr_schedule="cosine", num_steps_total=26, warmup_steps=6, lr_min_ratio=0.25
    )
    cosine = [0.5 * (1 + math.cos(math.pi * n / 20)) for n in range(21)]
    rates = [learning_rate_at(config, step, 10) for step in range(6, 27)]
    assert rates == pytest.approx([2 + 6 * factor for factor in cosine], rel=1e-12)
    linear = dataclasses.replace(config, lr_schedule="linear")
    assert learning_rate_at(linear, 16, 10) == 5 and learning_rate_at(linear, 26, 10) == 2


def test_inverse_sqrt_is_the_schedule_of_the_transformer():
    config = Config(learning_rate=8, lr_schedule="inverse_sqrt", warmup_steps=4)
    largest = 8 * 4**0.5  # arXiv:1706.03762, equation 3, without the constant
    expected = [largest * min(step**-0.5, step * 4**-1.5) for step in range(1, 30)]
    rates = [learning_rate_at(config, step, 10) for step in range(1, 30)]
    assert rates == pytest.approx(expected, rel=1e-12)
    without_warmup = dataclasses.replace(config, warmup_steps=0)
    assert [learning_rate_at(without_warmup, step, 10) for step in (0, 1, 4)] == [8, 8, 4]


@pytest.mark.parametrize("epochs, stalled", [(1, [3, 4]), (2, [4]), (3, []), (None, [])])
def test_a_run_has_stalled_after_n_epochs_without_improvement(epochs, stalled):
    perplexities = [9, 7, 7, 8, 6]
    assert [n for n in range(6) if has_stalled(perplexities[:n], epochs)] == stalled


def test_averaging_starts_when_an_epoch_is_worse_than_one_more_than_n_epochs_ago():
    """Follow the authors' code, which ignores the last n epochs. Algorithm 1 has a typing error."""
    position, started = TrainProgress(), []
    for epoch, perplexity in enumerate([9, 5, 7, 4, 6, 3, 8], start=1):
        position.step, position.valid_perplexity = 10 * epoch, perplexity
        position.finish_epoch(epoch, asgd_trigger_epochs=2)
        started.append(position.averages_from)
    # Epoch 4: 4 is below 9. Epoch 5: 6 is above 5, the best of the first two.
    assert started == [None] * 4 + [50] * 3
    assert position.num_averaged == 20 and TrainProgress(step=20).num_averaged == 0


def test_early_stopping_and_averaging_ignore_validations_within_epochs():
    at = TrainProgress()
    for step, perplexity in [(4, 3.0), (10, 5.0), (14, 9.0), (20, 4.0), (30, 4.5)]:
        at.step, at.valid_perplexity = step, perplexity
        if step % 10:
            at.record_validation()
        else:
            at.finish_epoch(step // 10, asgd_trigger_epochs=1)
    assert at.valid_perplexities == (3, 5, 9, 4, 4.5) and at.last_validation == 30
    assert at.epoch_perplexities(10) == [5, 4, 4.5]
    assert at.averages_from is None  # 4.5 is not above 5, but above 3


def test_epochs_without_validation_record_no_perplexity():
    position = TrainProgress(step=10)
    position.finish_epoch(1, asgd_trigger_epochs=None)
    assert position.epochs_done == 1 and position.valid_perplexities == ()


@pytest.mark.parametrize(
    "fields, options, message",
    [
        ({"lr_schedule": "plateau"}, {"eval": False}, "lr_schedule plateau needs"),
        ({"lr_schedule": "inverse_sqrt"}, {"resume": True}, "inverse_sqrt needs warmup_steps"),
        ({"asgd_trigger_epochs": 5}, {"eval": False}, "asgd_trigger_epochs needs"),
        ({}, {"early_stopping_epochs": 2, "eval": False}, "early_stopping_epochs needs"),
        ({}, {"init_partly": True}, "--init_partly needs --init_from"),
        ({}, {"timeline": "t.json"}, "--timeline shows the exchange between ranks"),
    ],
)
def test_options_that_need_a_missing_option_are_rejected(tmp_path, fields, options, message):
    fields, comm = {"corpus": "embedded", **fields}, Communicator()
    options = {"data_path": str(tmp_path), "output_dir": str(tmp_path / "run"), **options}
    with contextlib.ExitStack() as stack, Supervisor(comm, 0) as supervisor:
        with pytest.raises(UserError, match=message):
            prepare(Config(**fields), RunOptions(**options), comm, stack, BUILT_IN, supervisor)
