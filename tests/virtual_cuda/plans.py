"""Plans that run on the virtual device: every placement, axis, schedule and format, at the smallest sizes.

Plans of a room share the ranks of one call, so that a plan costs little but its own steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from terrace.plan.context_rules import why_whole
from terrace.plan.keep import Keep
from terrace.plan.outer import Outer
from terrace.plan.presets import PRESETS
from terrace.runtime.settings import OptimizerConfig
from tests.support.parity import ADAMW, Case, exact
from tests.support.pipelines import SCHEDULES
from tests.support.toys import MODELS, WHOLE_ROWS, Rows, cluster_of, with_wires

Sizes = tuple[int, ...]
ONE_TIER, OUTER_TIER, FOUR = (2,), (1, 2), (2, 2)
DEEP, WIDE = "deep llama tied", "wide llama, 2 kv heads"
# What kernels of CUDA change in fp64, and in bf16: rows of an embedding are added, and attention is computed, in other
# orders.
ORDER, ORDER_BF16 = 1e-11, 0.05
# Where all kernels are the CPU's: products of some processors add in an order that follows from an operand's address.
BITS = 1e-15
PACKED = Rows(12, ((5, 1, 6), (12,), (1, 1, 3, 7), (7, 5)))


class Planned(NamedTuple):
    """A case and the tiers that it runs on, and how far its numbers may be from the CPU's.

    By night: other plans of its room have all that it has.
    """

    sizes: Sizes
    case: Case
    within: float = BITS
    by_night: bool = False


def planned(
    sizes: Sizes,
    name: str,
    model: str = "llama tied",
    *,
    micros: int = 2,
    steps: int = 1,
    rows: Rows = WHOLE_ROWS,
    optimizer: OptimizerConfig = ADAMW,
    within: float = BITS,
    by_night: bool = False,
    **changes: Any,
) -> Planned:
    """A preset in fp64 with changes."""
    plan = replace(exact(name, cluster_of(*sizes)), **changes)
    return Planned(sizes, Case(plan, micros, model, num_steps=steps, rows=rows, optimizer=optimizer), within, by_night)


def placements() -> Iterator[Planned]:
    """Every preset, with and without recomputation; units and prefetches."""
    for number, name in enumerate(PRESETS):
        yield planned(OUTER_TIER, name, "toy", steps=2, by_night=number % 4 != 0)
        yield planned(ONE_TIER, name, "gpt2", recompute=("*",), by_night=number % 4 != 1)
    several: Sequence[dict[str, Any]] = ({"prefetch": 0}, {"prefetch": 3}, {"unit": 2}, {"unit": 2, "prefetch": 0})
    for number, changes in enumerate(several):
        name, again = ("zero3", "zero2")[number % 2], number % 2 == 0
        yield planned(ONE_TIER, name, "toy", steps=2, micros=3, by_night=again, **changes)
    yield planned(ONE_TIER, "zero3", "stacks", steps=2)
    yield planned(ONE_TIER, "zero3", "llama, frozen layer", within=ORDER)


def recomputed() -> Iterator[Planned]:
    """Operations that are recomputed alone, and blocks."""
    every = ("block.*: attention, mlp, norms",)
    yield planned(ONE_TIER, "zero3", recompute=every)
    yield planned(
        ONE_TIER, "ddp", "gpt2", recompute=("block.* every 2: attention", "block.1: mlp, norms"), by_night=True
    )
    yield planned(
        ONE_TIER, "zero3", "wide llama, window", micros=1, rows=PACKED, within=ORDER, recompute=every, by_night=True
    )
    rows: dict[str, Any] = {"mapping": {"package": {"tensor": 2}}}
    yield planned(ONE_TIER, "ddp", WIDE, within=ORDER, recompute=("block.*: attention, mlp",), **rows)
    yield planned(ONE_TIER, "zero3", "mixture tied", micros=1, recompute=("block.* first 1: attention",), by_night=True)


def kept() -> Iterator[Planned]:
    """Optimizer states, parameters and gradients on a disk and in the host's memory, in several pieces."""
    keep = Keep(optimizer="disk", piece=128, ring=3)
    host = replace(keep, optimizer="host")
    for name, optimizer in (("ddp", ADAMW), ("zero3", OptimizerConfig(name="muon"))):
        for place in (keep, host):
            yield planned(ONE_TIER, name, "toy", steps=3, optimizer=optimizer, keep=place, by_night=True)
    yield planned(ONE_TIER, "zero1", steps=2, compute="bf16", master="fp32", within=ORDER_BF16, keep=keep)
    for name, keeps in (("ddp", replace(host, params="disk")), ("zero3", replace(keep, params="host"))):
        yield planned(ONE_TIER, name, "toy", steps=3, micros=2, keep=keeps, by_night=True)
        again: dict[str, Any] = {"by_night": name == "ddp"}
        yield planned(ONE_TIER, name, "toy", steps=2, micros=2, unit=2, keep=replace(keeps, grads="host"), **again)
    rows: dict[str, Any] = {"vocabulary": {"package": 2}, "within": ORDER}
    for place in (Keep(table="host", piece=64), replace(host, table="disk", params="host", piece=64)):
        again = {"by_night": place.table == "host"}
        yield planned(ONE_TIER, "zero3", "llama, many ids", steps=3, keep=place, **again, **rows)


