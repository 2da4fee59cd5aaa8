"""Frozen weights: --trainable."""

import dataclasses

import numpy as np
import pytest

from lm.config import Config
from lm.errors import UserError
from tests.unit.model.networks import start_values, train

CONFIG = Config(
    num_steps=4, batch_size=16, hidden_size=6, optimizer="adam", trainable="lstm_1|bias"
)


@pytest.mark.parametrize("fields", [{}, {"tie_weights": True}, {"recurrent_keep_prob": 0.5}])
def test_frozen_weights_keep_their_values_and_cost_nothing(fields):
    config = dataclasses.replace(CONFIG, **fields)
    before, after = start_values(config), train(config)
    trained = {name for name in before if "lstm_1" in name or "bias" in name}
    for name, value in before.items():
        assert np.array_equal(after[name], value) == (name not in trained), name
    slots = {name.removesuffix("/Adam") for name in after if name.endswith("/Adam")}
    assert slots == trained


def test_the_regular_expression_must_match_a_weight():
    with pytest.raises(UserError, match="--trainable lstm_7 matches none of the weights embedding"):
        train(dataclasses.replace(CONFIG, trainable="lstm_7"))
    with pytest.raises(UserError, match=r"trainable '\(' is not a regular expression: missing"):
        dataclasses.replace(CONFIG, trainable="(")
