"""Large: dropout 0.65. Published test perplexity 78.72 after 55 epochs.

In contrast to the paper, the learning rate rises to 1 over the first epoch of PTB (1327 steps). If
the learning rate is 1 from the first step, the loss jumps to 20 and more. The same happens in
TensorFlow's tutorial and in PyTorch. With some seeds, the loss does not recover within the epoch:
see "config_large" in docs/results.md.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the large model of Zaremba et al. (2014), with a warmup of one epoch."""
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
        warmup_steps=1327,
        max_grad_norm=10.0,
    )
