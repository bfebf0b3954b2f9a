"""Utilisation of the devices in a step: MFU and HFU, and the FLOPs behind them.

    MFU = model FLOPs of a step / (seconds of the step x devices x peak FLOP/s)
    HFU = hardware FLOPs of a step / (seconds of the step x devices x peak FLOP/s)

**Model FLOPs** are needed by the mathematics of a step (Chowdhery et al. 2204.02311, appendix B), with causal attention
counted exactly. A weight matrix of n elements that T tokens pass costs 2nT forward, 2nT for the gradient of its input
and, unless it is frozen, 2nT for its own gradient; of a stack a token passes k parts. Attention costs 4P per
element of the queries forward and twice as much backward, with P the visible (query, key) pairs: B S (S + 1) / 2 for B
causal sequences of S tokens, less under a sliding window. The embedding lookup, norms and activations count nothing.

**Hardware FLOPs** are these and once more the forward of every recomputed block, or the attention of layers that
recompute it alone (Korthikanti et al. 2205.05198, section 6, but there with the full square B S^2 of attention, which
kernels of flash attention do not execute). `terrace plan` and `terrace scale` count both in the same way.

Every token of the batch counts, trained on or not. Documents packed into one sequence count as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from terrace.cluster.cluster import Cluster
from terrace.model.config import ModelConfig, active_numel
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.simulate.masks import causal_pairs


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of one step over all devices: `products` and `attention` are the parts of `model`.

    `again` are those of recomputed forwards. `masked` and `masked_again` are what the full square of attention would
    add to `model` and to `again`.
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
    """Inputs of a run's MFU and HFU; `peak_flops_per_s` is of one device, `origin` names its source."""

    flops: StepFlops
    num_devices: int
    peak_flops_per_s: float
    origin: str
    is_measured_here: bool = False  # at the start of the run, from a layer

    def mfu(self, step_s: float) -> float:
        """Model FLOPs utilisation of a step of `step_s` seconds."""
        return self.flops.model / (step_s * self.num_devices * self.peak_flops_per_s)

    def hfu(self, step_s: float) -> float:
        """Hardware FLOPs utilisation of a step of `step_s` seconds."""
        return self.flops.hardware / (step_s * self.num_devices * self.peak_flops_per_s)


def step_flops(model: ModelConfig, blocks: Sequence[BlockSpec], plan: Plan, batch: int, sequence: int) -> StepFlops:
    """FLOPs of a step of `batch` sequences; `blocks` are whole, with frozen parameters marked."""
    tokens, again = batch * sequence, recomputed_parts(plan.recompute, blocks)
    products = rerun = 0
    for index in range(len(blocks)):
        forward, weights = _products(model, blocks, index)
        # Forward, gradient of the input, and the gradient of trained weights.
        products += 2 * tokens * (2 * forward + weights)
        rerun += 2 * tokens * forward if again[index] == WHOLE else 0
    each = 4 * batch * model.num_heads * model.head_dim  # of one pair in every sequence, forward
    seen = seen_again = layers_again = 0
    for layer in range(model.num_layers):
        # Windows differ from layer to layer.
        pairs = causal_pairs(sequence, model.of_layer(layer).sliding_window)
        seen += pairs
        # Recomputed layers run their attention once more, too.
        if again[layer + 1] == WHOLE or "attention" in again[layer + 1]:
            seen_again += pairs
            layers_again += 1
    return StepFlops(
        products=products,
        attention=3 * each * seen,
        again=rerun + each * seen_again,
        masked=3 * each * (model.num_layers * sequence**2 - seen),
        masked_again=each * (layers_again * sequence**2 - seen_again),
    )


def utilisation(
    model: ModelConfig,
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

    The peak is the peak of `cluster`'s device if its ranks run on such a device: on `backend`, and on a CPU only if it
    was probed, since a rank's share of a CPU is otherwise unknown. Otherwise it is the rate that a layer's forward
    reached at the start of the run, taken from `measured`, the cluster with constants of this machine.
    """
    device = cluster.device
    # A CPU's data-sheet peak says little about the share that a rank gets.
    is_own = backend == device.backend and (backend == "cuda" or cluster.is_measured)
    if is_own or measured is cluster:
        mark = device.marks.get(f"peak_flops_per_s.{plan.compute}", "preset")
        origin = f"the {plan.compute} peak of {device.name}, {mark}"
        peak = device.peak_flops_per_s[plan.compute]
    else:
        origin = "what a layer's forward reaches here, measured at the start"
        peak = measured.device.peak_flops_per_s[plan.compute]
    flops = step_flops(model, blocks, plan, batch, sequence)
    return Utilisation(
        flops=flops,
        num_devices=cluster.world_size,
        peak_flops_per_s=peak,
        origin=origin,
        is_measured_here=not (is_own or measured is cluster),
    )


def _products(model: ModelConfig, blocks: Sequence[BlockSpec], index: int) -> tuple[int, int]:
    if index == 0:
        return 0, 0  # a look-up
    # Vectors (norms, biases) take no products.
    if index < len(blocks) - 1:
        matrices = [(active_numel(model, param), param.trainable) for param in blocks[index].params if param.is_matrix]
        return sum(numel for numel, _ in matrices), sum(numel for numel, trainable in matrices if trainable)
    if model.scalar_head:
        (score,) = (param for param in blocks[-1].params if param.is_matrix)
        return score.numel, score.numel if score.trainable else 0
    # A tied head multiplies with the embedding's matrix.
    owner = blocks[0] if model.tied_embeddings else blocks[-1]
    output = next(param for param in owner.params if param.name == "weight")
    size = model.hidden_size * model.vocab_size
    return size, size if output.trainable else 0
