"""Rules for the plan key `vocabulary` (terrace.plan.tables). Every error names the value, the rule and the fix."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from terrace.base.errors import PlanError, did_you_mean
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.mesh import STAGE, Mesh
from terrace.plan.plan import Plan
from terrace.plan.recompute import recomputed_parts
from terrace.plan.slices import tables_of
from terrace.plan.tables import MOST_ROWS

_LEAVE_OUT = "or leave vocabulary out"


def check_vocabulary_tiers(cluster: Cluster, plan: Plan) -> None:
    """Raise `PlanError` unless `vocabulary` gives each row one owner among the ranks synchronised every step."""
    if not plan.vocabulary:
        return
    sizes = {tier.name: tier.size for tier in cluster.tiers}
    for name, degree in plan.vocabulary.items():
        if name not in sizes:
            raise PlanError(f"vocabulary names tier {name!r}, which is not in the cluster{did_you_mean(name, sizes)}")
        if degree < 1:
            raise PlanError(f"vocabulary.{name} = {degree}: a degree is at least 1")
    island = plan.outer.tier_between(cluster)
    table = whole_vocabulary(cluster, plan) or {next(iter(sizes)): 1}
    for index, (name, ranks) in enumerate(zip(sizes, _members(cluster, plan), strict=True)):
        degree = plan.vocabulary.get(name, 1)
        if index >= island:
            if degree > 1:
                raise PlanError(
                    f"vocabulary.{name} = {degree}: tier {name!r} is not synchronised every step (outer.tier = "
                    f"{plan.outer.tier!r}), and a look-up would cross it in every micro-batch; name only tiers inside"
                )
        elif degree > ranks:
            raise PlanError(
                f"vocabulary.{name} = {degree}: a stage has {ranks} ranks on tier {name!r}; use {ranks}, {_LEAVE_OUT}"
            )
        elif degree != ranks:
            raise PlanError(
                f"vocabulary.{name} = {degree}, and a stage has {ranks} ranks on tier {name!r}: each row has one owner "
                f"among the ranks that are synchronised every step; write {vocabulary_words(table)}, {_LEAVE_OUT}"
            )


def whole_vocabulary(cluster: Cluster, plan: Plan) -> dict[str, int]:
    """The `vocabulary` that gives each row one owner: all ranks of a stage on tiers synchronised every step.

    Tiers with one rank are left out. Without another tier it is empty, and any one of them has degree 1.
    """
    inside = list(zip(cluster.tiers, _members(cluster, plan), strict=True))[: plan.outer.tier_between(cluster)]
    return {tier.name: ranks for tier, ranks in inside if ranks > 1}


def vocabulary_words(table: Mapping[str, int]) -> str:
    """The key `vocabulary` as a plan's file has it: `vocabulary = { node = 4 }`."""
    degrees = ", ".join(f"{name} = {degree}" for name, degree in table.items())
    return f"vocabulary = {{ {degrees} }}"


def _members(cluster: Cluster, plan: Plan) -> tuple[int, ...]:
    # Ranks of a stage on each tier. The plan's own `vocabulary` may be wrong.
    return Mesh.of(cluster, replace(plan, vocabulary={})).group(*STAGE)


def check_vocabulary(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` if the model, or another key of the plan, does not go with `vocabulary`."""
    if not plan.vocabulary:
        return
    tables = tables_of(blocks[0])  # only the first block receives ids
    if not tables:
        raise PlanError(
            f"vocabulary has no effect: {blocks[0].name}, which receives the token ids, declares no table; leave it "
            'out, or declare the dims ("vocab", "hidden") of its table'
        )
    if len(tables) > 1:
        names = ", ".join(f"{blocks[0].name}.{param.name}" for param in tables)
        raise PlanError(f"vocabulary takes one table, and the model has {names}: join their rows into one table")
    (table,) = tables
    name, rows = f"{blocks[0].name}.{table.name}", (table.whole or table.shape)[0]
    for block in blocks:
        if 0 in block.tied_to:
            raise PlanError(
                f"vocabulary spreads the rows of {name}, to which {block.name} is tied, and a head multiplies with all "
                f"of them: untie the embedding, {_LEAVE_OUT}"
            )
    mesh = Mesh.of(cluster, plan)
    if mesh.total("tensor") > 1:
        raise PlanError(
            f"vocabulary with a tensor axis, whose rows and columns cut {name} already: give the tier to the data "
            f"axis, {_LEAVE_OUT}"
        )
    ranks = 1 if mesh.tables is None else mesh.tables.total("expert")
    if not ranks <= rows <= MOST_ROWS:
        raise PlanError(f"vocabulary spreads {name} of {rows} rows over {ranks} ranks: use {ranks} to {MOST_ROWS} rows")
    if recomputed_parts(plan.recompute, blocks)[0]:
        raise PlanError(
            f"recompute names {blocks[0].name}, whose rows would be looked up on other ranks again; it keeps no "
            "more than its output: leave it out of recompute"
        )
    _check_states(plan, name)


def _check_states(plan: Plan, name: str) -> None:
    asked = {
        f"master = {plan.master!r}": plan.master == "bf16",
        f"optimizer_states = {plan.optimizer_states!r}": plan.optimizer_states is not None,
    }
    for words, is_asked in asked.items():
        if is_asked:
            raise PlanError(
                f"{words} with vocabulary: rows of {name} are updated one by one, with states in full precision; "
                f"leave it out, {_LEAVE_OUT}"
            )
