"""Places of a flat parameter's gradients in one buffer."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class GradientViews:
    """Gradients of parameters as views of one uninitialised buffer.

    The first gradient of a parameter is written to its view and later ones are added. This spares the pass that would
    set the buffer to zero, and the pass that would read the zeros. Autograd's gradients come through a hook, which
    copies the first. Weight gradients that the runtime computes ask for their place by `gradient_of`
    (terrace.runtime.linear). A buffer of another dtype than the parameters', fp32 for bf16, gets the same gradients;
    torch then allows no `grad` that is a view of it, and `grad` stays empty.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], extents: Sequence[tuple[int, int]]) -> None:
        """`extents` are the (start, stop) of each parameter in the buffer; the rest is padding."""
        self._parameters, self._extents = parameters, extents
        self._missing: dict[Tensor, Tensor] = {}  # parameter -> its view, until it has its first gradient
        self._written: dict[Tensor, Tensor] = {}  # parameter -> its view, from then on
        self._hooks: list[RemovableHandle] = []
        self._converts = False

    def open(self, buffer: Tensor) -> None:
        """Collect the gradients of the next backwards in `buffer` (padded elements), until `close`."""
        # Padding is reduced and counted in norms like any element, so it must be zero.
        buffer[self._extents[-1][1] :].zero_()
        for parameter in self._parameters:
            parameter.grad = None
        self._converts = buffer.dtype != self._parameters[0].dtype
        self._missing = dict(zip(self._parameters, self.views(buffer), strict=True))
        self._written = {}
        # Hooks stay for the life of the parameters; `_missing` tells whether a buffer is open.
        if not self._hooks:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
                for parameter in self._parameters
                if parameter.requires_grad
            ]

    def _collect(self, parameter: Tensor) -> None:
        # Autograd also calls this without a gradient to add, as for a weight whose gradient is recorded.
        # The cheap question first: a parameter of a class of its own answers for `grad` through Python.
        if parameter in self._missing and parameter.grad is not None:
            gradient = parameter.grad
            self.gradient_of(parameter)[0].copy_(gradient)
        elif self._converts and parameter in self._written and parameter.grad is not None:
            self._written[parameter].add_(parameter.grad)
        if self._converts:
            parameter.grad = None

    def gradient_of(self, parameter: Tensor) -> tuple[Tensor, bool]:
        """The view of `parameter`, and whether it is still uninitialised: the caller writes or adds at once."""
        view = self._missing.pop(parameter, None)
        if view is not None:
            self._write(parameter, view)
            return view, True
        assert parameter in self._written, "a weight gradient was computed while no gradient buffer was open"
        return self._written[parameter], False

    def written(self, parameter: Tensor) -> Tensor | None:
        """The gradient of `parameter` so far; None without one, or without a buffer."""
        return self._written.get(parameter)

    def fill_missing(self) -> None:
        """Set the gradient of parameters that got none to zero; later ones are added."""
        for parameter, view in self._missing.items():
            self._write(parameter, view.zero_())
        self._missing = {}

    def _write(self, parameter: Tensor, view: Tensor) -> None:
        self._written[parameter] = view
        if not self._converts:
            parameter.grad = view

    def close(self) -> None:
        """Set missing gradients to zero and detach the parameters from the buffer."""
        self.fill_missing()
        self._written = {}
        for parameter in self._parameters:
            parameter.grad = None

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The part of `buffer` that belongs to each parameter, in the parameter's shape."""
        return [
            buffer[start:stop].view(parameter.shape)
            for parameter, (start, stop) in zip(self._parameters, self._extents, strict=True)
        ]
