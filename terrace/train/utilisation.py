"""Utilisation of the devices in a step: MFU and HFU, and the FLOPs behind them.

    MFU = model FLOPs of a step / (seconds of the step x devices x peak FLOP/s)
    HFU = hardware FLOPs of a step / (seconds of the step x devices x peak FLOP/s)

**Model FLOPs** are needed by the mathematics of a step (Chowdhery et al. 2204.02311, appendix B), with causal attention
counted exactly. A weight matrix of n elements that T tokens pass costs 2nT forward, 2nT for the gradient of its input
and, unless it is frozen, 2nT for its own gradient. In a stack of experts a token passes k of the matrices. Attention
costs 4P per element of the queries forward and twice as much backward, with P the visible (query, key) pairs: B S (S +
1) / 2 for B causal sequences of S tokens, less under a sliding window. The embedding lookup, norms and activations are
not counted.

**Hardware FLOPs** are these and once more the forward of every recomputed block, or the attention of layers that
recompute it alone (Korthikanti et al. 2205.05198, section 6, but there with the full square B S^2 of attention, which
kernels of flash attention do not execute). `terrace plan` counts both in the same way.

Every token of the batch counts, trained on or not. Documents packed into one sequence count as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.simulate.masks import causal_pairs


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of one step over all devices. `products` and `attention` are the parts of `model`.

    `again` are those of recomputed forwards. `masked` and `masked_again` are what counting the full square of attention
    would add to `model` and to `again`.
    """

    products: int
    attention: int
    again: int
    masked: int
    masked_again: int

    @property
    def model(self) -> int:
        return self.products + self.attention

    @property
    def hardware(self) -> int:
        return self.model + self.again


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Inputs of a run's MFU and HFU. `peak_flops_per_s` is per device; `origin` names its source."""

    flops: StepFlops
    num_devices: int
    peak_flops_per_s: float
    origin: str
    is_measured_here: bool = False  # at the start of the run, from a layer

    def mfu(self, step_s: float) -> float:
        return self.flops.model / (step_s * self.num_devices * self.peak_flops_per_s)

    def hfu(self, step_s: float) -> float:
        return self.flops.hardware / (step_s * self.num_devices * self.peak_flops_per_s)


def step_flops(blocks: Sequence[BlockSpec], plan: Plan, batch: int, sequence: int) -> StepFlops:
    """FLOPs of a step of `batch` sequences. `blocks` are unsharded, with frozen parameters marked."""
    tokens, again = batch * sequence, recomputed_parts(plan.recompute, blocks)
    products = rerun = 0
    for index in range(len(blocks)):
        forward, weights = _products(blocks, index)
        # Forward, gradient of the input, and the gradient of trained weights.
        products += 2 * tokens * (2 * forward + weights)
        rerun += 2 * tokens * forward if again[index] == WHOLE else 0
    seen = seen_again = square = square_again = 0
    for block, parts in zip(blocks, again, strict=True):
        core = block.operations.core
        each = 2 * batch * core.heads * (core.head_dim + core.value_dim)  # of one pair in every sequence, forward
        # Windows differ from layer to layer.
        pairs = causal_pairs(sequence, core.window)
        seen, square = seen + each * pairs, square + each * sequence**2
        # Recomputed layers run their attention once more, too.
        if parts == WHOLE or "attention" in parts:
            seen_again, square_again = seen_again + each * pairs, square_again + each * sequence**2
    return StepFlops(
        products=products,
        attention=3 * seen,
        again=rerun + seen_again,
        masked=3 * (square - seen),
        masked_again=square_again - seen_again,
    )


def utilisation(
    blocks: Sequence[BlockSpec],
    plan: Plan,
    batch: int,
    sequence: int,
    *,
    cluster: Cluster,
    measured: Cluster,
    backend: str,
) -> Utilisation:
    """Inputs of a run's utilisation.

    The peak, the mean where members differ, is that of `cluster`'s device if the ranks run on such a device
    (`backend`); on a CPU only if it was probed, since a rank's share of a CPU is otherwise unknown. Else it is the rate
    of a layer's forward at the start of the run, taken from `measured`, the cluster with constants of this machine.
    """
    device = cluster.device
    # A CPU's data-sheet peak says little about the share that a rank gets.
    is_own = backend == device.type and (backend == "cuda" or cluster.is_measured)
    if is_own or measured is cluster:
        mark, alike = device.marks.get(f"peak_flops_per_s.{plan.compute}", "preset"), cluster.alike
        of = device.name if len(alike) == 1 else "a device, the mean over unequal members"
        origin = f"the {plan.compute} peak of {of}, {mark}"
        peaks = ((each.device.peak_flops_per_s[plan.compute], count) for each, count in alike)
        peak = sum(peak * count for peak, count in peaks) / cluster.tiers[-1].size
    else:
        origin = "what a layer's forward reaches here, measured at the start"
        peak = measured.device.peak_flops_per_s[plan.compute]
    flops = step_flops(blocks, plan, batch, sequence)
    return Utilisation(
        flops=flops,
        num_devices=cluster.world_size,
        peak_flops_per_s=peak,
        origin=origin,
        is_measured_here=not (is_own or measured is cluster),
    )


def _products(blocks: Sequence[BlockSpec], index: int) -> tuple[int, int]:
    if index == 0:
        return 0, 0  # a look-up
    # Vectors (norms, biases) take no products.
    if index < len(blocks) - 1:
        block = blocks[index]
        matrices = [(block.active(param), param.trainable) for param in block.params if param.is_matrix]
        return sum(numel for numel, _ in matrices), sum(numel for numel, trainable in matrices if trainable)
    # A tied head multiplies with the embedding's matrix.
    owner = blocks[0] if blocks[-1].tied_to else blocks[-1]
    output = next(param for param in owner.params if param.is_matrix)
    numel = output.numel * blocks[index].operations.widths[0]
    return numel, numel if output.trainable else 0
