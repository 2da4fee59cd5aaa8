"""Medium in 7 epochs: the tied LSTM of config_medium_tied with 576 units and a linear schedule.

The learning rate is higher than in config_medium_tied, which trains for 40 epochs, and falls from
the first step on. There is less dropout. The test perplexity is 83.19 (docs/results.md), and the
published test perplexity of config_medium is 84.42.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the tied LSTM with 576 units for a short training."""
    return Config(
        name="medium_quick",
        init_scale=0.0416667,  # 1 / sqrt(576), as in nn.LSTM
        embedding_init_scale=0.1,
        hidden_size=576,
        num_layers=2,
        num_steps=35,
        keep_prob=0.67,
        tie_weights=True,
        batch_size=20,
        num_epochs=7,
        learning_rate=1.0,
        lr_schedule="linear",
        max_grad_norm=0.25 * 35,
        eval_batch_size=10,
    )
