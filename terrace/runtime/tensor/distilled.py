"""The divergence from a teacher with both vocabularies split over tensor ranks (terrace.runtime.distilled).

Each rank has the same rows of both output matrices. 6 + L numbers of a token are exchanged, in one message: of the
student's logits x the largest m, the sums of e^(x - m) and of e^((x - m) / T), and those of its L labels; of the
teacher's y the largest n, the sum s of e^((y - n) / T), and c = sum of e^((y - n) / T) (y - x) / T. With Z the sums of
all ranks

    sum p (log p - log q) = C / S  -  log Z_y  +  log Z_x        C, S: sums of c and s, rescaled to the largest n

and gradients follow from the two logarithms. Logits are computed in chunks of tokens, and again in the backward.

Shape legend: N tokens, B rows, S tokens of a row, H hidden, V' this rank's rows of a matrix, L labels of a token.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from terrace.model.loss_chunks import chunk_rows, part_rows, slices
from terrace.runtime.head import cap_, gradients_through_logits
from terrace.runtime.tensor.axis_comm import AxisComm

_OPERANDS = 5  # as large as the logits of a part, in fp32 at least


class Matrix(Protocol):
    """`terrace.runtime.hidden.OutputMatrix`."""

    weight: Tensor
    part: slice
    cap: float

    def rows(self, part: slice) -> Tensor:
        """The rows `part` of the whole matrix."""


def vocabulary_divergences(
    hidden: Tensor,
    student: Matrix,
    teacher_hidden: Tensor,
    teacher: Matrix,
    labels: Tensor,
    shares: Tensor,
    temperature: float,
    comm: AxisComm,
) -> tuple[Tensor, Tensor]:
    """Cross entropies and divergences (N) of hidden states (B, S, H) of both models, equal on every rank.

    Labels and their shares are (N, L), the share of an ignored label is 0 (terrace.runtime.distilled.labels_of). Both
    results are in fp32 at least, and 0 for tokens without a share. The teacher gets no gradient.
    """
    flat = hidden.flatten(0, 1), student.weight, teacher_hidden.flatten(0, 1), labels, shares
    results: tuple[Tensor, Tensor] = _Divergences.apply(  # type: ignore[no-untyped-call]
        *flat, student, teacher, temperature, comm
    )
    return results


class _Divergences(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        labels: Tensor,
        shares: Tensor,
        student: Matrix,
        teacher: Matrix,
        t: float,
        comm: AxisComm,
    ) -> tuple[Tensor, Tensor]:
        part = student.part
        valid, here = max(part.stop - part.start, 0), (labels >= part.start) & (labels < part.stop)
        # Labels of other ranks point at row 0 and are masked out.
        local = (labels - part.start).masked_fill(~here, 0)
        matrix, given = weight.detach()[:valid], teacher.rows(part)[:valid]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        numbers = torch.empty(6 + labels.shape[1], len(labels), dtype=wide, device=hidden.device)
        for chunk in slices(len(hidden), chunk_rows(len(weight), hidden.device.type)):
            x = cap_(hidden[chunk] @ matrix.t(), student.cap)
            y = cap_(teacher_hidden[chunk] @ given.t(), teacher.cap)
            _take_numbers(x, y, local[chunk], here[chunk], numbers[:, chunk], t)
        # (numbers, ranks, tokens)
        m, sums, warm, n, s, c, *found = comm.every(numbers.view(-1)).view(-1, *numbers.shape).unbind(1)
        largest, most = m.amax(0), n.amax(0)
        log_z = largest + (sums * (m - largest).exp()).sum(0).log()
        log_zx = largest / t + (warm * ((m - largest) / t).exp()).sum(0).log()
        rescaled = ((n - most) / t).exp()
        total = (s * rescaled).sum(0)
        log_zy = most / t + total.log()
        divergences = (c * rescaled).sum(0) / total - log_zy + log_zx
        shares = shares.to(wide)
        whole = shares.sum(-1)
        entropies = ((log_z - torch.stack(found).sum(1)) * shares.t()).sum(0)
        ctx.kept = hidden, teacher_hidden, local, shares * here, whole, (log_z, log_zx, log_zy)
        ctx.weight, ctx.given, ctx.valid, ctx.t, ctx.caps = weight, given, valid, t, (student.cap, teacher.cap)
        return entropies, (divergences * whole).masked_fill(whole == 0, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, teacher_hidden, local, shares, whole, (log_z, log_zx, log_zy) = ctx.kept
        del ctx.kept
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        valid, t, (cap, teacher_cap) = ctx.valid, ctx.t, ctx.caps
        of_entropies, of_divergences = (each.to(log_z.dtype) for each in gradients)

        def to_gradient(logits: Tensor, chunk: slice) -> None:
            y = cap_(teacher_hidden[chunk] @ ctx.given.t(), teacher_cap)
            for rows in slices(len(logits), _part_rows(logits)):
                own = slice(chunk.start + rows.start, chunk.start + min(rows.stop, len(logits)))
                x = logits[rows, :valid].to(log_z.dtype)
                hard = (x - log_z[own].unsqueeze(-1)).exp_().mul_(whole[own].unsqueeze(-1))
                if valid:
                    hard.scatter_add_(-1, local[own], -shares[own])
                q = (x / t - log_zx[own].unsqueeze(-1)).exp_()
                p = (y[rows].to(log_z.dtype) / t - log_zy[own].unsqueeze(-1)).exp_()
                soft = q.sub_(p).mul_((of_divergences[own] * whole[own]).unsqueeze(-1) / t)
                logits[rows, :valid] = hard.mul_(of_entropies[own].unsqueeze(-1)).add_(soft)
            # Padding rows of the matrix must get no gradient.
            logits[:, valid:] = 0.0

        found = gradients_through_logits(
            hidden, ctx.weight, None, to_gradient, of_hidden=needs_hidden, of_weight=needs_weight, cap=cap
        )
        return *found, None, None, None, None, None, None, None


def _take_numbers(x: Tensor, y: Tensor, local: Tensor, here: Tensor, numbers: Tensor, t: float) -> None:
    """Fill `numbers` (6 + L, n), as in the module's docstring, from the logits (n, v) of student and teacher.

    `local` and `here` (n, L): the labels among this rank's rows, and whether they are there.
    """
    if not x.shape[1]:  # a part of nothing but padding
        numbers[:] = 0.0
        numbers[0] = numbers[3] = -torch.inf
        return
    for rows in slices(len(x), _part_rows(x)):
        one, other = x[rows].to(numbers.dtype), y[rows].to(numbers.dtype)
        numbers[0, rows], numbers[3, rows] = one.amax(-1), other.amax(-1)
        off = one - numbers[0, rows].unsqueeze(-1)
        numbers[1, rows] = off.exp().sum(-1)
        numbers[2, rows] = off.div_(t).exp_().sum(-1)
        numbers[6:, rows] = one.gather(-1, local[rows]).masked_fill(~here[rows], 0.0).t()
        chances = (other - numbers[3, rows].unsqueeze(-1)).div_(t).exp_()
        numbers[4, rows] = chances.sum(-1)
        numbers[5, rows] = other.sub_(one).div_(t).mul_(chances).sum(-1)


def _part_rows(logits: Tensor) -> int:
    return part_rows(len(logits), max(1, logits.shape[1]), logits.device.type, _OPERANDS)
