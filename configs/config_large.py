"""Large: dropout 0.65. Published test perplexity 78.72 after 55 epochs."""

from lm.config import Config


def get_config() -> Config:
    """Return the large model of Zaremba et al. (2014)."""
    return Config(
        name="large",
        init_scale=0.04,
        hidden_size=1500,
        num_layers=2,
        num_steps=35,
        keep_prob=0.35,
        batch_size=20,
        num_epochs=55,
        learning_rate=1.0,
        lr_decay=1 / 1.15,
        lr_decay_start_epoch=15,
        max_grad_norm=10.0,
    )
