"""A Llama with torchtitan's names of parameters and torchtitan's order of a head: neighbours are turned as a pair."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.config import ModelConfig


class _Norm(nn.RMSNorm):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, eps=config.norm_eps)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, kv_heads, hidden = config.num_heads, config.num_kv_heads, config.hidden_size
        self.size, self.groups = config.head_dim, heads // kv_heads
        self.wq = nn.Linear(hidden, heads * self.size, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(heads * self.size, hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.wq, self.wk, self.wv)
        )
        query, key = (_turned(each, turns) for each in (query, key))
        key, value = (each.repeat_interleave(self.groups, 1) for each in (key, value))
        found: Tensor = self.wo(
            F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        )
        return found


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)


class _FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return found


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(config), _FeedForward(config)
        self.attention_norm, self.ffn_norm = _Norm(config), _Norm(config)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        found: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return found


class Titan(nn.Module):
    """The model; tokens (B, S) to logits (B, S, V)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): _Layer(config) for index in range(config.num_layers)})
        self.norm = _Norm(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.base, self.size = config.rope_theta, config.head_dim

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        powers = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        angles = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float64), self.base**-powers)
        turns = torch.polar(torch.ones_like(angles), angles)
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, turns)
        logits: Tensor = self.output(self.norm(x))
        return logits
