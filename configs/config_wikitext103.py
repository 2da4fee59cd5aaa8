"""WikiText-103: one LSTM layer of 1024 units and an adaptive softmax.

The reference is the LSTM of Grave et al. (2017), https://arxiv.org/abs/1612.04426, with a test
perplexity of 48.7. This config has not been trained on the whole corpus, and it does not claim to
use the settings of the paper. data/README.md describes how to provide the text.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the reference model, with a batch and an optimizer like in rafaljozefowicz/lm.

    There, Adagrad's sums of squared gradients start at 1, but the gradient of the embedding is a
    sum over the rows of the batch. Here, it is a mean over 128 rows, so the sums must start lower.
    Without the warmup, the loss exceeds 30 in the first steps.
    """
    return Config(
        name="wikitext103",
        init_scale=0.05,
        hidden_size=1024,
        num_layers=1,
        num_steps=20,
        keep_prob=0.9,
        adaptive_softmax_cutoffs="2000,20000,100000",
        batch_size=128,
        num_epochs=10,
        optimizer="adagrad",
        adagrad_initial_value=1e-5,
        learning_rate=0.2,
        lr_decay=1.0,
        warmup_steps=1000,
        max_grad_norm=10.0,
        eval_every_steps=5000,
    )
