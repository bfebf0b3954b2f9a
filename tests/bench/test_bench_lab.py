"""The lab: what the report makes of results, and adapters that train alike."""

import importlib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from bench.common import real_blocks
from bench.lab import counters
from bench.lab.__main__ import cause, parse, read_results
from bench.lab.contest import Setting, Text, model_of
from bench.lab.job import CONTESTANTS, Job, contestant, floor
from bench.lab.picture import lab_svg
from bench.lab.report import page
from bench.lab.results import COMPRESSED, UNCOMPRESSED, Case, loss_spread, summarise, verdicts
from bench.lab.ring import ring_reduce_scatter
from terrace.launch.start import LocalPool, World

TINY = Job(hidden=64, layers=2, vocab=257, sequence=16, tiers={"package": 2, "system": 2})
NUM_PARAMS = 1_000_000
S_BYTES = 2 * NUM_PARAMS
ALIKE = ("ddp", "zero3", "hpz", "hsdp", "terrace zero3", "terrace hsdp", "terrace three-level")


def record(name: str, accum: int, step_s: float, crossing: float, **more: Any) -> dict[str, Any]:
    """A line of results: `crossing` S between nodes, three rounds' worth of nearly equal steps."""
    sent = {"package": 8e6, "node": 4e6, "system": crossing * S_BYTES}
    machine = {"processor": "a processor", "cores": "2", "kernel": "6.1", "python": "3.11.7", "torch": "2.13.0"}
    return {
        **machine,
        "deepspeed": "not installed",
        "links": "1",
        "round": 0,
        "load": 1.0,
        "contestant": name,
        "accum": accum,
        "num_params": NUM_PARAMS,
        "steps_s": [step_s * factor for factor in (0.9, 1.0, 1.1)],
        "losses": [8.0, 7.5, 7.25],
        "grad_norms": [3.0, 2.0, 1.0],
        "sent_bytes": sent,
        "expected_bytes": {tier: int(count / 1.01) for tier, count in sent.items()} if "terrace" in name else None,
        "peak_growth_bytes": 100_000_000,
        "optimizer_bytes": 12 * NUM_PARAMS // 8,
        "time_s": {"forward": 0.1} if "terrace" in name else {},
        **more,
    }


def results(**ours: Any) -> list[dict[str, Any]]:
    """A lab in which every target is met, unless `ours` spoils the compressed plan."""
    found = []
    for accum in (1, 4):
        found += [
            record("zero3", accum, 20.0, 5.27 * accum),
            record("hsdp", accum, 6.0, 2.01),
            record(UNCOMPRESSED, accum, 2.5, 2.01),
            record(COMPRESSED, accum, 1.5, 0.76, **ours),
        ]
    return [*found, {**record("deepspeed zero++", 1, 1.0, 1.0), "error": "ValueError: not implemented"}]