def updated_on_host() -> Iterator[Planned]:
    """Updates on the host's cores, of states in its memory and on a disk."""
    host = Keep(optimizer="host", grads="host", update="host", piece=128)
    disk = replace(host, optimizer="disk", ring=3)
    for number, name in enumerate(("ddp", "zero1", "zero3", "zero++")):
        optimizer = OptimizerConfig(name="lion", lr=3e-3) if name == "zero1" else ADAMW
        own: dict[str, Any] = {"keep": (host, disk)[number % 2], "by_night": name != "zero++"}
        yield planned(ONE_TIER, name, "toy", steps=3, unit=2, optimizer=optimizer, **own)
    for keep in (replace(host, params="host"), replace(disk, params="disk")):
        yield planned(ONE_TIER, "zero3", DEEP, steps=2, micros=1, keep=keep, by_night=keep.params == "host")
    for name, keep in (("ddp", replace(host, order="backward")), ("zero3", replace(disk, order="backward"))):
        own = {"keep": keep, "optimizer": replace(ADAMW, clip=0.0), "by_night": name == "zero3"}
        yield planned(ONE_TIER, name, DEEP, steps=2, unit=2, **own)
    form: dict[str, Any] = {"compute": "bf16", "master": "fp32", "within": ORDER_BF16, "by_night": True}
    yield planned(ONE_TIER, "zero2", steps=2, micros=1, keep=host, **form)
    yield planned(ONE_TIER, "ddp", steps=2, micros=1, keep=disk, **form)


def kept_inputs() -> Iterator[Planned]:
    """Inputs of blocks that leave after their forward, in several pieces, with and without a graph that has them."""
    host = Keep(activations="host", piece=64)
    yield planned(ONE_TIER, "zero3", DEEP, steps=2, recompute=("block.*",), keep=host, by_night=True)
    # An input that comes back lies elsewhere in memory, which on some processors is another order of a sum.
    yield planned(ONE_TIER, "ddp", "deep gpt2", steps=2, unit=2, within=ORDER, keep=replace(host, activations="disk"))
    mapping = {"package": {"pipeline": 2}}
    keep = replace(host, optimizer="host", params="host", piece=128, ring=3)
    yield planned(ONE_TIER, "ddp", DEEP, micros=4, mapping=mapping, schedule="1f1b", recompute=("*",), keep=keep)


def pipelines() -> Iterator[Planned]:
    """Every schedule on two stages, with other placements, models and numbers in turns."""
    mapping = {"package": {"pipeline": 2}}
    turns: Sequence[dict[str, Any]] = ({}, {"recompute": ("*",)}, {"recompute": ("block.[0246]",), "prefetch": 0})
    for number, schedule in enumerate(SCHEDULES):
        model = (DEEP, "deep gpt2", "deep llama, frozen layer")[number % 3]
        within = ORDER if "frozen" in model else BITS
        unit: dict[str, Any] = {"unit": 2} if schedule.startswith("zeropp") else {}
        own: dict[str, Any] = {"mapping": mapping, "schedule": schedule, **unit}
        yield planned(ONE_TIER, "ddp", model, micros=4, within=within, by_night=number % 4 != 0, **own)
        if number % 2:
            again = number % 4 == 3
            yield planned(ONE_TIER, "zero1", DEEP, micros=3, by_night=again, **turns[number % 3], **own)


