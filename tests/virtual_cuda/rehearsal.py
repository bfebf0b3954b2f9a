"""Torch with a virtual CUDA device, for the length of a `with`."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.virtual_cuda import cuda_module, functions, gpu_lines, kernels, norms, symmetric
from tests.virtual_cuda.findings import Fault, Findings
from tests.virtual_cuda.machine import H100, Hardware, Machine
from tests.virtual_cuda.messages import Messages
from tests.virtual_cuda.operations import Operations
from tests.virtual_cuda.rules import Entry
from tests.virtual_cuda.stand_ins import stand_ins

_ABSENT = object()


class Rehearsal:
    """A rehearsal under way: its device, its messages, and what has been noticed."""

    def __init__(self, machine: Machine, messages: Messages) -> None:
        self.machine, self.messages = machine, messages

    @property
    def findings(self) -> Findings:
        """Faults and waits so far."""
        return self.machine.findings

    @property
    def faults(self) -> list[Fault]:
        """Faults of this rank."""
        return list(self.findings.faults)

    @property
    def log(self) -> list[Entry]:
        """Messages and communicators of this rank."""
        return self.messages.log


@contextmanager
def rehearsed(
    *,
    completes: str = "late",
    expandable: bool = True,
    limit_s: float = 60.0,
    agrees: bool = False,
    hardware: Hardware = H100,
) -> Iterator[Rehearsal]:
    """Run code on a virtual CUDA device, `hardware`.

    `completes` says when an event answers that it is over: "late", after the host has waited for it, or "early", when
    it is asked. A message that takes longer than `limit_s` is an error. With `agrees`, ranks compare every collective
    before they issue it.
    """
    early = {"late": False, "early": True}[completes]
    machine = Machine(early=early, expandable=expandable, hardware=hardware)
    messages = Messages(machine, limit_s, agrees=agrees)
    rehearsal = Rehearsal(machine, messages)
    with ExitStack() as stack:
        for owner, name, value in (
            *functions.patches(machine),
            *cuda_module.patches(machine),
            *messages.patches(),
            *symmetric.patches(machine, messages),
            *stand_ins(),
            (threading.Thread, "run", _with_mode(machine, messages)),
        ):
            stack.callback(_restore, owner, name, owner.__dict__.get(name, _ABSENT))
            setattr(owner, name, value)
        with gpu_lines.noted(), kernels.defined(), norms.fused(), Operations(machine, messages.collective):
            yield rehearsal
            messages.finish()
            machine.settle()
        machine.is_over = True


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


_run = threading.Thread.run


def _with_mode(machine: Machine, messages: Messages) -> Any:
    def run(self: threading.Thread) -> None:
        with Operations(machine, messages.collective):
            _run(self)

    return run
