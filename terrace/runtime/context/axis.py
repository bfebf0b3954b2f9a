"""The context axis of a rank. It replaces the attention of its blocks by attention over the context group."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError, PlanError
from terrace.model import decoder
from terrace.model.attention import NO_SINKS, PlannedAttention, Plans
from terrace.model.attention_plans import AttentionPlans
from terrace.model.delta_net import ROWS, GatedDeltaNet
from terrace.model.hf.blocks import EmbeddingBlock, HeadBlock
from terrace.plan.context import attention_heads, local_tokens
from terrace.plan.context_rules import windows_of
from terrace.plan.in_block_messages import ContextMessage
from terrace.plan.residency import recomputed
from terrace.plan.wire import MessageClass
from terrace.program.block_program.attention import steps_of
from terrace.program.block_program.steps import messages_of
from terrace.program.program import Program
from terrace.runtime.batch import Batch
from terrace.runtime.context.attention import attend
from terrace.runtime.context.device_layout import DeviceLayout
from terrace.runtime.context.peer_exchange import PeerComm
from terrace.runtime.context.states import RingRuns
from terrace.runtime.in_block import InBlockAxis
from terrace.runtime.scores import NO_SCORES
from terrace.sequence.static import static_token_layouts
from terrace.sequence.token_layout import TokenLayout
from terrace.sequence.traffic import sent_bytes

# Blocks that work on each token by itself.
ALONE = decoder.Embedding, decoder.Head, decoder.ValueHead, EmbeddingBlock, HeadBlock


class ContextAxis(InBlockAxis):
    """Attention backend of context parallelism. Replaces the mask planner of each block's attention."""

    def __init__(self, comm: PeerComm, program: Program, blocks: Iterable[nn.Module], device: torch.device) -> None:
        """Install itself in `blocks`. Raises `ModelError` for capped scores, and for differing undeclared windows."""
        self.comm, self.in_block = comm, comm.in_block
        self._program, self._device = program, device
        modules = [module for block in blocks for module in block.modules() if isinstance(module, PlannedAttention)]
        windows = _windows(program, modules)
        self._static = static_token_layouts(
            program.plan, program.mesh, program.model.sequence, windows[0], comm.member, windows[1:]
        )
        of_embedding = (param for param in program.blocks[0].params if param.dims and param.dims[0][0] == "positions")
        self._num_positions = next((param.shape[0] for param in of_embedding), 0)  # 0: not learned
        self._declared: dict[tuple[MessageClass, str], int] = defaultdict(int)
        self._layouts: list[DeviceLayout] = []
        self._micro = 0  # index of the current micro-batch in `_layouts`
        self._linear = [module for block in blocks for module in block.modules() if isinstance(module, GatedDeltaNet)]
        if self._linear:
            runs = RingRuns(comm, program.mesh.group("ring"), program.plan.micro_batch)
            for module in self._linear:
                module.runs = runs
        # Kept to restore the blocks on `remove`.
        self._replaced: list[tuple[PlannedAttention, Plans]] = [(attention, attention.plans) for attention in modules]
        for attention in modules:
            own = attention.plans
            index = windows.index(own.window) if isinstance(own, AttentionPlans) else 0
            attention.plans = LayerPlans(self, index)

    @property
    def declared(self) -> Mapping[tuple[MessageClass, str], int]:
        """Bytes of all steps so far, computed from the token layouts of their micro-batches."""
        return self._declared

    def remove(self) -> None:
        """Restore the blocks' own mask planners."""
        for attention, plans in self._replaced:
            attention.plans = plans
        for module in self._linear:
            module.runs = ROWS

    def take(self, batches: Sequence[Batch], *, trains: bool = True) -> list[Batch]:
        """This rank's part of the micro-batches of a training step or an evaluation. Splits whole micro-batches.

        Raises `PlanError` for a shape other than the plan's, `ModelError` for positions beyond the model's.
        """
        local = [self._localised(batch) for batch in batches]
        # Device tensors of a layout are reused for the same layout object; a hash would read all its runs.
        known = {id(layout.token_layout): layout for layout in self._layouts}
        self._layouts = []
        for _, token_layout in local:
            self._declare(token_layout, trains)
            layout = known.get(id(token_layout)) or DeviceLayout(token_layout, self.comm, self._device)
            known[id(token_layout)] = layout
            self._layouts.append(layout)
        return [batch for batch, _ in local]

    def _declare(self, token_layout: TokenLayout, trains: bool) -> None:
        program, group = self._program, self.comm.group
        again = recomputed(program.plan, program.blocks)
        wires = [program.plan.wire_format(MessageClass.CONTEXT, tier) for tier in program.layout.tiers]
        for block in program.stage.own:
            if program.blocks[block].operations.delta.heads:
                self._declare_scan(block, (2 if block in again else 1) if trains else 1, trains)
            heads = attention_heads(program.blocks[block], program.mesh.total("rows"))
            if heads is None:
                continue
            sent = sent_bytes(token_layout, group, heads, wires)
            for tier, forward, backward in zip(program.layout.tiers, sent.forward, sent.backward, strict=True):
                # A recomputed layer sends its forward messages twice.
                num_bytes = forward * (2 if block in again else 1) + backward if trains else forward
                if num_bytes:
                    self._declared[MessageClass.CONTEXT, tier] += num_bytes

    def _declare_scan(self, block: int, forwards: int, trains: bool) -> None:
        sent = self._program.model.context.attention(self._program.blocks[block])
        for steps, times in zip(steps_of(sent), (forwards, int(trains)), strict=True):
            for message in messages_of(steps):
                assert isinstance(message, ContextMessage), "a scan has no other messages"
                for tier, num_bytes in sent.sends(message):
                    self._declared[MessageClass.CONTEXT, self._program.layout.tiers[tier]] += times * num_bytes

    def _localised(self, batch: Batch) -> tuple[Batch, TokenLayout]:
        """The local tokens of a micro-batch, and its token layout."""
        plan, shape = self._program.plan, tuple(batch.labels.shape)
        if batch.token_layout is not None:
            # Cut batches have one row of local tokens, padding included.
            expected = (1, local_tokens(plan, self._program.mesh, self._program.model.sequence))
        else:
            expected = (plan.micro_batch, self._program.model.sequence)
            if plan.balance == "cost":
                raise PlanError(
                    'balance = "cost" assigns the documents of a whole global batch to ranks, and this micro-batch '
                    'comes without what was assigned: train with terrace train, or write balance = "tokens"'
                )
        if shape != expected or batch.inputs.shape != batch.labels.shape:
            raise PlanError(
                f"a micro-batch has inputs {tuple(batch.inputs.shape)} and labels {shape}, and the plan spreads "
                f"{expected[0]} x {expected[1]} tokens over ranks: give as many"
            )
        if batch.token_layout is not None:
            return batch, batch.token_layout
        if self._num_positions:  # one rank alone may hold the token that is beyond, and others would wait for it
            decoder.check_positions(batch.inputs, batch.positions, self._num_positions)
        token_layout = self._static(batch.document_begins())
        return batch.local(token_layout), token_layout

    def begin(self, micro: int, batch: Batch, recomputed: bool) -> None:
        """Select the micro-batch of the following passes."""
        self._micro = micro

    def layout(self, window: int) -> DeviceLayout:
        """The layout of the current micro-batch, for layers with a window by its index into the model's windows."""
        return self._layouts[self._micro].of_window(window)


