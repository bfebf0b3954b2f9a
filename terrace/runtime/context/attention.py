"""Attention of a micro-batch whose tokens are split over ranks: executes a `TokenLayout`, forward and backward.

Between the exchanges `into` and `back` there are rounds s = 0 ... R-1, on keys K_s and values V_s from exchange s:

    forward     q, K_0, V_0 <- into(queries, keys, values), to each rank its heads
                K_s+1, V_s+1 <- exchange s+1 (K_s, V_s)                         while round s is computed
                (o, l) <- (o, l) merged with attention of q to K_s, V_s         by log-sum-exp
                output <- back(o)
    backward    o' <- into(output')
                K_s+1, V_s+1 as in the forward
                q', K_s', V_s' += gradients of round s, and for s > 1 exchange s of K_s-1', V_s-1'
                exchange s+1 takes K_s', V_s' of s > 0 onward, for rows that it passes on, while round s+1 is computed
                other rows return to the rank that owns them, which adds them to its K_0', V_0'
                queries', keys', values' <- back(q', K_0', V_0')

(DeepSpeed-Ulysses 2309.14509, ring attention 2310.01889.) A layer saves q, K_0, V_0, o and l, each as large as the
local tokens in all heads, and no other round's keys. The order of messages is the block's own program
(terrace.program.block_program.attention).

A rank attends with N / u of the query heads and the K / u key-value heads that they use. If u > K it has one
key-value head, which u / K Ulysses ranks share; its gradients are summed by the rank that the head came from.

Shape legend: T local tokens, A attention tokens, N query heads, K key-value heads, D elements of a head, u Ulysses
ranks.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from terrace.model.attention import NO_SINKS, sinks_gradient, with_sinks
from terrace.model.blockwise import Attended, DensePair, Sums, pair_backward, pair_forward, rows
from terrace.model.pair_kernels import PairInputs, precise, side_by_side
from terrace.plan.context import Heads
from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.program.block_program.steps import ComputeKind
from terrace.runtime.context.device_layout import DeviceLayout, UlyssesHeads
from terrace.runtime.context.peer_exchange import PeerExchange, PendingRecv
from terrace.runtime.scores import NO_SCORES, Scores


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: DeviceLayout,
    sinks: Tensor = NO_SINKS,
    scores: Scores = NO_SCORES,
) -> Tensor:
    """Attention output (1, N, T, D) of this rank's queries over the keys and values (1, K, T, D) of all ranks.

    `sinks` (N) are those of the query heads, `scores` takes their largest ones.
    """
    output: Tensor = _Attend.apply(query, key, value, sinks, layout, scores)  # type: ignore[no-untyped-call]
    return output


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, layout: DeviceLayout, scores: Scores
    ) -> Tensor:
        ctx.layout = layout
        of_place = Heads(query.shape[1], key.shape[1], query.shape[3])
        ctx.heads = heads = UlyssesHeads(of_place, layout.comm.group.ulysses)

        def give(member: int) -> Sequence[Tensor]:
            of_keys = heads.of_keys(member)
            return query[:, heads.of_queries(member)], key[:, of_keys], value[:, of_keys]

        counts = (heads.queries, heads.keys, heads.keys)
        into = ContextMessage(ContextLeg.INTO)
        own = layout.comm.start(into, layout.into, give, counts, query).whole(layout.num_attention_tokens)
        # Once all rounds have been merged, each rank for the heads with which it attends.
        mine = heads.of_queries(layout.comm.member)
        out, lse = with_sinks(*_forward(layout, scores.of(mine), *own), sinks[mine])
        ctx.save_for_backward(*own, out, lse, sinks)
        return _back(layout, heads, [out], backward=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, heads = ctx.layout, ctx.heads

        def give(member: int) -> Sequence[Tensor]:
            return (grad[:, heads.of_queries(member)],)

        into = ContextMessage(ContextLeg.INTO, backward=True)
        pending = layout.comm.start(into, layout.into, give, [heads.queries], grad)
        # Deferred weight gradients overlap with this message; without one there is no reason to run them now.
        if not layout.into.is_silent:
            layout.comm.in_block.compute_weight_gradients()  # of the layers after attention
        (own,) = pending.whole(layout.num_attention_tokens)
        query, key, value, out, lse, sinks = ctx.saved_tensors
        of_sinks: Tensor | None = None
        if ctx.needs_input_grad[3]:
            # Ranks add up their gradients: of other heads this one has none.
            part, of_sinks = heads.of_queries(layout.comm.member), sinks.new_zeros(sinks.shape)
            of_sinks[part] = sinks_gradient(own, out, lse, sinks[part])
        grads = _backward(layout, own, query, key, value, out, lse)
        return *_back(layout, heads, grads, backward=True), of_sinks, None, None


def _forward(layout: DeviceLayout, scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse of queries (1, n, A, D) over the keys of all rounds; round 0's keys are (1, k, A, D)."""
    attended = Attended(query, layout.query_runs)
    keys: Sequence[Tensor] = (key, value)
    for step in range(len(layout.ring_steps)):
        # The next round's keys travel while this round is computed.
        pending = _pass_on(layout, step, keys, ContextLeg.KEYS, backward=False)
        layout.comm.in_block.computes(ComputeKind.ROUND, step)
        for pair in layout.pairs(step, query.dtype):
            own = rows(query, pair.queries), rows(keys[0], pair.keys), rows(keys[1], pair.keys)
            inputs = PairInputs(*own, pair.kind, pair.mask)
            scores.add_pair(inputs)
            attended.add(pair.queries, *pair_forward(inputs))
        if pending is not None:
            keys = pending.whole(layout.ring_steps[step + 1].num_rows)
    return attended.result()


