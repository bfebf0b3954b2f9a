"""A layer of the gated delta rule in place of attention (Gated DeltaNet, 2412.06464, section 3.4), on one device.

    q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      each feature over the last few tokens
    o = gated delta rule of q, k, v, with a decay and a strength of each token (terrace.model.delta_rule)
    y = W_o (norm(o) * silu(W_z x))                                       the norm over the elements of a head

Kimi Delta Attention (2510.26692, section 4) has a decay for each element of a key. Decays and the gate come through
`rank` features, and the gate is a sigmoid.

What is before the tokens of a micro-batch, or of a step of generation, is a state of fixed size and the last inputs of
the convolutions. `Runs` says where they come from: on one device nothing is before a row.

Shape legend: B batch, S sequence, H hidden, R runs, L tokens of a run, G key heads, N value heads, K and V elements of
a key and of a value, P taps, F features of queries, keys and values together.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.attention import document_begins
from terrace.model.cache import LayerCache, StateCache
from terrace.model.config import ModelConfig
from terrace.model.delta_rule import States, gated_delta_rule, prepared, scanned, short_convolution
from terrace.model.kinds import MOST_TAPS
from terrace.model.layers import RMSNorm


class Runs(Protocol):
    """How the tokens of a micro-batch are cut into runs, and what is before each of them."""

    @property
    def states(self) -> States | None:
        """What passes states between runs; None: nothing is before them."""
        ...

    def cut(self, x: Tensor) -> Tensor:
        """x (B, S, ...) as runs (R, L, ...)."""
        ...

    def begins(self, positions: Tensor | None) -> Tensor | None:
        """Where documents begin in runs, bool (R, L), from positions (B, S); None: nowhere but at rows."""
        ...

    def ages(self, positions: Tensor | None, begins: Tensor | None) -> Tensor | None:
        """Tokens of the same document before each token, int8 (R, L), from `begins`; None: runs are one document."""
        ...

    def halo(self, tails: Tensor) -> Tensor:
        """Inputs (R, h, F) of the convolutions before each run, h <= P - 1, from the last `tails` of each run."""
        ...


class Rows:
    """Every row is a run with nothing before it."""

    states: States | None = None

    def cut(self, x: Tensor) -> Tensor:
        return x

    def begins(self, positions: Tensor | None) -> Tensor | None:
        return None if positions is None else document_begins(positions)

    def ages(self, positions: Tensor | None, begins: Tensor | None) -> Tensor | None:
        return None if begins is None else _ages(begins)

    def halo(self, tails: Tensor) -> Tensor:
        return tails.new_empty(tails.shape[0], 0, tails.shape[2])


ROWS = Rows()


class ShortConvolution(nn.Module):
    """A causal convolution of each feature over a few tokens, with silu; (R, L, F) to (R, L, F)."""

    def __init__(self, features: int, taps: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, 1, taps, **where))
        self.used: slice | None = None  # the features that a tensor rank works on; None: all that it holds

    def forward(self, x: Tensor, halo: Tensor, ages: Tensor | None) -> Tensor:
        """As `terrace.model.delta_rule.short_convolution`."""
        return short_convolution(x, self.weight if self.used is None else self.weight[self.used], halo, ages)


class GatedDeltaNet(nn.Module):
    """The gated delta rule between projections; (B, S, H) to (B, S, H)."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        sizes, hidden = config.delta, config.hidden_size
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.runs: Runs = ROWS  # a context axis replaces it

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, **where)

        def ranked() -> nn.Module:
            return linear(hidden, sizes.rank) if sizes.rank else nn.Identity()

        # In the order of execution, as in terrace.model.block_operations.
        self.log_decay = nn.Parameter(torch.empty(sizes.value_heads, **where))
        self.decay_bias = nn.Parameter(torch.empty(sizes.num_decays, **where))
        self.query, self.key, self.value = linear(hidden, keys), linear(hidden, keys), linear(hidden, values)
        self.gate_down, self.gate = ranked(), linear(sizes.rank or hidden, values)
        self.beta = linear(hidden, sizes.value_heads)
        self.decay_down, self.decay = ranked(), linear(sizes.rank or hidden, sizes.num_decays)
        self.gated: Callable[[Tensor], Tensor] = torch.sigmoid if sizes.rank else F.silu
        self.query_conv, self.key_conv = (ShortConvolution(keys, sizes.taps, **where) for _ in range(2))
        self.value_conv = ShortConvolution(values, sizes.taps, **where)
        self.output = linear(values, hidden)
        self.norm = RMSNorm(sizes.value_dim, config.norm_eps, **where)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, cache: LayerCache | StateCache | None = None
    ) -> Tensor:
        """The layer's output for x (B, S, H), continuing the sequences of `cache`.

        `positions` (B, S) int64 are the positions of tokens within their documents; a state ends with its document.
        """
        entering = [self.query(x), self.key(x), self.value(x)]
        gate, beta, decay = self.gate(self.gate_down(x)), self.beta(x), self.decay(self.decay_down(x))
        if cache is not None:
            assert isinstance(cache, StateCache), "an engine gives linear layers a cache of states"
            mixed = self._continued(entering, decay, beta, cache)
        else:
            mixed = self._mixed(entering, decay, beta, positions)
        normed = self.norm(mixed.view(*x.shape[:-1], -1, self.value_dim)).flatten(-2)  # (B, S, N V)
        output: Tensor = self.output(self.gated(gate) * normed)
        return output

    def _mixed(self, entering: Sequence[Tensor], decay: Tensor, beta: Tensor, positions: Tensor | None) -> Tensor:
        runs = self.runs
        begins, cut = runs.begins(positions), [runs.cut(each) for each in entering]
        halo = runs.halo(_tails(cut, self._before))
        query, key, value = self._convolved(cut, halo, runs.ages(positions, begins))
        given = (query, key, value, runs.cut(decay), runs.cut(beta), self.log_decay, self.decay_bias)
        return gated_delta_rule(given, begins, runs.states)

    def _continued(self, entering: Sequence[Tensor], decay: Tensor, beta: Tensor, cache: StateCache) -> Tensor:
        """The output (T, N, V) of a step's tokens (1, T, ...); spans of equal length run together."""
        found = []
        for part in cache.parts:
            cut = [part.cut(each) for each in entering]
            halo, state = part.load()
            both = [torch.cat([halo, torch.cat(cut, -1)], 1)]
            query, key, value = self._convolved(cut, halo, None)
            given = (query, key, value, part.cut(decay), part.cut(beta), self.log_decay, self.decay_bias)
            out, state = scanned(prepared(given, None), _grouped(state, query.shape[2]))
            part.store(_tails(both, self._before), state.flatten(1, 2))
            found.append(out.permute(0, 3, 4, 1, 2, 5).flatten(1, 2)[:, : value.shape[1]].flatten(0, 1).flatten(1, 2))
        return torch.cat(found).to(beta.dtype)

    @property
    def _before(self) -> int:
        return self.value_conv.weight.shape[-1] - 1

    def _convolved(self, cut: Sequence[Tensor], halo: Tensor, ages: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        # Queries and keys (R, L, G, K), values (R, L, N, V).
        parts = torch.split(halo, [each.shape[-1] for each in cut], -1)
        modules, sizes = (self.query_conv, self.key_conv, self.value_conv), (self.key_dim, self.key_dim, self.value_dim)
        query, key, value = (
            (found := module(each, part, ages)).view(*found.shape[:2], -1, size)
            for module, each, part, size in zip(modules, cut, parts, sizes, strict=True)
        )
        return query, key, value


def _tails(cut: Sequence[Tensor], number: int) -> Tensor:
    # The last `number` inputs of each run, zeros where it is shorter.
    whole = torch.cat([each[:, max(0, each.shape[1] - number) :] for each in cut], -1)
    return F.pad(whole, (0, 0, number - whole.shape[1], 0))


def _grouped(state: Tensor, groups: int) -> Tensor:
    # (R, N, K, V) to (R, G, N / G, K, V)
    return state.view(state.shape[0], groups, -1, *state.shape[2:])


def _ages(begins: Tensor) -> Tensor:
    """Tokens of the same document before each token, (R, L); many where it began before the run."""
    places = torch.arange(begins.shape[1], device=begins.device)
    first = torch.where(begins, places, -begins.shape[1]).cummax(1).values
    return torch.where(first < 0, begins.shape[1], places - first).clamp_(max=MOST_TAPS - 1).to(torch.int8)
