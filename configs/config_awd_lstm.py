"""AWD-LSTM: averaged SGD and weight-drop, Merity et al. (2018), https://arxiv.org/abs/1708.02182.

The published test perplexity is 58.8 after 500 epochs. Not here: windows of random length, dropout
of whole words, and the fine-tuning after it. The top layer has 1150 units like the others, and its
outputs are projected down to the 400 of the embedding; there it is an LSTM layer of 400.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the model and schedule of their main.py for PTB, in this project's units.

    Its loss is a mean over words, ours a sum over the 70 time steps of a row: the learning rate of
    30 is 30 / 70 here, the clip of 0.25 and the weight decay of 1.2e-6 are 70 times that.
    """
    return Config(
        name="awd_lstm",
        init_scale=0.0294884,  # 1 / sqrt(1150), as nn.LSTM
        embedding_init_scale=0.1,
        hidden_size=1150,
        embedding_size=400,
        tie_weights=True,
        num_layers=3,
        num_steps=70,
        embedding_keep_prob=0.6,
        keep_prob=0.75,
        output_keep_prob=0.6,
        recurrent_keep_prob=0.5,
        locked_dropout=True,
        activation_penalty=2.0,
        temporal_activation_penalty=1.0,
        batch_size=20,
        num_epochs=500,
        learning_rate=30 / 70,
        lr_decay=1.0,
        asgd_trigger_epochs=5,
        weight_decay=1.2e-6 * 70,
        max_grad_norm=0.25 * 70,
        eval_batch_size=10,
    )
