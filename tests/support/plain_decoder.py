"""A Llama, with grouped heads or latent attention, as torch functions of a table of parameters; and QK-clip on it.

Written from the papers: it has whole score matrices, whose largest entries it returns.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.model.config import ModelConfig

Parameters = Mapping[str, Tensor]
Scores = list[Tensor]  # largest score of each head (N), by layer


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _rotated(x: Tensor, adjacent: bool) -> Tensor:
    """RoPE of x (B, N, S, R); pairs are `adjacent` elements, or those of the halves."""
    half = x.shape[3] // 2
    angles = torch.outer(torch.arange(x.shape[2]), 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half))
    a, b = (x[..., 0::2], x[..., 1::2]) if adjacent else (x[..., :half], x[..., half:])
    turned = torch.view_as_complex(torch.stack([a, b], -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def _heads(x: Tensor, number: int) -> Tensor:
    return x.view(*x.shape[:2], number, -1).transpose(1, 2)


def _operands(p: Parameters, x: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, N, S, .) of normed inputs x (B, S, H)."""
    if "key_value_down.weight" not in p:
        query, key, value = (
            F.linear(x, p[f"{each}.weight"], p.get(f"{each}.bias")) for each in ("query", "key", "value")
        )
        times = config.num_heads // config.num_kv_heads
        query, key, value = (
            _heads(query, config.num_heads),
            *(_heads(each, config.num_kv_heads) for each in (key, value)),
        )
        key, value = (each.repeat_interleave(times, 1) for each in (key, value))
        return _rotated(query, False), _rotated(key, False), value
    turned = config.rotary_dim
    query = _normed(x @ p["query_down.weight"].T, p["query_latent_norm.weight"]) @ p["query_up.weight"].T
    query = _heads(query, config.num_heads)
    down = x @ p["key_value_down.weight"].T
    up = _heads(_normed(down[..., :-turned], p["key_value_norm.weight"]) @ p["key_value_up.weight"].T, config.num_heads)
    shared = _rotated(down[:, None, :, -turned:], True).expand(-1, config.num_heads, -1, -1)
    of_head = config.head_dim - turned
    query = torch.cat([query[..., :-turned], _rotated(query[..., -turned:], True)], -1)
    return query, torch.cat([up[..., :of_head], shared], -1), up[..., of_head:]


def logits_of(blocks: Sequence[Parameters], tokens: Tensor, config: ModelConfig) -> tuple[Tensor, Scores]:
    """Logits (B, S, V), and the largest scores of this batch."""
    x, found = blocks[0]["weight"][tokens], Scores()
    for p in blocks[1:-1]:
        attention = {name.removeprefix("attention."): each for name, each in p.items() if name.startswith("attention.")}
        query, key, value = _operands(attention, _normed(x, p["attention_norm.weight"]), config)
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        scores = scores + torch.full(scores.shape[2:], -torch.inf).triu(1)
        found.append(scores.detach().amax((0, 2, 3)))
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, attention["output.weight"], attention.get("output.bias"))
        inner = _normed(x, p["mlp_norm.weight"])
        x = x + (F.silu(inner @ p["mlp.gate.weight"].T) * (inner @ p["mlp.up.weight"].T)) @ p["mlp.down.weight"].T
    return _normed(x, blocks[-1]["norm.weight"]) @ blocks[-1]["weight"].T, found


def clip(blocks: Sequence[Parameters], scores: Scores, limit: float, config: ModelConfig) -> int:
    """Algorithm 1 of Kimi K2 for the scores of a step; returns the number of heads that are scaled."""
    number = 0
    for p, of_layer in zip(blocks[1:-1], scores, strict=True):
        for head, largest in enumerate(of_layer.tolist()):
            if largest <= limit:
                continue
            number, gamma = number + 1, limit / largest
            if "attention.key_value_up.weight" in p:
                size, of_head = config.head_dim, config.head_dim - config.rotary_dim
                query = p["attention.query_up.weight"][head * size : (head + 1) * size]
                query[:of_head] *= math.sqrt(gamma)
                query[of_head:] *= gamma
                of_both = of_head + config.latent.value_dim
                p["attention.key_value_up.weight"][head * of_both : head * of_both + of_head] *= math.sqrt(gamma)
                continue
            grouped = config.num_kv_heads < config.num_heads  # a shared key is left alone
            rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
            for name in ("query",) if grouped else ("query", "key"):
                for each in ("weight", "bias"):
                    if (matrix := p.get(f"attention.{name}.{each}")) is not None:
                        matrix[rows] *= gamma if grouped else math.sqrt(gamma)
    return number
