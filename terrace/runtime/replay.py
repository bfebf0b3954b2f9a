"""Operations whose results are dropped and recomputed when the backward needs them.

y = f(x), and g reads y. Autograd would save x, the intermediate results of f, and y for g. Here it saves a `_Slot`
for each of these tensors, and the replay of f keeps x alone:

    forward     y = f(x), g(y)                    y is freed as soon as g has run
    backward    the first node that unpacks a slot reruns f on x, which fills all slots that still exist
                each tensor is freed with the node that saved it

The backward uses the nodes of the first forward, so it gives the same bits as with saved tensors; f draws no random
numbers and sends no messages. Deferred weight gradients hold the recomputed tensors. Torch does not check that
tensors saved through hooks stay unchanged; nothing in a layer writes in place.

Model code is unchanged: `install` replaces the `run` of layers (terrace.model.operation).
"""

from collections.abc import Callable, Mapping, Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from terrace.base.errors import ModelError
from terrace.model.decoder import DecoderLayer
from terrace.model.layers import MLP
from terrace.plan.recompute import operations_in
from terrace.program.program import Program
from terrace.runtime.pages import mark_returning


class _Slot:
    """Stands for a tensor that autograd would save. Has `values` from the replay until its node is freed."""

    def __init__(self, replay: "_Replay", view: tuple[Sequence[int], Sequence[int], int] | None) -> None:
        self.replay, self.view = replay, view  # shape, strides and offset in the result's storage; None: not of it
        self.values = list[Tensor]()  # one, or none


class _Replay:
    def __init__(self, operation: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self._operation = operation
        # Detached, so that a slot, which lives in the graph, does not hold the graph of the inputs.
        self._inputs = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
        self._inside: list[ReferenceType[_Slot]] = []  # in the order in which the operation saves them
        self._read: list[ReferenceType[_Slot]] = []  # views of the result that readers save
        self._result: StorageWeakRef | None = None

    def first(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with saved_tensors_hooks(self._save, _values):
            result = self._operation(*inputs)
        self._result = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
        return result

    def _save(self, saved: Tensor) -> _Slot:
        slot = _Slot(self, None)
        self._inside.append(ref(slot))
        return slot

    def is_of_result(self, saved: Tensor) -> bool:
        # The address of a storage is not used again while it is referred to here, also weakly.
        return self._result is not None and self._result.cdata == saved.untyped_storage()._cdata

    def read(self, saved: Tensor) -> _Slot:
        """A slot for a view of the result."""
        slot = _Slot(self, (tuple(saved.shape), saved.stride(), int(saved.storage_offset())))
        self._read.append(ref(slot))
        return slot

    def again(self) -> None:
        """Rerun the operation and fill the slots that still exist."""
        found: list[Tensor] = []

        def save(saved: Tensor) -> None:
            # Detached: its graph holds these hooks, which hold the list.
            found.append(saved.detach())

        with torch.enable_grad(), saved_tensors_hooks(save, _values):
            result = self._operation(*self._inputs).detach()
        assert len(found) == len(self._inside), f"{self._operation} saves other tensors than before"
        for reference, values in zip(self._inside, found, strict=True):
            slot = reference()
            if slot is not None:
                slot.values = [values]
        for reference in self._read:
            slot = reference()
            if slot is not None and slot.view is not None:
                slot.values = [result.as_strided(*slot.view)]


def _values(kept: object) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    assert isinstance(kept, _Slot), f"nothing else is kept: {kept}"
    if not kept.values:
        kept.replay.again()
    return kept.values[0]


class Replays:
    """Runs the recomputed operations of a rank's layers."""

    def __init__(self) -> None:
        self._open: list[_Replay] = []  # replays whose readers are running: a region's norm, and an operation inside it

    def join(self, layer: DecoderLayer, operations: Sequence[str]) -> None:
        """Run these `terrace.plan.recompute.OPERATIONS` of a layer through this object."""
        for operation in operations:
            match operation:
                case "attention":
                    layer.attention.run = self.run
                case "norms":
                    layer.run = self.run
                case _:
                    assert isinstance(layer.mlp, MLP), "validation refuses other layers"
                    layer.mlp.run = self.run

    def run(
        self, operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], reader: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`reader(operation(*inputs))`, for which autograd saves only the inputs and the reader's own tensors."""
        if not torch.is_grad_enabled():
            return reader(operation(*inputs))
        replay = _Replay(operation, inputs)
        result = mark_returning(replay.first(inputs))
        self._open.append(replay)
        try:
            with saved_tensors_hooks(self._save, _values):
                return reader(result)
        finally:
            self._open.pop()

    def _save(self, saved: Tensor) -> object:
        for replay in self._open:
            if replay.is_of_result(saved):
                return replay.read(saved)
        return saved


def install(modules: Mapping[int, nn.Module], program: Program) -> None:
    """Make the layers of a rank, by block index, recompute the operations that the plan names.

    Raises `ModelError` for a block that is not a decoder layer.
    """
    replays = Replays()
    for index, module in modules.items():
        parts = operations_in(program.model.recomputed[index])
        if not parts:
            continue
        if not isinstance(module, DecoderLayer):
            raise ModelError(
                f"recompute names operations of {program.blocks[index].name!r}, a {type(module).__name__}: they are of "
                "terrace.model.decoder.DecoderLayer; recompute the whole block"
            )
        replays.join(module, parts)
