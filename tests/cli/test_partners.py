"""Options and keys that would be accepted without effect: refused by one rule in every command."""

import argparse
import json
from pathlib import Path
from unittest import mock

import pytest

from terrace.cli import worker
from terrace.cli.main import main, parser_of
from terrace.cli.partners import PARTNERS, Partner
from tests.support.tiny_runs import write_run

# What each command needs beside the option.
BESIDE = {
    "doctor": (),
    "export": ("nowhere", "nowhere2"),
    "report": ("nowhere",),
    "plan": ("--model", "nowhere", "--cluster", "local", "--batch", "8", "--sequence", "8"),
    "simulate": (),
}
ROWS = [(command, partner) for command, partners in PARTNERS.items() for partner in partners]


@pytest.mark.parametrize(("command", "partner"), ROWS, ids=[f"{command} {each.option}" for command, each in ROWS])
def test_an_option_without_its_partner_is_refused(
    command: str, partner: Partner, capsys: pytest.CaptureFixture[str]
) -> None:
    (action,) = [each for each in _actions(command) if partner.option in each.option_strings]
    value = [] if action.nargs == 0 else [str(next(iter(action.choices or ()), 1))]
    assert main([command, *BESIDE[command], partner.option, *value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"terrace: error: {partner.option}"), error
    assert "has no effect without" in error
    assert error.count("\n") == 1


def _actions(command: str) -> list[argparse.Action]:
    (commands,) = [each for each in parser_of([command])._actions if isinstance(each, argparse._SubParsersAction)]
    parser: argparse.ArgumentParser = commands.choices[command]
    return parser._actions


KEYS = (
    ("--data.cache=text.txt", "text.txt"),
    ("--data.format=chat", "conversations are records"),
    ("--data.column=abc", "data.column = 'abc' has no effect"),
    ("--data.split=abc", "data.split = 'abc' has no effect"),
    ("--data=records.jsonl --data.separator=abc", "data.separator = 'abc' has no effect"),
    ("--data.path=nowhere", "nowhere does not exist"),
    ("--data=nowhere", "nowhere does not exist"),
    ("--data.eval.other=nowhere --train.eval_every=2", "nowhere does not exist"),
    ("--data.tokenizer=nowhere", "cannot read tokenizer"),
    ("--data.bos=abc", "data.bos = 'abc' has no effect"),
    ("--data.eos=abc", "data.eos = 'abc' has no effect"),
    ("--data.holdout=1e21", "data.holdout = 1e+21 is more samples"),
    ("--train.metrics=['nothing']", "train.metrics"),
    ("--train.steps=1000000000000000000000", "more than anything can be counted to"),
    ("--train.seed=1000000000000000000000", "more than anything can be counted to"),
    ("--train.slow_factor=1e21", "train.slow_factor = 1e+21 has no effect"),
    ("--train.slow_steps=99", "train.slow_steps = 99 has no effect"),
    ("--train.target_loss=1e21", "train.target_loss = 1e+21 must be a number below"),
    ("--optimizer.lr=1e21", "optimizer.lr = 1e+21 must be"),
    ("--optimizer.clip=1e21", "0 turns clipping off"),
    ("--plan.prefetch=99", "plan.prefetch = 99 has no effect: the model has 4 blocks"),
)


@pytest.mark.parametrize("command", ["train", "simulate", "doctor"])
def test_every_command_refuses_what_a_start_refuses(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, 2)
    (tmp_path / "records.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(worker, "launch_local", return_value=None):
        for word, said in KEYS:
            # The doctor tells the whole machine first, so it is asked for a few alone.
            if command == "doctor" and "data.format" not in word:
                continue
            code = main([command, "--config", str(config), *word.split()])
            out, error = capsys.readouterr()
            assert code != 0, word
            assert said in error + out, (word, error)


def test_data_that_only_a_file_names_may_be_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path, 2)
    words = ["simulate", "--config", str(config), "--data.holdout", "0"]
    config.write_text(config.read_text().replace("text.txt", "nowhere.txt"))
    assert main(words) == 0
    assert main([*words, "--data", "nowhere.txt"]) == 2
    assert "nowhere.txt does not exist" in capsys.readouterr().err


def test_keys_of_a_model_that_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads((write_run(tmp_path, 2).parent / "config.json").read_text())
    qwen = tmp_path / "qwen.json"
    qwen.write_text(json.dumps({**table, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}))
    words = ["simulate", "--cluster", "local", "--model", str(qwen)]
    assert main(words) == 0  # a published file has it
    assert main([*words, "--model.sliding_window", "4"]) == 2
    assert "model.sliding_window = 4 has no effect: no layer has a window" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("every<=100,delay<=200", "delay<=200 has no effect, since delay is at most every, so at most 100"),
        ("every<=4,fragments<=8", "fragments<=8 has no effect"),
    ],
)
def test_a_bound_that_another_sets_anyway(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_run(tmp_path, 2).parent / "config.json")
    words = ["plan", "--model", model, "--cluster", "ethernet", "--batch", "8", "--sequence", "8", "--outer", text]
    words += ["--out", str(tmp_path / "plan.toml")]
    assert main(words) == 2
    assert said in capsys.readouterr().err
