"""Formulas and rules of `plan.keep`."""

from dataclasses import replace
from itertools import pairwise

import pytest

from terrace.base.errors import ClusterError, PlanError, ProgramError
from terrace.cluster.below import Medium
from terrace.plan.keep import VECTOR, Keep
from terrace.plan.keep_rules import check_keep
from terrace.plan.kept import CHUNK, Group, cuts, groups, is_exact, pieces, resting_bytes, ring_bytes
from terrace.plan.kinds import Kinds
from terrace.plan.plan import Plan
from terrace.plan.presets import parse_plan, preset
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Op
from terrace.program.lowering import build
from terrace.program.verify import verify
from terrace.simulate.states import model_states, stage_blocks
from tests.support.toys import MODELS, cluster_of

CLUSTER = cluster_of(2, 2)
BLOCKS = MODELS["llama tied"].declared
DISK = Keep(optimizer="disk")


def kept(name: str = "zero3", keep: Keep = DISK, **changes: object) -> Plan:
    return replace(preset(name, CLUSTER), keep=keep, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("fp32", "int8", "int8"), ("bf16",)])
def test_cuts_cover_a_slice_and_begin_where_updates_do(formats: tuple[str, ...]) -> None:
    size = CHUNK if not is_exact(formats) else 256
    for numel in (1, size - 1, size, size + 1, 3 * size + 7):
        group = Group("states", formats, numel)
        found = pieces(kept(keep=replace(DISK, piece=size)), group)
        for start in (0, 5, size - 3, 10 * size + 1):
            for decayed in (0, 1, numel // 2, numel):
                parts = cuts(len(found), size, numel, formats, start, decayed)
                assert [parts[0].start, *(part.stop for part in parts)][0] == 0
                assert parts[-1].stop == numel
                assert all(one.stop == two.start for one, two in pairwise(parts))
                for part, piece in zip(parts, found, strict=True):
                    assert 0 < part.stop - part.start <= piece.numel
                for part in parts[1:]:
                    if is_exact(formats):  # no vector of an operation is cut
                        assert (part.start - decayed * (part.start > decayed)) % VECTOR == 0
                    else:
                        assert (start + part.start) % CHUNK == 0
        assert all(piece.num_bytes % 4096 == 0 for piece in found)


def test_a_rank_with_fewer_elements_leaves_its_last_pieces_empty() -> None:
    parts = cuts(4, 64, 100, ("fp32",), 0, 0)
    assert parts == [slice(0, 64), slice(64, 100), slice(100, 100), slice(100, 100)]


def test_what_rests_below() -> None:
    """Moments, and a master copy that is separate and that nothing but UPDATE changes."""

    def names(plan: Plan) -> set[tuple[str, tuple[str, ...]]]:
        flats = build(CLUSTER, plan, BLOCKS, 1).model.flats
        return {(group.name, group.formats) for block in flats for flat in block for group in groups(plan, flat)}

    assert names(kept()) == {("states", ("fp32", "fp32"))}
    assert names(kept(compute="bf16")) == {("states", ("fp32", "fp32", "fp32"))}
    assert names(kept(compute="bf16", optimizer_states="int8")) == {("states", ("fp32", "int8", "int8"))}
    assert names(kept(update="lion")) == {("states", ("fp32",))}
    assert names(kept(update="muon", compute="bf16")) == {
        ("momentum", ("fp32",)),
        ("matrices", ("fp32",)),
        ("states", ("fp32", "fp32", "fp32")),
    }
    assert names(preset("zero3", CLUSTER)) == set()
    islands = parse_plan(
        {"preset": "ddp", "outer": "diloco", "compute": "bf16", "keep": {"optimizer": "disk"}}, CLUSTER
    )
    assert names(islands) == {("states", ("fp32", "fp32"))}


@pytest.mark.parametrize("update", ["adamw", "lion", "muon"])
def test_memory_falls_by_the_states_and_rises_by_the_ring(update: str) -> None:
    changes = {"compute": "bf16", "update": update}
    keep = Keep(optimizer="disk", piece=256, ring=3)
    for name in ("ddp", "zero3"):
        before, after = (build(CLUSTER, kept(name, each, **changes), BLOCKS, 1) for each in (Keep(), keep))
        held = [after.model.flats[block] for block in after.stage.held]
        ring = ring_bytes(after.plan, held)
        assert after.state_bytes["optimizer"] == 0
        assert after.state_bytes["buffers"] == before.state_bytes["buffers"] + ring
        assert ring == 3 * max(
            piece.num_bytes
            for flats in held
            for flat in flats
            for each in groups(after.plan, flat)
            for piece in pieces(after.plan, each)
        )
        kinds = Kinds.of(BLOCKS)
        closed = model_states(CLUSTER, after.plan, kinds, stage_blocks(kinds, range(len(BLOCKS))), 1)
        assert closed.steady["optimizer"] == 0
        assert (
            closed.steady["buffers"] - ring
            == model_states(CLUSTER, before.plan, kinds, stage_blocks(kinds, range(len(BLOCKS))), 1).steady["buffers"]
        )


def test_a_step_reads_and_writes_everything_once() -> None:
    for update in ("adamw", "muon"):
        program = build(CLUSTER, kept(update=update, keep=Keep(optimizer="disk", piece=256)), BLOCKS, 2)
        held = [program.model.flats[block] for block in program.stage.held]
        for message in (MessageClass.KEEP_READ, MessageClass.KEEP_WRITE):
            assert program.sent_bytes[message, "disk"] == resting_bytes(program.plan, held)["disk"] > 0
    assert not any(key[1] == "disk" for key in build(CLUSTER, preset("zero3", CLUSTER), BLOCKS, 2).sent_bytes)
    assert any(each.op is Op.ORTHOGONALISE for each in program.counts)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_parameters_below_leave_two_blocks_on_the_device(name: str, compute: str) -> None:
    """One is updated and one written; bytes are those of two gathers of every block, and of a write of each."""
    keep = Keep(optimizer="disk", params="disk", piece=256)
    plan = kept(name, keep, compute=compute, prefetch=0)
    program = build(CLUSTER, plan, BLOCKS, 1)
    verify(program)
    item, held = {"bf16": 2, "fp32": 4}[compute], [program.model.flats[block] for block in program.stage.held]
    spans = [sum(flat.padded // flat.layout.span(flat.layout.params) for flat in flats) * item for flats in held]
    assert program.state_bytes["params"] == max(map(sum, pairwise(spans)))
    assert program.state_bytes["optimizer"] == 0, "master copies are apart, and rest with the optimizer"
    gathers = [each.block for each in program.instructions if each.op is Op.GATHER]
    updates = [each.block for each in program.instructions if each.op is Op.UPDATE]
    states = sum(
        piece.num_bytes
        for flats in held
        for flat in flats
        for group in groups(plan, flat)
        for piece in pieces(plan, group)
    )

    def below(block: int) -> int:
        found = 0
        for flat in held[block]:
            numel = flat.padded // flat.layout.span(flat.layout.params)
            found += sum(-(-(min(256, numel - start) * item + 64) // 4096) * 4096 for start in range(0, numel, 256))
        return found

    assert program.sent_bytes[MessageClass.KEEP_READ, "disk"] == states + sum(map(below, gathers))
    assert program.sent_bytes[MessageClass.KEEP_WRITE, "disk"] == states + sum(map(below, updates))
    kinds = Kinds.of(BLOCKS)
    closed = model_states(CLUSTER, plan, kinds, stage_blocks(kinds, range(len(BLOCKS))), 1)
    for each in ("params", "buffers", "optimizer", "grads"):
        assert closed.steady[each] + closed.updating.get(each, 0) == program.state_bytes[each]


@pytest.mark.parametrize("model", ["llama tied", "deep gpt2"])
@pytest.mark.parametrize("update", ["adamw", "muon"])
@pytest.mark.parametrize(("name", "sizes"), [("ddp", (1,)), ("ddp", (2, 2)), ("zero3", (2, 2))])
def test_gradients_below_are_on_the_device_while_they_are_used(
    model: str, update: str, name: str, sizes: tuple[int, ...]
) -> None:
    cluster, blocks = cluster_of(*sizes), MODELS[model].declared
    keep = Keep(grads="disk", piece=256)
    plan = replace(preset(name, cluster), update=update, unit=2, keep=keep)
    program = build(cluster, plan, blocks, 2)
    verify(program)
    whole = build(cluster, replace(plan, keep=Keep()), blocks, 2).state_bytes["grads"]
    kinds = Kinds.of(blocks)
    closed = model_states(cluster, plan, kinds, stage_blocks(kinds, range(len(blocks))), 2)
    assert closed.steady["grads"] == 0
    assert program.state_bytes["grads"] == max(*closed.accumulated, closed.updating["grads"]) <= whole
    written = program.sent_bytes[MessageClass.KEEP_WRITE, "disk"]
    assert written == program.sent_bytes[MessageClass.KEEP_READ, "disk"]
    assert written == resting_bytes(plan, [program.model.flats[block] for block in program.stage.held])["disk"]


def test_gradients_below_leave_once_a_step() -> None:
    plan = kept(keep=Keep(grads="disk"))
    with pytest.raises(PlanError, match=r"unit = 1: gradients leave the device once a step, so all 4 micro-batches"):
        build(CLUSTER, plan, BLOCKS, 4)
    with pytest.raises(PlanError, match=r"pass a block in a row; write unit = 16, or a larger micro_batch"):
        build(CLUSTER, replace(plan, compute="fp32"), BLOCKS, 16)
    with pytest.raises(PlanError, match=r"in bf16, so it has at most 8: write a larger micro_batch, or leave keep"):
        build(CLUSTER, replace(plan, compute="bf16"), BLOCKS, 16)
    for table, words in (
        ({"mapping": {"node": {"pipeline": 2}}, "schedule": "1f1b"}, "beside schedule = '1f1b'"),
        ({"outer": "diloco", "preset": "ddp"}, "beside plan.outer"),
    ):
        with pytest.raises(PlanError, match=words):
            check_keep(CLUSTER, parse_plan({"preset": "zero3", "keep": {"grads": "disk"}, **table}, CLUSTER))


def test_a_block_below_the_device_is_read_before_its_pass() -> None:
    """The rules of a gather hold for one rank, too."""
    cluster = cluster_of(1)
    program = build(cluster, replace(preset("ddp", cluster), keep=Keep(params="disk", piece=256)), BLOCKS, 1)
    verify(program)
    first = next(index for index, each in enumerate(program.instructions) if each.op is Op.GATHER)
    without = (*program.instructions[:first], *program.instructions[first + 1 :])
    with pytest.raises(ProgramError, match="are not gathered"):
        verify(replace(program, instructions=without))


REFUSED = [
    ({"optimizer": "host"}, "keep.optimizer = 'host' under a CPU: the host is the device"),
    ({"params": "host"}, "keep.params = 'host' under a CPU: the host is the device"),
    ({"grads": "host", "optimizer": "disk"}, "keep.grads = 'host' under a CPU: the host is the device"),
    ({"ring": 8}, "keep.piece = 1048576 and keep.ring = 8 have no effect, since no state is kept below"),
    ({"grads": "disk", "ring": 8}, "keep.ring = 8 has no effect: only optimizer states pass through the ring"),
    ({"optimizer": "disk", "piece": 100}, "keep.piece = 100 must be a multiple of 64"),
    ({"optimizer": "disk", "ring": 1}, "keep.ring = 1 must be 2 to 64 pieces"),
]


@pytest.mark.parametrize(("table", "words"), REFUSED)
def test_a_medium_that_does_not_work_is_refused(table: dict[str, object], words: str) -> None:
    plan = parse_plan({"preset": "zero3", "keep": table}, CLUSTER)
    with pytest.raises(PlanError, match=words):
        validate(CLUSTER, plan, BLOCKS)


def test_plans_that_hold_whole_parameters_are_refused_beside_parameters_below() -> None:
    keep = {"params": "disk"}
    for table, words in (
        ({"preset": "zero3", "params_backward": "package", "keep": keep}, "beside params_backward = 'package'"),
        ({"preset": "ddp", "outer": "diloco", "keep": keep}, r"beside plan\.outer: islands keep several whole copies"),
        (
            {"preset": "zero3", "products": "fp8", "wire": {"gather": {"node": "fp8"}}, "keep": keep},
            "beside products = 'fp8' in fp8 messages",
        ),
    ):
        with pytest.raises(PlanError, match=words):
            check_keep(CLUSTER, parse_plan(table, CLUSTER))


def test_what_has_no_effect_or_no_room_is_refused() -> None:
    with pytest.raises(PlanError, match="has no effect: optimizer 'sgd' keeps no state"):
        validate(CLUSTER, kept(update="sgd"), BLOCKS)
    with pytest.raises(PlanError, match=r"keep\.piece = 256 must be a multiple of 65536"):
        validate(CLUSTER, kept(optimizer_states="int8", keep=replace(DISK, piece=256)), BLOCKS)
    bare = replace(CLUSTER, device=replace(CLUSTER.device, below={}))
    with pytest.raises(PlanError, match=r"has no disk below it: describe it as \[device.below.disk\]"):
        validate(bare, kept(), BLOCKS)
    tiny = Medium(memory_bytes=1e4, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    small = replace(CLUSTER, device=replace(CLUSTER.device, below={"disk": tiny}))
    with pytest.raises(ProgramError, match="GB on the disk, and a device's share of it is 1e-05 GB"):
        verify(build(small, kept(), BLOCKS, 1))
    with pytest.raises(ClusterError, match=r"device\.below\.host: the device is a CPU"):
        replace(CLUSTER, device=replace(CLUSTER.device, below={"host": tiny}))
    with pytest.raises(ClusterError, match=r"device\.below\.dsk is no medium below a device: known are host and disk"):
        replace(CLUSTER, device=replace(CLUSTER.device, below={"dsk": tiny}))
