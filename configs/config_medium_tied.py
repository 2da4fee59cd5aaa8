"""Medium, tied: one matrix for the words that are read and predicted. 650 units, 40 epochs.

The recipe of pytorch/examples, word_language_model, whose README at bcea1f5 has test perplexity
75.96 (80.97 with --notie_weights). Its loss is a mean over words, ours a sum over the 35 time
steps of a row: its learning rate of 20 and clip of 0.25 are 20 / 35 and 0.25 * 35 here.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the tied LSTM of 650 units of pytorch/examples."""
    return Config(
        name="medium_tied",
        init_scale=0.0392232,  # 1 / sqrt(650), as nn.LSTM
        embedding_init_scale=0.1,
        hidden_size=650,
        num_layers=2,
        num_steps=35,
        keep_prob=0.5,
        tie_weights=True,
        batch_size=20,
        num_epochs=40,
        learning_rate=20 / 35,
        lr_schedule="plateau",
        lr_plateau_factor=0.25,
        max_grad_norm=0.25 * 35,
        eval_batch_size=10,
    )
