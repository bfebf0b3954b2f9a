"""Frozen matrices of a block that are held in codes (`lora.base`): slices are records, and gathers decode them.

A rank keeps the records of its slice (terrace.model.base_formats) and all constants of its matrices. A gather brings
the records of the other ranks into the memory of its lane, byte by byte, and decodes all into the full buffer in the
compute dtype, which is freed after use as any gathered parameters. So a rank without peers gathers too: it decodes.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from terrace.comm.collectives import Collectives
from terrace.model.base_formats import BASE_FORMATS
from terrace.plan.flats import FlatParamSpec
from terrace.plan.slices import rank_slices
from terrace.program.message import Transfer
from terrace.runtime.base_codes import decode, encode
from terrace.runtime.flat_param import FlatParam, Initial
from terrace.runtime.kept.states import RESIDENT, Passages
from terrace.runtime.noise import Noise
from terrace.runtime.settings import OptimizerConfig


class CodedParam(FlatParam):
    """A flat parameter of frozen matrices that is stored in codes.

    `shard` and `secondary` are records, uint8, and `constants` has those of each matrix, fp32.
    """

    def __init__(self, name: str, spec: FlatParamSpec, rank: int, *args: Any, **options: Any) -> None:
        self.code, self._form = spec.layout.code, BASE_FORMATS[spec.layout.code]
        super().__init__(name, spec, rank, *args, **options)
        mesh = self.layout.ranks
        self.constants = [torch.zeros(param.num_constants, device=self.full.device) for param in spec.params]
        self._places = [rank_slices(param, mesh, rank) for param in spec.params]
        self._stored_places = [rank_slices(param.stored, mesh, rank) for param in spec.params]
        # Whether this rank is the first of all that hold parts of these matrices.
        begins = not any(part.start for place in self._places for part in place)
        self.holds_first = begins and not (any(self.coordinates) or self.is_copy)

    def initialise(
        self, initial: Initial, config: OptimizerConfig, noise: Noise | None = None, below: Passages = RESIDENT
    ) -> None:
        """Encode the parameters from `initial`, one whole matrix at a time."""
        own = self.bytes_of(self.part(self.layout.params))
        for (param, start, stop), constants, place in zip(
            self.spec.extents, self.constants, self._stored_places, strict=True
        ):
            whole = initial(replace(param, shape=param.whole_shape, whole=(), cuts=()))
            records, found = encode(whole, self.code)
            constants.copy_(found)
            at = self.bytes_of(slice(start, stop))
            first, last = max(at.start, own.start), min(at.stop, own.stop)
            if first < last:
                part = records[place].reshape(-1)[first - at.start : last - at.start]
                self.shard[first - own.start : last - own.start].copy_(part)
        self._meter.add("params", self.shard.nbytes + sum(each.nbytes for each in self.constants))
        self._meter.add("secondary", self.secondary.nbytes if self.secondary is not None else 0)

    def gather(self, collectives: Collectives, transfer: Transfer, secondary: bool) -> None:
        """Gather the records from the primary or the secondary copy, and decode them into the full parameters."""
        layout = self.layout
        copy = self.secondary if secondary and self.secondary is not None else self.shard
        self.materialise()
        records = collectives.gather_bytes(transfer, copy, lambda tier: self.bytes_of(self.part(tier)), self.origin)
        if self.secondary is not None and not secondary:
            self.secondary.copy_(records[self.bytes_of(self.part(layout.params_backward))])
        for (param, start, stop), constants, place in zip(self.spec.extents, self.constants, self._places, strict=True):
            codes, out = records[self.bytes_of(slice(start, stop))], self.full[start:stop].view(param.shape)
            row, column = (part.start for part in place)
            decode(codes.view(param.stored.shape), constants, self.code, out, (row, column), param.whole_shape[1])

    def stored_start(self, tier: int) -> int:
        """The first byte of this rank's records on `tier`."""
        return int(self.bytes_of(self.part(tier)).start)

    def bytes_of(self, elements: slice) -> slice:
        """The bytes of the records of elements of the buffer."""
        return slice(self._form.coded_bytes(elements.start), self._form.coded_bytes(elements.stop))

    def _zeros(self, tier: int) -> Tensor:
        size = self._form.coded_bytes(self.padded // self.layout.span(tier))
        return torch.zeros(size, dtype=torch.uint8, device=self.full.device)
