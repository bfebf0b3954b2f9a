"""One process in which activations and their gradients are rounded where stages of a pipeline meet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.comm import codecs
from terrace.plan.wire import parse_format
from tests.support.parity import ADAMW, Case, Outcome, cut_rows, flatten, make_adamw, trainable
from tests.support.toys import MODELS, count_tokens


@dataclass(frozen=True)
class Formats:
    """Formats of a boundary between stages, "" for none: of activations, and of gradients."""

    onward: str = ""
    back: str = ""


@dataclass
class _Coder:
    """Rounds the messages over one boundary for one data rank, in equal parts for its tensor rows."""

    formats: Formats
    rows: int
    residuals: dict[int, Tensor] = field(default_factory=dict)

    def rounded(self, x: Tensor, name: str) -> Tensor:
        """`x` coded and decoded."""
        if not name:
            return x
        wire, flat = parse_format(name), x.detach().reshape(-1)
        parts = F.pad(flat, (0, -len(flat) % self.rows)).view(self.rows, -1)
        found = []
        for number, part in enumerate(parts):
            # Feedback, written out: what is lost is added to the next message.
            sent = part.float()
            if wire.feedback:
                sent = sent + self.residuals.get(number, torch.zeros_like(sent))
            codes = torch.empty(1, wire.message_bytes(len(part)), dtype=torch.uint8)
            codecs.encode(sent[None].to(part.dtype), parse_format(name.removesuffix("+feedback")), codes)
            decoded = torch.empty(1, len(part), dtype=torch.float32)
            codecs.decode(codes, wire, decoded)
            if wire.feedback:
                self.residuals[number] = sent - decoded[0]
            found.append(decoded[0].to(part.dtype))
        return torch.cat(found)[: len(flat)].view(x.shape)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coder: _Coder) -> Tensor:
        ctx.coder = coder
        return coder.rounded(x, coder.formats.onward) if coder.formats.onward else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.coder.rounded(grads[0], ctx.coder.formats.back), None


def coded_serial(
    case: Case,
    boundaries: Mapping[int, Formats],
    data: int,
    rows: int = 1,
    prepare: Callable[[Sequence[nn.Module]], None] = lambda blocks: None,
) -> Outcome:
    """Train a case in this process for `data` data ranks with `rows` tensor rows each; `boundaries` maps the block
    before a boundary to its formats, and `prepare` may change the blocks.

    Losses are sums over tokens until the step ends, since gradients cross stages so.
    """
    model, size = MODELS[case.model], case.plan.micro_batch
    blocks = model.blocks(torch.float64)
    prepare(blocks)
    parameters = trainable(blocks)
    optimizer = make_adamw(parameters)
    coders = {(rank, block): _Coder(each, rows) for rank in range(data) for block, each in boundaries.items()}
    losses, norms = [], []
    for step in range(case.num_steps):
        batch = case.rows.batch(step, size * data * case.num_micros)
        optimizer.zero_grad()
        total, count = 0.0, count_tokens(batch.labels)
        for micro in range(case.num_micros):
            for rank in range(data):
                place = micro * data + rank
                own = cut_rows(batch, size * place, size * (place + 1))
                x = own.inputs
                for index, block in enumerate(blocks):
                    x = block(x)
                    if index in boundaries:
                        x = _Crossing.apply(x, coders[rank, index])  # type: ignore[no-untyped-call]
                loss = model.objective(x, own.labels)
                torch.autograd.backward(loss)
                total += float(loss.detach())
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= count
        norms.append(float(nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
        losses.append(total / int(count))
    return Outcome(losses, norms, flatten(blocks))
