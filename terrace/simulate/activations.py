"""Activations of a block: bytes kept between forward and backward, and peaks while it runs.

A block is a tape (terrace.simulate.tape), to which rules by type write its operations (terrace.simulate.kept_tensors,
terrace.simulate.kept_by_mixture). The rules count what autograd keeps of this decoder on the backends `cpu` and `cuda`,
tensor by tensor; only `cpu` has been compared with a running decoder, and `cuda` follows the documented outputs of its
kernels. With T tokens on this context rank and tensor ranks in r rows and c columns, attention and MLP are cut by r,
the residual stream and the norms by c, and under sequence parallelism by r too.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import get_args

from terrace.base.errors import PlanError, did_you_mean
from terrace.model.operations import INPUT, OUTPUT, Mixture, Operations
from terrace.model.spec import BlockSpec
from terrace.plan.recompute import WHOLE
from terrace.simulate.block_tape import Backend, BlockTape
from terrace.simulate.kept_by_mixture import keep_mixture
from terrace.simulate.kept_tensors import RULES
from terrace.simulate.masks import work_in
from terrace.simulate.tape import backward_peak, forward_peak, kept_by_operation, split_backward
from terrace.simulate.work import Work

# What torch's generators remember, so that a recomputed block drops the same elements.
_RANDOM_STATE_BYTES: dict[Backend, int] = {"cpu": 5056, "cuda": 16}


@dataclass(frozen=True, kw_only=True)
class BlockActivations:
    """Bytes of one block and one micro-batch on one rank.

    `kept_bytes` is held from forward to backward: the block's input (the output of the block before, so it is counted
    once) and the tensors its operations keep (`saved`); a recomputed block keeps only a random state, and a
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
        """Bytes kept by each operation."""
        if self._again:
            kept = {"random state": self._random, "choices": self._choices}
            return {name: num_bytes for name, num_bytes in kept.items() if num_bytes}
        return kept_by_operation(self.tape.nodes, self.tape.sizes)

    @property
    def logits_bytes(self) -> int:
        """The part of `saved` that grows with the vocabulary."""
        return 0 if self._again else self.tape.logits_bytes

    @cached_property
    def kept_bytes(self) -> int:
        return self.input_bytes + sum(self.saved.values())

    @property
    def fixed_bytes(self) -> int:
        """The part of `kept_bytes` that does not grow with the sequences."""
        return self._random if self._again else self.tape.fixed_bytes

    # The peaks are found only where they are asked for: a search asks for the kept bytes of most blocks alone.
    @cached_property
    def forward_peak_bytes(self) -> int:
        # A head that runs in its backward computes nothing in the forward pass.
        if self.tape.runs_at_once:
            return self.input_bytes
        peak = forward_peak(self.tape.nodes, self.tape.sizes, keeping=not self._again)
        return peak + self._random + self._choices

    @cached_property
    def backward_peak_bytes(self) -> int:
        nodes, sizes = self.tape.nodes, self.tape.sizes
        peak = backward_peak(nodes, sizes)
        if self._again:
            # The gradient of the output is there already while the forward runs for the second time.
            peak = max(peak, forward_peak(nodes, sizes, keeping=True) + sizes[OUTPUT])
        return peak + self._random + self._choices

    @property
    def due_bytes(self) -> int:
        """Bytes held between the two halves of a backward, for the weight gradients."""
        return 0 if self.tape.runs_at_once else self._halves[1]  # a head's are not held (terrace.runtime.head)

    @property
    def halved_peak_bytes(self) -> int:
        """`backward_peak_bytes` of the first half of a backward."""
        return max(self.backward_peak_bytes, self._halves[0] + self._random + self._choices)

    @cached_property
    def _halves(self) -> tuple[int, int]:
        return split_backward(self.tape.nodes, self.tape.sizes)

    @property
    def _again(self) -> bool:
        # A head that runs in its backward keeps only its input, like a recomputed block, but stores no random state.
        return self.is_recomputed or self.tape.runs_at_once

    @property
    def _random(self) -> int:
        recomputes = self.is_recomputed and not self.tape.runs_at_once
        return _RANDOM_STATE_BYTES[self.tape.backend] if recomputes else 0

    @property
    def _choices(self) -> int:
        return self.tape.choices_bytes if self.is_recomputed else 0


def activations_of(work: Work, block: BlockSpec, backend: Backend) -> BlockActivations:
    """Bytes that a block holds for one micro-batch."""
    return block_activation_bytes(work_in(work, block, backend), block.operations, backend)


def recomputing(work: Work, parts: tuple[str, ...]) -> Work:
    """`work` of a block whose backward computes `parts` again (`terrace.plan.recompute.recomputed_parts`)."""
    return replace(work, recompute="full") if parts == WHOLE else replace(work, operations=parts)


@lru_cache(maxsize=4096)
def block_activation_bytes(work: Work, operations: Operations, backend: Backend = "cuda") -> BlockActivations:
    """Bytes that a block holds for one micro-batch. Cached, since planning asks for the same ones.

    Raises `PlanError` for a backend that does not exist.
    """
    if backend not in get_args(Backend):
        raise PlanError(f"backend = {backend!r} is not known{did_you_mean(backend, get_args(Backend))}")
    tape = BlockTape(work, backend, operations, RULES | {Mixture: keep_mixture})
    return BlockActivations(tape=tape, is_recomputed=work.recompute == "full")
