"""Options and plans of other trainers: refused with ours, and shown on a page whose every row can be predicted."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from terrace.base.coming_from import COMMANDS, OPTIONS, PLANS, RUN, command_for
from terrace.cli.keys import dotted
from terrace.cli.main import main, parser_of
from terrace.plan.presets import PRESETS
from tests.support.nightly import every

# With heads and layers that an axis of two ranks divides.
SIZES = ("--model.num_attention_heads", "4", "--model.num_key_value_heads", "4")

SYSTEMS = ("torchtitan", "Hugging Face Trainer", "DeepSpeed", "Megatron-LM")
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
_ROW = re.compile(r"^\| (.*?) \| (.*?) ?\| (.*?) ?\|$", re.M)
# Rows that point to another page, or to files that the test has not.
_ELSEWHERE = ("FOLDER", "PREFIX", "RUN")


def _rows() -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition("## Refused names")[0]
    rows = [own for _, own, _ in _ROW.findall(text) if own.startswith("`--")]
    return sorted({own.strip("`") for own in rows if not any(word in own for word in _ELSEWHERE)})


def test_there_are_four_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == [*SYSTEMS, "Refused names"]
    assert len(_ROW.findall(text)) > 70
    assert len(_rows()) > 40


@pytest.mark.parametrize("words", every(4, _rows()))
def test_a_row_can_be_predicted(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["simulate", *SIZES, *shlex.split(words)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "sequences x" in said.out


def test_the_page_has_every_name_that_is_refused() -> None:
    """The table of the page is the table of the command line."""
    lines = ["| refused | here |", "|---|---|"]
    for own, others in OPTIONS.items():
        lines.append(f"| {_cell(others)} | {_cell([each for each in own if each != RUN] + [RUN] * (RUN in own))} |")
    for preset, others in PLANS.items():
        lines.append(f"| {_cell([f'--plan {name}' for name in others])} | `--plan {preset}` |")
    for command, others in COMMANDS.items():
        lines.append(f"| {_cell([f'terrace {name}' for name in others])} | `{command}` |")
    page = PAGE.read_text(encoding="utf-8").partition("## Refused names")[2]
    assert [line for line in page.splitlines() if line.startswith("|")] == lines


def _cell(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# Keys of tables whose names a file chooses: a tier of a cluster, a key of a family of models.
FREE = "--cluster.tiers.node.size"


def test_every_name_of_ours_is_there() -> None:
    assert set(PLANS) <= set(PRESETS)
    assert not {other for others in PLANS.values() for other in others} & set(PRESETS)
    keys = dotted("train") | dotted("rl")
    actions = next(action for action in parser_of()._actions if isinstance(action, argparse._SubParsersAction))
    options = {name for parser in actions.choices.values() for name in parser._option_string_actions}
    for name in {name.partition(" ")[0] for own in OPTIONS for name in own} - {RUN, FREE}:
        section, dot, key = name.removeprefix("--").partition(".")
        known = f"{section}.{key.partition('.')[0]}" in keys or section == "model"  # whose keys are the family's
        assert known if dot else name in options, name
    for line in COMMANDS:
        program, command, *rest = line.split()
        assert program == "terrace"
        assert command in actions.choices
        assert command_for(command) == "", "ours as well"
        names = {word for word in rest if word.startswith("--")}
        assert all(name in options or name.removeprefix("--") in keys for name in names), line


def test_the_answer_to_a_model_in_words_of_megatron_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--tensor-model-parallel-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --kv-channels 16 "
        "--num-query-groups 2 --group-query-attention --ffn-hidden-size 128 --vocab-size 512 --seq-length 128 "
        "--max-position-embeddings 128 --rotary-base 5000 --norm-epsilon 1e-6 --init-method-std 0.01 "
        "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 8 --bf16"
    )
    assert main(["simulate", *words.split()]) == 2
    said = capsys.readouterr().err
    assert main(["keys", "num-layers"]) == 2
    assert "'num-layers' is --model.num_hidden_layers here" in capsys.readouterr().err
    answer = said.partition("did you mean ")[2].rstrip("?\n")
    assert answer.count("--") == words.count("--") - 1, "a group query needs no switch"
    assert main(["simulate", *answer.split()]) == 0, capsys.readouterr().err
    assert "8 sequences x 128" in capsys.readouterr().out


def test_a_word_is_answered_once() -> None:
    """Of a word that stood twice, the second answer would never be seen by who types it as an option."""
    for table in (OPTIONS, PLANS, COMMANDS):
        words = [word for others in table.values() for word in others]
        assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --plan fsdp2", "no plan preset or file 'fsdp2'; did you mean 'zero3'?"),
        ("simulate --plan.preset zero_1", "no plan preset 'zero_1'; did you mean 'zero1'?"),
        ("train --lr 1e-3", "unknown argument '--lr'; did you mean --optimizer.lr 1e-3?"),
        ("simulate --lr=1e-3", "unknown argument '--lr'; did you mean --optimizer.lr 1e-3?"),
        ("train --batch_size 8", "unknown argument '--batch_size'; did you mean --train.batch 8?"),
        ("simulate --per-device-train-batch-size=2", "did you mean --plan.micro_batch 2?"),
        ("train --gpus 8", "did you mean --ranks 8?"),
        ("train --bf16 --verbose", "did you mean --plan.compute bf16?"),
        ("train --bf16 True", "did you mean --plan.compute bf16?"),
        ("train --bf16=False", "unknown argument '--bf16'; it is off, so leave it out (--plan.compute bf16 where it"),
        ("train --gradient_checkpointing false", "it is off, so leave it out (--plan.recompute layers.* where it"),
        ("train --packing=False", "it is off, so leave it out"),
        ("train --sequence_parallel false", "did you mean --plan.sequence_parallel false?"),
        ("train --zero_stage 2", "did you mean --plan zero2?"),
        ("train --zero_stage 0", "did you mean --plan ddp?"),
        ("train --fsdp shard_grad_op", "did you mean --plan zero2?"),
        ("train --fsdp=hybrid_shard", "did you mean --plan hsdp?"),
        ("train --fsdp", "did you mean --plan zero3?"),
        ("train --deepspeed ds.json", "did you mean --plan zero3?"),
        (
            "train --model_name_or_path a --lr=1e-3 --bf16 --num_train_epochs 2",
            "unknown arguments '--model_name_or_path', '--lr', '--bf16', '--num_train_epochs'; did you mean "
            "--model a --optimizer.lr 1e-3 --plan.compute bf16 --train.epochs 2?",
        ),
        ("train --warmup_ratio 0.1", "did you mean --train.warmup_steps S?"),
        ("train --eval_strategy steps", "did you mean --train.eval_every S?"),
        ("train --checkpoint.interval 10", "did you mean --train.checkpoint_every 10?"),
        ("train --activation_checkpoint.mode=full", "did you mean --plan.recompute layers.*?"),
        ("train --save ckpt", "did you mean --folder ckpt?"),
        ("train --text-field 'a", "did you mean --data.column ''\"'\"'a'?"),
        ("plan --train.batch 8", "did you mean --batch 8?"),
        ("plan --seq 8", "unknown argument '--seq'; did you mean --sequence 8?"),
        ("plan --output=p.toml", "did you mean --out p.toml?"),
        ("plan --gpus 8", "did you mean --cluster.tiers.node.size 8?"),
        ("plan --plan.tensor 2", "did you mean --plan.mapping.node.tensor 2?"),
        ("plan --lr 1e-3", "unknown argument '--lr'; terrace train has it: terrace train --optimizer.lr 1e-3"),
        ("rehearse --batch_size 8", "terrace train has it: terrace train --train.batch 8"),
        ("generate a --seq-len 3", "terrace train has it: terrace train --train.sequence 3"),
        ("data prepare --seq 8", "did you mean --train.sequence 8?"),
        ("data lengths docs --seq 8", "did you mean --sequence 8?"),
        ("data lengths docs --output a.txt", "did you mean --out a.txt?"),
        ("train --output_dir a", "did you mean --folder a?"),
        ("train --max_steps 3", "did you mean --train.steps 3?"),
        ("rl --max-steps 3", "did you mean --run.steps 3?"),
        ("rl --batch_size 8", "did you mean --run.prompts 8?"),
        ("rl --train.batch 8", "did you mean --run.prompts 8?"),
        ("rl --num_generations 8", "did you mean --run.responses 8?"),
        ("rl --task sort --run.num_generations 8", "unknown key run.num_generations; did you mean 'run.responses'?"),
        ("generate a --top_p .9", "unknown argument '--top_p'; did you mean --top-p .9?"),
        ("generate --run a", "unknown argument '--run'; the folder is the first word: terrace generate RUN"),
        ("eval a --seq-len 8", "did you mean --context 8?"),
        ("train --tensor-model-parallel-size 2", "did you mean --plan.mapping.node.tensor 2?"),
        ("train --parallelism.tensor_parallel_degree 2", "did you mean --plan.mapping.node.tensor 2?"),
        ("train --use-distributed-optimizer", "did you mean --plan zero1?"),
        ("train --train.batch_size 8", "unknown key train.batch_size; did you mean 'train.batch'?"),
        ("simulate --train.learning_rate 1", "unknown key train.learning_rate; did you mean 'optimizer.lr'?"),
        ("train --plan.tensor 2", "unknown key plan.tensor; did you mean 'plan.mapping.node.tensor'?"),
        ("explain --plan zero3", "there is no command 'explain'; did you mean terrace simulate --view program?"),
        ("scale --plan zero3", "there is no command 'scale'; did you mean terrace plan --scale?"),
        ("sft --model a", "there is no command 'sft'; did you mean terrace train --model FOLDER --data FILE?"),
        ("dpo", "did you mean terrace train --model FOLDER --data FILE --train.objective dpo?"),
        ("grpo", "did you mean terrace rl --config FILE?"),
        ("serve", "did you mean terrace export RUN FOLDER?"),
    ],
)
def test_another_name_is_refused_with_ours(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


def test_a_key_of_a_file_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[train]\nlearning_rate = 1e-3\n")
    assert main(["simulate", "--config", str(tmp_path / "run.toml")]) == 2
    assert "unknown key train.learning_rate; did you mean 'optimizer.lr'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "key"), [("batch_size", "train.batch"), ("learning-rate", "optimizer.lr"), ("bf16", "plan.compute")]
)
def test_keys_are_found_by_such_words(word: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", word]) == 0
    assert capsys.readouterr().out.startswith(f"{key} = ")


def test_a_value_may_be_such_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp").write_text('preset = "ddp"\n')
    main(["simulate", "--plan", "fsdp"])
    assert "did you mean" not in capsys.readouterr().err
    assert main(["generate", "nowhere", "--prompt", "fsdp"]) == 2
    assert "nowhere is neither" in capsys.readouterr().err
    assert main(["generate", "nowhere", "--prompt=--epochs", "--stop", "lr"]) == 2
    assert "nowhere is neither" in capsys.readouterr().err
