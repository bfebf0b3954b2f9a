"""A step whose rows hold documents of known lengths (terrace.sequence.ragged), priced by the slowest rank."""

from dataclasses import replace
from typing import TYPE_CHECKING

from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.residency import recomputed
from terrace.plan.validate import check_context
from terrace.sequence.lengths import Lengths, MeanDealt, Ragged
from terrace.sequence.ragged import deal_drawn, drawn_shares, drawn_together
from terrace.simulate.attention_cost import attention_cost
from terrace.simulate.inside import InBlockPrices, attention_bytes

if TYPE_CHECKING:
    from terrace.simulate.step import Step


def with_lengths(step: "Step", lengths: Lengths) -> "Step":
    """The step on rows of documents of these lengths; the step itself without any.

    Raises `PlanError` for a model or a plan whose documents cannot be dealt by cost.
    """
    if not lengths:
        return step
    layout, data = Layout.of(step.cluster, step.plan), Mesh.of(step.cluster, step.plan).total("data")
    gathers = layout.span(layout.params) > 1
    together = 1 if gathers else drawn_together(step.num_micros, data * step.plan.micro_batch)
    ragged = Ragged(lengths, together, _dealt(step, lengths) if step.plan.balance == "cost" else MeanDealt())
    if isinstance(step.work, tuple):
        return replace(step, work=_fewer_flops(step, ragged))
    return replace(step, work=replace(step.work, documents=True, ragged=ragged))


def _fewer_flops(step: "Step", ragged: Ragged) -> tuple[float, ...]:
    """Forward FLOPs of every block, with those of attention at the slowest rank's share."""
    assert isinstance(step.work, tuple)
    mesh, rows, sequence, found = Mesh.of(step.cluster, step.plan), step.plan.micro_batch, step.sequence, list[float]()
    for flops, block in zip(step.work, step.blocks, strict=True):
        # FLOPs of a token with one key and with two tell those that do not depend on the keys.
        alike = 2 * block.forward_flops(1, 1) - block.forward_flops(1, 2) / 2
        core = max(0.0, block.forward_flops(rows, sequence) - rows * sequence * alike)
        window = block.operations.core.window
        share = ragged.dealt.slowest
        if core and step.plan.balance == "tokens":
            sizes = sequence, rows, mesh.total("ring"), mesh.total("data")
            share = drawn_shares(ragged, *sizes, window, (0.0, 0.0)).slowest
        found.append(flops - core * (1 - share))
    return tuple(found)


def _dealt(step: "Step", lengths: Lengths) -> MeanDealt:
    mesh, plan = Mesh.of(step.cluster, step.plan), step.plan
    check_context(step.cluster, plan, step.blocks)
    cost = attention_cost(
        step.cluster,
        step.blocks,
        rows=mesh.total("rows"),
        columns=mesh.total("columns"),
        ulysses=mesh.total("ulysses"),
        compute=plan.compute,
        recomputed=recomputed(plan, step.blocks),
    )
    degrees, ring = mesh.group("ring", "data"), mesh.total("ring")
    found = deal_drawn(lengths, step.sequence, degrees, ring, plan.micro_batch, step.num_micros, cost)
    if mesh.total("ulysses") == 1 or isinstance(step.work, tuple):
        return found
    # Ulysses ranks exchange the tokens that their ring rank attends to, about as many as it holds.
    attention = attention_bytes(step.work, mesh.group("ulysses"), (1,) * len(degrees))
    prices = InBlockPrices(step.cluster, None, attention)
    sent, wait_s = list(found.sent_bytes), found.wait_s
    for message in (ContextMessage(leg) for leg in (ContextLeg.INTO, ContextLeg.BACK)):
        wait_s += prices.seconds(message)
        for tier, num_bytes in attention.sends(message):
            sent[tier] += (cost.forwards + 1) * num_bytes
    return replace(found, wait_s=wait_s, sent_bytes=tuple(sent))
