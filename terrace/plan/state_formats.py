"""How optimizer states are stored, and their bytes.

A state is stored in a dtype, or in 8 bits an element with a scale for each block (Dettmers et al., arXiv 2110.02861):

    bytes(n) = n + 4 (ceil(n / 256) + 1)        n elements of a slice, 0 if there are none

Blocks lie in the flat buffer, not in the slice, so that a slice elsewhere has the same blocks, but for those that its
borders cut: n elements in a row lie in ceil(n / 256) + 1 blocks at most. `terrace.runtime.block_codes` has the codes.
"""

from terrace.plan.wire import FORMATS

STATE_BLOCK = 256  # elements: torchao's and Dettmers' later choice for blocks of states (2048 in the paper)
STATE_SCALE_BYTES = 4  # fp32
BLOCK_STATES = "int8"


def num_state_blocks(numel: int) -> int:
    """Blocks for which `numel` elements in a row keep a scale, wherever they begin."""
    return -(-numel // STATE_BLOCK) + 1 if numel else 0


def state_bytes(name: str, numel: int) -> int:
    """Bytes of one state of `numel` elements, stored as `name`."""
    if name != BLOCK_STATES:
        return numel * FORMATS[name].element_bytes
    return numel + STATE_SCALE_BYTES * num_state_blocks(numel)


def element_bytes(name: str) -> float:
    """Bytes of an element of a long state."""
    return 1 + STATE_SCALE_BYTES / STATE_BLOCK if name == BLOCK_STATES else FORMATS[name].element_bytes


def stored_bytes(name: str, numel: int) -> int:
    """Bytes of the same state in a checkpoint, where block codes are written as the fp32 values that they stand for."""
    return numel * FORMATS["fp32" if name == BLOCK_STATES else name].element_bytes
