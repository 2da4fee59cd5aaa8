"""Medium, variational: config_medium_tied with one dropout mask per row and window. 36 epochs.

Variational dropout is from Gal and Ghahramani (2016), arXiv:1512.05287. Each step also drops 30% of
the recurrent weights, as in Merity et al. (2018), arXiv:1708.02182. The learning rate falls
linearly from the first step on. The test perplexity is 74.19 (docs/results.md). pytorch/examples
reports 75.96 for the recipe of config_medium_tied.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the tied LSTM with 650 units, with variational dropout."""
    return Config(
        name="medium_variational",
        init_scale=0.0392232,  # 1 / sqrt(650), as in nn.LSTM
        embedding_init_scale=0.1,
        hidden_size=650,
        num_layers=2,
        num_steps=35,
        keep_prob=0.5,
        recurrent_keep_prob=0.7,
        locked_dropout=True,
        tie_weights=True,
        batch_size=20,
        num_epochs=36,
        learning_rate=20 / 35,
        lr_schedule="linear",
        max_grad_norm=0.25 * 35,
        eval_batch_size=10,
    )
