"""Checks of `Plan.keep` against the cluster. Every error names the value, the rule and the fix."""

from pathlib import Path

from terrace.base.errors import ConfigError, PlanError
from terrace.cluster.cluster import Cluster
from terrace.plan.keep import ALL_ON_DEVICE, DEVICE, HOST, KEPT, VECTOR
from terrace.plan.kept import CHUNK, is_exact
from terrace.plan.order_file import schedule_words
from terrace.plan.plan import Plan
from terrace.plan.state_bytes import moments
from terrace.plan.update import parse_update
from terrace.plan.wire import CODES

_LARGEST_PIECE = 1 << 28  # elements: a guess; a ring of four pieces of AdamW takes 13 GB then
_MOST_SLOTS = 64


def check_keep(cluster: Cluster, plan: Plan) -> None:
    """Raise `PlanError` for a missing medium, a key without effect, or a plan whose states cannot leave the device."""
    keep = plan.keep
    if keep == ALL_ON_DEVICE:
        return
    if keep.blocks and not keep.activations_below:
        raise PlanError(
            f"keep.blocks = {list(keep.blocks)} has no effect: their inputs would leave the device; leave it out, or "
            "write keep.activations = 'disk'"
        )
    if keep.layer_wise:
        _check_order(plan)
    if keep.updates_on_host and not keep.optimizer_below:
        raise PlanError(
            f"keep.update = {keep.update!r} with optimizer states on the device, which would move both ways: write "
            "keep.optimizer = 'host' or 'disk', or leave keep.update out"
        )
    if not keep.is_below:
        raise PlanError(
            f"keep.piece = {keep.piece} and keep.ring = {keep.ring} have no effect, since no state is kept below "
            "the device: leave them out, or write keep.optimizer = 'disk'"
        )
    for state in KEPT:
        if (medium := getattr(keep, state)) != DEVICE:
            _check_medium(cluster, state, medium)
    if keep.optimizer_below and not moments(plan.update, 1, 1):
        raise PlanError(
            f"keep.optimizer = {keep.optimizer!r} has no effect: optimizer {plan.update!r} keeps no state besides the "
            "parameters; leave it out"
        )
    if keep.table_below:
        _check_table(plan)
    if keep.updates_on_host:
        _check_update(cluster, plan)
    if keep.params_below:
        _check_params(plan)
    if keep.grads_below:
        _check_grads(plan)
    _check_pieces(plan)


def _check_medium(cluster: Cluster, state: str, medium: str) -> None:
    said = f"keep.{state} = {medium!r}"
    if medium == "host" and cluster.device.type == "cpu":
        raise PlanError(
            f"{said} under a CPU: the host is the device, so nothing would move; leave it out, or write 'disk'"
        )
    if medium not in cluster.device.below:
        measured = ", which terrace probe measures" * (medium == "disk")
        raise PlanError(
            f"{said}, and the device of cluster {cluster.name!r} has no {medium} below it: describe it as "
            f"[device.below.{medium}]{measured}"
        )


def _check_order(plan: Plan) -> None:
    said = f"keep.order = {plan.keep.order!r}"
    if not plan.keep.updates_on_host:
        raise PlanError(
            f"{said} of updates on the device, which would hold up its backward: write keep.update = 'host', or leave "
            "keep.order out"
        )
    if plan.compute == "fp16":
        raise PlanError(
            f"{said} beside compute = 'fp16': whether a step is skipped is known at its end; use bf16, or leave "
            "keep.order out"
        )
    if plan.schedule is not None:
        raise PlanError(
            f"{said} beside schedule = {schedule_words(plan.schedule)}: stages share the control message at the end of "
            "a step; leave one of them out"
        )
    if plan.expert_gaps:
        raise PlanError(f"{said} beside expert_gaps, whose gradients arrive in parts: leave one of them out")


def check_clip(plan: Plan, clip: float) -> None:
    """Raise `PlanError` if updates in the backward would need the norm of the whole model."""
    if plan.keep.layer_wise and clip:
        raise PlanError(
            f"keep.order = {plan.keep.order!r} with optimizer.clip = {clip:g}: a clipped update needs the norm of the "
            "whole model; write optimizer.clip = 0, or leave keep.order out"
        )