def met(records: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {verdict.target: verdict.met for verdict in verdicts(summarise(records), Job())}


def test_all_targets_can_be_met() -> None:
    found = met(results())
    assert len(found) == 11
    assert all(found.values())


@pytest.mark.parametrize(
    ("spoilt", "words", "count"),
    [
        ({"steps_s": [5.0, 5.0]}, "step at most", 3),
        ({"sent_bytes": {"package": 8e6, "node": 4e6, "system": 0.9 * S_BYTES}}, "between nodes", 2),
        ({"optimizer_bytes": 12 * NUM_PARAMS // 4}, "optimizer state", 1),
        ({"expected_bytes": {"package": 8e6, "node": 4e6, "system": 0.7 * S_BYTES}}, "ledger", 2),
    ],
)
def test_a_target_can_be_missed(spoilt: dict[str, Any], words: str, count: int) -> None:
    missed = [target for target, verdict in met(results(**spoilt)).items() if verdict is False]
    assert len([target for target in missed if words in target]) == count


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    without = [r for r in results() if r["contestant"] != COMPRESSED]
    found = met([{**r, "sent_bytes": None} for r in without])
    assert None in found.values()
    assert False not in found.values()


def test_the_page_shows_every_case_and_every_failure() -> None:
    text = page(results(steps_s=[5.0]), Job())
    assert text.count("| did not run |") == 1
    assert "- DeepSpeed ZeRO++, accum 1: ValueError: not implemented" in text
    assert "- not tried: DDP, FSDP2 hpZ" in text
    assert "**MISSED**" in text
    assert "| FSDP2 HSDP | 6.00 |" in text
    for entry in CONTESTANTS:
        assert entry.settings in text


def test_the_picture_is_small_and_well_formed() -> None:
    svg = lab_svg(summarise(results()), Job())
    assert len(svg.encode()) < 100_000
    words = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    assert {"Terrace three-level, compressed", "FSDP2 ZeRO-3", "FSDP2 HSDP"} <= set(words)
    assert "5.27 S" in words
    assert "DeepSpeed ZeRO++" not in words  # it did not run


def test_rounds_are_put_together_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lab.jsonl"
    whole = [record("hsdp", 1, 6.0, 2.0), record("hsdp", 1, 8.0, 2.0, round=1)]
    path.write_text("\n".join(json.dumps(line) for line in whole) + '\n{"contestant": "hs')
    case = summarise(read_results(path))["hsdp", 1]
    assert len(case.steps_s) == 6
    assert case.quartiles_s[0] < case.median_s < case.quartiles_s[1]


def test_floors_are_those_of_the_messages_on_paper() -> None:
    job = Job()
    found = {name: floor(contestant(name).inter_node, 4, job) for name in ("zero3", "hpz", "ddp", "hsdp", COMPRESSED)}
    assert found == {"zero3": 21.0, "hpz": 14.0, "ddp": 3.5, "hsdp": 2.0, COMPRESSED: 0.75}


def test_options_and_causes(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--quick"]).rounds == 1
    with pytest.raises(SystemExit):
        parse(["--only", "hsdp,nobody"])
    assert "nobody" in capsys.readouterr().err
    output = "[rank 3] Traceback\n[rank 3] ValueError: no such thing\nRuntimeError: Connection closed by peer\n"
    assert cause(output, 1) == "exit 1: ValueError: no such thing"


def test_counters_of_links(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    row = "  {}: 1 2 3 4 5 6 7 8 {} 10 11 12 13 14 15 16\n"
    table.write_text("heads\nheads\n" + row.format("lo", 7) + row.format("t0", 40) + row.format("t1", 50))
    assert counters.sent_bytes(2, table) == [40, 50]
    assert counters.sent_bytes(3, table) is None


def ring(world: World) -> None:
    """The ring's sums are those of an all-reduce, also where the output lies in the input."""
    given = torch.arange(4.0 * world.world_size) * (world.rank + 1)
    total = given.clone()
    dist.all_reduce(total)
    wanted = total.view(world.world_size, -1)[world.rank]
    own = given.view(world.world_size, -1)[world.rank]
    ring_reduce_scatter(own, given, group=dist.group.WORLD)
    assert torch.equal(own, wanted)


def train(world: World, names: tuple[str, ...], num_micros: int) -> dict[str, tuple[list[float], float]]:
    """Train two steps under each contestant; return mean losses and the first gradient norm."""
    text, found = Text(TINY), {}
    os.environ["LOCAL_RANK"] = str(world.rank)  # as a launcher does; DeepSpeed asks for it
    for name in names:
        entry = contestant(name)
        setting = Setting(job=TINY, blocks=real_blocks(model_of(TINY)), num_micros=num_micros, rank=world.rank)
        made = importlib.import_module(f"bench.lab.{entry.adapter}").make(setting, **entry.options)
        results = [made.step(text.batches(world.rank, step, num_micros)) for step in range(2)]
        made.finish()
        losses = torch.tensor([result.loss for result in results], dtype=torch.float64)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        found[name] = (losses.tolist(), results[0].grad_norm)
        assert made.states(), f"{name} keeps no optimizer state"
        made.close()
    return found


def agree(found: dict[str, tuple[list[float], float]]) -> None:
    """Losses within the rounding of bf16; norms too, since AdamW would hide a wrong scale of gradients."""
    cases = {(name, 1): Case(name=name, accum=1, losses=losses) for name, (losses, _) in found.items()}
    assert loss_spread(cases, 1) < 2e-3
    norms = [norm for _, norm in found.values()]
    assert max(norms) / min(norms) < 1.02


@pytest.mark.nightly
@pytest.mark.timeout(360)
def test_contestants_train_alike() -> None:
    with LocalPool(4) as pool:
        pool.run(4, ring)
        for num_micros in (1, 2):
            agree(pool.run(4, train, ALIKE, num_micros, timeout_s=200)[0])


@pytest.mark.timeout(360)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install -e '.[lab]'")
def test_deepspeed_trains_alike() -> None:
    with LocalPool(4) as pool:
        agree(pool.run(4, train, ("zero3", "deepspeed zero3"), 2, timeout_s=300)[0])
