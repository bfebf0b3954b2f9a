"""`train.epochs`: passes over the data, counted in samples, and the steps that a run takes from them."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ConfigError, TerraceError
from terrace.cli.main import main, parser_of
from terrace.cli.train import _table
from terrace.data.batches import Batches, Source
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from terrace.train.keys import UNCOUNTED
from terrace.train.prepare import prepare
from terrace.train.resolve import parse_run, resolve
from tests.support.tiny_runs import write_run


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, ...]:
    """Texts of 3,000 and 700 tokens, documents that are packed, and pairs."""
    folder, found = tmp_path_factory.mktemp("data"), []
    for name, size in (("long", 2999), ("short", 699)):
        (folder / f"{name}.txt").write_text("".join(chr(33 + index % 90) for index in range(size)))
        found.append(Source(tokens=prepare_tokens(folder / f"{name}.txt", ByteTokenizer(), folder), name=name))
    lines = [{"text": "a" * (7 + 13 * number % 40)} for number in range(31)]
    (folder / "packed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    packed = prepare_tokens(folder / "packed.jsonl", ByteTokenizer(), folder)
    found.append(Source(tokens=packed, name="packed", documents="whole", too_long="cut"))
    pairs = [{"prompt": "a", "chosen": "b" * (1 + number), "rejected": "c"} for number in range(9)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    of_pairs = prepare_pairs(folder / "pairs.jsonl", ByteTokenizer(), "bytes", "", folder)
    return (*found, Source(tokens=of_pairs, name="pairs", documents="pairs"))


def seen(batches: Batches, steps: int) -> list[Any]:
    """How often each sample of each source is in the first `steps` steps."""
    sources, samples = (
        np.concatenate(each) for each in zip(*(batches.places_of(step, 0, 1, 1) for step in range(steps)), strict=True)
    )
    return [
        np.bincount(samples[sources == number], minlength=use.num_samples) for number, use in enumerate(batches.uses(1))
    ]


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(["long", "short", "packed", "pairs"]),
    sequence=st.integers(60, 300),
    batch=st.integers(1, 12).map(lambda half: 2 * half),
    epochs=st.integers(1, 3),
    holdout=st.sampled_from([0, 0, 0.2]),
)
def test_every_sequence_is_seen_once_a_pass(
    sources: tuple[Source, ...], kind: str, sequence: int, batch: int, epochs: int, holdout: float
) -> None:
    """Exactly, but for the rest of the last step, which is the beginning of the next pass."""
    (source,) = (each for each in sources if each.name == kind)
    batches = Batches([source], sequence, batch, seed=3, holdout=0 if kind == "pairs" else holdout)
    steps, num_more = batches.steps_of(epochs)
    (counts,) = seen(batches, steps)
    assert 0 <= num_more < batch
    assert counts.sum() == steps * batch == epochs * batches.num_samples + num_more
    assert counts.min() >= epochs
    # Of the next passes, whole ones where a batch is larger than the data, each sample comes as often.
    assert counts.max() <= epochs + -(-num_more // batches.num_samples)
    assert (counts > epochs).sum() == min(num_more, batches.num_samples)


@settings(max_examples=10, deadline=None)
@given(
    weights=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    batch=st.integers(1, 20),
    epochs=st.sampled_from([0.1, 0.5, 1, 2, 2.5]),
)
def test_of_a_mixture_each_source_is_passed_so_often(
    sources: tuple[Source, ...], weights: tuple[int, int], batch: int, epochs: float
) -> None:
    mixed = [
        Source(tokens=each.tokens, name=each.name, weight=weight)
        for each, weight in zip(sources[:2], weights, strict=True)
    ]
    batches = Batches(mixed, 50, batch, seed=0)
    steps, num_more = batches.steps_of(epochs)
    assert min(use.epochs for use in batches.uses(steps)) >= epochs
    counts = seen(batches, steps)
    assert all(each.min() >= int(epochs) for each in counts)
    # One sample fewer, and a source would be short of it.
    short = Batches(mixed, 50, 1, seed=0).uses(steps * batch - num_more - 1)
    assert min(use.epochs for use in short) < epochs


def test_a_run_says_what_was_asked_and_what_it_came_to(tmp_path: Path) -> None:
    path, lines = write_run(tmp_path, 2), list[str]()
    run = resolve(str(path), {}, {"train": {"epochs": 2, "schedule": "wsd"}})
    assert (run.train.steps, run.train.epochs) == (UNCOUNTED, 2)
    job = prepare(run, tmp_path / "run", None, say=lines.append)
    (source,) = job.sources
    num_sequences = (source.tokens.num_tokens - 1) // 16
    assert job.run.train.steps == -(-2 * num_sequences // 8)
    more = job.run.train.steps * 8 - 2 * num_sequences
    (line,) = (line for line in lines if line.startswith("train.epochs"))
    assert line == (
        f"train.epochs = 2: {job.run.train.steps} steps of 8 sequences, the last with {more} "
        f"sequence{'s' * (more > 1)} of the next pass"
    )
    table = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (table["train"]["epochs"], table["train"]["steps"]) == (2.0, job.run.train.steps)
    # The file of the run is as good as what was given.
    again = prepare(parse_run(table), tmp_path / "again", None, say=lines.append)
    assert again.run.train == job.run.train
    # With other data it contradicts itself.
    (tmp_path / "text.txt").write_text("A fox.\n" * 50)
    with pytest.raises(
        ConfigError,
        match=r"^train.steps = \d+ beside train.epochs = 2: \d+ steps .*: give --train.epochs 2 or --train.steps \d+",
    ):
        prepare(parse_run(table), tmp_path / "other", None, say=lines.append)


@pytest.mark.parametrize(
    ("words", "steps", "epochs"),
    [
        ([], 1234, 2.0),
        (["--train.epochs", "3"], None, 3),
        (["--train.steps", "2000"], 2000, None),
    ],
)
def test_a_resumed_run_has_one_length(
    tmp_path: Path, words: list[str], steps: int | None, epochs: float | None
) -> None:
    path = write_run(tmp_path, 2)
    table = path.read_text().replace("steps = 6", "steps = 1234\nepochs = 2.0")
    (tmp_path / "run").mkdir()
    for name in ("cluster.toml", "config.json"):
        table = table.replace(f'"{name}"', f'"{tmp_path / name}"')
    (tmp_path / "run" / "config.toml").write_text(table)
    options, rest = parser_of(["train"]).parse_known_args(["train", "--resume", str(tmp_path / "run"), *words])
    train = _table(options, rest)["train"]
    assert (train.get("steps"), train.get("epochs")) == (steps, epochs)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 3, "epochs": 2}, "train.steps and train.epochs both say how long the run is: leave one of them out"),
        ({"epochs": 0}, "train.steps is missing: give it a value, or train.epochs one above 0"),
        ({"epochs": -1}, "train.epochs = -1.0 must be above 0"),
        ({"epochs": 1e9}, "train.epochs = 1000000000.0 must be above 0 and below 1e+06"),
        ({"epochs": "two"}, "train.epochs = 'two' must be of type float"),
    ],
)
def test_lengths_that_cannot_be(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(TerraceError) as caught:
        resolve(str(write_run(tmp_path, 2)), {}, {"train": given})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"train": {"schedule": "wsd", "decay_steps": 5000}}, ConfigError, "decay_steps = 5000 is longer than the"),
        (
            {"train": {"schedule": "wsd", "decay_steps": 5000, "warmup_steps": 5000}},
            ConfigError,
            "lower both, which together take at most ",
        ),
        ({"train": {"profile": "900-902"}}, ConfigError, "goes up to step 902, but the run ends at"),
        (
            {"prune": {"blocks": [8, 8], "share": 0.5, "after": 9000}},
            ConfigError,
            "sets no block to zero in train.steps",
        ),
    ],
)
def test_rules_on_the_length_hold_once_it_is_known(
    tmp_path: Path, more: dict[str, Any], error: type[TerraceError], said: str
) -> None:
    train = {"epochs": 1, **more.get("train", {})}
    run = resolve(str(write_run(tmp_path, 2)), {}, {**more, "train": train})
    with pytest.raises(error, match=said):
        prepare(run, tmp_path / "run", None, say=lambda text: None)
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_goes_on_for_several_passes(tmp_path: Path) -> None:
    lines = list[str]()
    run = resolve(str(write_run(tmp_path, 2)), {}, {"train": {"epochs": 1, "batch": 64}})
    (tmp_path / "text.txt").write_text("A fox and a hen.\n" * 3)
    prepare(run, tmp_path / "run", None, say=lines.append)
    assert "train.epochs = 1: 1 step of 64 sequences, the last with 61 sequences of the next passes" in lines


def test_a_rate_that_never_reaches_its_peak_is_said(tmp_path: Path) -> None:
    lines = list[str]()
    run = resolve(str(write_run(tmp_path, 2)), {}, {"train": {"epochs": 1, "warmup_steps": 500}})
    prepare(run, tmp_path / "run", None, say=lines.append)
    assert any(line.startswith("warning: train.warmup_steps = 500: the run ends after") for line in lines)


def test_an_island_of_a_roster_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which takes its steps with others: give train\.steps"):
        resolve(
            str(write_run(tmp_path, 2, plan="zero3")),
            {},
            {"train": {"epochs": 1}, "elastic": {"meet": "localhost:7000"}},
        )


def test_preparing_the_data_says_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", "--config", str(write_run(tmp_path, 2)), "--train.epochs", "2"]) == 0
    assert "train.epochs = 2: " in capsys.readouterr().out
    assert main(["simulate", "--config", str(tmp_path / "run.toml"), "--train.epochs", "2"]) == 0
