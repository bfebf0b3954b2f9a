"""Keys without effect are refused where a user has set them, and silent where nobody has."""

from pathlib import Path

import pytest
import tomli_w

from terrace.base.errors import ClusterError, ConfigError, TerraceError
from terrace.cli.overrides import parse_overrides
from terrace.train.config import RunConfig, run_toml
from terrace.train.effects import ASKED, RULES, check_effects, file_layers
from terrace.train.resolve import resolve

QWEN2 = ("--model.model_type", "qwen2", "--model.use_sliding_window", "false")
REWARD = ("--train.objective", "reward", "--data.format", "pairs", "--data.path", "pairs.jsonl")
LINEAR: tuple[str, ...] = ("--model.model_type", "qwen3_5_text", "--model.layer_types", str(["linear_attention"] * 4))
LINEAR += ("--model.linear_num_key_heads", "2", "--model.linear_num_value_heads", "2")
LINEAR += ("--model.linear_key_head_dim", "8", "--model.linear_value_head_dim", "8")
LARGE = ("--model.hidden_size", "3200", "--model.vocab_size", "20000")


def check(*words: str, config: Path | None = None, plan: str | None = None) -> RunConfig:
    path = None if config is None else str(config)
    overrides = parse_overrides(words)
    run = resolve(path, {"plan": plan}, overrides)
    check_effects(run, file_layers(path, plan), overrides)
    return run


CASES: list[tuple[tuple[str, ...], str]] = [
    (("--train.schedule", "constant", "--train.final_lr_fraction", "0.2"), "train.final_lr_fraction = 0.2"),
    (("--train.schedule", "constant", "--train.final_lr_fraction", "0.1"), "train.final_lr_fraction = 0.1"),
    (("--train.steps", "5", "--train.warmup_steps", "6"), "ends after 5 steps, below the peak rate: use at most 5"),
    ((*LARGE, "--train.prompt", "Once"), "writes no sample at the end"),
    ((*LINEAR, "--train.prompt", "Once"), "all layers are linear, and generation needs a layer with attention"),
    (("--lora.rank", "2", "--train.freeze", '["embedding.*"]'), "[lora] freezes all that 'embedding.*' matches"),
    (("--plan.preset", "ddp", "--plan.prefetch", "2"), "nothing is gathered"),
    (("--plan.sequence_parallel", "false"), "the tensor axis has no rows"),
    (("--plan.prefetch", "50"), "the model has 6 blocks: use at most 6"),
    (("--train.steps", "5", "--train.slow_steps", "6"), "the run ends after 5 steps: use at most 5"),
    (("--train.weights", "w", "--model.initializer_range", "0.1"), "the weights in "),
    (("--model.model_type", "mistral", "--model.sliding_window", "0"), "no layer has a window"),
    ((*QWEN2, "--model.max_window_layers", "1"), "no layer has a window"),
    (("--plan.master_apart", "true"), "it only takes memory without [prune]"),
    (("--plan.unit", "5"), "a rank has 4 micro-batches in a step: use at most 4"),
]


@pytest.mark.parametrize(
    ("words", "said"), CASES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_key_without_effect_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*words)
    assert said in str(caught.value)
    assert "has no effect: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_rule_has_a_case() -> None:
    given = {word.removeprefix("--") for words, _ in CASES for word in words if word.startswith("--")}
    assert RULES.keys() | ASKED.keys() <= given


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--train.steps", "5"),  # the default warm-up is longer
        ("--train.schedule", "constant"),
        ("--plan.preset", "ddp"),
        ("--train.final_lr_fraction", "0.2"),
        ("--train.steps", "5", "--train.warmup_steps", "5"),
        (*REWARD, "--train.weights", "w", "--model.initializer_range", "0.1"),
        ("--plan.prefetch", "2"),
        ("--plan.unit", "2"),
        ("--lora.rank", "2", "--train.freeze", '["layers.0.*lora*"]'),
    ],
    ids=" ".join,
)
def test_defaults_and_keys_with_an_effect_pass(words: tuple[str, ...]) -> None:
    check(*words)


def test_keys_of_files_count_unless_they_are_defaults(tmp_path: Path) -> None:
    path, plan = tmp_path / "run.toml", tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps({"train": {"schedule": "constant", "final_lr_fraction": 0.3}}))
    with pytest.raises(ConfigError, match=r"train\.final_lr_fraction = 0\.3 has no effect"):
        check(config=path)
    plan.write_text(tomli_w.dumps({"preset": "ddp", "prefetch": 3}))
    with pytest.raises(ConfigError, match=r"plan\.prefetch = 3 has no effect"):
        check(plan=str(plan))
    path.write_text(tomli_w.dumps({"plan": "plan.toml"}))
    with pytest.raises(ConfigError, match=r"plan\.prefetch = 3 has no effect"):
        check(config=path)
    # The file of an earlier run has every key.
    path.write_text(run_toml(check("--train.steps", "5", "--train.schedule", "constant", "--plan.preset", "ddp")))
    check(config=path)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"mixture": [{"path": "a.txt", "weight": 2.0}]}, "the weight 2.0 has no effect"),
        (
            {"documents": "separate", "mixture": [{"path": p, "documents": "whole"} for p in "ab"]},
            "data.documents = 'separate' has",
        ),
    ],
)
def test_keys_of_a_mixture_that_nothing_reads_are_refused(tmp_path: Path, table: dict[str, object], said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps({"data": table}))
    with pytest.raises(TerraceError) as caught:
        check(config=path)
    assert said in str(caught.value)


def test_flops_of_an_unknown_dtype_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"peak_flops_per_s\.bf61 has no effect.*did you mean 'bf16'"):
        check("--cluster.device.peak_flops_per_s.bf61", "1e12")
