"""The lab: the report of results, which settings are taken, and adapters that train alike."""

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
from bench.lab import __main__ as runner
from bench.lab import counters
from bench.lab.compute import split
from bench.lab.contest import Setting, Text, model_of
from bench.lab.entries import CONTESTANTS, Entry, Trial, contestant
from bench.lab.job import MEMORY_LIMIT_BYTES, Job, floor, windows
from bench.lab.launches import cause, command
from bench.lab.links import FRONTIER, LAB, gather_bytes, on_frontier, overrides, preset_rates, rates_in_proportion
from bench.lab.picture import lab_svg
from bench.lab.report import page
from bench.lab.results import COMPRESSED, UNCOMPRESSED, Case, goals, loss_spread, read, summarise
from bench.lab.ring import ring_reduce_scatter
from bench.lab.schedule import Task, estimate_s, micro_batch_s, missing, taken, tasks
from terrace.launch.start import LocalPool, World

TINY = Job(hidden=64, layers=2, vocab=257, sequence=16, tiers={"package": 2, "system": 2})
NUM_PARAMS = 1_000_000
S_BYTES = 2 * NUM_PARAMS
MB = 1 << 20
NAMES = [entry.name for entry in CONTESTANTS]


def record(name: str, accum: int, step_s: float, crossing: float, **more: Any) -> dict[str, Any]:
    """A line of results: `crossing` S between nodes, three nearly equal steps."""
    sent = {"package": 8e6, "node": 4e6, "system": crossing * S_BYTES}
    machine = {"processor": "a processor", "cores": "2", "kernel": "6.1", "python": "3.11.7", "torch": "2.13.0"}
    return {
        **machine,
        "deepspeed": "not installed",
        "kind": "cases",
        "links": LAB,
        "scale": 1.0,
        "rates": preset_rates(),
        "round": 0,
        "load": 1.0,
        "contestant": name,
        "accum": accum,
        "trial": contestant(name).trials[0].name,
        "dropped": False,
        "num_params": NUM_PARAMS,
        "steps_s": [step_s * factor for factor in (0.9, 1.0, 1.1)],
        "cpu_s": step_s,
        "losses": [8.0, 7.5, 7.25],
        "grad_norms": [3.0, 2.0, 1.0],
        "sent_bytes": sent,
        "expected_bytes": {tier: int(count / 1.01) for tier, count in sent.items()} if "terrace" in name else None,
        "peak_growth_bytes": 100 * MB,
        "optimizer_bytes": 12 * NUM_PARAMS // 8,
        "time_s": {"forward": 0.1} if "terrace" in name else {},
        **more,
    }


def tried(name: str, trial: Trial, step_s: float, **more: Any) -> dict[str, Any]:
    """A line of a short run."""
    return record(name, 4, step_s, 1.0, **{"kind": "trials", "trial": trial.name, "steps_s": [step_s], **more})


def results(**ours: Any) -> list[dict[str, Any]]:
    """A lab in which every target is met, unless `ours` spoils the compressed plan."""
    found = [record("zero3 x4", 4, 20.0, 21.0), record("hsdp x4", 4, 6.0, 2.01)]
    for accum in (1, 4):
        found += [
            record("compute", accum, 1.4, 0.0),
            record("hsdp", accum, 4.0, 2.01),
            record(UNCOMPRESSED, accum, 2.5, 2.01),
            record(COMPRESSED, accum, 1.5, 0.76, **ours),
        ]
    failed = {"kind": "cases", "contestant": "deepspeed zero++", "accum": 1, "error": "ValueError: not implemented"}
    place = {key: found[0][key] for key in ("links", "scale", "rates", "round", "cores", "processor")}
    return [{**place, **failed}, *found]


def met(records: list[dict[str, Any]], links: str = LAB) -> dict[str, bool | None]:
    found = goals(summarise(records)[links], Job(), links, cores=2)
    return {name: None if claim is None else claim.is_met for name, claim in found.items()}


def test_all_targets_can_be_met() -> None:
    found = met(results())
    assert len(found) == 14
    assert all(found.values())


def test_links_of_frontier_ask_for_more() -> None:
    there = [{**line, "links": FRONTIER} for line in results(steps_s=[1.8, 1.8])]
    assert all(met(there, FRONTIER).values())
    there = [{**line, "links": FRONTIER} for line in results(steps_s=[1.9, 1.9])]
    missed = [name for name, verdict in met(there, FRONTIER).items() if verdict is False]
    assert missed == [f"lab, frontier links, {COMPRESSED}, accum 4: times as fast as zero3 x4"]
    assert all(met([{**line, "links": LAB} for line in there]).values())


