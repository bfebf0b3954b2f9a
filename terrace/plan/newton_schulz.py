"""Constants and cost of Muon's Newton-Schulz iteration (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

from functools import lru_cache

from terrace.plan.flats import FlatParamSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steepest at zero that still maps values to near one
NORM_EPS = 1e-7  # added to the norm that a matrix is divided by; `eps` in Jordan's code and torch.optim.Muon
UPDATE_RMS = 0.2  # times sqrt(max(n, m)), to match AdamW's update RMS (Liu et al., arXiv 2502.16982, section 2.2)
NUM_STEPS = 5  # default of `optimizer.newton_schulz_steps`, with which steps are priced


def iteration_products(shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(m, k, n) of the matmuls of one iteration on a matrix: X X^T, its square, and the result times X."""
    short, long = sorted(shape)
    return [(short, long, short), (short, short, short), (short, short, long)]


@lru_cache(maxsize=4096)
def matrices_of_a_rank(flat: FlatParamSpec) -> tuple[tuple[int, ...], ...]:
    """Shapes of the matrices that overlap a rank's slice of a flat buffer, for the rank with the most work."""
    size = flat.padded // flat.layout.span(flat.layout.optimizer)
    # Only slices in which a matrix begins or ends can differ.
    slices = {place // size for _, begin, end in flat.orthogonal for place in (begin, end - 1)}
    held = [
        tuple(shape for shape, begin, end in flat.orthogonal if begin < (number + 1) * size and end > number * size)
        for number in sorted(slices)
    ]
    # Ranks wait for the slowest at the next message.
    return max(held, key=lambda shapes: sum(map(iteration_flops, shapes)), default=())


def iteration_flops(shape: tuple[int, ...]) -> int:
    """FLOPs of one iteration: 4 s^2 l + 2 s^3 for a matrix with sides s <= l."""
    return sum(2 * m * k * n for m, k, n in iteration_products(shape))
