"""Rules, bytes and memory of updates on the host's cores (`keep.update`)."""

from dataclasses import replace

import pytest

from terrace.base.errors import ClusterError, PlanError, ProgramError
from terrace.cluster.below import Medium
from terrace.cluster.cluster import Cluster
from terrace.plan.keep import CORES, Keep
from terrace.plan.keep_rules import check_keep
from terrace.plan.kept import resting_bytes, updated_bytes
from terrace.plan.plan import Plan
from terrace.plan.presets import parse_plan, preset
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from terrace.program.verify import verify
from tests.support.toys import MODELS, cluster_of

BLOCKS = MODELS["llama tied"].declared
HOST = Medium(memory_bytes=1e9, read_bytes_per_s=1e10, write_bytes_per_s=1e10, update_bytes_per_s=5e10)
ON_CPU = cluster_of(2, 2)
DISK = ON_CPU.device.below["disk"]
ON_HOST = Keep(optimizer="host", grads="host", update="host", piece=256)


def with_host(host: Medium = HOST) -> Cluster:
    return replace(ON_CPU, device=replace(ON_CPU.device, backend="cuda", below={"host": host, "disk": DISK}))


CLUSTER = with_host()


def planned(name: str, keep: Keep, **changes: object) -> Plan:
    return replace(preset(name, CLUSTER), keep=keep, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("update", ["adamw", "lion"])
def test_gradients_leave_and_parameters_come_back(name: str, update: str) -> None:
    """In the dtype of parameters, once each; states rest in the host's memory and nothing of them is on the device."""
    form = {"compute": "bf16", "update": update}
    program = build(CLUSTER, planned(name, ON_HOST, **form), BLOCKS, 1)
    before = build(CLUSTER, planned(name, Keep(), **form), BLOCKS, 1)
    owned = sum(
        flat.padded // flat.layout.span(flat.layout.optimizer) for block in program.model.flats for flat in block
    )
    numbers = [program.sent_bytes[message, "host"] for message in (MessageClass.KEEP_READ, MessageClass.KEEP_WRITE)]
    assert numbers[0] == numbers[1]
    pieces = sum(
        -(-(flat.padded // flat.layout.span(flat.layout.optimizer)) // 256)
        for block in program.model.flats
        for flat in block
    )
    assert 2 * owned < numbers[0] <= 2 * owned + 4096 * pieces, "2 B a parameter, each piece on whole sectors"
    assert program.state_bytes["optimizer"] == 0 < before.state_bytes["optimizer"]
    assert program.state_bytes["grads"] <= before.state_bytes["grads"]
    assert program.state_bytes.get("buffers", 0) <= before.state_bytes.get("buffers", 0) + 2 * 4096, "no ring"
    resting = resting_bytes(program.plan, program.model.flats)["host"]
    states = {"adamw": 12, "lion": 8}[update] * owned  # fp32: a master copy and moments
    assert resting >= states + numbers[0]
    updated = sum(updated_bytes(program.plan, flat) for block in program.model.flats for flat in block)
    assert updated == 2 * states + 4 * owned


def test_states_on_a_disk_pass_a_ring_in_the_hosts_memory() -> None:
    keep = replace(ON_HOST, optimizer="disk", ring=3)
    program = build(CLUSTER, planned("zero1", keep, compute="bf16"), BLOCKS, 1)
    on_device = build(CLUSTER, planned("zero1", Keep(optimizer="disk", piece=256, ring=3), compute="bf16"), BLOCKS, 1)
    for message in (MessageClass.KEEP_READ, MessageClass.KEEP_WRITE):
        assert program.sent_bytes[message, "disk"] == on_device.sent_bytes[message, "disk"] > 0
        assert program.sent_bytes[message, "host"] > 0
    assert program.state_bytes["buffers"] < on_device.state_bytes["buffers"]
    assert keep.lanes == ("disk", "host", CORES)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"keep": {"update": "host"}}, "keep.update = 'host' with optimizer states on the device"),
    ({"keep": {"update": "host", "optimizer": "host"}}, "keep.grads = 'device': its cores read gradients from its"),
    ({"keep": {"update": "host", "optimizer": "host", "grads": "disk"}}, "write keep.grads = 'host'"),
    ({"update": "muon"}, "beside optimizer 'muon', whose products of matrices belong on the device"),
    ({"outer": "diloco", "preset": "ddp"}, "beside plan.outer: exchanges of islands change the master copy"),
    ({"products": "fp8", "wire": {"gather": {"node": "fp8"}}}, "codes are made from the master copy"),
    ({"keep": {"update": "host", "optimizer": "host", "grads": "host", "ring": 8}}, "updated where they rest; leave"),
    (
        {
            "compute": "bf16",
            "master": "bf16",
            "keep": {"update": "host", "optimizer": "host", "grads": "host", "piece": 256},
        },
        "keep.piece = 256 must be a multiple of 65536",
    ),
]


