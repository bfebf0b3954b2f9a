"""Blocks of weight matrices that a run sets to zero: its settings, and the plans that cannot have it. Needs no torch.

In each matrix of attention and MLPs, and of each expert, the `share` of blocks with the smallest norms is zero in the
working copy, with which the forward and backward run. Masters stay whole and get the gradient of the working copy, so a
block may be used again. Masks are made from whole matrices, where a rank has them: after each GATHER of parameters that
are gathered for use, and after REFRESH of the others. No message is added.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from terrace.base.errors import ConfigError, PlanError
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.context import is_context_parallel
from terrace.plan.dims import is_layer, is_product_matrix
from terrace.plan.layout import Layout, message_tiers
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, OF_PARAMETERS


@dataclass(frozen=True, kw_only=True)
class BlockPruning:
    """The section `[prune]` of a run; see terrace.runtime.pruned_blocks for the penalty."""

    blocks: tuple[int, ...] = ()  # rows and columns of a block, which divide every matrix: [16, 16]
    share: float = 0.0  # of the blocks of each matrix that are zero, above 0 and below 1
    weight: float = 1e-4  # of the penalty on the norms of blocks, until blocks are zero; 0: no penalty
    after: int = 100  # number of updates after which blocks are set to zero

    def check(self) -> None:
        """Raises `ConfigError` for a value out of range."""
        if len(self.blocks) != 2 or min(self.blocks) < 1:
            raise ConfigError(
                f"prune.blocks = {list(self.blocks)} must be the rows and columns of a block, as [16, 16]"
            )
        if not 0 < self.share < 1:  # nan is not
            raise ConfigError(
                f"prune.share = {self.share} must be above 0 and below 1: the share of blocks that are set to zero"
            )
        if not 0 <= self.weight < 1e6:
            raise ConfigError(f"prune.weight = {self.weight} must be at least 0 and below 1e6; 0 is no penalty")
        if not 1 <= self.after < 2**63:
            raise ConfigError(f"prune.after = {self.after} must be a number of updates, at least 1")

    @property
    def is_on(self) -> bool:
        return bool(self.blocks)

    def num_zero(self, num_blocks: int) -> int:
        return round(self.share * num_blocks)


NO_PRUNING = BlockPruning()


def pruned_params(blocks: Sequence[BlockSpec]) -> Iterator[tuple[BlockSpec, ParamSpec]]:
    """The matrices whose blocks are set to zero: those of layers that train, without routers."""
    for index, block in enumerate(blocks):
        if is_layer(blocks, index):
            yield from ((block, param) for param in block.params if has_blocks(param))


def pruned_words(pruning: BlockPruning, blocks: Sequence[BlockSpec]) -> str:
    """A line on the blocks that a run sets to zero; "" if it sets none."""
    if not pruning.is_on:
        return ""
    rows, columns = pruning.blocks
    number = sum(param.num_parts for _, param in pruned_params(blocks))
    return (
        f"blocks of {rows} x {columns}: a share of {pruning.share:.3g} is zero in each of {number:,} matrices after "
        f"{counted(pruning.after, 'update')}"
    )


def has_blocks(param: ParamSpec) -> bool:
    """Whether blocks of this parameter of a layer are set to zero."""
    is_matrix = is_product_matrix(param) or (param.is_stack and param.is_matrix)
    return is_matrix and param.trainable and param.numel > 0


def check_pruning(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], pruning: BlockPruning) -> None:
    """Raises `PlanError` for a plan that cannot have masks, `ConfigError` for blocks that do not divide a matrix."""
    if not pruning.is_on:
        return
    pruning.check()
    mesh = Mesh.of(cluster, plan)
    if mesh.total("tensor") > 1:
        raise PlanError(
            "[prune] compares the blocks of whole matrices, and the tensor axis cuts them: give the tier to the data "
            "axis, or leave [prune] out"
        )
    if plan.experts and pruning.weight:
        raise PlanError(
            "[prune] weights its penalty with the tokens of the ranks that hold a matrix, and experts on other ranks "
            "(plan.experts) compute tokens of all ranks: set prune.weight = 0, or leave plan.experts out"
        )
    if any(axes.get("rows", 1) > 1 for axes in plan.experts.values()):
        raise PlanError(
            "[prune] compares the blocks of whole matrices, and the axis rows of plan.experts cuts them: give its "
            "ranks to the axis expert, or leave [prune] out"
        )
    for has, words in (
        (plan.outer.has_islands, "islands (plan.outer)"),
        (plan.products is not None, f"plan.products = {plan.products!r}"),
        (plan.keep.is_below, "states below the device (plan.keep)"),
        (is_context_parallel(mesh, plan), "a context axis or balance"),
        (plan.compute == "fp16", "plan.compute = 'fp16', whose steps may be skipped"),
    ):
        if has:
            raise PlanError(f"[prune] is not implemented beside {words}: leave one of them out")
    mask_dtype(cluster, plan)
    if not plan.master_apart and not Layout.of(cluster, plan).gathers and plan.compute == plan.master:
        raise PlanError(
            "[prune] sets blocks of the working copy to zero, and in this plan the masters share its memory: set "
            "plan.master_apart = true"
        )
    _check_matrices(blocks, pruning)


def mask_dtype(cluster: Cluster, plan: Plan) -> str:
    """Dtype that masks are made in: of messages of parameters where these round, else of the working copy.

    All ranks have these rounded values, so they make the same masks. Raises `PlanError` for a block format or several
    dtypes.
    """
    layout, compute = Layout.of(cluster, plan), FORMATS[plan.compute]
    found = dict[str, int]()
    for message in OF_PARAMETERS:
        for tier in message_tiers(layout, message):
            wire = plan.wire_format(message, layout.tiers[tier])
            if wire.block:
                raise PlanError(
                    f"[prune] needs the same rounded values on all ranks, and {message.value} on "
                    f"tier {layout.tiers[tier]!r} travels in {wire.name}: send it in a dtype such as bf16"
                )
            if wire.mantissa_bits < compute.mantissa_bits:
                found[wire.name] = wire.mantissa_bits
    if len(found) > 1:
        raise PlanError(
            "[prune] needs the same rounded values on all ranks, and messages of parameters travel in "
            f"{', '.join(found)}: give all the same dtype"
        )
    return next(iter(found), plan.compute)


def _check_matrices(blocks: Sequence[BlockSpec], pruning: BlockPruning) -> None:
    found = list(pruned_params(blocks))
    if not found:
        raise ConfigError("[prune] has no effect: no layer has a matrix that trains; leave it out")
    for block, param in found:
        rows, columns = param.part_shape
        if rows % pruning.blocks[0] or columns % pruning.blocks[1]:
            raise ConfigError(
                f"prune.blocks = {list(pruning.blocks)} does not divide {block.name}.{param.name}, which is {rows} x "
                f"{columns}: give divisors of both"
            )
        number = rows * columns // (pruning.blocks[0] * pruning.blocks[1])
        if pruning.num_zero(number) in (0, number):
            which = "none" if not pruning.num_zero(number) else "all"
            raise ConfigError(
                f"prune.share = {pruning.share} of the {counted(number, 'block')} of {block.name}.{param.name} is "
                f"{which} of them: give smaller blocks, or another share"
            )
