"""Medium in 11 epochs: the tied LSTM of config_medium_tied with a linear schedule.

The learning rate falls from the first step on, and there is less dropout than in
config_medium_tied, which trains for 40 epochs. The test perplexity is 81.69 (docs/results.md), and
the published test perplexity of config_medium is 84.42.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the tied LSTM with 650 units for a short training."""
    return Config(
        name="medium_quick",
        init_scale=0.0392232,  # 1 / sqrt(650), as in nn.LSTM
        embedding_init_scale=0.1,
        hidden_size=650,
        num_layers=2,
        num_steps=35,
        keep_prob=0.6,
        tie_weights=True,
        batch_size=20,
        num_epochs=11,
        learning_rate=20 / 35,
        lr_schedule="linear",
        max_grad_norm=0.25 * 35,
        eval_batch_size=10,
    )
