"""Activations of a decoder's blocks: bytes kept between forward and backward, and peaks while a block runs.

Each block is a tape (terrace.simulate.tape) of the operations in `terrace/model/decoder.py` and `layers.py`, with the
tensors that each operation keeps. Kernels keep different tensors, so a backend is named:

- `cpu`, `cuda`: this decoder under autograd, counted tensor by tensor. A norm keeps its input and a mean or a root per
  token; an rms norm on a CPU is several operations, which keep the input in fp32 and once more normalised. Attention
  keeps q, k, v, its output and one log-sum per token and head. A gated MLP keeps gate, up, act(gate) and the product; a
  mixture of experts its rows, the same of every row, and those of its gate (terrace.simulate.mlp_tape). The head
  computes its logits in chunks of tokens during its backward (terrace.runtime.head), so it keeps only its input.
  Attention by plain products keeps q, k, v and the softmax in fp32, and a copy of its output with the heads merged.
  With products in 8 bits a linear layer keeps the codes of its input, unless the input comes again for the backward.

Documents and windows are in terrace.simulate.masks.

With T tokens on this context rank and tensor ranks in r rows and c columns: attention and MLP are cut by r, the
residual stream and the norms by c, and under sequence parallelism by r too. A matrix product then takes a whole input
(T x hidden / c), which is gathered while its region runs, and again in the backward; a recomputed layer gathers it
once. The head of several tensor ranks keeps its normalised input whole, a few numbers per token, and the logits of a
small vocabulary. Only `cpu` has been compared with a running decoder; `cuda` follows the documented outputs of its
kernels. RoPE's tables are shared by all layers and are not counted here.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import get_args

from terrace.base.errors import PlanError, did_you_mean
from terrace.model.loss_chunks import chunk_bytes, chunk_rows
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.recompute import WHOLE
from terrace.simulate.attention_tape import AttentionTape
from terrace.simulate.block_tape import Backend
from terrace.simulate.masks import work_in
from terrace.simulate.tape import INPUT, OUTPUT, backward_peak, forward_peak, kept_by_operation, split_backward
from terrace.simulate.work import Work

_TOKEN_BYTES = 8

# What torch's generators remember, so that a recomputed block drops the same elements.
_RANDOM_STATE_BYTES: dict[Backend, int] = {"cpu": 5056, "cuda": 16}


@dataclass(frozen=True, kw_only=True)
class BlockActivations:
    """Bytes of one block and one micro-batch on one rank.

    `kept_bytes` is held from forward to backward: the block's input (the output of the block before, so it is counted
    once) and the tensors its operations keep (`saved`); a recomputed block keeps only a random state, and a
    mixture its choices. The peaks hold the kept tensors, both ends of the block, gradients and temporary tensors.
    """

    tape: "_Tape"
    is_recomputed: bool

    @property
    def input_bytes(self) -> int:
        return self.tape.sizes[INPUT]

    @property
    def output_bytes(self) -> int:
        return self.tape.sizes[OUTPUT]

    @cached_property
    def saved(self) -> dict[str, int]:
        """Bytes kept by each operation."""
        if self._again:
            kept = {"random state": self._random, "choices": self._choices}
            return {name: num_bytes for name, num_bytes in kept.items() if num_bytes}
        return kept_by_operation(self.tape.operations, self.tape.sizes)

    @property
    def logits_bytes(self) -> int:
        """The part of `saved` that grows with the vocabulary."""
        return 0 if self._again else self.tape.logits_bytes

    @cached_property
    def kept_bytes(self) -> int:
        return self.input_bytes + sum(self.saved.values())

    @property
    def fixed_bytes(self) -> int:
        """The part of `kept_bytes` that does not grow with the sequences."""
        return self._random if self._again else self.tape.fixed_bytes

    # The peaks are found only where they are asked for: a search asks for the kept bytes of most blocks alone.
    @cached_property
    def forward_peak_bytes(self) -> int:
        # A head that runs in its backward computes nothing in the forward pass.
        if self.tape.runs_at_once:
            return self.input_bytes
        peak = forward_peak(self.tape.operations, self.tape.sizes, keeping=not self._again)
        return peak + self._random + self._choices

    @cached_property
    def backward_peak_bytes(self) -> int:
        operations, sizes = self.tape.operations, self.tape.sizes
        peak = backward_peak(operations, sizes)
        if self._again:
            # The gradient of the output is there already while the forward runs for the second time.
            peak = max(peak, forward_peak(operations, sizes, keeping=True) + sizes[OUTPUT])
        return peak + self._random + self._choices

    @property
    def due_bytes(self) -> int:
        """Bytes held between the two halves of a backward, for the weight gradients."""
        return 0 if self.tape.runs_at_once else self._halves[1]  # a head's are not held (terrace.runtime.head)

    @property
    def halved_peak_bytes(self) -> int:
        """`backward_peak_bytes` of the first half of a backward."""
        return max(self.backward_peak_bytes, self._halves[0] + self._random + self._choices)

    @cached_property
    def _halves(self) -> tuple[int, int]:
        return split_backward(self.tape.operations, self.tape.sizes)

    @property
    def _again(self) -> bool:
        # A head that runs in its backward keeps only its input, like a recomputed block, but stores no random state.
        return self.is_recomputed or self.tape.runs_at_once

    @property
    def _random(self) -> int:
        recomputes = self.is_recomputed and not self.tape.runs_at_once
        return _RANDOM_STATE_BYTES[self.tape.backend] if recomputes else 0

    @property
    def _choices(self) -> int:
        return self.tape.choices_bytes if self.is_recomputed else 0


def activations_of(work: Work, block: BlockSpec, backend: Backend) -> BlockActivations:
    """Bytes that a block holds for one micro-batch."""
    if block.computes is None:
        return chain_activation_bytes(work, block.matrices, backend)
    return block_activation_bytes(work_in(work, block, backend), block.computes, backend)


def recomputing(work: Work, parts: tuple[str, ...]) -> Work:
    """`work` of a block whose backward computes `parts` again (`terrace.plan.recompute.recomputed_parts`)."""
    return replace(work, recompute="full") if parts == WHOLE else replace(work, operations=parts)


@lru_cache(maxsize=4096)
def block_activation_bytes(work: Work, computes: Computes, backend: Backend = "cuda") -> BlockActivations:
    """Bytes that a block holds for one micro-batch. Cached, since planning asks for the same ones.

    Raises `PlanError` for a backend that does not exist.
    """
    if backend not in get_args(Backend):
        raise PlanError(f"backend = {backend!r} is not known{did_you_mean(backend, get_args(Backend))}")
    tape = _Tape(work, backend)
    match computes:
        case Computes.LOOK_UP:
            tape.look_up()
        case Computes.RESIDUAL:
            tape.residual_block()
        case Computes.LOGITS:
            tape.logits()
        case Computes.VALUES:
            tape.values()
    return BlockActivations(tape=tape, is_recomputed=work.recompute == "full")


@lru_cache(maxsize=4096)
def chain_activation_bytes(
    work: Work, matrices: tuple[tuple[int, int], ...], backend: Backend = "cuda"
) -> BlockActivations:
    """Bytes of products with (inputs, outputs), one after the other."""
    tape = _Tape(work, backend)
    tape.chain(matrices)
    return BlockActivations(tape=tape, is_recomputed=work.recompute == "full")


class _Tape(AttentionTape):
    def look_up(self) -> None:
        """Looked-up rows plus learned positions; the tokens belong to the batch."""
        model, work, hidden = self.work.model, self.work, self.work.model.hidden_size
        matrix = self._rows_added(-(-model.vocab_size // work.tensor) * hidden)
        # Words are cut over all tensor ranks: each has rows of the whole hidden size to sum up.
        whole = work.tokens * hidden * self.item if work.stream_cut > 1 else 0
        stream = self.residual * self.item
        self.sizes |= {INPUT: 0, "rows": stream, OUTPUT: stream}
        if model.scales.embedding != 1.0:
            self._add("look up", (INPUT,), "rows", (), whole, matrix + whole)
            self._add("scale rows", ("rows",), OUTPUT)
            return
        if not model.learned_positions:
            self._add("look up", (INPUT,), OUTPUT, (), whole, matrix + whole)
            return
        self._add("look up", (INPUT,), "rows", (), whole, matrix + whole)
        used = min(work.sequence, work.tokens) * self.hidden * self.item  # summed over the sequences first
        self._add("positions", ("rows",), OUTPUT, (), 0, used + model.max_positions * self.hidden * self.item, True)

    def _rows_added(self, numel: int) -> int:
        """Bytes beside the gradient of a look-up in a matrix of `numel` elements.

        On CUDA it is autograd's, and as large as the matrix. On a CPU the rows of the tokens are added where gradients
        are kept (terrace.runtime.weight_records); narrow ones are widened, and summed once a word.
        """
        if self.backend == "cuda":
            return numel * self.item
        tokens, hidden = self.work.tokens, self.work.model.hidden_size
        words = min(tokens, numel // hidden)
        return tokens * (hidden * self.wide + _TOKEN_BYTES) + words * hidden * self.wide if self.item < self.wide else 0

    def chain(self, matrices: tuple[tuple[int, int], ...]) -> None:
        self.sizes |= dict.fromkeys((INPUT, OUTPUT), self.residual * self.item)
        source = INPUT
        for index, (inputs, outputs) in enumerate(matrices[:-1]):
            width = -(-outputs // self.work.tensor)
            self.sizes[f"product {index}"] = self.work.tokens * width * self.item
            self._product(f"product {index}", source, f"product {index}", inputs * width)
            source = f"product {index}"
        if matrices:
            self._product("last product", source, OUTPUT, math.prod(matrices[-1]) // self.work.tensor)
        else:
            self._add("pass on", (source,), OUTPUT)

    def residual_block(self) -> None:
        model, stream = self.work.model, self.residual * self.item
        parallel = model.parallel_residual
        self.sizes |= dict.fromkeys((INPUT, "attended", "middle", "mlp output", OUTPUT), stream)
        source = self._before("attention", INPUT)
        self._attention(self._entered(source), "attended")
        self._residual("attention residual", INPUT, self._after("attention", "attended"), "middle")
        source = self._before("mlp", INPUT if parallel else "middle")
        feed = self._mlp if model.experts is None else self._mixture
        feed(self._entered(source), "mlp output")
        self._residual("mlp residual", "middle", self._after("mlp", "mlp output"), OUTPUT)

    def _before(self, sublayer: str, source: str) -> str:
        if self.work.model.norms == "after":
            return source
        self._norm(f"{sublayer} norm", source, f"{sublayer} input")
        return f"{sublayer} input"

    def _after(self, sublayer: str, source: str) -> str:
        if self.work.model.norms != "before":
            self._norm(f"{sublayer} output norm", source, f"{sublayer} output normalised")
            source = f"{sublayer} output normalised"
        if self.work.model.scales.residual != 1.0:
            # Its gradient is a tensor of its own.
            self.sizes[f"{sublayer} output scaled"] = self.sizes[source]
            self._add(f"scale {sublayer} output", (source,), f"{sublayer} output scaled")
            source = f"{sublayer} output scaled"
        return source

    def logits(self) -> None:
        """Final norm, logits, and the cross-entropy, which computes in fp32 at least."""
        model, work = self.work.model, self.work
        self.sizes |= {INPUT: self.residual * self.item, OUTPUT: 4}  # the loss in fp32
        # Rounded up: the rank with the largest part counts.
        vocab = -(-model.vocab_size // work.tensor)
        whole = work.tokens * model.hidden_size * self.item if work.stream_cut > 1 else 0
        if work.tensor > 1:
            self._final_norm()
            self._exchanged_loss(self._gathered("head input", whole), vocab)
        else:
            self.runs_at_once = True
            self._final_norm(keeps_target=True)
            is_served = "loss" in work.served
            capped = model.scales.logit_cap > 0
            adds = chunk_bytes(
                work.tokens, vocab, model.hidden_size, self.item, self.wide, self.backend, capped, is_served
            )
            self._add("loss", ("head input",), OUTPUT, ("head input",), forward_adds=adds, backward_adds=adds)

    def _final_norm(self, keeps_target: bool = False) -> None:
        if self.work.model.scales.logit_divisor == 1.0:
            self._norm("final norm", INPUT, "head input", keeps_target)
            return
        self._norm("final norm", INPUT, "normalised")
        self.sizes["head input"] = self.sizes["normalised"]
        self._add("divide logits", ("normalised",), "head input", ("head input",) if keeps_target else ())

    def values(self) -> None:
        """Final norm and a product with one output; a loss of it has a few numbers a token."""
        model, work = self.work.model, self.work
        whole = work.tokens * model.hidden_size * self.item if work.stream_cut > 1 else 0
        self.sizes |= {INPUT: self.residual * self.item, OUTPUT: work.tokens * self.wide}
        self._norm("final norm", INPUT, "head input")
        source = self._gathered("head input", whole) if work.tensor > 1 else "head input"
        self._product("score", source, OUTPUT, model.hidden_size)

    def _exchanged_loss(self, source: str, vocab: int) -> None:
        tokens = self.work.tokens
        # The label's place, whether it is here, whether it counts; the log-sum.
        self.sizes["statistics of tokens"] = tokens * (_TOKEN_BYTES + 2 + self.wide)
        keeps: tuple[str, ...] = (source, "statistics of tokens")
        hidden, capped = self.work.model.hidden_size, self.work.model.scales.logit_cap > 0
        adds = chunk_bytes(tokens, vocab, hidden, self.item, self.wide, self.backend, capped)
        # If one chunk holds all tokens, its logits are kept for the backward; otherwise they are computed again.
        if tokens <= chunk_rows(vocab, self.backend):
            self.sizes["logits"] = self.logits_bytes = tokens * vocab * self.item
            keeps = (*keeps, "logits")
            adds -= self.logits_bytes
        self._add("loss", (source,), OUTPUT, keeps, forward_adds=adds, backward_adds=adds)
