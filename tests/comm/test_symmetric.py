"""Torch's fused products as they are called, and where they are refused; without a device."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from terrace.base.errors import PlanError
from terrace.comm.symmetric import check_one_host, operators
from terrace.launch.start import LocalPool, World

CUDA = torch.device("cuda", 0)


def shapes(world: World) -> list[tuple[int, ...]]:
    group = dist.group.WORLD
    assert group is not None
    x, matrices = torch.empty(3, 4, device="meta"), [torch.empty(5 + i, 4, device="meta").t() for i in range(2)]
    whole, products = operators(CUDA).gather(x, matrices, group.group_name)
    return [tuple(each.shape) for each in (whole, *products)]


def test_a_gather_has_the_arguments_of_torchs_operator(pool: LocalPool) -> None:
    """Tensors without values go through the operator itself, on a group of two."""
    assert pool.run(2, shapes, timeout_s=60.0) == [[(6, 4), (6, 5), (6, 6)]] * 2


def test_a_scatter_has_the_arguments_of_torchs_operator() -> None:
    """By the operator's declaration: its form without values would import a compiler."""
    schema = torch.ops.symm_mem.fused_matmul_reduce_scatter.default._schema
    declared = [(argument.name, str(argument.type)) for argument in schema.arguments]
    assert declared == [
        ("A", "Tensor"),
        ("B", "Tensor"),
        ("reduce_op", "str"),
        ("scatter_dim", "int"),
        ("group_name", "str"),
    ]


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(PlanError) as caught:
        call(*arguments)
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith("write a number of parts instead, plan.tensor_chunks = 4")
    return said


def test_a_cpu_and_a_torch_without_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs CUDA: a CPU has no symmetric memory" in refusal(operators, torch.device("cpu"))
    monkeypatch.setattr(torch.ops, "symm_mem", object())
    assert f"torch {torch.__version__} has no fused products" in refusal(operators, CUDA)


def test_hosts_and_devices_that_share_no_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_one_host(["a", "a"])
    assert "tensor rows are on hosts a and b, and share memory on one host alone" in refusal(
        check_one_host, ["b", "a", "b"]
    )
    asked: list[tuple[str, int]] = []

    def workspace(group: str, min_size: int) -> Tensor:
        asked.append((group, min_size))
        if min_size > 8:
            raise RuntimeError("no peer access\nand a trace")
        return torch.empty(min_size)

    monkeypatch.setattr(symm_mem, "get_symm_mem_workspace", workspace)
    share = operators(CUDA).share
    share("rows", 8)
    assert re.search(r"devices of tensor rows cannot share memory \(no peer access\)", refusal(share, "rows", 16))
    assert asked == [("rows", 8), ("rows", 16)]