def _pass_on(
    layout: DeviceLayout, step: int, given: Sequence[Tensor], leg: ContextLeg, *, backward: bool
) -> PendingRecv | None:
    if step + 1 == len(layout.ring_steps):
        return None
    return _to_ring(layout, layout.ring_steps[step + 1].exchange, given, leg, backward=backward)


def _to_ring(
    layout: DeviceLayout, exchange: PeerExchange, given: Sequence[Tensor], leg: ContextLeg, *, backward: bool
) -> PendingRecv:
    message = layout.comm.ring_message(leg, exchange, backward=backward)
    return layout.comm.start(message, exchange, lambda _: given, [x.shape[1] for x in given], given[0])


def _backward(
    layout: DeviceLayout, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> list[Tensor]:
    """Gradients of the inputs of `_forward`, given the gradient of its output and its results `out` and `lse`."""
    of_query = Sums(query, layout.query_runs)
    own: list[Sums] = []  # of the keys and values of round 0, which stay where they are
    return_gradients: PendingRecv | None = None
    brought: PendingRecv | None = None
    keys: Sequence[Tensor] = (key, value)
    for step, ring_step in enumerate(layout.ring_steps):
        pending = _pass_on(layout, step, keys, ContextLeg.KEYS, backward=True)
        layout.comm.in_block.computes(ComputeKind.ROUND_GRADIENTS, step)
        pairs = layout.pairs(step, query.dtype)
        # Sums need room for rows that other ranks will add to.
        others = [ring_step.exchange] if step > 1 else []
        if step == 0:
            # Gradients of this rank's own keys return from every round.
            others = [each.return_gradients for each in layout.ring_steps[1:]]
        runs = [*(pair.keys for pair in pairs), *(run for exchange in others for run in exchange.brings)]
        sums = [Sums(x, runs) for x in keys]
        for pair in pairs:
            _add_pair(pair, (grad, query, *keys, out, lse), (of_query, *sums))
        # Arrivals go as soon as they are added: beside the keys of two rounds there are the gradients of two.
        if return_gradients is not None:
            _add(return_gradients, own)
            return_gradients = None
        if brought is not None:
            _add(brought, sums)
            brought = None
        if step == 0:
            own = sums
        else:
            done = [each.result() for each in sums]
            return_gradients = _to_ring(
                layout, ring_step.return_gradients, done, ContextLeg.RETURN_GRADIENTS, backward=True
            )
            brought = _pass_on(layout, step, done, ContextLeg.GRADIENTS, backward=True)
            # Freed now, so that gradients of two rounds at most are held.
            del done
        del sums
        if pending is not None:
            keys = pending.whole(layout.ring_steps[step + 1].num_rows)
    if any(not ring_step.return_gradients.is_silent for ring_step in layout.ring_steps):
        layout.comm.in_block.compute_weight_gradients()  # unless they were computed before
    if return_gradients is not None:
        _add(return_gradients, own)
    return [each.result() for each in (of_query, *own)]


def _add_pair(pair: DensePair, given: Sequence[Tensor], sums: Sequence[Sums]) -> None:
    runs = pair.queries, pair.keys, pair.keys
    grad, query, key, value, out, lse = (
        rows(x, run) for x, run in zip(given, (pair.queries, *runs, pair.queries, pair.queries), strict=True)
    )
    grads = pair_backward(grad, PairInputs(query, key, value, pair.kind, pair.mask), out, lse)
    for total, run, part in zip(sums, runs, grads, strict=True):
        total.add(run, part)


def _add(pending: PendingRecv, sums: Sequence[Sums]) -> None:
    for _, there, values in pending.parts():
        for total, part in zip(sums, values, strict=True):
            first = 0
            for run in there.runs:
                size = run[1] - run[0]
                total.add(run, part[:, :, first : first + size])
                first += size


def _back(layout: DeviceLayout, heads: UlyssesHeads, given: Sequence[Tensor], *, backward: bool) -> list[Tensor]:
    """Exchange results of all Ulysses ranks' heads into those of this rank's tokens, (1, N, T, D) and (1, K, T, D).

    A key-value head that several ranks share is summed over them.
    """
    message = ContextMessage(ContextLeg.BACK, backward=backward)
    pending = layout.comm.start(message, layout.back, lambda _: given, [x.shape[1] for x in given], given[0])
    parts, ulysses = list(pending.parts()), layout.comm.group.ulysses
    # Nothing was exchanged: no copy is needed.
    if ulysses == 1 and len(parts) == 1 and parts[0][1].is_all(layout.num_local_tokens):
        return list(parts[0][2])
    # Rows that no part covers (padding) must be zero, not uninitialised.
    covers = sum(there.num for _, there, _ in parts) == layout.num_local_tokens * ulysses
    found = []
    for index, x in enumerate(given):
        # Shared key-value heads collect gradients from several Ulysses ranks, summed in wide precision.
        adds = index > 0 and heads.shared > 1
        num_heads = x.shape[1] * ulysses // (heads.shared if adds else 1)
        whole = side_by_side(x, precise(x.dtype) if adds else None, (1, num_heads, layout.num_local_tokens, x.shape[3]))
        if adds or not covers:
            whole.zero_()
        for member, there, values in parts:
            part = whole[:, heads.of_keys(member) if index else heads.of_queries(member)]
            (there.add if adds else there.set)(part, values[index])
        found.append(whole.to(x.dtype))
    return found