@pytest.mark.parametrize(
    ("spoilt", "words", "count"),
    [
        ({"steps_s": [5.0, 5.0]}, "times as fast", 4),
        ({"cpu_s": 2.0}, "processor seconds", 2),
        ({"sent_bytes": {"package": 8e6, "node": 4e6, "system": 0.9 * S_BYTES}}, "between nodes", 2),
        ({"optimizer_bytes": 12 * NUM_PARAMS // 4}, "optimizer state", 1),
        ({"expected_bytes": {"package": 8e6, "node": 4e6, "system": 0.7 * S_BYTES}}, "ledger", 2),
    ],
)
def test_a_target_can_be_missed(spoilt: dict[str, Any], words: str, count: int) -> None:
    missed = [name for name, verdict in met(results(**spoilt)).items() if verdict is False]
    assert len([name for name in missed if words in name]) == count


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    without = [line for line in results() if line["contestant"] != COMPRESSED]
    found = met([{**line, "sent_bytes": None} for line in without])
    assert None in found.values()
    assert False not in found.values()


def test_the_fastest_setting_within_the_memory_limit_is_taken() -> None:
    entry = contestant("hsdp")
    first, second, third, kept, _ = entry.trials
    over = {"peak_growth_bytes": MEMORY_LIMIT_BYTES + 1}
    lines = [tried("hsdp", first, 4.0), tried("hsdp", second, 3.0), tried("hsdp", kept, 2.0, **over)]
    lines.append(tried("hsdp", third, 1.0, dropped=True))
    assert taken(lines, LAB, entry) == second
    assert taken(lines, FRONTIER, entry) is None
    # None fits: the one that needs least.
    more = {"peak_growth_bytes": MEMORY_LIMIT_BYTES + 5}
    assert taken([*({**line, **more} for line in lines[:2]), lines[2]], LAB, entry) == kept
    assert taken([], LAB, contestant("hsdp x4")) == contestant("hsdp x4").trials[0]


def test_a_second_call_runs_the_missing_cases() -> None:
    entry = contestant("hsdp")
    first, *others = entry.trials
    trials, cases = Task("trials", LAB, entry), Task("cases", LAB, entry, 1)
    lines = [tried("hsdp", first, 4.0), tried("hsdp", others[0], 4.0, error="ValueError: no")]
    assert missing(trials, lines, [1, 4]) == [trial.name for trial in others[1:]]
    assert missing(trials, lines, [1, 4], retry=True) == [trial.name for trial in others]
    assert missing(cases, [record("hsdp", 1, 4.0, 2.0)], [1, 4]) == [1, 4]
    assert missing(cases, [record("hsdp", 1, 4.0, 2.0, round=1)], [1, 4]) == [4]
    assert missing(Task("cases", LAB, contestant("hsdp x4")), [], [1, 4]) == [4]


def test_a_whole_run_takes_less_than_35_minutes() -> None:
    job, whole = Job(), tasks(NAMES, [LAB, FRONTIER], 2)
    assert whole[0] == Task("trials", LAB, contestant("compute"))
    assert all(task not in whole[:number] for number, task in enumerate(whole))
    assert {task.entry.name for task in whole if task.round == 1} == {e.name for e in CONTESTANTS if e.is_central}
    rates = {LAB: preset_rates(), FRONTIER: rates_in_proportion(on_frontier(), 0.4, 12_500_000, job)}
    total_s = sum(estimate_s(task, rates[task.links], 1.0, 2, job) for task in whole)
    assert total_s < 60 * 35


def test_a_setting_that_fails_costs_itself_alone_and_an_absent_rival_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def launch(command: list[str], timeout_s: float) -> tuple[list[dict[str, Any]], str]:
        """Ranks whose second setting fails; the last is the fastest."""
        name, cases = (command[command.index(word) + 1] for word in ("bench.lab.rank", "--cases"))
        launched.append((name, len(json.loads(cases)), timeout_s))
        names = [trial.name for trial in contestant(name).trials]
        found: list[dict[str, Any]] = []
        for accum, words in json.loads(cases):
            if names.index(words) == 1:
                return found, "ValueError: no"
            line = record(name, accum, 9.0 - names.index(words), 1.0, trial=words)
            found.append({key: value for key, value in line.items() if key not in ("kind", "links", "scale", "round")})
        return found, ""

    monkeypatch.setattr(runner, "run", launch)
    monkeypatch.setattr(Entry, "absence", lambda self: "not here" if "deepspeed" in self.name else "")
    path = tmp_path / "lab.jsonl"
    words = ["--only", "hsdp,deepspeed zero3", "--links", LAB, "--rounds", "1", "--results", str(path)]
    lab = runner.Lab(runner.parse(words))
    for task in lab.remaining():
        lab.run(task)
    assert [(name, count) for name, count, _ in launched] == [("compute", 2), ("hsdp", 5), ("hsdp", 3), ("hsdp", 2)]
    assert max(timeout_s for *_, timeout_s in launched) <= runner.TIMEOUT_S
    lines = read(path)
    failed = [(line["contestant"], line["error"]) for line in lines if "error" in line]
    assert failed == [("compute", "ValueError: no"), ("hsdp", "ValueError: no"), *[("deepspeed zero3", "not here")] * 4]
    assert {line["trial"] for line in lines if line["kind"] == "cases" and "trial" in line} == {
        contestant("hsdp").trials[4].name
    }
    assert not lab.remaining()
    late = runner.Lab(runner.parse([*words, "--retry", "--minutes", "0"]))
    for task in late.remaining():
        late.run(task)
    assert late.left_out == 4  # all that failed, since there is no time for another launch


def test_no_launch_begins_after_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[float] = []

    def launch(command: list[str], timeout_s: float) -> tuple[list[dict[str, Any]], str]:
        """Ranks that do not end: they are stopped, and then the time is over."""
        launched.append(timeout_s)
        monkeypatch.setattr(lab, "_end_s", 0.0)
        return [], "did not end"

    monkeypatch.setattr(runner, "run", launch)
    words = ["--only", "compute,hsdp", "--links", LAB, "--minutes", "5", "--results", str(tmp_path / "lab.jsonl")]
    lab = runner.Lab(runner.parse(words))
    remaining = lab.remaining()
    for task in remaining:
        lab.run(task)
    assert len(launched) == 1
    assert launched[0] <= 5 * 60 + runner.GRACE_S
    assert lab.left_out == len(remaining)  # the first has a setting left that was not tried


def test_links_stand_to_compute_as_on_frontier() -> None:
    wanted, job = on_frontier(), Job()
    assert wanted.num_params == pytest.approx(20e9, rel=0.02)
    # One product forward and two backward, 2 FLOPs a parameter and token, at the 125 TFLOP/s measured on a GCD.
    assert wanted.compute_s == pytest.approx(6 * 20.1e9 * 2048 / 125e12, rel=0.3)
    rates = rates_in_proportion(wanted, 0.5, NUM_PARAMS, job)
    seconds = {tier: sent / rates[tier] for tier, sent in gather_bytes(S_BYTES, job).items()}
    assert {tier: each / 0.5 for tier, each in seconds.items()} == pytest.approx(wanted.shares())
    assert gather_bytes(8.0, job) == {"package": 4.0, "node": 2.0, "system": 1.0}
    whole, cut = contestant("compute").trials
    assert micro_batch_s([tried("compute", whole, 2.0), tried("compute", cut, 2.4)]) == 0.5
    assert micro_batch_s([]) is None
    assert set(overrides(rates)) < set(command(contestant("hsdp"), [(4, "x")], 1, 2.0, FRONTIER, rates))


def test_the_page_shows_every_case_every_failure_and_every_setting() -> None:
    hsdp = contestant("hsdp")
    lines = [*results(steps_s=[5.0]), tried("hsdp", hsdp.trials[0], 4.0), tried("hsdp", hsdp.trials[1], 3.0)]
    lines += [tried("compute", trial, 1.0) for trial in contestant("compute").trials]
    there = [{**line, "links": FRONTIER} for line in results()]
    text = page([*lines, *there], Job())
    assert text.count("| did not run |") == 2
    assert "- DeepSpeed ZeRO++, accum 1: ValueError: not implemented" in text
    assert "- not measured on these links: DDP, FSDP2 ZeRO-3, FSDP2 hpZ" in text
    assert "**MISSED**" in text
    assert "| FSDP2 HSDP | 1 x 4, next block prefetched | 4.00 |" in text
    assert "| FSDP2 HSDP | 1 x 4, next two blocks prefetched | 3.00 | 105 | taken |" in text
    assert "Compute : package : node : system is **1 : 0.060 : 0.091 : 0.219**" in text
    for entry in CONTESTANTS:
        assert entry.settings in text


def test_the_picture_is_small_and_well_formed() -> None:
    svg = lab_svg(summarise(results())[LAB], Job(), "slow links")
    assert len(svg.encode()) < 100_000
    words = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    assert {"Terrace three-level, compressed", "FSDP2 ZeRO-3, 4 micro-batches", "FSDP2 HSDP"} <= set(words)
    assert "21.00 S" in words
    assert "DeepSpeed ZeRO++" not in words  # it did not run


def test_rounds_are_put_together_and_a_torn_or_old_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lab.jsonl"
    whole = [record("hsdp", 1, 6.0, 2.0), record("hsdp", 1, 8.0, 2.0, round=1), {"contestant": "hsdp", "links": "1"}]
    path.write_text("\n".join(json.dumps(line) for line in whole) + '\n{"contestant": "hs')
    case = summarise(read(path))[LAB]["hsdp", 1]
    assert len(case.steps_s) == 6
    assert case.quartiles_s[0] < case.median_s < case.quartiles_s[1]


def test_floors_are_those_of_the_messages_on_paper() -> None:
    job = Job()
    found = {name: floor(contestant(name).inter_node, 4, job) for name in ("zero3", "hpz", "ddp", "hsdp", COMPRESSED)}
    assert found == {"zero3": 21.0, "hpz": 14.0, "ddp": 3.5, "hsdp": 2.0, COMPRESSED: 0.75}
    for entry in CONTESTANTS:
        assert len({trial.name for trial in entry.trials}) == len(entry.trials)
        for trial in entry.trials:
            assert floor(trial.inter_node or entry.inter_node, 1, job) <= floor(entry.inter_node, 4, job)


def test_a_step_has_the_same_sequences_however_it_is_cut() -> None:
    job = Job()
    whole, cut = ([*windows(job, 3, 2, 4, size)] for size in (4, 1))
    assert [number for micro in cut for number in micro] == whole[0]
    every = [n for step in (0, 1) for rank in range(8) for micro in windows(job, rank, step, 4, 2) for n in micro]
    assert sorted(every) == list(range(64))


def test_shares_of_the_update_are_of_nearly_equal_size() -> None:
    parameters = [p for block in real_blocks(model_of(Job())) for p in block.parameters()]
    sizes = [sum(p.numel() for p in share) for share in split(parameters, 8)]
    assert sum(sizes) == sum(p.numel() for p in parameters)
    assert max(sizes) < 1.15 * sum(sizes) / 8


def test_options_and_causes(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.parse(["--quick"]).rounds == 1
    assert runner.parse(["--plain"]).links == ["none"]
    with pytest.raises(SystemExit):
        runner.parse(["--only", "hsdp,nobody"])
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


def train(world: World, cases: tuple[tuple[str, str], ...], accum: int) -> dict[str, tuple[list[float], float]]:
    """Train two steps under each contestant and setting; return mean losses and the first gradient norm."""
    text, found = Text(TINY), {}
    os.environ["LOCAL_RANK"] = str(world.rank)  # as a launcher does; DeepSpeed asks for it
    for name, words in cases:
        entry = contestant(name)
        trial = entry.trial(words)
        size = trial.cut(accum)
        blocks = real_blocks(model_of(TINY))
        setting = Setting(job=TINY, blocks=blocks, num_micros=accum // size, micro_batch=size, rank=world.rank)
        made = importlib.import_module(f"bench.lab.{entry.adapter}").make(setting, **entry.arguments(trial))
        results = [made.step(text.batches(world.rank, step, accum, size)) for step in range(2)]
        made.finish()
        losses = torch.tensor([result.loss for result in results], dtype=torch.float64)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        found[f"{name}, {words}"] = (losses.tolist(), results[0].grad_norm)
        assert made.states(), f"{name} keeps no optimizer state"
        made.close()
    return found


def agree(found: dict[str, tuple[list[float], float]]) -> None:
    """Losses within the rounding of bf16; norms too, since AdamW would hide a wrong scale of gradients."""
    cases = {(name, 1): Case(name=name, accum=1, losses=losses) for name, (losses, _) in found.items()}
    assert loss_spread(cases, 1) < 5e-3
    norms = [norm for _, norm in found.values()]
    assert max(norms) / min(norms) < 1.02


def cases_of(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, trial.name) for name in names for trial in contestant(name).trials)


@pytest.mark.nightly
@pytest.mark.timeout(360)
def test_contestants_train_alike() -> None:
    alike = cases_of("ddp", "zero3", "hpz", "hsdp", "hsdp x4", "terrace zero3", "terrace hsdp", "terrace three-level")
    with LocalPool(4) as pool:
        pool.run(4, ring)
        agree(pool.run(4, train, alike, 4, timeout_s=300)[0])


@pytest.mark.timeout(360)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install -e '.[lab]'")
def test_deepspeed_trains_alike() -> None:
    with LocalPool(4) as pool:
        agree(pool.run(4, train, cases_of("zero3 x4", "deepspeed zero3"), 4, timeout_s=300)[0])
