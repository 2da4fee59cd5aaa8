"""Medium, tied: the output layer uses the weights of the embedding. 650 units, 40 epochs.

This is the recipe of word_language_model in pytorch/examples. Its README (bcea1f5) reports a
test perplexity of 75.96 with tied weights and 80.97 with separate weights (--notie_weights). The
loss in pytorch/examples is a mean over words, but the loss of this trainer is a sum over the 35
time steps of a row. Therefore, the original learning rate (20) is divided by 35, and the original
clip (0.25) is multiplied by 35.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the tied LSTM with 650 units from pytorch/examples."""
    return Config(
        name="medium_tied",
        init_scale=0.0392232,  # 1 / sqrt(650), as in nn.LSTM
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
