"""Input and output of `terrace plan`, `scale` and `simulate`: bad input is one line, no file is lost."""

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from terrace.base.errors import ConfigError, ModelError
from terrace.base.schema import read_table
from terrace.cli.main import main
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.plan.presets import parse_plan
from terrace.plan.residency import residencies
from terrace.plan.stage import whole_stage
from tests.support.byte_formula import gather_counts, step_bytes

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that calls the command line in a folder with m.json, and gives the one line it ends with."""
    monkeypatch.chdir(tmp_path)
    Path("m.json").write_text(json.dumps(LLAMA))

    def call(*words: str) -> str:
        capsys.readouterr()
        code = main(words)
        said = capsys.readouterr()
        assert (code, said.out, said.err.count("\n")) == (2, "", 1), said
        return said.err

    return call


def planning(*words: str, batch: int = 16) -> tuple[str, ...]:
    task = ("--model", "m.json", "--cluster", "lab", "--batch", str(batch), "--sequence", "16")
    return ("plan", *task, *words)


@cache
def _searched(*words: str) -> bytes:
    """The plan file of a search, made once: what follows reads it and changes nothing of it."""
    assert main(planning("--out", "searched.toml", *words)) == 0
    return Path("searched.toml").read_bytes()


def planned(*words: str) -> None:
    Path("p.toml").write_bytes(_searched(*words))


@pytest.mark.parametrize("key", ["hidden_size", "head_dim"])
def test_a_size_that_no_float_holds_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match=f"smaller .*{key}"):
        parse_model(LLAMA | {key: 4 * 10**400})


@pytest.mark.parametrize("value", [0, False, "", []])
def test_a_rope_table_is_a_table_or_null(value: object) -> None:
    with pytest.raises(ModelError, match="must be a table or null"):
        parse_model(LLAMA | {"rope_scaling": value})


def test_a_key_twice_in_json_is_refused_and_a_mark_at_the_beginning_is_not(tmp_path: Path) -> None:
    twice, marked = tmp_path / "twice.json", tmp_path / "marked.toml"
    twice.write_text('{"a": {"hidden_size": 1, "hidden_size": 2}}')
    with pytest.raises(ConfigError, match="'hidden_size' is there twice"):
        read_table(twice)
    marked.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_table(marked) == {"a": 1}


@pytest.mark.parametrize("output", ["loop", "a\0b", "x" * 300])
def test_an_output_that_no_file_can_be_is_one_line(refused: Refused, output: str) -> None:
    planned()
    os.symlink("loop", "loop")
    assert "cannot be written" in refused(*planning("--out", output))
    assert "cannot be written" in refused("simulate", "p.toml", "--page", output)
    assert "cannot be written" in refused("plan", "--scale", "--plan", "p.toml", "--picture", output)


def test_an_output_does_not_replace_what_is_read(refused: Refused) -> None:
    planned()
    before = {name: Path(name).read_text() for name in ("m.json", "p.toml")}
    assert "read as the model" in refused(*planning("--out", "m.json", "--force"))
    assert "read as the plan" in refused("simulate", "p.toml", "--trace", "./p.toml", "--force")
    assert "read as the plan" in refused("plan", "--scale", "--plan", "p.toml", "--picture", "p.toml", "--force")
    assert before == {name: Path(name).read_text() for name in before}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--bogus.x", "1"), "unknown section 'bogus'"),
        (("--data.bogus", "1"), "unknown key data.bogus"),
        (("--optimizer.bogus", "1"), "unknown key optimizer.bogus"),
        (("--optimizer.lr", "nan"), "optimizer.lr"),
        (("--train.error_budget.sync", "0.1"), "error_budget.sync"),
        (("--plan.schedule", '""'), "plan.schedule is empty"),
    ],
)
def test_a_plan_with_other_axes_ignores_no_key(refused: Refused, words: tuple[str, str], said: str) -> None:
    planned("--axes", "all", "--pin", "pipeline=2")
    assert said in refused("simulate", "p.toml", *words)


def test_what_excludes_every_plan_is_named(refused: Refused) -> None:
    line = refused(*planning("--axes", "data,tensor,pipeline", "--pin", "context=2"))
    assert "satisfies context=2 with 16 sequences" in line
    assert "add --axes data,tensor,pipeline,context" in line
    seven = refused(*planning("--axes", "all", "--nodes", "7"))
    assert "pin" not in seven
    assert "another --nodes" in seven
    assert "write --axes all alone" in refused(*planning("--axes", "all,data"))


def test_no_batch_is_advised_that_is_refused(refused: Refused) -> None:
    assert "--batch" not in refused(*planning("--axes", "data", "--nodes", "100000")).split("use ")[1]
    assert "use --batch 99968, " in refused(*planning("--axes", "data", "--nodes", "16", batch=99_999)).replace(
        "99968 or 100032", "?"
    )


@pytest.mark.parametrize("key", ["tiers.node.efficiency", "device.kernels.gemm", "device.kernels.memory"])
def test_a_share_so_small_that_seconds_leave_what_a_float_holds_is_refused(refused: Refused, key: str) -> None:
    assert "must lie between 1e-06 and 1" in refused(*planning(f"--cluster.{key}", "1e-320"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 3, 9, 40])
def test_gather_counts_of_many_units_are_those_of_going_through_them(tied: bool, prefetch: int) -> None:
    blocks = block_specs(parse_model(LLAMA | {"tie_word_embeddings": tied}))
    cluster = load_cluster("lab")
    for num_micros, unit in ((1, 1), (3, 1), (4, 1), (11, 1), (11, 2), (12, 4)):
        plan = parse_plan({"preset": "zero3", "prefetch": prefetch, "unit": unit}, cluster)
        stays = residencies(whole_stage(len(blocks), num_micros, unit), blocks, prefetch)
        whole = Counter((stay.block, stay.backward, stay.opening) for stay in stays)
        assert Counter(gather_counts(blocks, num_micros, plan)) == whole


def test_bytes_of_many_micro_batches_take_no_time() -> None:
    blocks, cluster = block_specs(parse_model(LLAMA)), load_cluster("lab")
    plan = parse_plan({"preset": "zero3"}, cluster)
    few, more = (step_bytes(cluster, plan, blocks, count) for count in (10, 11))
    many = step_bytes(cluster, plan, blocks, 10**6 + 10)
    assert many == {key: few[key] + 10**6 * (more[key] - few[key]) for key in few}
