"""What an instruction costs on a device and a tier.

Compute is a roofline: the larger of FLOPs over the peak of the compute dtype and bytes over the memory
bandwidth. A collective on a tier with n members that makes a rank send B bytes takes

    (n - 1) * latency + B / bandwidth

and a collective over several tiers the sum over them, since each waits for the one before. This is a first
model: no efficiency curve, no shared adapters, no host time, no time to encode block formats. Its constants
are the cluster's, and their `source` says whether they are preset or measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from terrace.plan.memory import keeps_master
from terrace.plan.wire import FORMATS
from terrace.program import Instruction, Program

# AdamW reads the gradient, both moments and the parameter, and writes the last three; the gradient is
# read once more for the norm and once read and written to be scaled.
_ADAMW_PASSES = 10


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of each compute instruction, per block, and of every collective."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # without recomputation
    update_s: tuple[float, ...]
    program: Program

    def collective_s(self, instruction: Instruction) -> float:
        """Return the seconds a collective instruction occupies the lane."""
        tiers, degrees = self.program.cluster.tiers, self.program.layout.degrees
        return sum(
            (degrees[tier] - 1) * tiers[tier].latency_s + num_bytes / tiers[tier].bandwidth_bytes_per_s
            for tier, num_bytes in self.program.sends(instruction)
        )


def step_costs(program: Program, forward_flops: Sequence[float]) -> Costs:
    """Price a program; `forward_flops` holds one micro-batch's forward FLOPs of every block on a rank.

    The backward of a block takes twice the FLOPs of its forward: one product for the gradient of the
    input and one for that of the weight, which a frozen block does without.
    """
    device, plan, layout = program.cluster.device, program.plan, program.layout
    peak = device.peak_flops_per_s.get(plan.compute) or max(device.peak_flops_per_s.values())
    item, master = FORMATS[plan.compute].element_bytes, FORMATS[plan.master].element_bytes
    bandwidth = device.memory_bandwidth_bytes_per_s
    copied = item if keeps_master(plan, layout) else 0
    forward, backward, update = [], [], []
    for block, flops in zip(program.blocks, forward_flops, strict=True):
        weights = (block.num_trainable + block.num_frozen) * item
        forward.append(max(flops / peak, weights / bandwidth))
        backward.append((2 if block.num_trainable else 1) * forward[-1])
        owned = layout.padded(block.num_trainable) // layout.span(layout.optimizer)
        update.append(owned * (_ADAMW_PASSES * master + copied) / bandwidth)
    return Costs(forward_s=tuple(forward), backward_s=tuple(backward), update_s=tuple(update), program=program)
