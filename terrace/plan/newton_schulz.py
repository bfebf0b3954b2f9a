"""Constants and products of Muon's Newton-Schulz iteration (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steepest at zero that still maps values to near one
NORM_EPS = 1e-7  # added to the norm that a matrix is divided by; `eps` in Jordan's code and torch.optim.Muon
UPDATE_RMS = 0.2  # times sqrt(max(n, m)), to match AdamW's update RMS (Liu et al., arXiv 2502.16982, section 2.2)
NUM_STEPS = 5  # default of `optimizer.newton_schulz_steps`, with which steps are priced


def iteration_products(shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(m, k, n) of the matmuls of one iteration on a matrix: X X^T, its square, and the result times X."""
    short, long = sorted(shape)
    return [(short, long, short), (short, short, short), (short, short, long)]
