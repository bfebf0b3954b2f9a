"""Activations of a block: bytes kept between forward and backward, and peaks while it runs.

A block is a tape (terrace.simulate.tape), to which rules by type write its operations (terrace.simulate.kept_tensors,
terrace.simulate.kept_by_mixture). The rules count what autograd keeps for this decoder on the backends `cpu` and
`cuda`, tensor by tensor; only `cpu` has been compared with a running decoder, and `cuda` follows the documented outputs
of its kernels. With T tokens on this context rank and tensor ranks in r rows and c columns, attention and MLP are cut
by r, the residual stream and the norms by c, and under sequence parallelism by r too.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import get_args

from terrace.base.errors import PlanError, did_you_mean
from terrace.model.operations import INPUT, OUTPUT, Mixture, Operation, Operations
from terrace.model.spec import BlockSpec
from terrace.plan.recompute import WHOLE
from terrace.simulate.block_tape import Backend, BlockTape, Rule
from terrace.simulate.kept_by_mixture import mixture_nodes
from terrace.simulate.kept_tensors import RULES
from terrace.simulate.masks import work_in
from terrace.simulate.tape import backward_peak, forward_peak, kept_by_operation, split_backward
from terrace.simulate.work import Work

_RULES: dict[type[Operation], Rule] = {**RULES, Mixture: mixture_nodes}

# Saved RNG state, so that a recomputed block repeats its dropout masks.
_RANDOM_STATE_BYTES: dict[Backend, int] = {"cpu": 5056, "cuda": 16}


@dataclass(frozen=True, kw_only=True)
class BlockActivations:
    """Activation bytes of one block and one micro-batch on one rank.

    `kept_bytes` is held from forward to backward: the block's input (the output of the block before, so it is counted
    once) and the tensors its operations keep (`saved`); a recomputed block keeps only an RNG state, and a
    mixture its choices. The peaks hold the kept tensors, both ends of the block, gradients and temporary tensors.
    """

    tape: BlockTape
    is_recomputed: bool

    @property
    def input_bytes(self) -> int:
        return self.tape.sizes[INPUT]

    @property
    def output_bytes(self) -> int:
        return self.tape.sizes[OUTPUT]

    @cached_property
    def saved(self) -> dict[str, int]:
        return self._remembered if self._is_recomputed else kept_by_operation(self.tape.nodes, self.tape.sizes)

    @property
    def logits_bytes(self) -> int:
        """Bytes of `saved` that scale with the vocabulary."""
        return 0 if self._is_recomputed else self.tape.logits_bytes

    @cached_property
    def kept_bytes(self) -> int:
        return self.input_bytes + sum(self.saved.values())

    @property
    def fixed_bytes(self) -> int:
        """Bytes of `kept_bytes` that do not scale with the number of sequences."""
        return self._remembered.get("random state", 0) if self._is_recomputed else self.tape.fixed_bytes

    # Peaks are lazy: a search reads only the kept bytes of most blocks.
    @cached_property
    def forward_peak_bytes(self) -> int:
        # A head that runs in its backward computes nothing in the forward pass.
        if self.tape.runs_at_once:
            return self.input_bytes
        peak = forward_peak(self.tape.nodes, self.tape.sizes, keeping=not self._is_recomputed)
        return peak + sum(self._remembered.values())

    @cached_property
    def backward_peak_bytes(self) -> int:
        nodes, sizes = self.tape.nodes, self.tape.sizes
        peak = backward_peak(nodes, sizes)
        if self._is_recomputed:
            # The gradient of the output is already alive during recomputation.
            peak = max(peak, forward_peak(nodes, sizes, keeping=True) + sizes[OUTPUT])
        return peak + sum(self._remembered.values())

    @property
    def due_bytes(self) -> int:
        """Bytes kept between the input-gradient and weight-gradient halves of a backward."""
        return 0 if self.tape.runs_at_once else self._halves[1]  # a head's are not held (terrace.runtime.head)

    @property
    def halved_peak_bytes(self) -> int:
        return max(self.backward_peak_bytes, self._halves[0] + sum(self._remembered.values()))

    @cached_property
    def _halves(self) -> tuple[int, int]:
        return split_backward(self.tape.nodes, self.tape.sizes)

    @property
    def _is_recomputed(self) -> bool:
        # A head that runs in its backward keeps only its input, like a recomputed block.
        return self.is_recomputed or self.tape.runs_at_once

    @cached_property
    def _remembered(self) -> dict[str, int]:
        """Bytes that make a recomputation repeat the first forward's dropout and routing; none for a chunked head."""
        if not self.is_recomputed or self.tape.runs_at_once:
            return {}
        choices = self.tape.choices_bytes
        return {"random state": _RANDOM_STATE_BYTES[self.tape.backend]} | ({"choices": choices} if choices else {})


def activations_of(work: Work, block: BlockSpec, backend: Backend) -> BlockActivations:
    return block_activation_bytes(work_in(work, block, backend), block.operations, backend)


def recomputing(work: Work, parts: tuple[str, ...]) -> Work:
    """`work` of a block that recomputes `parts` in its backward (`terrace.plan.recompute.recomputed_parts`)."""
    return replace(work, recompute="full") if parts == WHOLE else replace(work, operations=parts)


@lru_cache(maxsize=4096)
def block_activation_bytes(work: Work, operations: Operations, backend: Backend = "cuda") -> BlockActivations:
    """Bytes that a block holds for one micro-batch; cached.

    Raises `PlanError` for an unknown backend.
    """
    if backend not in get_args(Backend):
        raise PlanError(f"backend = {backend!r} is not known{did_you_mean(backend, get_args(Backend))}")
    tape = BlockTape(work, backend, operations, _RULES)
    return BlockActivations(tape=tape, is_recomputed=work.recompute == "full")
