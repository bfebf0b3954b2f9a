"""States and inputs of layers that a plan keeps below the device (`--allow keep=disk`), and the search that uses them.

With `--allow`, the search is repeated with optimizer states on each allowed medium, with inputs of layers there, and
with both, and the one with the shortest step is taken if that is shorter than without: less memory may permit less
recomputation, larger micro-batches, or fewer ranks that share a state. In the host's memory states may be updated by
its cores, too, or pass through the device: whichever step is shorter. Unasked they are taken only if nothing fits
without them, from all media of the device: optimizer states, then parameters, too, then gradients. If nothing fits then
either, inputs are kept there, alone and then beside states.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError
from terrace.base.words import quantity, seconds
from terrace.cluster.below import MEDIA
from terrace.plan.boundaries import input_bytes, leaving
from terrace.plan.dims import is_layer
from terrace.plan.edges import edge_of
from terrace.plan.flats import FlatParamSpec, block_flats
from terrace.plan.keep import ALL_ON_DEVICE, HOST, Keep, Order
from terrace.plan.keep_rules import check_keep
from terrace.plan.kept import resting_bytes, updated_bytes
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.slices import slice_blocks
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.planner.evaluate import step_of
from terrace.planner.ranking import TIE, Estimate
from terrace.planner.space import Space
from terrace.planner.task import Task, plan_of
from terrace.simulate.step import predict_step

if TYPE_CHECKING:
    from terrace.planner.products import ProductsFound

_OPTION = "keep"
_Kept = tuple[str, ...]  # keys of `Keep` with the same medium
_OPTIMIZER, _INPUTS = ("optimizer",), ("activations",)
_ON_CORES = ("grads", *_OPTIMIZER, "update")  # states in the host's memory, which its cores update
# In the order in which they are tried; the next row only if nothing of the one before fits.
_ROWS: tuple[tuple[_Kept, ...], ...] = (
    (_OPTIMIZER, _ON_CORES),
    (("params", *_OPTIMIZER),),
    (("params", "grads", *_OPTIMIZER), ("params", *_ON_CORES)),
    (_INPUTS,),
    ((*_INPUTS, *_OPTIMIZER),),
    ((*_INPUTS, "params", "grads", *_OPTIMIZER),),
)
_ASKED: tuple[_Kept, ...] = (_OPTIMIZER, _INPUTS, (*_INPUTS, *_OPTIMIZER), _ON_CORES, (*_INPUTS, *_ON_CORES))
_NAMES = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "activations": "inputs of layers",
}


def take_keep(texts: Sequence[str], task: Task) -> tuple[list[str], list[str]]:
    """Split `--allow` texts into the media that they allow, and the rest.

    Raises `PlanError` for a medium that no plan of the task can use.
    """
    asked = [text.partition("=")[2].strip() for text in texts if text.partition("=")[0].strip() == _OPTION]
    rest = [text for text in texts if text.partition("=")[0].strip() != _OPTION]
    for medium in asked:
        said = f"--allow {_OPTION}={medium}"
        if medium not in MEDIA:
            raise PlanError(f"{said}: states can be kept on {' or '.join(MEDIA)}; write {_OPTION}=disk")
        if task.keep != ALL_ON_DEVICE:
            kept = " and the ".join(task.keep.media)
            raise PlanError(f"{said} has no effect: the plan keeps states on the {kept} anyway")
        plan = Plan(params="device", grads="device", optimizer="device", keep=Keep(optimizer=medium))  # type: ignore[arg-type]
        try:
            check_keep(task.cluster, plan)
        except PlanError as error:
            raise PlanError(f"{said}: {error}") from error
    return list(dict.fromkeys(asked)), rest


class KeptSearch:
    """A search that may keep states below the device: on `asked` media, or if nothing fits on the device alone."""

    def __init__(self, asked: Sequence[str], search: "Callable[[Space], ProductsFound]") -> None:
        self._asked, self._search = asked, search
        self._steps_s = dict[Task, float]()  # without states below, by the task with them that was chosen

    def __call__(self, space: Space) -> "ProductsFound":
        found = self._search(space)
        on_device_s, task = _step_s(found), space.task
        media = self._asked or ([] if found.searched.found.best else [*task.cluster.device.below])
        rows = (_ASKED, *(row for row in _ROWS if not set(row) <= set(_ASKED))) if self._asked else _ROWS
        has_layers = any(is_layer(task.blocks, index) for index in range(1, len(task.blocks)))
        for row in rows if task.keep == ALL_ON_DEVICE else ():
            tried = [states for states in row if has_layers or "activations" not in states]
            for states, medium in product(tried, media):
                if "update" in states and not _may_update(task, medium):
                    continue
                keep = replace(ALL_ON_DEVICE, **dict.fromkeys(states, medium))  # type: ignore[arg-type]  # of `MEDIA`
                below = self._search(replace(space, task=replace(task, keep=keep)))
                if _has_room(below) and _step_s(below) < (1 - TIE) * _step_s(found):
                    self._steps_s[below.searched.space.task] = on_device_s
                    found = below
            if found.searched.found.best:
                break
        return found

    def words(self, task: Task, best: Estimate) -> str:
        """Whether the plan of `task` keeps states below, and what that costs; "" if nobody asked and it does not."""
        return "; ".join(filter(None, (self._why(task, best.step_s), lanes_words(task, best))))

    def _why(self, task: Task, step_s: float) -> str:
        if task.keep == ALL_ON_DEVICE:
            where = " or ".join(self._asked)
            return f"states and inputs of layers on the {where}, as allowed, make no step shorter" if where else ""
        before_s = self._steps_s.get(task, math.nan)
        if math.isnan(before_s):  # of the user's own plan
            return ""
        where = "; ".join(
            f"{_listed([_NAMES[state] for state in task.keep.on(medium)])} are kept on the {medium}"
            for medium in task.keep.media
        )
        if math.isinf(before_s):
            return f"nothing fits on the device alone: {where} (docs/offload.md)"
        return f"{where}, as allowed: step {seconds(step_s)}, {seconds(before_s)} without"


def _may_update(task: Task, medium: str) -> bool:
    """Whether the host's cores may update states of a task in a medium: in its memory, at a rate that is known."""
    return medium == HOST and task.cluster.device.below[medium].update_bytes_per_s > 0 and task.islands.num == 1


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def lanes_words(task: Task, best: Estimate) -> str:
    """Seconds of each medium's lanes beside those of computing, and the batch from which computing takes longer."""
    found, device, plan = list[str](), task.cluster.device, plan_of(task, best.candidate)
    computing_s = sum(spent for name, spent in best.time_s.items() if not name.startswith("wait "))
    for medium in task.keep.media:
        below = device.below[medium]
        moved = [best.sent_bytes.get((message, medium), 0) for message in ("keep_read", "keep_write")]
        lanes_s = below.read_s(moved[0]), below.write_s(moved[1])
        passes_s = sum(best.time_s.get(name, 0.0) for name in ("forward", "backward"))
        most = math.ceil(max(lanes_s) / (passes_s / task.batch)) if passes_s else 0
        words = (
            f"a step reads {quantity(moved[0], 'B')} from the {medium} in {seconds(lanes_s[0])}, writes "
            f"{quantity(moved[1], 'B')} in {seconds(lanes_s[1])}, and computes for {seconds(computing_s)}"
        )
        if task.keep.hands_over and medium == HOST:
            numels = sum(updated_bytes(plan, flat) for flats in _flats(task, plan) for flat in flats)
            cores_s = below.update_s(numels) / Mesh.of(task.cluster, plan).total("pipeline")
            words += f"; updates take the host's cores {seconds(cores_s)}"
            words += _order_words(task, plan)
        # Bytes of inputs grow with the batch as computing does.
        if max(lanes_s) > computing_s and task.keep.activations != medium:
            words += f"; from a batch of about {most:,} sequences on, passed in one unit, it computes for longer"
        found.append(words)
    return "; ".join(found)


