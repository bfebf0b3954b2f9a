"""Experts that a pass of a mixture's blocks chose, token by token.

A token has k experts in each of the L layers with experts. They are packed as L k numbers of one byte, or of two where
there are more than 256 experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terrace.base.errors import ConfigError
from terrace.generation.request import Recorder
from terrace.model.balance import BalanceConfig
from terrace.model.experts.gating import Gating, Kept
from terrace.model.experts.mixture import Router

_BYTE = 256


def route_dtype(num_experts: int) -> torch.dtype:
    """The dtype of a packed expert."""
    return torch.uint8 if num_experts <= _BYTE else torch.int16


class Routes(Recorder):
    """Records the choices of all routers of `blocks`, in their order. Without any, does nothing."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._routers = [each for block in blocks for each in block.modules() if isinstance(each, Router)]
        for router in self._routers:
            router.gating = Gating(BalanceConfig())

    def begin(self) -> None:
        for router in self._routers:
            assert router.gating is not None, "set above"
            router.gating.kept = Kept()

    def take(self) -> list[bytes]:
        """The packed experts of every token of the pass, in order."""
        kept = [router.gating.kept for router in self._routers if router.gating is not None]
        chosen = [each.experts for each in kept if each is not None and each.experts is not None]
        if not chosen:
            return []
        packed = torch.stack(chosen, 1).to(route_dtype(self._routers[0].config.num_experts))  # (T, L, k)
        return [row.tobytes() for row in packed.cpu().numpy()]


def unpacked(routes: Sequence[bytes], num_experts: int, width: int) -> Tensor:
    """Packed experts of N tokens, each `width` = L k numbers, as a tensor (N, L k)."""
    dtype = route_dtype(num_experts)
    whole = bytearray(b"".join(routes))
    if len(whole) != len(routes) * width * dtype.itemsize:
        raise ConfigError(f"{len(whole)} bytes of routes for {len(routes)} tokens of {width} experts each")
    return torch.frombuffer(whole, dtype=dtype).view(-1, width) if whole else torch.zeros(0, width, dtype=dtype)
