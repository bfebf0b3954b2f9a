"""Products of bf16 and fp32 matrices on this machine's CPU, to see whether bf16 compute pays off."""

import time

import torch

_ROWS, _WIDTH = 256, 512  # fp32: some 3 ms on one core; a CPU without bf16 instructions takes ten times that
_REPEATS = 3


def bf16_slowdown() -> float:
    """Time of a bf16 product relative to an fp32 one on one thread; takes some 0.1 s where bf16 is slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _product_s(torch.bfloat16) / _product_s(torch.float32)
    finally:
        torch.set_num_threads(threads)


def _product_s(dtype: torch.dtype) -> float:
    left, right = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    taken_s = []
    for _ in range(1 + _REPEATS):  # the first makes the kernel
        # Not wall time, since other processes run concurrently.
        begin_s = time.process_time()
        left @ right
        taken_s.append(time.process_time() - begin_s)
    return max(min(taken_s[1:]), 1e-9)
