"""Kernels: the shares of a device's peaks that its kernels reach."""

import math
from dataclasses import dataclass

_FLASH2_HALF_HEAD = 16.0  # `attention_half_head` of flash attention 2: heads of 64 reach 0.9 of the rate of 128
_TUNED_HEAD = 128  # head size of `Kernels.attention`


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Shares of a device's peaks that kernels reach. The defaults are ideal.

    A tile is (rows, columns, its share of `gemm`): the part of a matmul's result that one core computes at a time.
    """

    gemm: float = 1.0  # share of the peak that a large matrix product reaches
    gemm_fp8: float = 0.0  # the same for 8-bit floats, of their peak; 0: as `gemm`
    gemm_half_depth: float = 0.0  # inner size at which a matmul reaches half of that
    num_cores: int = 0  # cores that compute tiles; 0: any number of tiles fills the device
    tiles: tuple[tuple[int, int, float], ...] = ()  # empty: no tile quantisation
    memory: float = 1.0  # share of the memory bandwidth
    stream: float = 0.0  # the same for plain sums, matmul operands and the optimizer; 0: as `memory`
    attention: float = 1.0  # share of the peak that flash attention reaches forward, long rows and heads of 128
    attention_backward: float = 0.0  # the same backward, of the FLOPs of its five matmuls; 0: as forward
    flash2: float = 0.0  # share of flash attention 2, if `attention` is another kernel; 0: as `attention`
    flash2_backward: float = 0.0  # the same backward
    attention_half_head: float = 0.0  # head size at half the rate of infinitely large heads; see `attention_share`
    attention_half_keys: float = 0.0  # number of keys that reaches half the share, for all kernels
    attention_half_keys_backward: float = 0.0  # the same backward; 0: as forward
    codec: float = 1.0  # share of the memory bandwidth that encoding and decoding block formats reaches
    launch_s: float = 0.0  # overhead per kernel
    host_layer_s: float = 0.0  # time the host needs to launch the kernels of one layer, in one direction
    optimizer_s: float = 0.0  # overhead per optimizer step
    source: str = ""

    def attention_share(
        self, head_dim: int, keys: float = math.inf, *, backward: bool = False, flash2: bool = False
    ) -> float:
        """Share of the peak that flash attention reaches with heads of `head_dim` and `keys` keys per row.

        `flash2`: of version 2, used for documents, windows, and context ranks with large heads. Kernels are tuned for
        heads of up to 128; larger ones gain nothing (Shah et al. 2407.08608, figures 5 and 6).
        """
        share = self.attention_backward if backward and self.attention_backward else self.attention
        head, half_head = min(head_dim, _TUNED_HEAD), self.attention_half_head
        if flash2 and self.flash2:
            share = self.flash2_backward if backward and self.flash2_backward else self.flash2
            half_head = _FLASH2_HALF_HEAD
        share *= head / (head + half_head) * (1 + half_head / _TUNED_HEAD)
        half_keys = (self.attention_half_keys_backward if backward else 0.0) or self.attention_half_keys
        return share if math.isinf(keys) else share * keys / (keys + half_keys)


IDEAL = Kernels()
