"""The slow link: its runner, its page, and rivals that train as the reference of an outer loop."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.claims import read
from bench.common import real_blocks
from bench.lab.contest import Text, model_of
from bench.lab.job import ADAMW, Job
from bench.lab.launch import Place
from bench.slow import __main__ as runner
from bench.slow.contestants import CONTESTANTS, DELAY, EVERY, FREE, JOB, PLAN, SLOW, Entry, contestant
from bench.slow.page import claims, page, summarise
from bench.slow.rank import run
from terrace.launch.start import LocalPool, World
from terrace.model.decoder import token_loss
from tests.support.outer_reference import OuterLoop, OuterReference

TINY = Job(hidden=64, layers=2, vocab=257, sequence=16, tiers={"package": 2, "system": 2})
NUM_STEPS = 2 * EVERY + 2  # two steps see what two exchanges left
CLOSE = 1e-5  # fp32 against fp64
NEVER = OuterLoop(every=1000 * EVERY, optimizer="average", lr=1.0)
NAMES = [entry.name for entry in CONTESTANTS]


class Early(OuterLoop):
    """A fragment starts `delay` steps before its turn and is applied in it, as torchft has it."""

    def starting(self, step: int) -> list[int]:
        return super().starting(step + self.delay)


def train(world: World, name: str, **options: Any) -> Any:
    """The record of a contestant, with other options where given: its first cycle is for warming up."""
    torch.set_num_threads(1)
    entry = contestant(name)
    own = {**entry.options, **options}
    short = Entry(name=name, label="", module=entry.module, options=own, warmup=EVERY, span=NUM_STEPS - EVERY)
    return run(short, TINY, Place(world.rank, TINY.world_size), 1)


def train_in_fp32(world: World) -> Any:
    """The record of ours with nothing rounded on the way."""
    exact = PLAN.replace('messages = "bf16"\n', "").partition("[wire.outer]")[0]
    return train(world, "terrace", plan=exact)


def reference(outer: OuterLoop, num_islands: int = TINY.num_nodes, exchanges: range = range(0)) -> list[float]:
    """Mean losses of steps; after those in `exchanges` everything is exchanged besides."""
    table = {"name": "adamw", "beta1": ADAMW.beta1, "beta2": ADAMW.beta2, "eps": ADAMW.eps, "clip": ADAMW.clip}
    blocks = real_blocks(model_of(TINY), torch.float64)
    simulated = OuterReference(blocks, token_loss, num_islands, table, outer)
    text, losses, size = Text(TINY), [], TINY.world_size // num_islands
    for step in range(NUM_STEPS):
        micros = [
            [(*batch, None) for place in range(size) for batch in text.batches(island * size + place, step, 1, 1)]
            for island in range(num_islands)
        ]
        losses.append(simulated.step(micros, ADAMW.lr, last=step in exchanges).loss)
    return losses


def apart(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_hooks_train_as_the_reference() -> None:
    with LocalPool(4) as pool:
        local, bf16, powersgd = (
            pool.run(4, train, name, timeout_s=300)[0]["losses"]
            for name in ("post-local-sgd", "ddp-bf16", "ddp-powersgd")
        )
    assert apart(local, reference(NEVER, exchanges=range(0, NUM_STEPS, EVERY))) < CLOSE
    assert apart(local, reference(NEVER)) > 100 * CLOSE, "the averages would not be missed"
    synchronous = reference(NEVER, num_islands=1)
    assert apart(bf16, synchronous) < 5e-3
    assert apart(powersgd[:3], synchronous[:3]) < CLOSE, "its first two steps send whole gradients"
    assert apart(powersgd, synchronous) > 100 * CLOSE, "it compresses"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ours_trains_as_the_reference() -> None:
    with LocalPool(4) as pool:
        rounded = pool.run(4, train, "terrace", timeout_s=300)[0]["losses"]
        found = pool.run(4, train_in_fp32, timeout_s=300)[0]["losses"]
    exact = reference(OuterLoop(every=EVERY, fragments=4, delay=DELAY))
    assert apart(found, exact) < CLOSE
    assert apart(rounded, exact) < 5e-3, "gradients are rounded to bf16, changes to int4"
    assert apart(rounded, reference(NEVER)) > 2e-2


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed: pip install -e '.[lab]'")
@pytest.mark.parametrize(
    ("name", "outer"),
    [
        ("torchft", OuterLoop(every=EVERY)),
        ("torchft-fsdp", OuterLoop(every=EVERY)),
        ("torchft-streaming", Early(every=EVERY, fragments=4, delay=4, keep=0.0)),
    ],
)
def test_torchft_trains_as_the_reference(name: str, outer: OuterLoop) -> None:
    with LocalPool(4) as pool:
        found = pool.run(4, train, name, timeout_s=300)[0]
    assert apart(found["losses"], reference(outer)) < CLOSE
    assert apart(found["losses"], reference(NEVER)) > 100 * CLOSE
    assert found["sent_bytes"] is None, "the loopback has no link to count"
    assert len(found["steps_s"]) == 1


def record(name: str, links: str, step_s: float, number: int = 0, **more: Any) -> dict[str, Any]:
    """A line of results, in which losses fall by 0.01 a step."""
    machine = {"processor": "a processor", "cores": "2", "torch": "2.13.0", "torchft": "0.2.0"}
    return {
        **machine,
        "contestant": name,
        "links": links,
        "round": number,
        "load": 1.5,
        "num_params": 1_000_000,
        "steps_s": [step_s, step_s],
        "cpu_s": 0.5,
        "losses": [5.0 - 0.01 * step for step in range(100)],
        "sent_bytes": {"package": 3e6, "node": 2e6, "system": 5e5},
        **more,
    }


def test_the_page_has_steps_bytes_and_losses() -> None:
    records = [
        record("post-local-sgd", SLOW, 0.2),
        record("post-local-sgd", FREE, 0.1),
        record("ddp-bf16", SLOW, 0.4),
        record("ddp-bf16", FREE, 0.1),
        record("ddp-powersgd", SLOW, 4.0),
        record("ddp-powersgd", FREE, 0.1),
        record("torchft", SLOW, 1.0),  # on one kind of links alone
        {**record("torchft-fsdp", SLOW, 0.0), "error": "torchft is not installed"},
    ]
    assert list(summarise(records)) == ["ddp-bf16", "ddp-powersgd", "post-local-sgd"]
    text = page(records)
    assert "| PostLocalSGD | 0.200 | 0.200 - 0.200 (2) | 0.100 | 2.00 | 0.500 | 0.250 | 0.50 |" in text
    # 100 steps of the fastest are 20 s, in which the others take 50 and 5.
    assert "| PostLocalSGD | 4.1050 | 100 | 4.1050 |" in text
    assert "| DDP, gradients in bf16 | 4.1050 | 50 | 4.6050 |" in text
    assert "| DDP, PowerSGD of rank 1 | 4.1050 | 5 | - |" in text
    assert "- torchft-fsdp: torchft is not installed" in text
    assert "Nobody ran" in page(records[:1])


def test_ours_is_held_to_goals() -> None:
    records = [record("terrace", SLOW, 0.2), record("terrace", FREE, 0.19)]
    assert not claims(summarise(records[:1]))
    for name, step_s in (("torchft", 0.5), ("ddp-bf16", 4.2), ("ddp-powersgd", 0.2)):
        records += [record(name, SLOW, step_s), record(name, FREE, 0.1)]
    made = claims(summarise(records))
    assert [round(each.found, 2) for each in made] == [2.5, 21.0, 1.0, 1.05, 0.25]
    assert [each.is_met for each in made] == [False, True, True, False, False]
    text = page(records)
    assert "torchft DiLoCo, DDP inside | 2.5 | at least 3 | **missed** |" in text
    assert "step over that without a limit | 1.05 | at most 1.05 | **missed** |" in text


@pytest.mark.parametrize(
    ("formula", "apart", "is_met"), [(51e3, 0.02, True), (47e3, 0.064, False), (54e3, 0.074, False)]
)
def test_the_kernels_bytes_are_held_to_the_formula(formula: float, apart: float, is_met: bool) -> None:
    more: dict[str, Any] = {
        "sent_bytes": {"package": 0.0, "node": 0.0, "system": 5e4},
        "expected_bytes": {"system": formula},
    }
    records = [record("terrace", links, 0.2, **more) for links in (SLOW, FREE)]
    copies, counted = claims(summarise(records))[-2:]
    assert copies.found == pytest.approx(0.025)
    assert copies.is_met
    assert counted.found == pytest.approx(apart, abs=1e-3)
    assert counted.is_met == is_met


def test_launches_flip_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = runner.launches(NAMES, 2)
    order = [entry.name for number, links, entry in found if links == SLOW]
    assert order == NAMES + NAMES[::-1]
    assert len(found) == 4 * len(NAMES)
    path, wanted = tmp_path / "slow.jsonl", list[str]()

    def fake(line: list[str], timeout_s: float) -> tuple[list[dict[str, Any]], str]:
        name = line[line.index("--spans") - 1]
        wanted.append(name)
        rate = next(float(word.partition("=")[2]) for word in line if "system.bandwidth" in word)
        spans = int(line[line.index("--spans") + 1])
        assert (rate, spans) == ((312_500.0, 3) if rate < 1e9 else (1.5e9, {"ddp-bf16": 40}.get(name, 3)))
        of_ranks = {key: value for key, value in record(name, "", 0.1).items() if key not in ("links", "round", "load")}
        return ([of_ranks], "") if name != "ddp-bf16" else ([], "exit 1: no")

    monkeypatch.setattr(runner, "run", fake)
    monkeypatch.setattr(runner, "is_root", lambda: True)
    words = ["slow", "--only", "post-local-sgd", "ddp-bf16", "--rounds", "1", "--spans", "3", "--steps", "80"]
    words += ["--results", str(path), "--page", str(tmp_path / "slow.md")]
    monkeypatch.setattr("sys.argv", words)
    assert runner.main() == 0
    assert wanted == ["post-local-sgd", "ddp-bf16"] * 2
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n", encoding="utf-8")
    assert runner.main() == 0
    assert wanted[4:] == ["ddp-bf16"], "a second call runs what is missing alone"
    assert [each.get("error", "") for each in read(path)] == ["", "", "exit 1: no", "exit 1: no"]
    assert "PostLocalSGD" in (tmp_path / "slow.md").read_text(encoding="utf-8")
    # Lines of another job are no lines of this one, and not on its page.
    monkeypatch.setattr(runner, "JOB", replace(JOB, hidden=64))
    monkeypatch.setattr("sys.argv", [*words, "--only", "ddp-bf16"])
    assert runner.main() == 0
    assert wanted[5:] == ["ddp-bf16"] * 2
    assert "PostLocalSGD" not in (tmp_path / "slow.md").read_text(encoding="utf-8")
    monkeypatch.setattr(runner, "is_root", lambda: False)
    assert runner.main() == 1


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.slow.contestants.find_spec", lambda name: None)
    assert "torchft is not installed" in contestant("torchft").absence()
    assert not contestant("ddp-bf16").absence()
