"""The gated delta rule over runs of tokens, in chunks (Gated DeltaNet, Yang et al. 2412.06464, sections 3.1 to 3.3).

A value head has a state S (K, V). With the decay a_t = exp(g_t) and the strength b_t, token t gives

    S_t = a_t (I - b_t k_t k_t^T) S_t-1 + b_t k_t v_t^T        o_t = S_t^T q_t        (equation 10, transposed)

For the C tokens of a chunk let c_i = g_1 + ... + g_i, D_ij = exp(c_i - c_j) for i >= j, else 0. With the matrices Q, K,
V of the chunk, L = strictly lower part of diag(b) (D * K K^T), and S the state before it (the WY form of section 3.3):

    U = (I + L)^-1 diag(b) V              W = (I + L)^-1 diag(b exp(c)) K
    N = U - W S                           what the tokens write, each without what is there already
    O = diag(exp(c)) Q S + (D * Q K^T) N
    S' = exp(c_C) S + (diag(exp(c_C - c)) K)^T N

Kimi Delta Attention (2510.26692, equation 1) has a decay for each element of a key: a_t, c_i and D_ij are vectors of K
elements, S decays by rows before the token corrects it, and scores are sum_d D_ijd k_id k_jd and sum_d D_ijd q_id k_jd.
They are no product of exp(c_i) and exp(-c_j), which may leave the range of a float. A chunk is halved instead: with m
the last token of the earlier half, i after m and j up to m,

    D_ij = exp(c_i - c_m) exp(c_m - c_j)

has exponents that are not positive, so these scores are a plain product, of any decay; then each half is halved.

So a chunk, and a run of chunks, maps the state before it by S' = M S + B, with M (K, K) and B (K, V) that do not depend
on S: M = diag(exp(c_C)) - E^T W and B = E^T U, where E is the factor of N in S'. The gradient goes back by
G = M^T G' + H, where H is that of the run's own outputs. `States` says where S and G' of the first and last chunk come
from: on one device nothing is there, and ranks that share a sequence exchange (M, B), and (M, H), of fixed size
(terrace.runtime.context.states).

Backward of one chunk, given the gradients O^ and S'^ (a hat is a gradient; the factors of N are F = D * Q K^T and E,
that of S in O is R = diag(exp(c)) Q, z = exp(c_C)):

    N^ = F^T O^ + E S'^               S^ = z S'^ + R^T O^ - W^T N^
    R^ = O^ S^T    F^ = O^ N^T    E^ = N S'^T    z^ = sum(S'^ * S)    U^ = N^    W^ = -N^ S^T

The rest, from inputs to (R, F, U, W, E, z), is left to autograd, on values that are computed again. So the forward
keeps its inputs, and the states before its runs.

Where a document begins, the state before it is dropped: factors between tokens of different documents are zero.

Shape legend: R runs, L tokens of a run, G key heads, r value heads of a key head, n chunks, C tokens of a chunk, K and
V elements of a key and of a value, P taps, F features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from terrace.model.operations import CHUNK

_EPS = 1e-6  # of the norm of queries and keys, as in the released models


class States(Protocol):
    """What is before and after the runs of a micro-batch. Tensors are in fp32, or fp64."""

    def before(self, maps: Tensor) -> Tensor:
        """States (R, G, r, K, V) before the runs, from their maps (M, B) (R, G, r, K, K + V)."""
        ...

    def after(self, maps: Tensor) -> Tensor:
        """Gradients (R, G, r, K, V) of the states after the runs, from (M, H) (R, G, r, K, K + V)."""
        ...


class Chunks(NamedTuple):
    """The factors of all chunks, with leading dims (R, G, r, n), named as in this module's equations."""

    reads: Tensor  # R (C, K)
    within: Tensor  # F (C, C)
    values: Tensor  # U (C, V)
    keys: Tensor  # W (C, K)
    writes: Tensor  # E (C, K)
    decay: Tensor  # z (1, 1), or (K, 1) of a decay for each element of a key


