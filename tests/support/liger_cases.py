"""Kernels of liger-kernel in Triton's interpreter: alone against fp64, and under the engine against torch's parts.

Run with TRITON_INTERPRET=1, which Triton reads when it is imported:

    python -m tests.support.liger_cases [alone | layers | plans | alone-by-day | layers-by-day]
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.model import liger
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.init import initialise
from terrace.model.part_kernel import PARTS as LIGER_PARTS
from terrace.plan.plan import Plan
from terrace.runtime.engine import Engine
from tests.support import parity
from tests.support.liger_trial import difference
from tests.support.parity import Case, Outcome, deviation, exact, run, train
from tests.support.toys import cluster_of
from tests.support.triton_bounds import check_bounds

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 40, "hidden_size": 24, "intermediate_size": 36}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TOLERANCE = 2e-4  # of fp32 after a few steps of AdamW, which divides small gradients by small moments


def interpret() -> None:
    """Mend the interpreter, so that kernels compute in it as they do compiled.

    It passes floats as Python's, where a compiled kernel has scalars of fp32, and its functions of libdevice, which
    have no body, return None. Accesses outside a tensor end the process.
    """
    interpreter, language = import_module("triton.runtime.interpreter"), import_module("triton.language")
    convert = interpreter._implicit_cvt
    if getattr(convert, "of_floats", False):
        return

    def converted(argument: object) -> object:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    converted.of_floats = True  # type: ignore[attr-defined]
    vars(interpreter)["_implicit_cvt"] = converted
    vars(import_module("liger_kernel.ops.rms_norm"))["rsqrt"] = lambda x: language.math.rsqrt(x)
    vars(import_module("liger_kernel.ops.geglu"))["tanh"] = lambda x: 2 * language.sigmoid(2 * x) - 1
    check_bounds()


def models() -> Iterator[ModelConfig]:
    """Grouped heads; heads with norms, in a size that is no power of two; a part of a head turned, and a tanh gelu."""
    llama = parse_model(LLAMA)
    yield llama
    yield parse_model(LLAMA | {"model_type": "qwen3", "head_dim": 10})
    yield replace(llama, rotary_dim=4, activation="gelu_tanh", vocab_size=70)


def alone(by_day: bool = False) -> None:
    """Every kernel agrees with fp64, and a wrong one is found; by day for the last of the models, in fp32."""
    config, *others = models()
    for each in others[-1:] if by_day else (config, *others):
        for part in LIGER_PARTS:
            assert difference(part, each, CPU, torch.float32) == "", part
    for part in () if by_day else LIGER_PARTS:  # the interpreter multiplies bf16 as integers
        assert difference(part, config, CPU, torch.float16) == "", part
    for part, wrong in WRONG.items():
        name, function = wrong
        with patch.object(liger, name, function):
            assert "differs" in difference(part, config, CPU, torch.float32), part


def _gated_without_gradient(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate.detach() + 0 * gate) * up


WRONG: dict[Any, tuple[str, Any]] = {
    "norms": ("rms_norm", lambda x, weight, eps: nn.functional.rms_norm(x, weight.shape, weight, 0.1)),
    "gated activations": ("GATED", {"silu": _gated_without_gradient}),
    "rotary positions": ("rotate_both", lambda dim, query, key, cos, sin: (query, key)),
    "loss": ("to_gradient", lambda logits, labels, scale: torch.zeros(())),
}


def layers(by_day: bool = False) -> None:
    """Blocks with kernels have the loss and the gradients of those without; autograd notices writes in place.

    Rows have positions of their own, of the first model also those of one document: the interpreter takes its time. By
    day the second model, whose heads have norms, is the only one.
    """
    for index, config in enumerate(models()):
        if by_day and not config.qk_norm:
            continue
        plain, served = (_blocks(config) for _ in range(2))
        number = liger.serve(served, "liger", CPU)
        assert number == {"norms": 3 + 2 * config.qk_norm, "rotary positions": 1, "gated activations": 1, "loss": 1}
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5]])
        for places in (None, positions)[index > 0 :]:
            for one, other in zip(_gradients(plain, places), _gradients(served, places), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    gate, up = (torch.randn(2, 6, requires_grad=True) * 1.0 for _ in range(2))
    square = gate * gate  # keeps gate, and has its backward after that of the kernel
    product = liger.silu_gated(gate, up) + square
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()  # type: ignore[no-untyped-call]


def _blocks(config: ModelConfig) -> list[nn.Module]:
    blocks = build_blocks(config)
    initialise(blocks, replace(config, init_std=0.3), 0, torch.float32, CPU)
    return blocks


def _gradients(blocks: Sequence[nn.Module], positions: Tensor | None) -> list[Tensor]:
    x = tokens = torch.arange(16).view(2, 8) * 5 % 40
    for block in blocks:
        x = block(x, positions)
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    loss = token_loss(x, tokens)
    return [loss, *torch.autograd.grad(loss, parameters)]


@contextmanager
def kernels_of(choice: Any) -> Iterator[None]:
    """In the body of a `with`, engines of cases have the kernels of `choice`."""
    engine_of = parity.engine_of

    def served(world: World, cluster: Cluster, case: Case, blocks: Sequence[nn.Module], **more: Any) -> Engine:
        number = liger.serve(blocks, choice, CPU)
        assert choice == "torch" or number.keys() == {"norms", "rotary positions", "gated activations", "loss"}
        engine = engine_of(world, cluster, case, blocks, **more)
        # A tensor axis has replaced some of the modules.
        parts = [each for block in engine.state.modules.values() for each in block.modules()]
        assert all(vars(each)["normal"].run is liger.rms_norm for each in parts if "normal" in vars(each))
        return engine

    with patch.object(parity, "engine_of", served), patch.object(liger, "DEVICES", ("cuda", "cpu")):
        yield


def train_served(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """As `train`, with the kernels in an interpreter."""
    interpret()
    with kernels_of("liger"):
        return train(world, cluster, cases)


def plans() -> None:
    """Engines with kernels learn as those without: states sharded, recomputed, in two halves, over a tensor axis."""
    cluster = cluster_of(1, 4)
    inside, tensor = {"node": {"data": 4}}, {"node": {"tensor": 2, "data": 2}}
    cases = [
        Case(_fp32("zero3", cluster, mapping=inside, recompute=("*.1: mlp, norms",)), 2, "llama tied"),
        Case(_fp32("zero3", cluster, mapping=tensor), 2, "wide qwen3, 2 kv heads"),
        Case(_fp32("ddp", cluster, mapping={"node": {"pipeline": 4}}, schedule="zb-h1"), 4, "deep llama tied"),
        Case(_fp32("ddp", cluster, mapping={"node": {"tensor": {"columns": 2}, "data": 2}}), 2, "llama tied"),
    ]
    with LocalPool(4) as pool:
        found, wanted = run(pool, cluster, cases, train_served), run(pool, cluster, cases)
    for case, own, other in zip(cases, found, wanted, strict=True):
        worst = deviation(own, other[0])
        assert max(worst.values()) < TOLERANCE, (case, worst)
        assert not any(outcome.complaint for outcome in own), case
        print(case.plan.mapping, worst, flush=True)


def _fp32(name: str, cluster: Cluster, **changes: object) -> Plan:
    return replace(exact(name, cluster, **changes), compute="fp32", master="fp32")


PARTS: dict[str, Callable[[], None]] = {"alone": alone, "layers": layers, "plans": plans}
PARTS |= {"alone-by-day": partial(alone, by_day=True), "layers-by-day": partial(layers, by_day=True)}

if __name__ == "__main__":
    interpret()
    with patch.object(liger, "DEVICES", ("cuda", "cpu")):
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
            print(f"{part}: equal, {liger.words()}, triton {import_module('triton').__version__}", flush=True)
