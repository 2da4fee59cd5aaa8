"""Test: a tiny model that learns the synthetic corpus in about a minute, offline."""

from lm.config import Config


def get_config() -> Config:
    """Return the model that the quickstart and the tests use."""
    return Config(
        name="test",
        corpus="embedded",
        init_scale=0.1,
        hidden_size=64,
        num_layers=2,
        num_steps=20,
        keep_prob=1.0,
        batch_size=20,
        num_epochs=6,
        learning_rate=1.0,
        lr_decay=0.4,
        lr_decay_start_epoch=3,
        max_grad_norm=5.0,
    )
