"""The state of a model on one rank: parameters, gradients and optimizer."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from terrace.base.errors import PlanError
from terrace.comm.collectives import Collectives
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.counts import num_choices
from terrace.plan.dims import is_layer
from terrace.plan.flats import FlatParamSpec
from terrace.plan.keep_rules import check_clip
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.pruning import NO_PRUNING, BlockPruning
from terrace.plan.slices import rank_slices
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.runtime.describe import replace_parameters
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.kept.below import NOTHING_BELOW, Below
from terrace.runtime.loss_scale import LossScale
from terrace.runtime.noise import Noise
from terrace.runtime.outer_numbers import OuterNumbers
from terrace.runtime.own_rule import check_own
from terrace.runtime.pages import Pages
from terrace.runtime.pruned_blocks import PrunedBlocks
from terrace.runtime.scaled_linear import scale_matrices
from terrace.runtime.scaling import Scaling
from terrace.runtime.settings import OptimizerConfig

InitialValue = Callable[[str, str, tuple[int, ...]], Tensor]  # (block name, parameter name, shape) -> values


def _nothing() -> None:
    """Nothing is borrowed."""


class ModelState:
    """Flat parameters of the blocks that one rank holds, and the modules whose parameters are views of them.

    `blocks` are the modules of the whole model as this rank runs them, `specs` describe them unsplit. Parameters of
    the held blocks are replaced by views of flat buffers in the compute dtype. `initial` gives whole values. `meter`
    counts the memory of the state by category, `seed` is for stochastic rounding, `below` has what is kept below the
    device, and `pruning` says which blocks of matrices are zero. `edges` are the origins of messages to other stages;
    `choices` maps a block to its tokens per router choice in the last step, int64 (E).
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        blocks: Sequence[nn.Module],
        *,
        specs: Sequence[BlockSpec],
        settings: OptimizerConfig,
        initial: InitialValue,
        device: torch.device | str,
        meter: Meter,
        seed: int,
        below: Below = NOTHING_BELOW,
        pruning: BlockPruning = NO_PRUNING,
    ) -> None:
        self.program, self.rank, self.specs, self.settings = program, rank, tuple(specs), settings
        check_settings(program.plan, settings)
        self.below = below
        held = program.stage.held
        self.modules = {index: blocks[index] for index in held}
        self.loss_scale = LossScale.of(program.plan)
        self.reclaim: Callable[[], None] = _nothing  # takes back memory that a hand-over borrows
        scaling = Scaling.of(program.plan, torch.device(device))
        allocated = ["gathered", "grads_full"] + ["params"] * program.plan.keep.params_below
        allocated += ["grads"] * program.plan.keep.grads_below
        pages = Pages(sum(program.state_bytes[each] for each in allocated))
        self.flats: dict[int, tuple[FlatParam, ...]] = {}
        replacements: dict[int, nn.Parameter] = {}
        for index in held:
            self.flats[index] = tuple(
                _kind_of(spec)(
                    program.blocks[index].name,
                    spec,
                    rank,
                    program.plan,
                    torch.device(device),
                    meter,
                    pages=pages,
                    is_copy=index in program.stage.copies,
                    scaling=scaling,
                )
                for spec in program.model.flats[index]
            )
            old, block = dict(blocks[index].named_parameters()), program.blocks[index].name

            # A default binds the loop's block now; a closure would see the last one.
            def value(spec: ParamSpec, block: str = block) -> Tensor:
                # The whole value is made and then cut, so that it does not depend on the plan.
                whole = initial(block, spec.name, spec.whole or spec.shape)
                return _slice_value(whole, spec, program.mesh, rank)

            for number, flat in enumerate(self.flats[index]):
                if pruning.is_on and is_layer(program.blocks, index):
                    flat.pruned = PrunedBlocks.of(flat.spec, pruning)
                flat.initialise(value, settings, self._noise(flat, seed), below.passages(index, number))
                if scaling is not None:
                    named = zip(flat.spec.params, flat.parameters, strict=True)
                    scales = None if flat.codes is None else tuple(flat.codes.scales)
                    scale_matrices(named, program.blocks, index, scaling, scales)
                # Replaced by identity and all at once, so that tied parameters stay tied.
                for name, new in flat.named_parameters():
                    replacements[id(old[name])] = new
        if scaling is not None:
            for module in self.modules.values():
                scaling.forget_after(module)
        replace_parameters(list(self.modules.values()), replacements)
        sends = program.stage.own if program.stage.num_stages > 1 else ()
        self.edges = {block: Origin(program.blocks[block].name, torch.device(device), meter) for block in sends}
        self.outer_numbers = OuterNumbers(program.plan.outer, program.model.world_layout, rank, torch.device(device))
        self.choices = {
            block: torch.zeros(num, dtype=torch.int64, device=device)
            for block in program.stage.own
            if (num := num_choices(program.blocks[block]))
        }

    def _noise(self, flat: FlatParam, seed: int) -> Noise | None:
        plan, params = self.program.plan, flat.spec.params
        if not flat.spec.trainable or "bf16" not in (plan.master, plan.optimizer_states):
            return None
        slices = [rank_slices(spec, self.program.mesh, self.rank) for spec in params]
        return Noise(seed, flat.name, params, [tuple(part.start for part in each) for each in slices], flat.spec.numel)

    def __iter__(self) -> Iterator[FlatParam]:
        for flats in self.flats.values():
            yield from flats

    def seed(self, loss: Tensor) -> Tensor:
        """The gradient that the backward of a loss starts from."""
        return torch.full_like(loss, self.loss_scale.value)

    def recover(self) -> None:
        """Take back the memory of working copies that generation has borrowed."""
        reclaim, self.reclaim = self.reclaim, _nothing
        reclaim()

    def trainable(self, block: int) -> list[FlatParam]:
        return [flat for flat in self.flats[block] if flat.spec.trainable]

    def named_parameters(self, block: int) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of a block by name. They have values only while gathered."""
        for flat in self.flats[block]:
            yield from flat.named_parameters()

    def gather(self, collectives: Collectives) -> None:
        """Materialise the full parameters of every block that does not stay gathered; the caller frees them."""
        self.recover()
        for index, flats in self.flats.items():
            for transfer in self.program.message(Instruction(Op.GATHER, index)).transfers:
                flats[transfer.flat].fetch().wait()
                flats[transfer.flat].gather(collectives, transfer, False)


def check_settings(plan: Plan, settings: OptimizerConfig) -> None:
    """Raise `PlanError` if plan and settings name different optimizers, or updates in the backward would be clipped.

    Raise `ConfigError` for a user's optimizer that cannot be sharded.
    """
    check_own(settings)
    check_clip(plan, settings.clip)
    if plan.update != settings.update:
        raise PlanError(
            f"the plan is for the optimizer {plan.update!r}, the settings are of {settings.update!r}: give both the "
            "same"
        )


def _kind_of(spec: FlatParamSpec) -> type[FlatParam]:
    if spec.layout.code:
        from terrace.runtime.coded_param import CodedParam  # few runs hold a base in codes

        return CodedParam
    if not spec.is_spread:
        return FlatParam
    from terrace.runtime.table_param import TableParam  # few plans spread a table

    return TableParam


def _slice_value(value: Tensor, spec: ParamSpec, mesh: Mesh, rank: int) -> Tensor:
    if not spec.cuts:
        return value
    parts = rank_slices(spec, mesh, rank)
    local = value[parts]
    if tuple(local.shape) == spec.shape:
        return local
    # Padding with zeros adds nothing to any product.
    padded = value.new_zeros(spec.shape)
    padded[tuple(slice(0, size) for size in local.shape)] = local
    return padded