def gated_delta_rule(inputs: Sequence[Tensor], begins: Tensor | None = None, states: States | None = None) -> Tensor:
    """Output (R, L, N, V) for the `inputs` query, key, value, decay, beta, log_decay and decay_bias.

    Queries and keys are (R, L, G, K), values (R, L, N, V), with N = G r value heads.

    The strength is sigmoid(`beta`), the decay exp(-exp(`log_decay`) softplus(`decay` + `decay_bias`)), with `beta`
    (R, L, N) and `log_decay` (N). With `decay` (R, L, N) a head has one decay, with (R, L, N K) each element of its key
    has one; `decay_bias` has as many numbers. `begins` (R, L) says where documents begin; None: nowhere inside a
    run. Without `states` nothing is before the runs. Computed in fp32, or fp64.
    """
    result: Tensor = _Delta.apply(*inputs, begins, states)  # type: ignore[no-untyped-call]
    return result


class _Delta(Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        inputs, begins, states = given[:-2], given[-2], given[-1]
        chunks = prepared(inputs, begins)
        before = None if states is None else states.before(_maps(chunks))
        out, _ = scanned(chunks, before)
        ctx.states = states
        ctx.save_for_backward(*inputs, begins, before)
        return _joined(out, inputs[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, begins, before = ctx.saved_tensors[:-2], ctx.saved_tensors[-2], ctx.saved_tensors[-1]
        inputs = [each.detach().requires_grad_(needs) for each, needs in zip(saved, ctx.needs_input_grad, strict=False)]
        with torch.enable_grad():
            graph = prepared(inputs, begins)
        chunks = Chunks(*(each.detach() for each in graph))
        of_out = _apart(grad.to(chunks.values.dtype), chunks)
        after = None
        if ctx.states is not None:
            maps = _maps(chunks)[..., : chunks.keys.shape[-1]]
            after = ctx.states.after(torch.cat([maps, _returned(chunks, of_out)], -1))
        grads = _chunk_gradients(chunks, of_out, before, after)
        wanted = [each for each in inputs if each.requires_grad]
        found = iter(torch.autograd.grad(list(graph), wanted, list(grads), allow_unused=True))
        return *(next(found) if each.requires_grad else None for each in inputs), None, None


def prepared(inputs: Sequence[Tensor], begins: Tensor | None) -> Chunks:
    """The factors of the chunks of runs, with the arguments of `gated_delta_rule`."""
    query, key, value, decay, beta, log_decay, decay_bias = inputs
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value, decay, beta = (each.to(wide) for each in (query, key, value, decay, beta))
    rate = torch.unflatten(F.softplus(decay + decay_bias.to(wide)), -1, (value.shape[2], -1))
    rate = -log_decay.to(wide).exp().unsqueeze(-1) * rate  # g (R, L, N, 1 or K)
    groups, size = query.shape[2], min(CHUNK, query.shape[1])
    if rate.shape[-1] > 1:
        size = 1 << (size - 1).bit_length()  # so that it can be halved
    query = _cut(_normal(query) * query.shape[-1] ** -0.5, groups, size)
    key, value = _cut(_normal(key), groups, size), _cut(value, groups, size)
    rate, strength = (_cut(each, groups, size) for each in (rate, beta.sigmoid().unsqueeze(-1)))
    total = rate.cumsum(-2)  # c (R, G, r, n, C, 1 or K)
    seen = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    last = total[..., -1:, :]
    start, end, whole = total.exp(), (last - total).exp(), last.exp()
    if begins is not None:
        marks = F.pad(begins.to(torch.int32), (0, -begins.shape[1] % size))
        numbers = _cut(marks.cumsum(1, dtype=torch.int32)[..., None, None], 1, size).squeeze(-1)
        first = numbers[..., :1] - _cut(marks[..., None, None], 1, size).squeeze(-1)[..., :1]
        seen = seen & (numbers.unsqueeze(-1) == numbers.unsqueeze(-2))
        numbers, first = numbers.unsqueeze(-1), first.unsqueeze(-1)
        start, end = start * (numbers == first), end * (numbers == numbers[..., -1:, :])
        whole = whole * (numbers[..., -1:, :] == first)
    if total.shape[-1] > 1:
        of_keys, of_queries = _decayed(torch.stack([key, query]), key, total).masked_fill(~seen, 0).unbind()
        lower = strength * of_keys  # L, and its diagonal
    else:
        between = (total - total.mT).masked_fill(~seen, -torch.inf).exp()  # D
        lower, of_queries = strength * between * (key @ key.mT), between * (query @ key.mT)
    right = torch.cat([value, (start * key).expand(*value.shape[:-1], -1)], -1)
    solved = torch.linalg.solve_triangular(lower, strength * right, upper=False, unitriangular=True)
    values, keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    return Chunks(start * query, of_queries, values, keys, end * key, whole.mT)


def _decayed(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """sum_d left_id right_jd exp(c_id - c_jd) for i >= j, else 0, (2, R, G, r, n, C, C); C is a power of two.

    `left` (2, R, G, 1, n, C, K) has two factors of one `right` (R, G, 1, n, C, K); `total` (R, G, r, n, C, K) is c.
    """
    of_itself = (left * right).sum(-1)  # the score of each token with itself
    found = of_itself.expand(left.shape[0], *total.shape[:-1])[..., None, None]
    for half in (1 << level for level in range(total.shape[-2].bit_length() - 1)):
        (_, later), (earlier, _), (first, second) = (
            torch.unflatten(each, -2, (-1, 2, half)).unbind(-3) for each in (left, right, total)
        )
        middle = first[..., -1:, :]
        below = (later * (second - middle).exp()) @ (earlier * (middle - first).exp()).mT
        before, after = torch.unflatten(found, -3, (-1, 2)).unbind(-3)
        above = torch.cat([before, torch.zeros_like(before)], -1)
        found = torch.cat([above, torch.cat([below, after], -1)], -2)
    return found.squeeze(-3)


def scanned(chunks: Chunks, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs (R, G, r, n, C, V) and the states (R, G, r, K, V) after the runs, given those `before`; None: zero."""
    state, found = _zero(chunks) if before is None else before, []
    for reads, within, values, keys, writes, decay in _each(chunks):
        new = values - keys @ state
        found.append(reads @ state + within @ new)
        state = decay * state + writes.mT @ new
    return torch.stack(found, 3), state


def _maps(chunks: Chunks) -> Tensor:
    """(M, B) of whole runs, (R, G, r, K, K + V)."""
    size = chunks.keys.shape[-1]
    identity = torch.eye(size, dtype=chunks.keys.dtype, device=chunks.keys.device)
    state = torch.cat([identity.expand(*_zero(chunks).shape[:-1], -1), _zero(chunks)], -1)
    for _, _, values, keys, writes, decay in _each(chunks):
        state = decay * state + writes.mT @ (F.pad(values, (size, 0)) - keys @ state)
    return state


def _returned(chunks: Chunks, of_out: Tensor) -> Tensor:
    """H: gradients of the states before the runs, where nothing comes back to the states after them."""
    grad = _zero(chunks)
    for (reads, within, _, keys, writes, decay), out in reversed(
        list(zip(_each(chunks), of_out.unbind(3), strict=True))
    ):
        new = within.mT @ out + writes @ grad
        grad = decay * grad + reads.mT @ out - keys.mT @ new
    return grad


def _chunk_gradients(chunks: Chunks, of_out: Tensor, before: Tensor | None, after: Tensor | None) -> Chunks:
    """Gradients of all factors, from those of the outputs and of the states after the runs; None: zero."""
    state, steps = _zero(chunks) if before is None else before, []
    for _, _, values, keys, writes, decay in _each(chunks):
        new = values - keys @ state
        steps.append((state, new))
        state = decay * state + writes.mT @ new
    grad, found = _zero(chunks) if after is None else after, []
    for (reads, within, _, keys, writes, decay), (state, new), out in reversed(
        list(zip(_each(chunks), steps, of_out.unbind(3), strict=True))
    ):
        of_new = within.mT @ out + writes @ grad
        of_decay = (grad * state).sum_to_size(decay.shape)
        found.append(Chunks(out @ state.mT, out @ new.mT, of_new, -of_new @ state.mT, new @ grad.mT, of_decay))
        grad = decay * grad + reads.mT @ out - keys.mT @ of_new
    return Chunks(*(torch.stack(each, 3) for each in zip(*reversed(found), strict=True)))


def _each(chunks: Chunks) -> list[tuple[Tensor, ...]]:
    return list(zip(*(each.unbind(3) for each in chunks), strict=True))


def _zero(chunks: Chunks) -> Tensor:
    # A state (R, G, r, K, V).
    shape = (*chunks.values.shape[:3], chunks.keys.shape[-1], chunks.values.shape[-1])
    return chunks.values.new_zeros(shape)


def _normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _cut(x: Tensor, groups: int, size: int) -> Tensor:
    # (R, L, N, ...) to (R, G, N / G, n, C, ...), with zeros at the end: tokens of strength 0 that do not decay
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.reshape(x.shape[0], -1, size, groups, x.shape[2] // groups, x.shape[3]).permute(0, 3, 4, 1, 2, 5)


def _joined(out: Tensor, value: Tensor) -> Tensor:
    # (R, G, r, n, C, V) to (R, L, N, V) of `value`
    return out.permute(0, 3, 4, 1, 2, 5).flatten(3, 4).flatten(1, 2)[:, : value.shape[1]].to(value.dtype).contiguous()


def _apart(grad: Tensor, chunks: Chunks) -> Tensor:
    return _cut(grad, chunks.values.shape[1], chunks.values.shape[4])


def short_convolution(x: Tensor, weight: Tensor, halo: Tensor, ages: Tensor | None) -> Tensor:
    """silu of a causal convolution of each feature of x (R, L, F); `weight` (F, 1, P), the last tap for the token.

    `halo` (R, h, F), h <= P - 1, are the tokens before each run, zero where there are none of the same document. `ages`
    (R, L) is the number of tokens of the run's document before each token; None: runs are one document each.
    """
    result: Tensor = _Convolution.apply(x, weight, halo, ages)  # type: ignore[no-untyped-call]
    return result


class _Convolution(Function):
    # Keeps its input alone; autograd would keep a tensor for each tap, and another for silu.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, halo: Tensor, ages: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, halo, ages)
        return F.silu(_convolved(_with_halo(x, weight, halo), weight, ages))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, halo, ages = ctx.saved_tensors
        whole, length, taps = _with_halo(x, weight, halo), x.shape[1], weight.shape[-1]
        inner = _convolved(whole, weight, ages)
        share = inner.sigmoid()
        grad = grad * share * (1 + inner * (1 - share))
        of_whole, of_weight = torch.zeros_like(whole), torch.empty_like(weight)
        for tap in range(taps):
            part = grad if ages is None else grad * (ages >= taps - 1 - tap).unsqueeze(-1)
            of_weight[:, 0, tap] = (part * whole[:, tap : tap + length]).sum((0, 1))
            of_whole[:, tap : tap + length].addcmul_(part, weight[:, 0, tap].expand_as(part))
        return of_whole[:, taps - 1 :], of_weight, of_whole[:, taps - 1 - halo.shape[1] : taps - 1], None


def _with_halo(x: Tensor, weight: Tensor, halo: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(x.shape[0], weight.shape[-1] - 1 - halo.shape[1], x.shape[2]), halo, x], 1)


def _convolved(whole: Tensor, weight: Tensor, ages: Tensor | None) -> Tensor:
    taps = weight.shape[-1]
    length = whole.shape[1] - taps + 1
    found = torch.zeros_like(whole[:, :length])
    for tap in range(taps):
        part = whole[:, tap : tap + length] * weight[:, 0, tap]
        found += part if ages is None else part * (ages >= taps - 1 - tap).unsqueeze(-1)
    return found
