"""Activations of a decoder's blocks: bytes kept between forward and backward, and peaks while a block runs.

Each block is a tape (terrace.simulate.tape) of the operations in `terrace/model/decoder.py` and `layers.py`, with the
tensors that each operation keeps. Kernels keep different tensors, so a backend is named:

- `cpu`, `cuda`: this decoder under autograd, counted tensor by tensor. A norm keeps its input and a mean or a root per
  token; an rms norm on a CPU is several operations, which keep the input in fp32 and once more normalised. Attention
  keeps q, k, v, its output and one log-sum per token and head. A gated MLP keeps gate, up, act(gate) and the product; a
  mixture of experts its rows, the same of every row, and those of its gate (terrace.simulate.mlp_tape). The head
  computes its logits in chunks of tokens during its backward (terrace.runtime.head), so it keeps only its input.
  Attention by plain products keeps q, k, v and the softmax in fp32, and a copy of its output with the heads merged.

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
from terrace.simulate.block_tape import Backend
from terrace.simulate.masks import CPU_PLAIN_SEQUENCE, copied_bytes, work_in
from terrace.simulate.mlp_tape import MlpTape
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


class _Tape(MlpTape):
    def look_up(self) -> None:
        """Looked-up rows plus learned positions; the tokens belong to the batch."""
        model, work, hidden = self.work.model, self.work, self.work.model.hidden_size
        matrix = self._rows_added(-(-model.vocab_size // work.tensor) * hidden)
        # Words are cut over all tensor ranks: each has rows of the whole hidden size to sum up.
        whole = work.tokens * hidden * self.item if work.stream_cut > 1 else 0
        stream = self.residual * self.item
        self.sizes |= {INPUT: 0, "rows": stream, OUTPUT: stream}
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
        self._norm("attention norm", INPUT, "attention input")
        self._attention(self._entered("attention input"), "attended")
        self._residual("attention residual", INPUT, "attended", "middle")
        self._norm("mlp norm", INPUT if parallel else "middle", "mlp input")
        feed = self._mlp if model.experts is None else self._mixture
        feed(self._entered("mlp input"), "mlp output")
        self._residual("mlp residual", "middle", "mlp output", OUTPUT)

    def logits(self) -> None:
        """Final norm, logits, and the cross-entropy, which computes in fp32 at least."""
        model, work = self.work.model, self.work
        self.sizes |= {INPUT: self.residual * self.item, OUTPUT: 4}  # the loss in fp32
        # Rounded up: the rank with the largest part counts.
        vocab = -(-model.vocab_size // work.tensor)
        whole = work.tokens * model.hidden_size * self.item if work.stream_cut > 1 else 0
        if work.tensor > 1:
            self._norm("final norm", INPUT, "head input")
            self._exchanged_loss(self._gathered("head input", whole), vocab)
        else:
            self.runs_at_once = True
            self._norm("final norm", INPUT, "head input", keeps_target=True)
            is_served = "loss" in work.served
            adds = chunk_bytes(work.tokens, vocab, model.hidden_size, self.item, self.wide, self.backend, is_served)
            self._add("loss", ("head input",), OUTPUT, ("head input",), forward_adds=adds, backward_adds=adds)

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
        adds = chunk_bytes(tokens, vocab, self.work.model.hidden_size, self.item, self.wide, self.backend)
        # If one chunk holds all tokens, its logits are kept for the backward; otherwise they are computed again.
        if tokens <= chunk_rows(vocab, self.backend):
            self.sizes["logits"] = self.logits_bytes = tokens * vocab * self.item
            keeps = (*keeps, "logits")
            adds -= self.logits_bytes
        self._add("loss", (source,), OUTPUT, keeps, forward_adds=adds, backward_adds=adds)

    def _attention(self, source: str, target: str) -> None:
        model, tokens = self.work.model, self.work.tokens
        key = tokens * self.kv_heads * model.head_dim
        rotary = model.rotary_dim > 0
        sizes = {"query": self.query, "key": key, "value": key}
        self.sizes |= {name: numel * self.item for name, numel in sizes.items()}
        parts = {"query": self.heads, "key": self.kv_heads, "value": self.kv_heads}
        stages = {name: [name] for name in parts}  # the tensors that a product's result passes, the last one first
        for name in ("query", "key"):
            if rotary:
                stages[name].append(f"{name} before RoPE")
            if model.qk_norm:
                stages[name].append(f"{name} before norm")
        for name, heads in parts.items():
            self.sizes |= dict.fromkeys(stages[name], self.sizes[name])
            weight = heads * model.head_dim * self.hidden
            self._product(name, source, stages[name][-1], weight, whole=self.gathered_beside)
            if model.qk_norm and name != "value":
                self._head_norm(f"{name} norm", stages[name][-1], stages[name][-2], tokens * heads)
        if rotary:
            for name in ("query", "key"):
                whole = self.sizes[name]
                self._add("RoPE", (f"{name} before RoPE",), name, forward_adds=whole, backward_adds=whole)
        self.sizes["mixed"] = self.query * self.item
        self._core()
        # Fused kernels write heads merged already; plain products and pieces need a contiguous copy.
        merged = "mixed"
        if (self._plain or self.in_pieces) and not self.work.is_spread:
            merged = "merged"
            self.sizes[merged] = self.sizes["mixed"]
            self._add("merge heads", ("mixed",), merged)
        weight = self.heads * model.head_dim * self.hidden
        self._product("attention output", merged, target, weight, (source, "query", "key", "value"), self.whole)

    @property
    def _plain(self) -> bool:
        return not self.work.flash

    def _seen(self) -> tuple[str, ...]:
        # Windows and masks make attention copy its keys and values.
        copied = copied_bytes(self.work, self.backend, self.sizes["key"], self.sizes["query"])
        if not copied:
            return "query", "key", "value"
        for name in ("key", "value"):
            self.sizes[f"copied {name}"] = copied
            self._add(f"copy {name}", (name,), f"copied {name}")
        return "query", "key", "value", "copied key", "copied value"

    def _core(self) -> None:
        if self.work.is_spread:
            self._spread_core()
            return
        model, reads = self.work.model, self._seen()
        statistics = self.work.tokens * self.heads * self.wide
        if not self._plain:
            self.sizes["log-sums"] = statistics
            # The gradient of the output, times the output, is summed per token and head.
            self._add("attention", reads, "mixed", (*reads, "mixed", "log-sums"), backward_adds=statistics)
            return
        # In fp32, with scaled queries; torch repeats keys for every query head, the form for a CPU does not.
        inputs = ("scaled query", "scaled key", "wide value")
        keyed = self.sizes["key"] // self.item if self.backend == "cpu" else self.query
        sequence = self.work.sequence
        keys = min(sequence, CPU_PLAIN_SEQUENCE) if self.in_pieces else sequence
        scores = self.work.tokens * self.heads * keys
        self.sizes |= dict.fromkeys(inputs[1:], keyed * self.wide)
        self.sizes |= {"scaled query": self.query * self.wide, "softmax": scores * self.wide}
        # Without grouped heads in fp32 or fp64, widening is a no-op, so the values are the layer's own tensor.
        if self.item == self.wide and model.num_kv_heads == model.num_heads:
            inputs = ("scaled query", "scaled key", "value")
        adds = 2 * self.sizes["softmax"]
        # torch adds a mask to the scores; the form for a CPU has it in the product.
        forward_adds = adds // 2 if self.backend == "cpu" else adds
        self._add("attention", reads, "mixed", (*inputs, "softmax"), forward_adds=forward_adds, backward_adds=adds)

    def _spread_core(self) -> None:
        """Attention over context ranks (terrace.runtime.context); it keeps its operands and output where it runs.

        Under Ulysses these are separate tensors, built from the all-to-all messages. A ring holds the keys of two
        rounds and one message of keys, in the backward with their gradients. `balance = "cost"` is counted at its upper
        bound: all of `most_attended` arrives in messages, and a row's partial results are summed in fp32 at least, next
        to one result.
        """
        work, reads, output = self.work, ("query", "key", "value"), "mixed"
        row = work.most_attended * work.model.head_dim * self.item  # of a head
        query, keys = row * work.attended_heads, 2 * row * work.attended_kv_heads
        self.sizes["log-sums"] = work.most_attended * work.attended_heads * self.wide
        # Keys received, sent and of the round itself; in the backward also gradients of the round, received and sent.
        rounds = 0 if work.places == 1 else 2 if work.places == 2 else 3
        forward_adds, backward_adds = rounds * keys, self.sizes["log-sums"]
        if rounds:
            backward_adds = 4 * keys if work.places == 2 else 5 * keys + self.sizes["log-sums"]
            # Keys are decoded as they are taken. Their codes are made, joined and sent, while others arrive; in the
            # backward of a longer ring they take no more than what arrives decoded otherwise.
            codes = math.ceil(work.codes * keys)
            forward_adds += codes if work.places == 2 else 3 * codes
            backward_adds += codes if work.places == 2 else 0
        # A Ulysses rank receives all parts but its own.
        of_others = (query + keys) * (work.ulysses - 1) // work.ulysses
        if work.balance == "cost":
            # The balancer may assign every token to another rank, so all of them may arrive in messages.
            merged, of_others = query // self.item * self.wide, query + keys
            forward_adds += merged
            backward_adds += merged + keys // self.item * (2 * self.wide - self.item) + query + keys
        kept: tuple[str, ...] = (*reads, output)
        if work.ulysses > 1 or work.balance == "cost":
            kept = ("attended query", "attended key", "attended value", "attended output")
            self.sizes |= dict.fromkeys(kept[1:3], keys // 2) | dict.fromkeys((kept[0], kept[3]), query)
            # The layer's own output, and gradients of its operands, are alive while attention's tensors are sent back.
            forward_adds = max(forward_adds - self.sizes[output], of_others)
            backward_adds = max(query + backward_adds, query + keys + of_others)
        self._add("attention", reads, output, (*kept, "log-sums"), forward_adds, backward_adds)
