"""Products in 8-bit floats that a user allows (`--allow products=fp8`), used where the predicted step is shorter.

As with wire formats (terrace.planner.formats), a search never chooses rounding: with products allowed it runs twice,
without and with them, and the 8-bit plan must be faster by more than a tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.products import check_products
from terrace.planner.formats import Allowed, Searched
from terrace.planner.narrow_states import Way, find_stored
from terrace.planner.ranking import TIE
from terrace.planner.space import Space
from terrace.planner.task import Task

_OPTION = "products"


@dataclass(frozen=True)
class ProductsFound:
    """A search with the allowed products, if any, and the best steps with and without them.

    A step is None if no plan was found; `wide_s` is the one without narrow states (terrace.planner.narrow_states).
    """

    searched: Searched
    wide_s: float
    allowed: str | None = None
    scaled_s: float | None = None
    plain_s: float | None = None

    @property
    def used(self) -> bool:
        return self.searched.space.task.products is not None


def take_products(texts: Sequence[str], task: Task) -> tuple[str | None, list[str]]:
    """Split `--allow` texts into the format of products, if any, and the rest.

    Raises `PlanError` for products that no plan of the task can have, and for more than one format of them.
    """
    asked = [text.partition("=")[2].strip() for text in texts if text.partition("=")[0].strip() == _OPTION]
    rest = [text for text in texts if text.partition("=")[0].strip() != _OPTION]
    if len(set(asked)) > 1:
        raise PlanError(f"--allow products = {' and '.join(asked)}: all take as long, so give the one that you want")
    if not asked:
        return None, rest
    plan = Plan(params="device", grads="device", optimizer="device", compute=task.compute, products=asked[0])
    cluster = task.cluster
    try:
        check_products(cluster.device, Mesh.of(cluster, plan), replace(plan, master=task.master), task.blocks)
    except PlanError as error:
        raise PlanError(f"--allow products={asked[0]}: {error}") from error
    return asked[0], rest


def find_with(
    products: str | None, space: Space, allowed: Allowed, ways: Sequence[Way], count: int, limit: int
) -> ProductsFound:
    """`find_stored`, in `products` where they make the step shorter."""
    plain, wide_s = find_stored(space, allowed, ways, count, limit)
    if products is None:
        return ProductsFound(plain, wide_s)
    scaled_space = replace(space, task=replace(space.task, products=products))
    scaled, scaled_wide_s = find_stored(scaled_space, allowed, ways, count, limit)
    scaled_s, plain_s = (each.found.best[0].step_s if each.found.best else None for each in (scaled, plain))
    if scaled_s is not None and (plain_s is None or scaled_s < (1 - TIE) * plain_s):
        return ProductsFound(scaled, scaled_wide_s, products, scaled_s, plain_s)
    return ProductsFound(plain, wide_s, products, scaled_s, plain_s)
