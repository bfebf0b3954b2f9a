"""Gradients of a flat parameter as views of one buffer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# Attributes of a parameter subclass go through Python, unless it is treated as a plain tensor.
_AsPlain = torch._C.DisableTorchFunctionSubclass


class GradientViews:
    """Gradients of parameters as views of one uninitialised buffer.

    The first gradient of a parameter is written to its view, later ones are added. This saves the pass that would
    zero the buffer and the pass that would read the zeros. Autograd's gradients come through a hook, which copies the
    first. Weight gradients that the runtime computes go straight to the view from `gradient_of`
    (terrace.runtime.linear). A buffer of another dtype than the parameters', such as fp32 for bf16, gets the same
    gradients, but torch allows no `grad` of another dtype, so `grad` stays None.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], extents: Sequence[tuple[int, int]]) -> None:
        """`extents` are the (start, stop) of each parameter in the buffer; the rest is padding."""
        self._parameters, self._extents = parameters, extents
        # By the `id` of a parameter, since a tensor's own hash is computed in Python.
        self._missing: dict[int, Tensor] = {}  # the view of each, until it has its first gradient
        self._written: dict[int, Tensor] = {}  # from then on
        self._laid_out: list[tuple[Tensor, list[Tensor]]] = []  # buffers that were open, and their views
        self._hooks: list[RemovableHandle] = []
        self._converts = False

    def open(self, buffer: Tensor) -> None:
        """Collect the gradients of the following backwards in `buffer` (padded size), until `close`."""
        # Padding is reduced and counted in norms like any element, so it must be zero.
        buffer[self._extents[-1][1] :].zero_()
        self._detach()
        self._converts = buffer.dtype != self._parameters[0].dtype
        self._missing = dict(zip(map(id, self._parameters), self._views_of(buffer), strict=True))
        self._written = {}
        # Hooks stay for the lifetime of the parameters; `_missing` says whether a buffer is open.
        if not self._hooks:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
                for parameter in self._parameters
                if parameter.requires_grad
            ]

    def _collect(self, parameter: Tensor) -> None:
        # Autograd also calls this without a gradient to add, as for a weight whose gradient is recorded.
        # The cheap test first: reading `grad` of a parameter subclass goes through Python.
        if id(parameter) in self._missing and parameter.grad is not None:
            gradient = parameter.grad
            self.gradient_of(parameter)[0].copy_(gradient)
        elif self._converts and id(parameter) in self._written and parameter.grad is not None:
            self._written[id(parameter)].add_(parameter.grad)
        if self._converts:
            parameter.grad = None

    def gradient_of(self, parameter: Tensor) -> tuple[Tensor, bool]:
        """The view of `parameter`, and whether it is uninitialised: the caller then writes it now, otherwise adds."""
        view = self._missing.pop(id(parameter), None)
        if view is not None:
            self._write(parameter, view)
            return view, True
        assert id(parameter) in self._written, "a weight gradient was computed while no gradient buffer was open"
        return self._written[id(parameter)], False

    def written(self, parameter: Tensor) -> Tensor | None:
        return self._written.get(id(parameter))

    def fill_missing(self) -> None:
        """Zero the gradient of parameters that have none yet; later ones are added."""
        for parameter in self._parameters if self._missing else ():
            view = self._missing.pop(id(parameter), None)
            if view is not None:
                self._write(parameter, view.zero_())

    def _write(self, parameter: Tensor, view: Tensor) -> None:
        self._written[id(parameter)] = view
        if not self._converts:
            with _AsPlain():
                parameter.grad = view

    def close(self) -> None:
        """Zero missing gradients and detach the parameters from the buffer."""
        self.fill_missing()
        self._written = {}
        self._detach()

    def _detach(self) -> None:
        with _AsPlain():
            for parameter in self._parameters:
                parameter.grad = None

    def _views_of(self, buffer: Tensor) -> list[Tensor]:
        for known, views in self._laid_out:
            if known is buffer:
                return views
        # One is open, one may still be reduced, and one of them is the accumulated gradient.
        self._laid_out = [*self._laid_out[-2:], (buffer, self.views(buffer))]
        return self._laid_out[-1][1]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's slice of `buffer`, in the parameter's shape."""
        return [
            buffer[start:stop].view(parameter.shape)
            for parameter, (start, stop) in zip(self._parameters, self._extents, strict=True)
        ]
