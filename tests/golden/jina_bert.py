"""Jina v2, which transformers 5 has no class for: BERT of transformers with ALiBi and with gated
feed-forward networks.

ALiBi: Press et al. 2022, https://arxiv.org/abs/2108.12409, here with distances in both directions.
Gated networks: Shazeer 2020, https://arxiv.org/abs/2002.05202. Jina v2, with both: Günther et al.
2023, https://arxiv.org/abs/2310.19923.
"""

import math

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

# From names in transformers' BERT with gated networks to names in published checkpoints.
NAMES = {
    ".intermediate.gated_layers.": ".mlp.gated_layers.",
    ".output.dense.": ".mlp.wo.",
    ".output.LayerNorm.": ".mlp.layernorm.",
}
ACTIVATIONS = {"geglu": F.gelu, "reglu": F.relu}


class Gated(nn.Module):
    """`activation(x·W₁) · (x·W₂)`, in place of BERT's `activation(x·W + b)`."""

    def __init__(self, config):
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.activation = ACTIVATIONS[config.feed_forward_type]

    def forward(self, x):
        gate, other = self.gated_layers(x).chunk(2, dim=-1)
        return self.activation(gate) * other


def gated(model):
    """Replaces the intermediate layers of a BERT, unless `feed_forward_type` is `original`."""
    if model.config.feed_forward_type != "original":
        for layer in model.base_model.encoder.layer:
            layer.intermediate = Gated(model.config)
    return model


def with_zero_positions(model):
    nn.init.zeros_(model.base_model.embeddings.position_embeddings.weight)
    return model


def slopes(heads):
    """ALiBi's slopes: a geometric series if `heads` is a power of two; otherwise the slopes of the
    next smaller power of two, then every second slope of the next larger power of two."""
    n = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * k / n) for k in range(1, n + 1)]
    return first if n == heads else first + slopes(2 * n)[0::2][: heads - n]


def attention_bias(mask, heads):
    """`(B, H, T, T)`: -slope · distance for visible keys, -inf for hidden ones."""
    index = torch.arange(mask.shape[1])
    distance = (index[:, None] - index[None, :]).abs()
    bias = -torch.tensor(slopes(heads))[:, None, None] * distance
    return bias + torch.where(mask == 1, 0.0, float("-inf"))[:, None, None, :]


def rename(folder):
    """Gives the tensors of a saved model their published names; removes the position embeddings."""
    path = folder / "model.safetensors"
    saved = load_file(path)
    is_gated = any("gated_layers" in name for name in saved)
    tensors = {}
    for name, tensor in saved.items():
        if is_gated and ".attention." not in name:
            for ours, published in NAMES.items():
                name = name.replace(ours, published)
        if "position_embeddings" not in name:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
