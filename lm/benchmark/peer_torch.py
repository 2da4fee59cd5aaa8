"""The training step in PyTorch: nn.LSTM or a network of a config file, autograd and torch.optim.

With an adaptive softmax, the gradient of the embedding is sparse.

Shapes: T time steps, B rows, H units, A heads, S = M + T words that a word may see, with M words in
memory. PyTorch stores matrices transposed.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from lm.benchmark.workload import LSTM_WEIGHTS, Step, StepResult, network_of
from lm.config import Config

State = tuple[torch.Tensor, ...]


class Lstm(nn.Module):
    """The built-in network, with dropout on the non-recurrent connections."""

    def __init__(self, config: Config, weights: Mapping[str, torch.Tensor]):
        super().__init__()
        units, layers, drop = config.hidden_size, config.num_layers, 1 - config.keep_prob
        self.lstm = nn.LSTM(units, units, layers, dropout=drop if layers > 1 else 0.0)
        self.dropout = nn.Dropout(drop)
        self.state_shapes = [(layers, config.batch_size, units)] * 2
        self._load(weights)

    def forward(self, x_TBH: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        outputs, state = self.lstm(self.dropout(x_TBH), state)
        return self.dropout(outputs), state

    @torch.no_grad()
    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the weights. PyTorch orders the gates i, f, j, o."""
        for layer, (*trained, second_bias) in enumerate(self.lstm.all_weights):
            for name, parameter in zip(LSTM_WEIGHTS, trained):
                i, j, f, o = weights[f"lstm_{layer}/{name}"].chunk(4)
                parameter.copy_(torch.cat([i, f, j, o]))
            # Training both biases would double the learning rate of their sum.
            second_bias.zero_().requires_grad_(False)