def coded_edges() -> Iterator[Planned]:
    """Activations and gradients in block formats between stages."""
    wire = {"pipeline": {"package": "int8:16"}, "pipeline_backward": {"package": "int4:16+feedback"}}
    for schedule in ("1f1b", "zb-h1"):
        own: dict[str, Any] = {"mapping": {"package": {"pipeline": 2}}, "wire": wire, "by_night": schedule == "1f1b"}
        yield planned(ONE_TIER, "ddp", DEEP, micros=2, schedule=schedule, **own)


def tensors() -> Iterator[Planned]:
    """Rows, columns and depth of a tensor axis, in parts and whole."""
    forms: Sequence[dict[str, Any]] = ({"rows": 2}, {"columns": 2}, {"depth": 2})
    models = (WIDE, "wide gpt2", "wide qwen3, 2 kv heads", "wide latent", "wide phi3", "wide llama, 1 kv head")
    for number, model in enumerate(models):
        name, mapping = "zero3" if number % 3 == 2 else "ddp", {"package": {"tensor": forms[number % 3]}}
        yield planned(ONE_TIER, name, model, micros=1, within=ORDER, by_night=number not in (0, 2), mapping=mapping)
    rows: dict[str, Any] = {"mapping": {"package": {"tensor": 2}}}
    yield planned(ONE_TIER, "ddp", WIDE, micros=1, within=ORDER, sequence_parallel=False, by_night=True, **rows)
    yield planned(ONE_TIER, "ddp", WIDE, within=ORDER, tensor_chunks=2, **rows)
    again: dict[str, Any] = {"tensor_chunks": 3, "recompute": ("*",), "by_night": True}
    yield planned(ONE_TIER, "ddp", "wide gpt2", within=ORDER, **again, **rows)
    yield planned(ONE_TIER, "ddp", "wide gemma2", micros=1, rows=PACKED, within=ORDER, **rows)


def fused() -> Iterator[Planned]:
    """Products that are one operation with their messages, divided by torch's own Python."""
    changes: dict[str, Any] = {"mapping": {"package": {"tensor": 2}}, "tensor_chunks": "fused"}
    yield planned(ONE_TIER, "ddp", WIDE, within=ORDER, by_night=True, **changes)
    yield planned(ONE_TIER, "ddp", "wide gpt2", micros=1, within=ORDER, recompute=("*",), **changes)
    yield planned(ONE_TIER, "ddp", "wide llama, 1 kv head", micros=1, rows=Rows(7), within=ORDER, **changes)


def contexts() -> Iterator[Planned]:
    """Rings and Ulysses, with windows and packed documents."""
    for number, model in enumerate((WIDE, "wide llama, window", "wide gpt2", "wide llama, 1 kv head")):
        form = ({"ring": 2}, {"ulysses": 2})[number % 2]
        rows = Rows(9) if number < 2 else PACKED
        if model == "wide gpt2":
            rows = Rows(7)
        own: dict[str, Any] = {"mapping": {"package": {"context": form}}, "by_night": number != 1}
        yield planned(ONE_TIER, "zero3", model, micros=1 + number % 2, rows=rows, within=ORDER, **own)
    ring: dict[str, Any] = {"mapping": {"package": {"context": 2}}, "recompute": ("*",)}
    yield planned(ONE_TIER, "zero3", "wide llama, window", micros=1, rows=PACKED, within=ORDER, **ring)
    for model in ("llama tied", "wide llama, window"):
        yield planned(ONE_TIER, "zero3", model, rows=PACKED, within=ORDER, by_night=True)
    for sequence in (16, 256):  # pairs of runs by flash attention's kernel, and by cuDNN's
        found = planned(
            ONE_TIER,
            "zero3",
            "llama of sixteens",
            micros=1,
            rows=Rows(sequence),
            within=ORDER_BF16,
            mapping={"package": {"context": 2}},
        )
        yield found._replace(case=replace(found.case, plan=replace(found.case.plan, compute="bf16", master="bf16")))


