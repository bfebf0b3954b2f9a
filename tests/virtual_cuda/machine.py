"""The state of a rehearsal: one device, its streams and its memory."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.virtual_cuda.allocator import Allocator, Block
from tests.virtual_cuda.clocks import Host, Timeline
from tests.virtual_cuda.findings import Findings, Place

if TYPE_CHECKING:
    from tests.virtual_cuda.pages import Range
    from tests.virtual_cuda.storages import Access


@dataclass(frozen=True)
class Hardware:
    """What code asks a device and its system for."""

    capability: tuple[int, int] = (9, 0)
    architecture: str = ""  # AMD's name of its instructions; "" for a device of NVIDIA
    lockable_bytes: float = float("inf")  # page-locked memory that the system allows


H100 = Hardware()
MI300X, MI250X = Hardware((9, 4), "gfx942:sramecc+:xnack-"), Hardware((9, 0), "gfx90a:sramecc+:xnack-")


class Machine:
    """The device of this process during a rehearsal."""

    def __init__(self, *, early: bool = False, expandable: bool = True, hardware: Hardware = H100) -> None:
        self.hardware = hardware
        self.host = Host(early=early)
        self.default = self.host.timeline("the default stream")
        self.allocator = Allocator(expandable=expandable)
        self.findings = Findings()
        self.index = 0  # of the device
        self.ranges: dict[int, Range] = {}  # addresses of mapped pages, by their first
        self.num_pages = 0  # that a driver has made and not released
        # What was freed, and by stream, until it allocates again, who used that and where it was freed.
        self.dead: deque[tuple[Block, Timeline, list[Access], Place]] = deque()
        self.freed: dict[int, list[tuple[list[Access], Place]]] = {}
        self.thread = Thread()
        self.is_over = False

    def current(self) -> Timeline:
        """The current stream of this thread."""
        stack = self.thread.streams
        return stack[-1].timeline if stack else self.default

    def settle(self) -> None:
        """Tell the allocator what has been freed."""
        while self.dead:
            block, owner, accesses, place = self.dead.popleft()
            self.allocator.free(block)
            if accesses:
                self.freed.setdefault(owner.number, []).append((accesses, place))

    def name(self, stream: int) -> str:
        """Of a stream, in messages."""
        return self.host.streams[stream].name


class Thread(threading.local):
    """What differs by thread of the host."""

    def __init__(self) -> None:
        self.streams: list[Any] = []  # made current, innermost last; a new thread begins with the default stream
        self.target: bool | None = None  # whether tensors made now are on the device; None: nobody has said
        self.moving: bool | None = None  # whether a copy goes to the device or, False, comes from it
        self.is_fused = False  # inside a product that is fused with its messages