def _order_words(task: Task, plan: Plan) -> str:
    """The step of the plan in the other order of updates, which clipping decides."""
    if plan.compute == "fp16":
        return ""
    other: Order = "forward" if plan.keep.layer_wise else "backward"
    step = step_of(task, replace(plan, keep=replace(plan.keep, order=other)))
    clip = " and optimizer.clip = 0" if other == "backward" else ""
    return f", and with keep.order = {other!r}{clip} the step is {seconds(predict_step(step).step_s)}"


def _has_room(found: "ProductsFound") -> bool:
    """Whether the best plan's states fit their media, on average over pipeline stages; a program is checked exactly."""
    task, best = found.searched.space.task, found.searched.found.best
    if not best:
        return True
    plan = plan_of(task, best[0].candidate)
    mesh = Mesh.of(task.cluster, plan)
    below, stages = task.cluster.device.below, mesh.total("pipeline")
    resting = resting_bytes(plan, _flats(task, plan))
    if gone := leaving(plan.keep, task.blocks):
        tensor = TensorTraffic.of(mesh, [tier.name for tier in task.cluster.tiers], plan, task.sequence)
        numel = math.prod(edge_of(tensor, slice_blocks(task.blocks, mesh)).shape)
        # Stage i of n has n - i micro-batches in flight, and a stage without a pipeline those of a unit.
        flying = max(plan.unit, (stages + 1) / 2)
        resting[plan.keep.activations] += math.ceil(flying * len(gone)) * input_bytes(plan, numel)
    return all(size <= stages * below[name].share_bytes for name, size in resting.items())


def _flats(task: Task, plan: Plan) -> tuple[tuple[FlatParamSpec, ...], ...]:
    return block_flats(task.cluster, plan, slice_blocks(task.blocks, Mesh.of(task.cluster, plan)))


def _step_s(found: "ProductsFound") -> float:
    best = found.searched.found.best
    return best[0].step_s if best else math.inf
