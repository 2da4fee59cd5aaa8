"""Medium: dropout 0.5. Published test perplexity 84.42 after 39 epochs."""

from lm.config import Config


def get_config() -> Config:
    """Return the medium model of Zaremba et al. (2014), with the schedule of the tutorial."""
    return Config(
        name="medium",
        init_scale=0.05,
        hidden_size=650,
        num_layers=2,
        num_steps=35,
        keep_prob=0.5,
        batch_size=20,
        num_epochs=39,
        learning_rate=1.0,
        lr_decay=0.8,
        lr_decay_start_epoch=7,
        max_grad_norm=5.0,
    )
