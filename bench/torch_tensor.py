"""A decoder under torch's own tensor parallelism, after the recipe in its documentation for Llama.

Column-parallel query, key, value, gate and up, row-parallel output and down, a row-parallel embedding and a
column-parallel output matrix over the vocabulary, the loss computed on parts of the vocabulary. In the sequence
parallel form norms and residual stream are split over the sequence, and attention and MLP gather their input once; in
the other form the residual stream is whole on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common import ADAMW, Batch, torch_adamw
from bench.torch_fsdp import exchange_reduce_scatter
from terrace.model.decoder import IGNORE_INDEX

_OVERRIDES = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]


class Decoder(nn.Module):
    """The blocks of a decoder as one module, with torch's own embedding and output matrix."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        first, *layers, last = blocks
        weight: Any = first.weight
        num_tokens, hidden = weight.shape
        self.embedding = nn.Embedding(num_tokens, hidden, _weight=weight.detach())
        self.layers = nn.ModuleList(layers)
        self.norm: Any = last.norm
        self.output = nn.Linear(hidden, num_tokens, bias=False, device="meta")
        self.output.weight = last.weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of tokens (B, S)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def parallelised(blocks: Sequence[nn.Module], mesh: DeviceMesh, sequence_parallel: bool) -> Decoder:
    """The decoder cut over `mesh`."""
    model = Decoder(blocks)
    stream = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        styles["norm"] = SequenceParallel()
    parallelize_module(model, mesh, styles)
    for layer in model.layers:
        parts: dict[str, ParallelStyle] = {
            # Its other inputs, positions of packed documents and a cache, are absent here.
            "attention": PrepareModuleInput(
                input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
            "attention.output": RowwiseParallel(output_layouts=stream),
            "mlp.down": RowwiseParallel(output_layouts=stream),
        }
        for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
            parts[name] = ColwiseParallel()
        if sequence_parallel:
            parts |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        parallelize_module(layer, mesh, parts)
    return model


def training_step(model: Decoder) -> Callable[[Sequence[Batch]], tuple[float, float]]:
    """A function from the micro-batches of a step to its mean loss and gradient norm."""
    parameters = list(model.parameters())
    # DTensors and plain tensors, if norms are not cut, take no part in one call.
    kinds: list[list[nn.Parameter]] = [[], []]
    for parameter in parameters:
        kinds[isinstance(parameter, DTensor)].append(parameter)
    optimizer = torch_adamw(parameters)

    def step(batches: Sequence[Batch]) -> tuple[float, float]:
        num_tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
        total = torch.zeros((), dtype=torch.float64)
        for tokens, labels in batches:
            with loss_parallel():
                logits = model(tokens)
                loss: Any = F.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
                )
                (loss / num_tokens).backward()
            total += loss.detach().to_local()
        norm = clip(kinds)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item() / num_tokens, norm

    return step


def clip(kinds: Sequence[Sequence[nn.Parameter]]) -> float:
    """Clip the gradients of all parameters together; their norm before that."""
    squares = []
    for parameters in kinds:
        if parameters:
            norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).square())
    total = torch.stack(squares).sum().sqrt()
    for parameters in kinds:
        if parameters:
            nn.utils.clip_grads_with_norm_(parameters, ADAMW.clip, total)
    return total.item()


def replace_reduce_scatter() -> None:
    """Give this process's DTensors a reduce-scatter of (W - 1) / W of the buffer; gloo's own sends twice as much."""
    _OVERRIDES.impl("reduce_scatter_tensor", _exchanged, "CPU")  # type: ignore[no-untyped-call]


def _exchanged(given: Tensor, op: str, num_ranks: int, group_name: str) -> Tensor:
    output = given.new_empty((given.shape[0] // num_ranks, *given.shape[1:]))
    kind = {"sum": dist.ReduceOp.SUM}[op.lower()]
    exchange_reduce_scatter(output, given.contiguous(), kind, _resolve_process_group(group_name))  # type: ignore[arg-type]
    return output


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, num_ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._num_ranks = num_ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # called again with its parts
        name = str(func)
        if "c10d_functional" in name and "wait" not in name and "_wrap" not in name:
            others, nbytes = self._num_ranks - 1, args[0].nbytes
            if "all_gather" in name:
                self.num_bytes += others * nbytes
            elif "reduce_scatter" in name:
                self.num_bytes += others * nbytes // self._num_ranks
            elif "all_reduce" in name:
                self.num_bytes += 2 * others * nbytes // self._num_ranks
            else:
                raise NotImplementedError(f"the bytes of {name} are not counted here")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_bytes(num_ranks: int) -> Iterator[Callable[[], int]]:
    """Yields a function that returns the bytes one rank had to send for the collectives in the body."""
    with _Counter(num_ranks) as counter:
        yield lambda: counter.num_bytes
