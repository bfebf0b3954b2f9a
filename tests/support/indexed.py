"""Megatron's indexed data sets, written for tests."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def indexed(prefix: Path, sequences: Sequence[Sequence[int]], documents: Sequence[int], dtype: str = "<u2") -> Path:
    """Megatron's two files; `documents` are the first sequence of each, and one past the last."""
    codes = {"<u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<f4": 7, "<u2": 8}
    width = np.dtype(dtype).itemsize
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(each, dtype).tobytes() for each in sequences))
    sizes = [len(each) for each in sequences]
    pointers = [width * sum(sizes[:index]) for index in range(len(sizes))]
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, codes[dtype], len(sequences), len(documents))
        + np.array(sizes, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )
    return prefix
