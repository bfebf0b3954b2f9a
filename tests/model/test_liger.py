"""Kernels of liger-kernel: which parts they serve, refusals, and their numbers in Triton's interpreter and on a GPU."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terrace.base.errors import ConfigError
from terrace.base.extras import install
from terrace.model import liger
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.experts.config import ExpertsConfig
from terrace.model.init import initialise
from terrace.model.part_kernel import PARTS, PartsCase, left_to_torch, refusal
from terrace.runtime import compiled
from terrace.simulate.held_activations import activations_by_block
from terrace.simulate.work import Work
from terrace.train import prepare
from terrace.train.prediction import given_step
from terrace.train.resolve import resolve
from terrace.train.rules import parts_words
from tests.support.command_line import interpreted
from tests.support.liger_cases import LLAMA
from tests.support.liger_trial import difference
from tests.support.nightly import nightly

GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 8}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

needs_liger = pytest.mark.skipif(
    find_spec("liger_kernel") is None or find_spec("triton") is None,
    reason="liger-kernel or triton is not installed: none of its kernels was tested",
)


def release(package: str) -> tuple[int, ...]:
    """(3, 6) of version 3.6.0; () without the package."""
    try:
        return tuple(int(number) for number in version(package).split(".")[:2])
    except PackageNotFoundError:
        return ()


needs_interpreter = pytest.mark.skipif(
    () < release("triton") < (3, 7) and release("numpy") >= (2, 4),
    reason="the interpreter of Triton before 3.7 cannot run loops of liger-kernel under numpy 2.4: install numpy<2.4",
)


def llama(**changes: Any) -> ModelConfig:
    return replace(parse_model(LLAMA), **changes)


@needs_liger
@needs_interpreter
@pytest.mark.parametrize(
    "parts", [("alone-by-day", "layers-by-day"), *nightly((("alone", "layers"),), (("plans",),))], ids=" ".join
)
def test_kernels_in_the_interpreter(parts: Sequence[str]) -> None:
    """In one process, whose imports take as long as the kernels."""
    said = interpreted("tests.support.liger_cases", *parts)
    assert [line.partition(",")[0] for line in said.splitlines() if ": equal" in line] == [
        f"{part}: equal" for part in parts
    ]


@needs_liger
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels were not run on one")
def test_kernels_on_a_gpu() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000}
    device = torch.device("cuda")
    for config in (llama(**sizes, head_dim=128), llama(**sizes, head_dim=128, qk_norm=True, activation="gelu_tanh")):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert [difference(part, config, device, dtype) for part in PARTS] == [""] * len(PARTS)


@pytest.mark.parametrize(
    ("config", "case", "left"),
    [
        (llama(), {}, {}),
        (llama(), {"rows": 2}, {"loss": "cuts the vocabulary"}),
        (llama(), {"columns": 2}, {"norms": "columns", "loss": "cuts the vocabulary"}),
        (llama(), {"objective": "dpo"}, {"loss": "'dpo'"}),
        (llama(activation="gelu"), {}, {"gated activations": "silu and gelu_tanh, and the model's activation is gelu"}),
        (llama(hidden_size=65540, intermediate_size=65540), {}, {"norms": "65540", "gated activations": "65540"}),
        (llama(hidden_size=65540, intermediate_size=65540), {"rows": 2}, {"norms": "65540", "loss": "vocabulary"}),
        (
            llama(experts=ExpertsConfig(num_experts=4, per_token=2, intermediate_size=5)),
            {},
            {"gated activations": "own"},
        ),
        (
            parse_model(GPT2),
            {},
            {"norms": "layer norms", "gated activations": "no gate", "rotary positions": "has none"},
        ),
    ],
)
def test_parts_that_stay_with_torch_have_a_reason(
    config: ModelConfig, case: dict[str, Any], left: dict[str, str]
) -> None:
    found = left_to_torch(PartsCase(config, "cuda", "bf16", **case))
    assert found.keys() == left.keys()
    assert all(left[part] in reason for part, reason in found.items())
    assert refusal(PartsCase(config, "cuda", "bf16", **case)) == ""


def test_kernels_that_serve_nothing_are_refused() -> None:
    assert "'cpu'" in refusal(PartsCase(llama(), "cpu", "bf16"))
    assert "'fp64'" in refusal(PartsCase(llama(), "cuda", "fp64"))
    nothing = refusal(PartsCase(parse_model(GPT2), "cuda", "bf16", rows=2))
    assert all(part in nothing for part in PARTS)


@pytest.mark.parametrize("config", [llama(), llama(qk_norm=True, activation="gelu"), parse_model(GPT2)])
def test_the_table_agrees_with_the_modules_that_get_kernels(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "why_missing", lambda: "")
    blocks = build_blocks(config)
    assert liger.serve(blocks, "torch", torch.device("cuda")) == {}
    assert not liger.any_served(blocks)
    number = liger.serve(blocks, "liger", torch.device("cuda"))
    assert number.keys() == set(PARTS) - left_to_torch(PartsCase(config, "cuda", "bf16")).keys()
    assert liger.any_served(blocks)
    # Those that have kernels are not compiled, and the blocks around them only in parts.
    others = {"norms": 5, "gated activations": 1, "rotary positions": 1, "loss": 1}
    assert "kernels of liger-kernel" in compiled.why_parts([SimpleNamespace()], has_kernels=True)  # type: ignore[list-item]
    left = sum(others[part] for part in left_to_torch(PartsCase(config, "cuda", "bf16")) if part != "loss")
    if config.family == "llama":
        assert compiled.compile_parts(blocks, backend="eager") == left


def test_a_run_says_which_parts_are_served_and_is_refused_where_none_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolve(
        None, {"cluster": "dgx-h100"}, {"plan": {"preset": "ddp", "compute": "bf16"}, "train": {"kernels": "liger"}}
    )
    assert parts_words(run) == f"kernels of liger-kernel: {', '.join(PARTS)}"
    with pytest.raises(
        ConfigError, match=r"train.kernels = 'liger' cannot serve: this machine has no CUDA device; leave"
    ):
        prepare._check_kernels(run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    missing = rf"liger-kernel is not installed \({re.escape(install('liger-kernel'))}\); leave train.kernels out"
    with pytest.raises(ConfigError, match=missing):
        prepare._check_kernels(run)
    with pytest.raises(ConfigError, match=missing):
        liger.serve([], "liger", torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"for CUDA, and devices are of type 'cpu'; leave train.kernels out"):
        resolve(None, {}, {"train": {"kernels": "liger"}})
    with pytest.raises(ConfigError, match=r"for CUDA, and this is cpu"):
        liger.serve([], "liger", torch.device("cpu"))


def test_parts_that_are_served_keep_less() -> None:
    made = {"cluster": "dgx-h100"}, {"plan": {"preset": "ddp", "compute": "bf16"}, "train": {"sequence": 512}}
    run = resolve(None, *made)
    served = replace(run, train=replace(run.train, kernels="liger"))
    works = [given_step(each).work for each in (run, served)]
    held = []
    for work, parts in zip(works, ((), PARTS), strict=True):
        assert isinstance(work, Work)
        assert work.served == parts
        held.append(activations_by_block(work, run.plan, run.blocks(), "cuda"))
    before, after = held
    inner = run.plan.micro_batch * 512 * run.model.intermediate_size * 2
    # The activation of the gate is computed again; a chunk of logits has no copy in fp32.
    assert before[1].kept - after[1].kept == inner
    assert before[-1].on_top - after[-1].on_top == run.plan.micro_batch * 512 * run.model.vocab_size * 4


def test_a_kernel_that_cannot_run_leaves_its_part_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "why_missing", lambda: "")
    monkeypatch.setattr(liger, "words", lambda: "liger-kernel 0.9")
    monkeypatch.setattr(liger, "_ops", lambda name: SimpleNamespace())
    plain, served = (build_blocks(llama()) for _ in range(2))
    for blocks in (plain, served):
        initialise(blocks, llama(), 0, torch.float32)
    liger.serve(served, "liger", torch.device("cuda"))
    x = wanted = torch.arange(6).view(1, 6)
    with warnings.catch_warnings(record=True) as warned:
        for block, other in zip(served, plain, strict=True):
            x, wanted = block(x), other(wanted)
    assert torch.equal(x, wanted)
    said = {str(each.message).partition(" object")[0] for each in warned}
    words = "by torch, not by liger-kernel 0.9: AttributeError: 'types.SimpleNamespace'"
    assert said == {f"{part} {words}" for part in PARTS if part != "loss"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served[1](torch.randn(1, 6, 24))  # a kernel is not asked again


def test_an_old_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "find_spec", lambda name: name)
    for number, is_old in (("0.8.4", True), ("0.8.5", False), ("0.10.0", False)):
        monkeypatch.setattr(liger, "version", lambda package, number=number: number)
        assert ("is older than 0.8.5" in liger.why_missing()) is is_old