def _check_update(cluster: Cluster, plan: Plan) -> None:
    keep, said = plan.keep, f"keep.update = {plan.keep.update!r}"
    if parse_update(plan.update).takes_whole:
        raise PlanError(
            f"{said} beside optimizer {plan.update!r}, whose products of matrices belong on the device: leave one of "
            "them out, or use adamw, lion or sgd with momentum"
        )
    if plan.outer.has_islands:
        raise PlanError(f"{said} beside plan.outer: exchanges of islands change the master copy; leave one of them out")
    if plan.shares_scales:
        raise PlanError(
            f"{said} beside products = {plan.products!r} in {CODES.name} messages: codes are made from the master copy "
            "on the device; leave one of them out, or scale rows, as fp8:row does"
        )
    wanted = DEVICE if cluster.device.type == "cpu" else HOST
    if keep.grads != wanted:
        why = "the device is the host" if wanted == DEVICE else "its cores read gradients from its memory"
        raise PlanError(f"{said} with keep.grads = {keep.grads!r}: {why}; write keep.grads = {wanted!r}")
    if wanted == HOST and not cluster.device.below[HOST].update_bytes_per_s:
        raise PlanError(
            f"{said}, and cluster {cluster.name!r} does not say how fast that is: give "
            "device.below.host.update_bytes_per_s, which terrace probe measures"
        )


def _check_params(plan: Plan) -> None:
    said = f"keep.params = {plan.keep.params!r}"
    if plan.params_backward is not None:
        raise PlanError(
            f"{said} beside params_backward = {plan.params_backward!r}: a second copy would stay on the device; leave "
            "one of them out"
        )
    if plan.outer.has_islands:
        raise PlanError(
            f"{said} beside plan.outer: islands keep several whole copies of the parameters on the device; leave one "
            "of them out"
        )
    if plan.shares_scales:
        raise PlanError(
            f"{said} beside products = {plan.products!r} in {CODES.name} messages: the codes of matrices stay on "
            "the device; leave one of them out, or scale rows, as fp8:row does"
        )


def _check_grads(plan: Plan) -> None:
    said = f"keep.grads = {plan.keep.grads!r}"
    if plan.schedule is not None:
        raise PlanError(
            f"{said} beside schedule = {schedule_words(plan.schedule)}: stages of a pipeline add to gradients in every "
            "micro-batch; leave one of them out"
        )
    if plan.outer.has_islands:
        raise PlanError(f"{said} beside plan.outer: islands keep changes of the same size on the device; leave one out")
    if plan.expert_gaps:
        raise PlanError(
            f"{said} beside expert_gaps: later parts of a message would read gradients that have left the device; "
            "leave one out"
        )


def _check_table(plan: Plan) -> None:
    said = f"keep.table = {plan.keep.table!r}"
    if not plan.vocabulary:
        raise PlanError(
            f"{said} has no effect: it is of the table whose rows plan.vocabulary spreads; write vocabulary, too, or "
            "leave it out"
        )
    if plan.outer.has_islands:
        raise PlanError(f"{said} beside plan.outer: islands exchange the changes of all rows; leave one of them out")


def kept_in(plan: Plan, folder: str | Path | None, key: str = "keep_folder") -> Path | None:
    """The folder, given as `key`, of states that the plan keeps on a disk; raises `ConfigError` if it keeps none."""
    if folder is not None and "disk" not in plan.keep.media:
        raise ConfigError(
            f"{key} = {str(folder)!r} has no effect: the plan keeps nothing on a disk; leave it out, or write "
            "plan.keep.optimizer = 'disk'"
        )
    return None if folder is None else Path(folder)


def _check_pieces(plan: Plan) -> None:
    keep, least = plan.keep, VECTOR if is_exact((plan.master, plan.optimizer_states or plan.sums)) else CHUNK
    if keep.piece % least or not least <= keep.piece <= _LARGEST_PIECE:
        raise PlanError(
            f"keep.piece = {keep.piece} must be a multiple of {least} up to {_LARGEST_PIECE}: updates take so many "
            "elements at a time"
        )
    if keep.ring != ALL_ON_DEVICE.ring and not keep.states_pass:
        why = (
            "they are updated where they rest"
            if keep.optimizer_below
            else "only optimizer states pass through the ring"
        )
        raise PlanError(f"keep.ring = {keep.ring} has no effect: {why}; leave it out, or write keep.optimizer = 'disk'")
    if not 2 <= keep.ring <= _MOST_SLOTS:
        raise PlanError(
            f"keep.ring = {keep.ring} must be 2 to {_MOST_SLOTS} pieces: one is updated while the next is read"
        )
