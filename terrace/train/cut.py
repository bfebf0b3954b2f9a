"""Cuts the tensors given to a trainer, a whole batch or this rank's part of one, into the rank's micro-batches."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.comm.collectives import DTYPES
from terrace.plan.context import is_context_parallel
from terrace.plan.dims import has_routers
from terrace.plan.members import count_micros, micros_before
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.train.user_blocks import digest

Tensors = Mapping[str, Tensor]  # inputs, labels and maybe positions, all with samples as the first dim


class Cutter:
    """Cuts batches for a rank: its own part if `is_local`, else the whole batch.

    Labels equal to `ignored` do not count.
    """

    def __init__(self, engine: Engine, *, is_local: bool, ignored: int) -> None:
        self._engine, self._is_local, self.ignored = engine, is_local, ignored

    def micro_batches(self, tensors: Tensors, step: int) -> list[Batch]:
        """This rank's micro-batches of `step`.

        Raises `ConfigError` for a batch that cannot be divided.
        """
        num, unit = num_samples(tensors), self._unit()
        if num < 1 or num % unit:
            below = num // unit * unit
            near = f"{below} or {below + unit}" if below else str(unit)
            num_micros, shares = self._engine.program.num_micros, self._engine.program.plan.shares
            parts = f"{counted(unit // num_micros, 'data rank')} x {counted(num_micros, 'micro-batch')} = {unit}"
            fix = "another num_micros"
            if shares:
                parts, fix = f"the {unit} micro-batches of plan.shares = {list(shares)}", "other shares"
            raise ConfigError(
                f"a batch of {counted(num, 'sample')} does not divide into {parts}: give {near}, or {fix}"
            )
        size, plan = num // unit, self._engine.program.plan
        if (does := self._fixes_size()) and size != plan.micro_batch:
            raise ConfigError(
                f"a micro-batch of {counted(size, 'sample')}: {does} of plan.micro_batch = "
                f'{plan.micro_batch}; write plan={{"preset": ..., "micro_batch": {size}}}, or give '
                f"{counted(unit * plan.micro_batch, 'sample')}"
            )
        return self._cut(tensors, size, step)

    def eval_passes(self, tensors: Tensors) -> list[Callable[[], list[Batch]]]:
        """Splits a batch of any size into evaluation passes. Every rank calls this.

        The last pass is padded with copies of the first sample, with ignored labels. Raises `ConfigError` for an empty
        batch, and if padding is needed but labels are not integers.
        """
        num, unit = num_samples(tensors), self._unit()
        # Ranks that have less of their own than others still take part, and need a sample to copy.
        of_a_micro = -(-num // unit)
        of_ranks = self._engine.comm.exchange(of_a_micro) if self._is_local else [of_a_micro]
        most = max(of_ranks)
        if min(of_ranks) < 1:
            raise ConfigError("a batch of 0 samples cannot be evaluated: give every rank one or more")
        size = self._engine.program.plan.micro_batch if self._fixes_size() else most
        num_passes = -(-most // size)
        lacks = num_passes * unit * size - num
        if lacks:
            labels = tensors["labels"]
            if labels.is_floating_point():
                raise ConfigError(
                    f"a batch of {counted(num, 'sample')} is filled up to {num_passes * unit * size} with labels that "
                    f"do not count, and labels of floats all count: give a multiple of {unit} samples"
                )
            tensors = {
                name: torch.cat([each, each[:1].expand(lacks, *each.shape[1:])]) for name, each in tensors.items()
            }
            tensors["labels"][num:] = self.ignored
        parts = [
            {name: each[at : at + unit * size] for name, each in tensors.items()}
            for at in range(0, num + lacks, unit * size)
        ]
        return [partial(self._cut, part, size, number) for number, part in enumerate(parts)]

    def check_same(self, tensors: Tensors) -> None:
        """Raises `ConfigError` if ranks were given different whole batches. Every rank calls this."""
        if self._is_local or self._engine.program.cluster.world_size == 1:
            return
        # Digests instead of tensors keep the exchange small.
        digests = self._engine.comm.exchange({name: digest(tensor) for name, tensor in tensors.items()})
        for rank, theirs in enumerate(digests):
            for name, value in theirs.items():
                if value != digests[0].get(name):
                    raise ConfigError(
                        f"rank {rank} has other {name} than rank 0 in its first batch: give every rank the same whole "
                        "batch (the same seed), or its own part with Trainer(..., local_batches=True)"
                    )

    def _unit(self) -> int:
        program = self._engine.program
        return program.num_micros if self._is_local else count_micros(program.plan, program.layout, program.num_micros)

    def _fixes_size(self) -> str:
        """Why every micro-batch must have `plan.micro_batch` samples; "" if it need not."""
        program = self._engine.program
        if is_context_parallel(program.mesh, program.plan):
            return "a context axis spreads the tokens"
        return "stages exchange activations" if program.stage.num_stages > 1 else ""

    def _cut(self, tensors: Tensors, size: int, step: int) -> list[Batch]:
        program, layout = self._engine.program, self._engine.program.layout
        num_micros, plan = program.num_micros, program.plan
        before = micros_before(plan, layout, layout.data_rank(self._engine.rank), num_micros)
        # A whole batch is cut by data rank; a local one is this rank's already.
        first = 0 if self._is_local else before * size
        row = (step * count_micros(plan, layout, num_micros) + before) * size
        micros = []
        for micro, start in enumerate(range(first, first + num_micros * size, size)):
            rows = {name: self._placed(name, tensor[start : start + size]) for name, tensor in tensors.items()}
            batch = Batch(rows["inputs"], rows["labels"], rows.get("positions"))
            is_text = has_routers(program.blocks) and batch.labels.shape == batch.inputs.shape
            micros.append(batch.with_places(row + micro * size, self.ignored) if is_text else batch)
        return micros

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        # Labels keep their dtype, as a loss may need it.
        floats = name == "inputs" and tensor.is_floating_point()
        return tensor.to(self._engine.device, DTYPES[self._engine.program.plan.compute] if floats else tensor.dtype)


def num_samples(tensors: Tensors) -> int:
    """Number of samples in a batch. Raises `ConfigError` if its tensors disagree."""
    sizes = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"the first dim of a batch is its samples, and these differ: {sizes}")
    return sizes["inputs"]
