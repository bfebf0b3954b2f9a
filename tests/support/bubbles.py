"""Published bubbles of pipeline schedules."""

import pytest

# Qi et al. 2401.10241, section 5.3 and appendix: 8 stages; model, micro-batches, chunks of interleaved 1F1B,
# milliseconds of F, B, W and a message, then the bubble of 1F1B, interleaved, ZB-H1, ZB-H2, ZB-1p and ZB-2p.
TABLE = [
    ("1.5B", 24, 3, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    ("1.5B", 32, 3, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    ("1.5B", 64, 3, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026),
    ("6.2B", 24, 4, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029),
    ("6.2B", 32, 4, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022),
    ("6.2B", 64, 4, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010),
]
HEADS_AND_HIDDEN = {"1.5B": (24, 2304), "6.2B": (32, 4096)}  # sequences of 1024
Row = tuple[str, int, int, float, float, float, float, float, float, float, float, float, float]
rows = pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}")


def weight_share(model: str) -> float:
    """M_W / M_B = 32 s b h / (34 s b h + 5 a s s b) (Qi et al., Table 1)."""
    heads, hidden = HEADS_AND_HIDDEN[model]
    return 32 * hidden / (34 * hidden + 5 * heads * 1024)