class Gru(nn.Module):
    """The network of configs/config_gru.py. nn.GRU has a different equation for the candidate."""

    def __init__(self, config: Config, weights: Mapping[str, torch.Tensor]):
        super().__init__()
        self.gates, self.gates_bias, self.candidate, self.candidate_bias = (
            nn.Parameter(weights[f"{part}/{kind}"])
            for part in ("gates", "candidate")
            for kind in ("weights", "bias")
        )
        self.dropout = nn.Dropout(1 - config.keep_prob)
        self.state_shapes = [(config.batch_size, config.hidden_size)]

    def forward(self, x_TBH: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        x_TBH = self.dropout(x_TBH)
        gates_of_x, gates_of_h = self.gates.chunk(2, 1)
        candidate_of_x, candidate_of_h = self.candidate.chunk(2, 1)
        # One product projects the inputs of all time steps.
        gates_TBG = F.linear(x_TBH, gates_of_x, self.gates_bias)
        candidate_TBH = F.linear(x_TBH, candidate_of_x, self.candidate_bias)
        (h,), outputs = state, []
        for gates, candidate in zip(gates_TBG.unbind(), candidate_TBH.unbind()):
            reset, update = torch.sigmoid(gates + F.linear(h, gates_of_h)).chunk(2, 1)
            h = update * h + (1 - update) * torch.tanh(
                candidate + F.linear(reset * h, candidate_of_h)
            )
            outputs.append(h)
        return self.dropout(torch.stack(outputs)), (h,)


class Transformer(nn.Module):
    """The network of configs/config_transformer.py."""

    def __init__(self, config: Config, weights: Mapping[str, torch.Tensor]):
        super().__init__()
        self.config, self.dropout = config, nn.Dropout(1 - config.keep_prob)
        self.weights = nn.ParameterDict(weights)
        B, T, H = config.batch_size, config.num_steps, config.hidden_size
        M = T if config.memory else 0
        self.state_shapes = [(B, M), *[(B, M, H)] * config.num_layers] if M else []
        back_TS = M + torch.arange(T)[:, None] - torch.arange(M + T)
        self.register_buffer("is_near_TS", (back_TS >= 0) & (back_TS <= T))
        self.register_buffer("distance_TS", back_TS.clip(0, T))

    def forward(self, x_TBH: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        x_BTH = self.dropout(x_TBH.transpose(0, 1) * self.config.hidden_size**0.5)
        after = [torch.ones_like(x_BTH[:, :, 0])] if state else []
        may_see = self.is_near_TS
        if state:
            may_see = may_see * torch.cat([state[0], after[0]], 1)[:, None, None]
        for layer in range(self.config.num_layers):
            name = f"layer_{layer}"
            seen_BSH = torch.cat([state[1 + layer], x_BTH], 1) if state else x_BTH
            if state:
                after.append(x_BTH)
            attended = self._attention(seen_BSH, may_see, x_BTH.shape[1], name)
            x_BTH = x_BTH + self.dropout(attended)
            inner = F.relu(self._dense(self._normalize(x_BTH, f"{name}/norm"), f"{name}/inner"))
            x_BTH = x_BTH + self.dropout(self._dense(inner, f"{name}/outer"))
        return self._normalize(x_BTH, "norm").transpose(0, 1), tuple(after)

    def _attention(self, seen_BSH, may_see, num_steps: int, name: str) -> torch.Tensor:
        seen_BSH = self._normalize(seen_BSH, f"{name}/norm_attention")

        def heads(y_BSH, part):
            y_BSH = self._dense(y_BSH, f"{name}/{part}")
            return y_BSH.unflatten(2, (self.config.num_heads, -1)).transpose(1, 2)

        bias_ATS = self.weights[f"{name}/distance"][:, self.distance_TS]
        mask = torch.where(may_see > 0, bias_ATS, -1e9)
        query = heads(seen_BSH[:, -num_steps:], "q")
        key, value = heads(seen_BSH, "k"), heads(seen_BSH, "v")
        mask = mask.to(query.dtype).expand(len(query), -1, -1, -1)
        mixed_BATh = F.scaled_dot_product_attention(query, key, value, mask)
        return self._dense(mixed_BATh.transpose(1, 2).flatten(2), f"{name}/mixed")

    def _dense(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}/weights"], self.weights[f"{name}/bias"])

    def _normalize(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[2:], self.weights[f"{name}/scale"], eps=1e-6)


_NETWORKS = {"lstm": Lstm, "gru": Gru, "transformer": Transformer}


class LanguageModel(nn.Module):
    """Embedding, network and projection."""

    def __init__(self, config: Config, weights: Mapping[str, np.ndarray]):
        super().__init__()
        words, units = weights["embedding"].shape
        self.is_adaptive = bool(config.adaptive_softmax_cutoffs)
        self.embedding = nn.Embedding(words, units, sparse=self.is_adaptive)
        own = {name: torch.from_numpy(value.T.copy()) for name, value in weights.items()}
        table = own.pop("embedding")
        top = {name: own.pop(name) for name in weights if name.startswith("softmax/")}
        self.network = _NETWORKS[network_of(weights)](config, own)
        if self.is_adaptive:
            self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(
                units, words, config.cutoffs, config.adaptive_softmax_factor, head_bias=True
            )
        else:
            self.projection = nn.Linear(units, words)
        self._load(table, top)
        if config.tie_weights:
            self.projection.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, state: State):
        """Return the loss, summed over time and averaged over rows, and the final state."""
        outputs, state = self.network(self.embedding(inputs), state)
        outputs, targets = outputs.flatten(0, 1), targets.flatten()
        if self.is_adaptive:
            nll = -self.adaptive(outputs, targets).output.sum()
        else:
            logits = self.projection(outputs)
            nll = F.cross_entropy(logits, targets, reduction="sum")
        return nll / inputs.shape[1], state

    @torch.no_grad()
    def _load(self, table: torch.Tensor, top: Mapping[str, torch.Tensor]) -> None:
        self.embedding.weight.copy_(table.T)
        layer = self.adaptive.head if self.is_adaptive else self.projection
        layer.weight.copy_(top.get("softmax/weights", table.T))
        layer.bias.copy_(top["softmax/bias"])
        for c, (projection, words) in enumerate(self.adaptive.tail if self.is_adaptive else ()):
            projection.weight.copy_(top[f"softmax/cluster_{c}/projection"])
            words.weight.copy_(top[f"softmax/cluster_{c}/words"].T)


def _optimizer(config: Config, parameters: Sequence[nn.Parameter], fused: bool):
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, fused=fused)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.Adam(
        parameters, config.learning_rate, betas, eps=config.adam_epsilon, fused=fused
    )


@torch.no_grad()
def _clip(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip in place and return the norm. clip_grad_norm_ does not support sparse gradients."""
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norm = nn.utils.get_total_norm(values)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def build_step(
    config: Config, weights: Mapping[str, np.ndarray], variant: str, threads: int
) -> tuple[Step, str]:
    """Build the training step of a variant with these initial weights.

    "torch" computes in float32, "torch-autocast" computes products in bfloat16, and
    "torch-bfloat16" also stores weights in bfloat16. Each variant may end in "-compile". Like this
    program, the step uses a GPU if there is one.
    """
    features = variant.split("-")
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = False  # the default is different for other products
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if "bfloat16" in features else torch.float32
    model = LanguageModel(config, weights).to(device, dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The fused update does not support sparse gradients.
    optimizer = _optimizer(config, parameters, fused=not model.is_adaptive)
    forward = torch.compile(model) if "compile" in features else model
    shapes = model.network.state_shapes
    state = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

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

    return step, "CPU" if device == "cpu" else "GPU"
