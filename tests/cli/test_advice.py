"""A value that a refusal advises is accepted: after "use at most 5", 5 is taken and 6 refused."""

import re
from pathlib import Path

import pytest

from terrace.base.errors import ModelError
from terrace.cli import worker
from terrace.model.experts.config import ExpertsConfig
from tests.support.command_line import CommandLine, leave_launcher
from tests.support.tiny_runs import write_run

_GPT2 = '{"model_type": "gpt2", "vocab_size": 257, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}'  # noqa: E501
_WSD = "--train.schedule wsd --train.decay_steps"
_PLAN = "plan --model config.json --cluster ethernet --batch 32 --sequence 32 --axes data --force --nodes"
# Words after `terrace train --config run.toml`, the key whose value is replaced, and the advised value (None: any).
CASES = (
    (f"{_WSD} 5", "train.decay_steps", 4),
    (f"{_WSD} 0.9", "train.decay_steps", 4),
    (f"{_WSD} 3 --train.warmup_steps 6", "train.warmup_steps", 3),
    (f"{_WSD} 0.5 --train.warmup_steps 9", "train.warmup_steps", 3),
    ("--train.warmup_steps 9", "train.warmup_steps", 6),
    ("--lora.rank 20", "lora.rank", 8),  # of a key's matrix; that of a query could have 16
    ("--plan.unit 5", "plan.unit", 2),
    ("--plan.unit 9 --plan.compute bf16 --train.batch 64", "plan.unit", 8),
    ("--model gpt2.json --train.sequence 33", "train.sequence", 32),
    ("--train.sequence 100000", "train.sequence", None),
    ("--data.holdout 100000", "data.holdout", None),
)


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """A folder with a tiny run; no rank is started."""
    write_run(tmp_path, 2, 2)
    (tmp_path / "gpt2.json").write_text(_GPT2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "launch_local", lambda *_, **__: None)
    leave_launcher(monkeypatch)
    return CommandLine(tmp_path, capsys)


@pytest.mark.parametrize(("text", "key", "value"), CASES, ids=[text for text, _, _ in CASES])
def test_the_advised_value_is_accepted(text: str, key: str, value: int | None, here: CommandLine) -> None:
    words = ["train", "--config", "run.toml", *text.split()]
    refused = here.call(*words)
    assert refused.code == 2
    found = re.search(r"(?:use|to|out) at most (\d+)", refused.error)
    assert found, refused.error
    advised = int(found[1])
    assert value in (None, advised), refused.error
    words[words.index(f"--{key}") + 1] = str(advised)
    accepted = here.call(*words)
    assert accepted.code == 0, accepted.error
    # No larger value is accepted.
    words[words.index(f"--{key}") + 1] = str(advised + 1)
    assert here.call(*words).code == 2


def test_batches_and_nodes_that_divide_are_accepted(here: CommandLine) -> None:
    words = [*_PLAN.split(), "3"]
    refused = here.call(*words)
    batches = re.findall(r"(?<=--batch )\d+|(?<=or )\d+(?=, --nodes)", refused.error.partition(": use ")[2])
    nodes = re.findall(r"--nodes (\d+)(?: or (\d+))?", refused.error)
    assert len(batches) == 2, refused.error
    assert nodes, refused.error
    for option, values in (("--batch", batches), ("--nodes", [each for each in nodes[0] if each])):
        for value in values:
            tried = [*words]
            tried[tried.index(option) + 1] = value
            assert here.call(*tried).code == 0, (option, value)


def test_the_largest_delay_of_exchanges_is_accepted(here: CommandLine) -> None:
    words = [*_PLAN.split(), "2", "--outer"]
    refused = here.call(*words, "every<=20,delay>=30")
    assert "delay is at most every, so at most 20, not 30" in refused.error
    assert here.call(*words, "every<=20,delay>=20").code == 0


def test_the_largest_number_of_virtual_stages_is_accepted(here: CommandLine) -> None:
    words = ["simulate", "--config", "run.toml", "--plan.mapping.node.pipeline", "2", "--plan.schedule"]
    refused = here.call(*words, "interleaved:3")
    assert re.search(r"6 virtual stages .*; use at most 4", refused.error), refused.error
    assert here.call(*words, "interleaved:2").code == 0


@pytest.mark.parametrize(("num_experts", "advised"), [(10, 5), (9, 3), (7, 1)])
def test_the_largest_number_of_groups_divides_the_experts(num_experts: int, advised: int) -> None:
    def checked(num_groups: int) -> None:
        ExpertsConfig(
            num_experts=num_experts,
            gate="sigmoid",
            per_token=1,
            intermediate_size=8,
            num_groups=num_groups,
            kept_groups=1,
        ).check(2, {})

    with pytest.raises(ModelError, match=f"use at most {advised}$"):
        checked(num_experts)
    checked(advised)