def check_declared(blocks: Mapping[str, nn.Module]) -> None:
    """Raise `ModelError` for a block that does not declare how it mixes tokens."""
    for name, block in blocks.items():
        alone = isinstance(block, ALONE)
        if not alone and not any(isinstance(module, PlannedAttention | GatedDeltaNet) for module in block.modules()):
            raise ModelError(
                f"block {name!r} is a {type(block).__name__}, whose attention is not declared, and a context axis "
                "spreads tokens that attend to one another over ranks: build it with terrace.model.layers.Attention, "
                "declare a model of transformers (docs/declaring.md), or give the tier to the data axis"
            )


class LayerPlans:
    """The axis in place of a layer's mask plans. `scores` takes the layer's largest scores."""

    def __init__(self, axis: ContextAxis, window: int) -> None:
        self._axis, self._window, self.scores = axis, window, NO_SCORES

    def plan(self, positions: Tensor | None, query: Tensor) -> "LayerPlans":
        """Returns itself: the current micro-batch's layout replaces a mask plan."""
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """Attention of the local tokens (1, N, T, D) over the keys and values (1, K, T, D) of all ranks.

        `sinks` are of this rank's heads (N).
        """
        return attend(query, key, value, self._axis.layout(self._window), sinks, self.scores)


def _windows(program: Program, modules: Iterable[PlannedAttention]) -> tuple[int, ...]:
    """The windows of all layers of the model, widest first; equal on every rank."""
    plans = [module.plans for module in modules if isinstance(module.plans, AttentionPlans)]
    if any(each.cap for each in plans):
        raise ModelError("layers cap scores of attention, which no kernel of a context axis supports: use another axis")
    declared = windows_of(program.blocks)
    found = {each.window for each in plans}
    if not declared:
        if len(found) > 1:
            raise ModelError(
                f"layers have the windows {sorted(found)}, and a context axis takes one where blocks do not declare "
                "theirs: make them the same"
            )
        return tuple(found) or (0,)
    assert found <= set(declared), f"windows {found} of modules, {declared} of the blocks"
    return declared
