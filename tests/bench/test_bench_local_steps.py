"""The contestants of the benchmark of local steps: plans that run, one start for all, the loss of one model."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.common import decoder
from bench.learning import Held
from bench.local_steps import Found, Job, claims_of, found_of, rises
from bench.loops import MAIN, VARIANTS
from terrace.data.tokenizer import load_tokenizer
from terrace.data.tokens import prepare_tokens
from terrace.launch.start import LocalPool
from terrace.model.blocks import block_specs
from terrace.plan.validate import validate

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    lines = (f"The fox of line {number} jumps over the lazy dog.\n" for number in range(2000))
    (tmp_path / "text.txt").write_text("".join(lines))
    text = prepare_tokens(tmp_path / "text.txt", load_tokenizer("bytes"), tmp_path / "cache")
    sizes = {"steps": 44, "sequence": 16, "batch": 8, "hidden": 32, "layers": 1, "lr": 1e-2}
    return Job("synchronous", 0, **sizes, tokens=text, start=4, starts=tmp_path / "starts")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_plan_for_the_model(name: str) -> None:
    variant = VARIANTS[name]
    assert variant.against in VARIANTS
    validate(variant.cluster, variant.plan(4), block_specs(decoder(160, 3)))


@pytest.mark.nightly
def test_all_begin_at_one_checkpoint(pool: LocalPool, job: Job, tmp_path: Path) -> None:
    """The synchronous run from its checkpoint is the run that never stopped; two stages are no other run."""
    found = {name: found_of(pool, replace(job, variant=name)) for name in ("synchronous", "every-20", "stages")}
    (folder,) = (tmp_path / "starts").iterdir()
    assert folder == job.folder
    straight = found_of(pool, replace(job, start=0))
    assert found["synchronous"].loss == straight.loss
    assert found["synchronous"].train_loss == straight.train_loss
    assert found["stages"].loss == pytest.approx(straight.loss, rel=1e-4)
    assert found["every-20"].loss == pytest.approx(straight.loss, rel=0.3)
    assert abs(found["every-20"].loss - straight.loss) > 1e-4, "islands went on apart"
    # Four islands send in an exchange what a synchronous step sends, and they made two in 40 steps.
    assert found["every-20"].sent_bytes == pytest.approx(found["synchronous"].sent_bytes / 20, rel=0.05)


def test_a_result_is_held_for_its_plan_alone(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "found.jsonl", list[str]()
    path.write_text('{"variant": "synchronous", "seed": 0}\n', encoding="utf-8")  # before lines had keys

    def result() -> Found:
        def run() -> Found:
            calls.append("run")
            return Found("every-20", 0, job.setting, float(len(calls)), 0.0, 0.0, 0.0, [])

        own = replace(job, variant="every-20")
        return Held(path, Found).result(own, own.plans, run)

    assert [result().loss, result().loss] == [1.0, 1.0]
    folder = job.folder
    monkeypatch.setitem(VARIANTS, "every-20", replace(VARIANTS["every-20"], label="the same plan"))
    assert result().loss == 1.0
    monkeypatch.setitem(VARIANTS, "every-20", VARIANTS["every-10"])
    assert [result().loss, result().loss] == [2.0, 2.0]
    monkeypatch.setitem(MAIN, "synchronous", replace(MAIN["synchronous"], table={"preset": "zero1"}))
    assert result().loss == 3.0, "it begins at another run"
    assert job.folder != folder


def test_the_claims_are_means_over_seeds_of_rises() -> None:
    def runs(**losses: float) -> dict[str, Found]:
        return {name.replace("_", "-"): Found(name, 0, "", loss, 0.0, 0.0, 0.0, []) for name, loss in losses.items()}

    found = [runs(synchronous=2.0, every_20=2.08, int4=2.08), runs(synchronous=2.0, every_20=2.16), runs(int4=2.0)]
    assert rises(found, "every-20") == pytest.approx([0.04, 0.08])
    claims = claims_of(found)
    assert [claim.is_met for claim in claims] == [False, True]
    assert (claims[0].found, claims[0].low, claims[0].high) == pytest.approx((0.06, 0.04, 0.08))
    assert claims[1].found == 0.0
    assert {name for name, each in MAIN.items() if each.most is not None} >= {"every-20", "int4"}
