"""Small: no dropout. Published test perplexity 114.72 after 13 epochs."""

from lm.config import Config


def get_config() -> Config:
    """Return the small model of Zaremba et al. (2014)."""
    return Config(
        name="small",
        init_scale=0.1,
        hidden_size=200,
        num_layers=2,
        num_steps=20,
        keep_prob=1.0,
        batch_size=20,
        num_epochs=13,
        learning_rate=1.0,
        lr_decay=0.5,
        lr_decay_start_epoch=5,
        max_grad_norm=5.0,
    )
