"""Projected updates: how many numbers a rank keeps for a matrix, and the matmuls of its update. No tensors.

Two rules keep the moments of a layer's matrix W (m, n), with gradient G, in a smaller space. With projectors P, Q, the
projected gradient S and AdamW's direction N computed from S,

    galore   m <= n:  S = P^T G  (r, n),  W -= lr scale P N       P (m, r) orthonormal: leading left singular vectors
             m > n:   S = G Q    (m, r),  W -= lr scale N Q^T     Q (n, r): leading right singular vectors
    lsp      S = P^T G Q  (r, r),         W -= lr scale P N Q^T   P (m, r), Q (n, r) with `density` non-zeros in a row

GaLore is Zhao et al., arXiv 2403.03507, Algorithm 2; LSP-Offload Chen et al., arXiv 2406.10181. With s <= l the sides
of a matrix, a rank keeps, in the dtype of sums,

    galore   s r      of the projector                      + 2 l r   of the two moments
    lsp      2 (m + n) density   values and their indices   + 2 r^2

for every matrix that overlaps its slice of the flat buffer: as under Muon, ranks that share a matrix all compute
its update and keep their part.
"""

from collections.abc import Sequence

from terrace.plan.newton_schulz import NUM_STEPS, iteration_products
from terrace.plan.plan import Plan
from terrace.plan.state_formats import state_bytes
from terrace.plan.update import EVERY, GALORE, LSP, Extent, MatrixSlice, Shape, Update, UpdateRule, parse_update
from terrace.plan.wire import FORMATS

Product = tuple[float, int, int, int]  # how often a step computes a matmul on average, and its (m, k, n)

# GaLore's subspace is found by a randomised SVD (Halko et al., arXiv 0909.4061, Algorithm 4.4 and section 5.1): more
# columns than asked for, and passes of the power iteration, which sharpen a spectrum that decays slowly. The numbers
# are those that the authors recommend (section 1.3).
OVERSAMPLE, POWER = 10, 2
# LSP's projectors are learned by at most this many steps of gradient descent. Its error has flattened out by then for
# matrices of 128 to 384 rows whose singular values decay as 1/k and 1/sqrt(k).
LEARN_STEPS = 40


def numbers_of(rule: UpdateRule, shape: Shape) -> int:
    """Numbers that a rank keeps for a matrix: projectors, then both moments."""
    return projector_numbers(rule, shape) + 2 * space_numel(rule, shape)


def projector_numbers(rule: UpdateRule, shape: Shape) -> int:
    """Numbers of a matrix's projectors."""
    if rule.name == GALORE:
        return min(shape) * rule.rank
    return 2 * sum(shape) * rule.density


def space_numel(rule: UpdateRule, shape: Shape) -> int:
    """Elements of the projected gradient, and of each moment."""
    return rule.rank * (max(shape) if rule.name == GALORE else rule.rank)


def products_of(rule: UpdateRule, shape: Shape) -> list[Product]:
    """The matmuls of a matrix's update in a step; those that find new projectors are spread over `EVERY` steps."""
    if rule.name == "muon":
        return [(NUM_STEPS, *each) for each in iteration_products(shape)]
    (rows, columns), rank, share = shape, rule.rank, 1 / EVERY
    if rule.name == LSP:
        to_space, from_space = (rank, rows, columns), (rows, rank, columns)
        small = [(1.0, rank, columns, rank), (1.0, rows, rank, rank)]
        # A step of learning multiplies the gradient by both projectors, projectors by each other and by matrices of the
        # projected space, and these by each other.
        learning = [(1, rank, rows, columns), (1, rank, columns, rows), (4, rank, rows, rank), (3, rank, columns, rank)]
        learning.append((6, rank, rank, rank))
        again = [(LEARN_STEPS * share * times, m, k, n) for times, m, k, n in learning]
        return [(1.0, *to_space), *small, (1.0, *from_space), *again]
    short, long = sorted(shape)
    width = min(short, rank + OVERSAMPLE)
    passes = 2 * POWER + 1  # each orthogonalises a product with the gradient
    bases = [(passes * share, width, short, long), (passes * share, long, width, width)]
    return [(1.0, rank, short, long), (1.0, short, rank, long), *bases, (share, width, short, long)]


def flops_of(rule: UpdateRule, shape: Shape) -> float:
    """FLOPs of a matrix's update."""
    return sum(2.0 * times * m * k * n for times, m, k, n in products_of(rule, shape))


def products_of_a_rank(update: Update, slices: Sequence[MatrixSlice]) -> tuple[Product, ...]:
    """The matmuls in the update of a flat buffer, on the rank with the most work.

    `slices` are `FlatParamSpec.matrix_slices`. Empty without matrices that are updated whole.
    """
    rule = parse_update(update)
    # Ranks wait for the slowest at the next message.
    most = max(slices, key=lambda each: sum(flops_of(rule, shape) for shape in each[0]), default=((), 0))
    return tuple(product for shape in most[0] for product in products_of(rule, shape))


def projected_bytes(plan: Plan, slices: Sequence[MatrixSlice]) -> int:
    """Bytes of optimizer states on the device for a flat buffer with projected matrices, on the rank with most.

    They are projectors and moments of the matrices, and AdamW's two moments of all other elements unless these are kept
    below the device.
    """
    rule, item = parse_update(plan.update), FORMATS[plan.sums].element_bytes
    moments = 0 if plan.keep.optimizer_below else 2
    return max(
        item * sum(numbers_of(rule, shape) for shape in shapes)
        + moments * state_bytes(plan.optimizer_states or plan.sums, elementwise)
        for shapes, elementwise in slices
    )


def projected_numbers(update: Update, extents: Sequence[Extent], part: slice) -> int:
    """How many numbers the owner of a part of a flat buffer saves for its matrices; 0 without projections.

    Projectors and moments of a matrix are saved by the rank that owns its first element.
    """
    rule = parse_update(update)
    if not rule.projects:
        return 0
    return sum(numbers_of(rule, shape) for shape, begin, _ in extents if part.start <= begin < part.stop)
