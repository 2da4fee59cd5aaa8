"""AWD-LSTM: averaged SGD and weight-drop, Merity et al. (2018), https://arxiv.org/abs/1708.02182.

The published test perplexity is 58.8 after 500 epochs. This config does not include windows of
random length, dropout of whole words, or fine-tuning. All layers have 1150 units, and the outputs
of the top layer are projected to the 400 units of the embedding. In the paper, the top layer is an
LSTM layer with 400 units.
"""

from lm.config import Config


def get_config() -> Config:
    """Return the model and the schedule of the authors' main.py for PTB.

    The authors' loss is a mean over words, but the loss of this trainer is a sum over the 70 time
    steps of a row. Therefore, the published learning rate (30) is divided by 70. The published
    clip (0.25) and weight decay (1.2e-6) are multiplied by 70.
    """
    return Config(
        name="awd_lstm",
        init_scale=0.0294884,  # 1 / sqrt(1150), as in nn.LSTM
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
