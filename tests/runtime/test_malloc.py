"""Large buffers that come and go: few page faults, and nothing but the buffer's own pages touched."""

import resource
from pathlib import Path

import pytest
import torch

from terrace.runtime.malloc import take_large_pages

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NUMEL = 16 << 20  # 64 MiB, which glibc always maps anew


def faults_of(*, advised: bool) -> int:
    buffer = torch.empty(NUMEL)
    if advised:
        assert take_large_pages(buffer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not MODE.exists() or "[madvise]" not in MODE.read_text(), reason="the kernel takes no advice")
def test_a_new_buffer_in_large_pages_has_few_faults() -> None:
    small, large = faults_of(advised=False), faults_of(advised=True)
    assert small > 4 * NUMEL // 4096 / 2
    assert large < small / 4


def test_small_and_empty_buffers_are_left_alone() -> None:
    assert not take_large_pages(torch.empty(1000))
    freed = torch.empty(NUMEL)
    freed.untyped_storage().resize_(0)
    assert not take_large_pages(freed)
