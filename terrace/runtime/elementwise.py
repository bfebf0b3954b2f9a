"""Base of AdamW, Lion, SGD and users' rules: reads, updates and writes the states of a slice chunk by chunk.

Checkpoints see the state of any optimizer as `StatePart`s.

The update of an element depends on that element alone, so any slice of a flat buffer can be updated separately.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from terrace.plan.keep import STATES
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.states import UNSIGNED, kinds_of
from terrace.runtime.stored import RowWise, State, Storage, chunks


class Gradient(Protocol):
    """The finished gradient of a slice (1-D): a tensor, or one that the host's cores read (terrace.runtime.kept)."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """State of some elements of a rank's slice, from parameters of one group: 1-D views by kind."""

    group: str
    elements: slice  # of the slice that the optimizer owns
    values: Mapping[str, Tensor]


def whole_part(group: str, *states: Tensor) -> StatePart:
    """A part with all elements, given the group's states in the order of `kinds_of`."""
    values = dict(zip(kinds_of(group), states, strict=True))
    return StatePart(group=group, elements=slice(0, states[0].numel()), values=values)


class Elementwise:
    """Updates `master`, a slice of a flat buffer from `start` on; the buffer's first `num_decayed` elements decay.

    `gradient` (1-D, as long as `master`) holds the finished gradient of the same elements when `update` is called.
    `storage` is how states are stored, in the dtype of `gradient` by default.
    """

    def __init__(
        self,
        master: Tensor,
        gradient: Gradient,
        num_decayed: int,
        config: OptimizerConfig,
        *,
        start: int = 0,
        storage: Storage | None = None,
    ) -> None:
        numel, device, decayed = master.numel(), master.device, min(max(num_decayed - start, 0), master.numel())
        storage = (storage or Storage(gradient.dtype)).group(STATES, numel, start, decayed)
        self.num_steps = 0
        self._gradient, self._decayed, self._config, self._start = gradient, decayed, config, start
        self._numel = numel
        self.states: tuple[State, ...] = (
            storage.parameters(master, start),
            *(
                storage.zeros(kind, numel, start, device, signed=kind not in UNSIGNED)
                for kind in kinds_of(self.group)[1:]
            ),
        )

    @property
    def master(self) -> Tensor:
        """The parameters that it updates; a copy if they are kept below the device."""
        return self.states[0].tensor

    @property
    def masters(self) -> list[tuple[int, State]]:
        """The state of the parameters, with its first element."""
        return [(0, self.states[0])]

    @property
    def group(self) -> str:
        """Name of its group of states (`terrace.runtime.states`)."""
        return self._config.group

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states[1:])

    @property
    def parts(self) -> Iterator[StatePart]:
        for elements in self.states[0].windows(self._numel):
            yield replace(whole_part(self.group, *(state.tensor for state in self.states)), elements=elements)

    @torch.no_grad()
    def update(self, lr: float, gathered: Tensor | None = None) -> None:
        """Take one step."""
        for part in chunks(self.states, self._gradient.numel(), self._start, self._gradient.device):
            values = [state.read(part) for state in self.states]
            # A part may lie before, across or after the end of the decayed elements.
            num_decayed = min(max(self._decayed - part.start, 0), part.stop - part.start)
            self._step(values, self._gradient[part], num_decayed, lr)
            for state, each in zip(self.states, values, strict=True):
                state.write(part, each, self.num_steps + 1)
        self.num_steps += 1

    @torch.no_grad()
    def update_rows(self, rows: Tensor, width: int, gradient: Tensor, lr: float) -> None:
        """Update distinct `rows` (n) of `width` elements each, with their `gradient` (n width), as part of a step.

        All elements take weight decay. Other rows keep parameters and moments. States must be stored exactly.
        """
        states = [cast(RowWise, state) for state in self.states if state.is_exact]
        assert len(states) == len(self.states), "narrow states have no row-wise update"
        values = [state.read_rows(rows, width).view(-1) for state in states]
        if len(rows):
            self._step(values, gradient, len(gradient), lr)
        for state, each in zip(states, values, strict=True):
            state.write_rows(rows, each.view(-1, width))

    def _step(self, values: list[Tensor], gradient: Tensor, num_decayed: int, lr: float) -> None:
        """Update `values` in place: one tensor per state, parameters first. The first `num_decayed` elements decay."""
        raise NotImplementedError