def experts() -> Iterator[Planned]:
    """Mixtures on one rank and on two, with chunks and gaps, every gate."""
    spread: dict[str, Any] = {"experts": {"package": {"expert": 2}}}
    models = ("experts in groups", "mixture, shared expert", "one of many experts", "all experts")
    for number, model in enumerate(models):
        yield planned(ONE_TIER, "zero3", model, micros=1, by_night=number != 2, **spread)
    for model in ("experts, noisy", "experts, cosine", "experts choose", "experts, even"):
        yield planned(ONE_TIER, "zero2", model, micros=1, by_night=model in ("experts, cosine", "experts, even"))
    yield planned(ONE_TIER, "ddp", "experts", experts={"package": {"rows": 2}})
    for chunks in ({"forward": 2}, {"forward": 2, "backward": 2}, {"forward": 1, "backward": 3, "ahead": 1}):
        own: dict[str, Any] = {"expert_chunks": chunks, "by_night": "ahead" not in chunks}
        yield planned(ONE_TIER, "zero1", "experts", micros=1, within=ORDER, **own, **spread)
    yield planned(ONE_TIER, "zero3", "experts", within=ORDER, expert_gaps=(0.1, 0.5, 0.4), by_night=True, **spread)
    yield planned(ONE_TIER, "zero1", "experts", within=ORDER, expert_gaps=(0, 0, 1), by_night=True, **spread)
    two = {"forward": 1, "backward": 2}
    yield planned(
        ONE_TIER, "zero2", "experts", within=ORDER, expert_gaps=(0, 0, 0.25, 0.75), expert_chunks=two, **spread
    )
    yield planned(ONE_TIER, "zero3", "experts", within=ORDER, recompute=("*",), unit=2, by_night=True, **spread)


def wires() -> Iterator[Planned]:
    """Messages in every format."""
    for number, wire in enumerate(("bf16", "fp32", "int8:16", "fp8:32", "int4:16", "int8:16+feedback")):
        again = wire in ("fp32", "int4:16", "int8:16")
        found = planned(ONE_TIER, ("zero3", "zero1")[number % 2], "toy", steps=2, by_night=again)
        cluster, plan = cluster_of(*found.sizes), found.case.plan
        if "+" in wire:
            yield planned(ONE_TIER, "zero2", "toy", steps=2, wire={"reduce": {"package": wire}}, by_night=True)
        else:
            yield found._replace(case=replace(found.case, plan=with_wires(cluster, plan, wire)))
    yield planned(ONE_TIER, "zero3", "gpt2", steps=2, wire={"reduce": {"package": "topk:32+feedback"}})


def optimizers() -> Iterator[Planned]:
    """Every update rule, and states in few bits."""
    lsp = [("lsp", {"rank": 3, "density": 2, "check_every": every}) for every in (1, 2)]
    projected = (("galore", {"rank": 3, "check_every": 2}), *lsp)
    for name, more in (("lion", {}), ("muon", {"momentum": 0.9}), ("sgd", {}), ("sgd", {"momentum": 0.9}), *projected):
        optimizer = OptimizerConfig(name=name, lr=3e-3, **more)  # type: ignore[arg-type]
        # Projectors that are learned twice take the time of ten plans.
        placement, again = "ddp" if name == "muon" else "zero3", name not in ("muon", "galore")
        yield planned(ONE_TIER, placement, "gpt2", steps=2, optimizer=optimizer, by_night=again)
    for states in ("bf16", "int8"):
        own: dict[str, Any] = {"optimizer_states": states, "by_night": states == "bf16"}
        found = planned(ONE_TIER, "zero3", "gpt2", steps=2, within=ORDER_BF16, **own)
        plan = replace(found.case.plan, compute="fp32", master="fp32")
        yield found._replace(case=replace(found.case, plan=plan))
    found = planned(ONE_TIER, "zero2", "gpt2", within=ORDER_BF16)
    plan = replace(found.case.plan, compute="bf16", master="bf16")
    yield found._replace(case=replace(found.case, plan=plan))


