"""Small, tied: the output layer uses the weights of the embedding. 200 units, 40 epochs.

This is the recipe of word_language_model in pytorch/examples. Its README (bcea1f5) reports a
test perplexity of 87.17. The loss in pytorch/examples is a mean over words, but the loss of this
trainer is a sum over the 35 time steps of a row. Therefore, the original learning rate (20) is
divided by 35, and the original clip (0.25) is multiplied by 35.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the tied LSTM with 200 units from pytorch/examples."""
    return Config(
        name="small_tied",
        init_scale=0.0707107,  # 1 / sqrt(200), as in nn.LSTM
        embedding_init_scale=0.1,
        hidden_size=200,
        num_layers=2,
        num_steps=35,
        keep_prob=0.8,
        tie_weights=True,
        batch_size=20,
        num_epochs=40,
        learning_rate=20 / 35,
        lr_schedule="plateau",
        lr_plateau_factor=0.25,
        max_grad_norm=0.25 * 35,
        eval_batch_size=10,
    )
