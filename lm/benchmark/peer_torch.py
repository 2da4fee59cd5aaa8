"""The training step in PyTorch: nn.LSTM, autograd and torch.optim.SGD.

With an adaptive softmax, the gradient of the embedding is sparse.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from lm.bands import cutoffs_of
from lm.benchmark.workload import LSTM_WEIGHTS, Step, StepResult, initial_weights
from lm.config import Config


class LanguageModel(nn.Module):
    """Embedding, LSTM layers and projection, with dropout on the non-recurrent connections."""

    def __init__(self, config: Config, vocab_size: int):
        super().__init__()
        hidden, drop = config.hidden_size, 1 - config.keep_prob
        self.is_adaptive = bool(config.adaptive_softmax_cutoffs)
        self.dropout = nn.Dropout(drop)
        self.embedding = nn.Embedding(vocab_size, hidden, sparse=self.is_adaptive)
        between_layers = drop if config.num_layers > 1 else 0.0
        self.lstm = nn.LSTM(hidden, hidden, config.num_layers, dropout=between_layers)
        if self.is_adaptive:
            self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(
                hidden,
                vocab_size,
                cutoffs_of(config),
                config.adaptive_softmax_factor,
                head_bias=True,
            )
        else:
            self.projection = nn.Linear(hidden, vocab_size)

    def forward(self, inputs, targets, state):
        """Return the loss, summed over time and averaged over rows, and the final state."""
        outputs, state = self.lstm(self.dropout(self.embedding(inputs)), state)
        outputs, targets = self.dropout(outputs).flatten(0, 1), targets.flatten()
        if self.is_adaptive:
            nll = -self.adaptive(outputs, targets).output.sum()
        else:
            logits = self.projection(outputs)
            nll = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return nll / inputs.shape[1], state

    @torch.no_grad()
    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set the weights. PyTorch stores matrices transposed, and orders the gates i, f, j, o."""
        values = {name: torch.from_numpy(value.T) for name, value in weights.items()}
        self.embedding.weight.copy_(values["embedding"].T)
        top = self.adaptive.head if self.is_adaptive else self.projection
        top.weight.copy_(values["softmax/weights"])
        top.bias.copy_(values["softmax/bias"])
        for c, (projection, words) in enumerate(self.adaptive.tail if self.is_adaptive else ()):
            projection.weight.copy_(values[f"softmax/cluster_{c}/projection"])
            words.weight.copy_(values[f"softmax/cluster_{c}/words"].T)
        for layer, (*trained, second_bias) in enumerate(self.lstm.all_weights):
            for name, parameter in zip(LSTM_WEIGHTS, trained):
                i, j, f, o = values[f"lstm_{layer}/{name}"].chunk(4)
                parameter.copy_(torch.cat([i, f, j, o]))
            # Training both biases would double the learning rate of their sum.
            second_bias.zero_().requires_grad_(False)


@torch.no_grad()
def _clip(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip in place and return the norm. clip_grad_norm_ does not support sparse gradients."""
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norm = nn.utils.get_total_norm(values)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def build_step(config: Config, vocab_size: int, variant: str, threads: int) -> Step:
    """Build the training step of a variant.

    "torch" computes in float32, "torch-autocast" computes products in bfloat16, and
    "torch-bfloat16" also stores weights in bfloat16. Each variant may end in "-compile". Like this
    program, the step uses a GPU if there is one.
    """
    features = variant.split("-")
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = False  # the default is different for other products
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LanguageModel(config, vocab_size)
    model.load(initial_weights(config, vocab_size))
    dtype = torch.bfloat16 if "bfloat16" in features else torch.float32
    model = model.to(device, dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The fused update does not support sparse gradients.
    optimizer = torch.optim.SGD(parameters, lr=config.learning_rate, fused=not model.is_adaptive)
    forward = torch.compile(model) if "compile" in features else model
    shape = (config.num_layers, config.batch_size, config.hidden_size)
    state = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "hc")

    def step(inputs: np.ndarray, targets: np.ndarray) -> StepResult:
        nonlocal state
        inputs, targets = (torch.from_numpy(ids).to(device).long() for ids in (inputs, targets))
        with torch.autocast(device, torch.bfloat16, enabled="autocast" in features):
            loss, state = forward(inputs, targets, state)
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        # A cluster without targets in the batch has no gradient.
        gradients = [p.grad for p in parameters if p.grad is not None]
        grad_norm = _clip(gradients, config.max_grad_norm)
        optimizer.step()
        return StepResult(loss.item(), grad_norm.item())

    return step