def islands() -> Iterator[Planned]:
    """Outer loops: at once and late, whole and in turns."""
    for outer in (
        Outer(tier="node", every=2),
        Outer(tier="node", every=2, fragments=2),
        Outer(tier="node", every=2, delay=1),
        Outer(tier="node", every=2, delay=2, optimizer="momentum", keep=0.0, penalty=True, clip=0.02),
        Outer(tier="node", every=1, delay=1, optimizer="average"),
    ):
        steps = 2 * outer.every + 1
        again = outer.fragments == 1 and outer.optimizer != "momentum"
        yield planned(OUTER_TIER, "ddp", "toy", micros=1, steps=steps, outer=outer, by_night=again)


def scaled() -> Iterator[Planned]:
    """Products in 8 bits, by their definition."""
    for products, model, more in (
        ("fp8", "llama of sixteens", {}),
        ("fp8:row", "llama of sixteens", {"recompute": ("*",)}),
        ("fp8:row+e4m3", "wide mixture of sixteens", {"experts": {"package": {"expert": 2}}}),
        ("fp8", "llama of sixteens", {"wire": {"gather": {"package": "fp8"}}}),
    ):
        within = 2 * ORDER_BF16 if ":row" in products else BITS
        found = planned(ONE_TIER, "zero3", model, micros=1, rows=Rows(20), within=within, products=products, **more)
        found = found._replace(by_night=":row" not in products or "+" in products)
        plan = replace(found.case.plan, compute="bf16" if within > BITS else "fp32", master="fp32")
        yield found._replace(case=replace(found.case, plan=plan))


def saved() -> Iterator[Planned]:
    """Plans whose states differ, for checkpoints."""
    yield planned(ONE_TIER, "zero3", "gpt2", steps=2, within=ORDER, by_night=True)
    yield planned(ONE_TIER, "zero1", "toy", steps=2, within=ORDER, by_night=True)
    yield planned(ONE_TIER, "zero3", "toy", steps=2, within=ORDER, wire={"reduce": {"package": "int8:16+feedback"}})
    yield planned(ONE_TIER, "ddp", "experts", steps=2, within=ORDER, experts={"package": {"expert": 2}})


def on_four() -> Iterator[Planned]:
    """Plans that need several tiers or several axes."""
    for name in ("zero++", "three-level"):
        yield planned(FOUR, name, "gpt2", within=ORDER, by_night=name == "zero++")
    axes: Sequence[tuple[str, int, dict[str, Any]]] = (
        (DEEP, 3, {"mapping": {"node": {"pipeline": 2}}, "schedule": "zb-h1"}),
        (WIDE, 1, {"mapping": {"package": {"tensor": 2}, "node": {"context": 2}}}),
        ("deep experts", 2, {"mapping": {"node": {"pipeline": 2}}, "experts": {"package": {"expert": 2}}}),
    )
    for model, micros, changes in axes:
        yield planned(FOUR, "zero2", model, micros=micros, within=ORDER, by_night=model != WIDE, **changes)


def more_on_four() -> Iterator[Planned]:
    """The rest of what four ranks can run: nightly."""
    for name in PRESETS:
        yield planned(FOUR, name, DEEP, recompute=("block.[0246]",), micros=3, within=ORDER)
    for schedule in SCHEDULES:
        unit: dict[str, Any] = {"unit": 2} if schedule.startswith("zeropp") else {}
        for place in ("node", "package"):
            yield planned(
                FOUR, "zero2", DEEP, micros=4, within=ORDER, mapping={place: {"pipeline": 2}}, schedule=schedule, **unit
            )
    for model in MODELS:
        if model.startswith("wide") and "sixteens" not in model:
            yield planned(FOUR, "three-level", model, mapping={"package": {"tensor": 2}}, micros=1, within=ORDER)
            if not why_whole(MODELS[model].declared):
                ring = {"node": {"context": 2}}
                yield planned(FOUR, "zero3", model, mapping=ring, micros=1, rows=Rows(7), within=ORDER)


ROOMS = {
    each.__name__: each
    for each in (
        placements,
        recomputed,
        kept,
        updated_on_host,
        kept_inputs,
        pipelines,
        coded_edges,
        tensors,
        fused,
        contexts,
        experts,
        wires,
        optimizers,
        islands,
        scaled,
        on_four,
    )
}
NIGHTLY = {"more_on_four": more_on_four}
