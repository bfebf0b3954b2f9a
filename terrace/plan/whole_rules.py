"""Checks of optimizers that update the matrices of layers whole.

Every error names the value, the rule and the fix.
"""

from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_layer
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.update import parse_update


def check_whole_matrices(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` if matrices are cut or missing, or too small for the space that they are projected into."""
    rule = parse_update(plan.update)
    if rule.projects and Mesh.of(cluster, plan).total("tensor") > 1:
        raise PlanError(
            f"optimizer {rule.name!r} keeps projectors of whole matrices, and the tensor axis cuts them: give the tier "
            "to the data axis, or use 'muon', 'adamw' or 'lion'"
        )
    # Embedding and head are left to AdamW, as in Jordan's Muon.
    inner = [(block, param) for index, block in enumerate(blocks) if is_layer(blocks, index) for param in block.params]
    matrices = [(block, param) for block, param in inner if param.trainable and param.is_matrix and param.numel]
    if not matrices:
        raise PlanError(f"optimizer {rule.name!r} has no effect: no layer has a matrix that trains; use 'adamw'")
    # The smallest side of all, so that one change is enough.
    block, param = min(matrices, key=lambda each: min(each[1].part_shape))
    rows, columns = param.part_shape
    if rule.rank > min(rows, columns):
        raise PlanError(
            f"rank = {rule.rank} of optimizer {rule.name!r} is larger than a side of {block.name}.{param.name} "
            f"({rows} x {columns}): use at most {min(rows, columns)}, or 'muon' or 'adamw'"
        )
    if rule.projects and plan.outer.has_islands:
        raise PlanError(
            f"optimizer {rule.name!r} under an outer loop is not built: every island would have projectors of its own, "
            "which no checkpoint holds; use 'muon' or 'adamw', or leave outer out"
        )
