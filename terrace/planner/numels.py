"""Parameters of a block of each kind on a rank, for one task; each is found once."""

from collections.abc import Sequence

from terrace.plan.mesh import Mesh
from terrace.planner.task import Task
from terrace.simulate.states import StageBlocks, stage_blocks

_Numels = tuple[int, ...]  # by kind


class Numels:
    """Parameters of the blocks of one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        specs = task.kinds.specs
        stacks = ([param.numel for param in spec.params if param.is_stack and param.trainable] for spec in specs)
        self._all_stacks: _Numels = tuple(map(sum, stacks))
        self._flats: dict[tuple[object, ...], tuple[_Numels, _Numels]] = {}

    def all(self, mesh: Mesh) -> _Numels:
        """Parameters on a tensor rank, where borrowers and lenders are together."""
        return self._together(mesh).sizes

    def trained(self, mesh: Mesh) -> _Numels:
        """Those of `all` that train."""
        each = [flats.sizes for flats in self._together(mesh).flats if flats.trainable]
        return tuple(map(sum, zip(*each, strict=True)))

    def own(self, mesh: Mesh) -> _Numels:
        """As `trained`, without parameters that tensor ranks share, stacks among them, since their states are sharded
        over these ranks, and without stacks that ranks divide; for bounds.
        """
        return self._of(mesh)[0]

    def stacks(self, mesh: Mesh) -> _Numels:
        """Elements of the stacks of a rank that train; 0 where they are among `own`."""
        return self._of(mesh)[1]

    def least(self, mesh: Mesh) -> _Numels:
        """`own` without any stacks, however ranks divide them."""
        if mesh.total("tensor") > 1:
            return self.own(mesh)
        return tuple(numel - stack for numel, stack in zip(self.own(mesh), self._all_stacks, strict=True))

    def held(self, mesh: Mesh, blocks: Sequence[int]) -> StageBlocks:
        """Of some blocks together."""
        tensor, columns = mesh.total("tensor"), mesh.total("columns")
        return stage_blocks(self.task.kinds, blocks, tensor, columns, 1, mesh.stack_degrees)

    def _of(self, mesh: Mesh) -> tuple[_Numels, _Numels]:
        key = (*mesh.inside_degrees[:2], mesh.stack_degrees)
        found = self._flats.get(key)
        if found is None:
            flats = self._together(mesh).flats
            none = (0,) * len(self._all_stacks)
            stacks = self._all_stacks if mesh.total("tensor") > 1 else none
            if mesh.divides_stacks:
                trained = [each.sizes for each in flats if each.stacked and each.trainable]
                stacks = tuple(map(sum, zip(none, *trained, strict=True)))
            found = self._flats[key] = flats[0].sizes, stacks
        return found

    def _together(self, mesh: Mesh) -> StageBlocks:
        return self.held(mesh, range(len(self.task.blocks)))