@pytest.mark.parametrize(("table", "words"), REFUSED)
def test_updates_that_cannot_run_on_the_host_are_refused(table: dict[str, object], words: str) -> None:
    keep = {"optimizer": "host", "grads": "host", "update": "host"}
    update = table.pop("update", "adamw")
    plan = replace(parse_plan({"preset": "zero3", "keep": keep, **table}, CLUSTER), update=str(update))
    table["update"] = update  # parameters are shared by all runs of this test
    with pytest.raises(PlanError, match=words):
        check_keep(CLUSTER, plan)


def test_a_cluster_says_how_fast_its_host_updates() -> None:
    silent = with_host(replace(HOST, update_bytes_per_s=0.0))
    with pytest.raises(PlanError, match=r"give device\.below\.host\.update_bytes_per_s, which terrace probe measures"):
        validate(silent, planned("ddp", ON_HOST), BLOCKS)
    with pytest.raises(PlanError, match="the device is the host; write keep"):
        validate(ON_CPU, planned("ddp", Keep(optimizer="disk", grads="disk", update="host")), BLOCKS)
    fast = {"disk": replace(DISK, update_bytes_per_s=1e9)}
    with pytest.raises(ClusterError, match=r"below\.disk\.update_bytes_per_s = 1e\+09 has no effect"):
        replace(ON_CPU, device=replace(ON_CPU.device, below=fast))
    with pytest.raises(ClusterError, match=r"update_bytes_per_s = 50 must be a positive number"):
        with_host(replace(HOST, update_bytes_per_s=50))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"keep": {"optimizer": "host", "order": "backward"}}, "of updates on the device, which would hold up its"),
        ({"compute": "fp16"}, "beside compute = 'fp16': whether a step is skipped is known at its end"),
        ({"schedule": "1f1b", "mapping": {"node": {"pipeline": 2}}}, "beside schedule = '1f1b'"),
    ],
)
def test_an_order_that_does_not_work_is_refused(table: dict[str, object], words: str) -> None:
    keep = {"optimizer": "host", "grads": "host", "update": "host", "order": "backward"}
    with pytest.raises(PlanError, match=words):
        check_keep(CLUSTER, parse_plan({"preset": "zero3", "keep": keep, **table}, CLUSTER))


def test_a_program_updates_a_block_behind_its_gradient() -> None:
    """A verified one: the update of a block whose sums are not there is refused."""
    program = build(CLUSTER, planned("zero3", replace(ON_HOST, order="backward")), BLOCKS, 1)
    verify(program)
    named = [str(each) for each in program.instructions]
    assert named.index("UPDATE b3") < named.index("BACKWARD b2 m0")
    assert named[-1] == "CLIP"
    without = tuple(each for each in program.instructions if str(each) != "AGREE b3")
    with pytest.raises(ProgramError, match="UPDATE b3`: it needs `AGREE b3` before it"):
        verify(replace(program, instructions=without))
