"""Flat buffers: the parameters of one block in one storage, of which each rank keeps a slice.

The module's parameters are views of the flat storage. Freeing shrinks that storage to nothing and
gathering grows and refills the *same* storage, so that whatever autograd saved (a transposed view of a
weight, say) sees the refilled values. The views are made with `set_`, not by slicing: slices would
share the flat tensor's version counter, and a refill would look like an illegal in-place change.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from terrace.comm import Meter
from terrace.model.spec import ParamSpec
from terrace.plan.layout import DEVICE, Layout

Initial = Callable[[ParamSpec], Tensor]


class Flat:
    """One flat buffer: the trainable, or the frozen, parameters of one block.

    Matrices come first: `num_decayed` elements from the start take weight decay. `full` is the padded
    buffer of all elements (its storage is empty while freed), `shard` the slice of the params tier,
    `secondary` the slice of the params_backward tier if the plan has one.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        layout: Layout,
        coordinates: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self.specs = sorted(specs, key=lambda spec: not spec.decays)
        self.numel = sum(spec.numel for spec in self.specs)
        self.num_decayed = sum(spec.numel for spec in self.specs if spec.decays)
        self.padded = layout.padded(self.numel)
        self._layout = layout
        self._coordinates = coordinates
        self._meter = meter
        self.full = torch.empty(self.padded, dtype=dtype, device=device)
        self.parameters = self._make_parameters()  # before the storage is emptied: `set_` would grow it again
        self.shard = self.full
        if layout.params != DEVICE:
            self._resize(0)
            self.shard = self._zeros(layout.params)
        self.secondary = self._zeros(layout.params_backward) if layout.has_secondary else None
        self._awaited: dict[Tensor, Tensor] = {}  # parameter -> where its first gradient goes
        self._given: dict[Tensor, Tensor] = {}  # parameter -> where its gradient is, once it has one
        self._hooks: list[RemovableHandle] = []

    def part(self, tier: int) -> slice:
        """Return the slice of this rank for a state placed on `tier`."""
        return self._layout.slice(tier, self._coordinates, self.padded)

    def part_within(self, tier: int, base: int) -> slice:
        """Return that slice relative to the one of an inner tier `base`."""
        inner, outer = self.part(base), self.part(tier)
        return slice(outer.start - inner.start, outer.stop - inner.start)

    def fill(self, initial: Initial) -> Tensor:
        """Set the parameters from `initial`, and return the values of the optimizer tier's slice unrounded.

        Holds all elements of this one buffer on the CPU while it works.
        """
        values = torch.zeros(self.padded, dtype=torch.float64 if self.full.dtype == torch.float64 else torch.float32)
        for spec, (start, stop) in zip(self.specs, self._extents(), strict=True):
            values[start:stop] = initial(spec).reshape(-1)
        self.shard.copy_(values[self.part(self._layout.params)])
        return values[self.part(self._layout.optimizer)].clone()

    def materialise(self) -> None:
        """Give the full buffer its memory; its content is undefined until gathered."""
        self._meter.add("gathered", self.full.nbytes)
        self._resize(self.full.nbytes)

    def free(self) -> None:
        """Take the memory of the full buffer away."""
        self._resize(0)
        self._meter.add("gathered", -self.full.nbytes)

    def collect_gradients_in(self, buffer: Tensor) -> None:
        """Have the gradients of backwards to come stand in an uninitialised, padded buffer, until they are dropped.

        The first gradient of a parameter is written there and later ones are added, which spares the pass that
        would set the buffer to zero and the one that would read those zeros. Autograd's come through a hook, which
        copies the first; weight gradients that the runtime computes ask for their place by `gradient_of`.
        """
        buffer[self.numel :].zero_()
        for parameter in self.parameters:
            parameter.grad = None
        self._awaited = dict(zip(self.parameters, self._views(buffer), strict=True))
        self._given = {}
        if not self._hooks:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
                for parameter in self.parameters
                if parameter.requires_grad
            ]

    def _collect(self, parameter: Tensor) -> None:
        # Autograd calls this also when it has no gradient to add, as for a weight whose gradient is recorded.
        # The cheap question first: a parameter of a class of its own answers for `grad` through Python.
        if parameter in self._awaited and parameter.grad is not None:
            view = self._awaited.pop(parameter)
            view.copy_(parameter.grad)
            parameter.grad = self._given[parameter] = view

    def gradient_of(self, parameter: Tensor) -> tuple[Tensor, bool]:
        """Return where the gradient of `parameter` is, and whether its values there are yet to be written.

        The caller writes them at once, or adds to them.
        """
        view = self._awaited.pop(parameter, None)
        if view is not None:
            parameter.grad = self._given[parameter] = view
            return view, True
        assert parameter in self._given, "a weight gradient was computed while no gradient buffer was open"
        return self._given[parameter], False

    def complete_gradients(self) -> None:
        """Give a gradient of zero to the parameters that got none; further ones are added."""
        for parameter, view in self._awaited.items():
            parameter.grad = self._given[parameter] = view.zero_()
        self._awaited = {}

    def drop_gradients(self) -> None:
        """Detach the parameters from the gradient buffer; what got no gradient has one of zero there."""
        self.complete_gradients()
        self._given = {}
        for parameter in self.parameters:
            parameter.grad = None

    def extents(self) -> list[tuple[ParamSpec, int, int]]:
        """Return (spec, start, stop) of every parameter in the flat buffer."""
        return [(spec, *extent) for spec, extent in zip(self.specs, self._extents(), strict=True)]

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start:stop].view(parameter.shape)
            for parameter, (start, stop) in zip(self.parameters, self._extents(), strict=True)
        ]

    def _extents(self) -> list[tuple[int, int]]:
        extents, start = [], 0
        for spec in self.specs:
            extents.append((start, start + spec.numel))
            start += spec.numel
        return extents

    def _make_parameters(self) -> list[nn.Parameter]:
        parameters = []
        for spec, (start, _) in zip(self.specs, self._extents(), strict=True):
            view = torch.empty(0, dtype=self.full.dtype, device=self.full.device)
            stride = torch.empty(spec.shape, device="meta").stride()
            view.set_(self.full.untyped_storage(), start, spec.shape, stride)
            parameters.append(nn.Parameter(view, requires_grad=spec.trainable))
        return parameters

    def _zeros(self, tier: int) -> Tensor:
        size = self.padded // self._layout.span(tier)
        return torch.zeros(size, dtype=self.full.dtype, device=self.full.device)

    def _resize(self, num_bytes: int) -> None:
        self.full.untyped_storage().resize_(num_bytes)
