"""How optimizer states are stored, and their bytes.

A state is stored in a dtype, or in 8 bits per element with one scale per block (Dettmers et al., arXiv 2110.02861):

    bytes(n) = n + 4 (ceil(n / 256) + 1)        n elements of a slice, 0 if there are none

Blocks are aligned to the flat buffer, not to the slice, so resharding keeps all blocks except those cut by a slice
border: n consecutive elements overlap at most ceil(n / 256) + 1 blocks. For the codes see terrace.runtime.block_codes.
"""

from terrace.plan.wire import FORMATS

STATE_BLOCK = 256  # elements, as in torchao and Dettmers' later work (2048 in the paper)
STATE_SCALE_BYTES = 4  # fp32
BLOCK_STATES = "int8"


def num_state_blocks(numel: int) -> int:
    """Number of blocks, and so scales, for `numel` consecutive elements with any start."""
    return -(-numel // STATE_BLOCK) + 1 if numel else 0


def state_bytes(name: str, numel: int) -> int:
    if name != BLOCK_STATES:
        return numel * FORMATS[name].element_bytes
    return numel + STATE_SCALE_BYTES * num_state_blocks(numel)


def element_bytes(name: str) -> float:
    """Bytes per element of a large state, scales included."""
    return 1 + STATE_SCALE_BYTES / STATE_BLOCK if name == BLOCK_STATES else FORMATS[name].element_bytes


def stored_bytes(name: str, numel: int) -> int:
    """Bytes of the state in a checkpoint, which stores int8 blocks dequantised to fp32."""
    return numel * FORMATS["fp32" if name == BLOCK_STATES else name].element_bytes
