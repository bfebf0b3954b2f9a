"""Bandwidth of copies; on the device a byte counts twice, once read and once written."""

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu_parts.setting import Row, Setting


def rows(setting: Setting) -> Iterator[Row]:
    """On the device, and from and to pinned host memory."""
    num_bytes = setting.size(1 << 30, 1 << 16)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=setting.is_cuda)
    first, second = (torch.zeros(num_bytes, dtype=torch.uint8, device=setting.device) for _ in range(2))
    kinds = (
        ("on the device", second, first, 2),
        ("host to device", first, host, 1),
        ("device to host", host, first, 1),
    )
    for name, target, source, factor in kinds:
        seconds = setting.median_s(partial(target.copy_, source, non_blocking=True))
        yield Row(f"copy {name}", f"{factor * num_bytes / seconds / 1e9:.0f} GB/s")
