"""Builder of a block's operations for `terrace.simulate.tape`: norms, products, residuals, messages.

terrace.simulate.activations lists the tensors each operation keeps, by backend.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from terrace.model.product_parts import converted_bytes
from terrace.plan.plan import scales_rows
from terrace.plan.wire import FORMATS
from terrace.simulate.tape import Operation

if TYPE_CHECKING:
    from terrace.simulate.work import Work

Backend = Literal["cpu", "cuda"]

# Operations of a tape that are recomputed together: operation -> name in the plan, and replay.
_REPLAYS = {
    **dict.fromkeys(("copy key", "copy value", "attention", "merge heads"), ("attention", "attention")),
    **dict.fromkeys(("activation", "gating"), ("mlp", "mlp")),
    **{name: ("norms", name) for name in ("attention norm", "mlp norm")},
}

_STATISTIC_BYTES = 4  # log-sums and roots are kept in fp32 at least
_SCALE_BYTES = 4  # of codes, in fp32


@dataclass
class BlockTape:
    """Operations and tensor sizes in bytes; a subclass adds the operations of a block."""

    work: "Work"
    backend: Backend
    operations: list[Operation] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    logits_bytes: int = 0
    fixed_bytes: int = 0  # kept, whatever the number of sequences
    choices_bytes: int = 0  # of a mixture, which a recomputed block keeps
    runs_at_once: bool = False  # whether the backward runs the whole block, and the forward nothing

    def __post_init__(self) -> None:
        work, model = self.work, self.work.model
        self.item = FORMATS[work.compute].element_bytes
        self.wide = max(self.item, _STATISTIC_BYTES)
        self.cut = work.rows if work.sequence_parallel else 1  # of the tokens of the residual stream
        self.heads = -(-model.num_heads // work.rows)
        self.kv_heads = -(-model.num_kv_heads // work.rows)
        self.inner = -(-model.mlp_size // work.rows)
        self.hidden = -(-model.hidden_size // work.columns)
        self.residual = work.tokens * self.hidden // self.cut  # elements
        self.query = work.tokens * self.heads * model.head_dim
        self.in_pieces = work.is_masked and work.kernel_on(self.backend) == "pieces"
        # What tensor ranks gather for a matrix product, or sum up after one, is whole for as long as it runs.
        self.whole = work.tokens * self.hidden * self.item if self.cut > 1 else 0
        # A region drops its gathered input after its forward, unless the block is being recomputed for its backward.
        self.keeps_gathered = work.recompute == "full"
        self.gathered_beside = 0 if self.keeps_gathered else self.whole

    def _norm(self, name: str, source: str, target: str, keeps_target: bool = False) -> None:
        self.sizes[target] = self.residual * self.item
        self._normalise(name, source, target, self.work.tokens // self.cut, self.work.model.norm, keeps_target)

    def _head_norm(self, name: str, source: str, target: str, num_heads: int) -> None:
        self._normalise(name, source, target, num_heads, "rms")

    def _normalise(
        self, name: str, source: str, target: str, num_rows: int, norm: str, keeps_target: bool = False
    ) -> None:
        numel = self.sizes[target] // self.item
        # Of a weight and an offset the sum is kept, once.
        moved = f"weight of {name}"
        self.sizes[moved] = self.item * (numel // num_rows) if self.work.model.norm_offset else 0
        statistics, normalised = f"statistics of {name}", f"normalised by {name}"
        widened = f"widened by {name}"
        keeps: tuple[str, ...] = (source,)
        adds = 0
        # A layer norm keeps mean and root; on a CPU torch keeps them in the dtype of the input.
        if norm == "layer":
            self.sizes[statistics] = 2 * num_rows * (self.item if self.backend == "cpu" else self.wide)
            keeps = (source, statistics)
        elif self.backend == "cuda":
            self.sizes[statistics] = num_rows * self.wide
            keeps = (source, statistics)
        else:
            # On a CPU an rms norm is a chain of operations, each of which keeps its own operand.
            self.sizes |= {statistics: num_rows * self.wide, normalised: numel * self.wide}
            keeps = (source, statistics, normalised)
            if self.wide > self.item:
                self.sizes[widened] = numel * self.wide
                keeps = (widened, statistics, normalised)
            adds = 3 * numel * self.wide  # gradients of the operations that it consists of
        if self.sizes[moved]:
            keeps = (*keeps, moved)
        self._add(name, (source,), target, (*keeps, target) if keeps_target else keeps, backward_adds=adds)

    def _gathered(self, source: str, whole: int) -> str:
        # 0 bytes: the input is whole already.
        if not whole:
            return source
        self.sizes[f"whole {source}"] = whole
        self._add(f"gather {source}", (source,), f"whole {source}")
        return f"whole {source}"

    def _entered(self, source: str) -> str:
        return self._gathered(source, self.whole) if self.keeps_gathered else source

    def _product(
        self,
        name: str,
        source: str,
        target: str,
        weight_numel: int,
        variables: tuple[str, ...] = (),
        whole: int = 0,
        kept: str = "",
        codes: int = 0,
    ) -> None:
        """A matrix product, which keeps its `source` or what is `kept` in its place; `codes` as of an `Operation`."""
        self._add(
            name,
            (source,),
            target,
            (kept or source,),
            forward_adds=whole,
            # With the weight's gradient live the re-gathered input and the gradient of the region's output, which the
            # weights wait for.
            backward_adds=converted_bytes(weight_numel, self.item, self.wide, self.backend) + 2 * whole,
            variables=variables,
            weighs=True,
            codes=codes,
        )

    def _linear(
        self,
        name: str,
        source: str,
        target: str,
        features: tuple[int, int],
        variables: tuple[str, ...] = (),
        whole: int = 0,
        returns: bool = False,
        stack: tuple[int, int] | None = None,
    ) -> None:
        """A product with a matrix of (inputs, outputs), or with a `stack` of (matrices, rows of all), of a layer.

        With products in 8 bits it keeps the codes of its input over the rows, unless the input `returns` for the
        backward (terrace.runtime.scaled_operands).
        """
        inputs, outputs = features
        if self.work.products is None:
            self._product(name, source, target, inputs * outputs, variables, whole)
            return
        by_row, (number, rows) = scales_rows(self.work.products), stack or (1, self.work.tokens)
        kept = source
        # What is recomputed comes again, as what is gathered again does.
        if not returns and not any(each.replay for each in self.operations if each.writes == source):
            kept = f"codes of {source}"
            self.sizes[kept] = rows * inputs + _SCALE_BYTES * number * (inputs if by_row else 1)
        codes = rows * outputs + _SCALE_BYTES * number * (outputs if by_row else 1)
        self._product(name, source, target, inputs * outputs, variables, whole, kept, codes)

    def _residual(self, name: str, stream: str, branch: str, target: str) -> None:
        self._add(name, (stream, branch), target, is_sum=True)

    def _add(
        self,
        name: str,
        reads: tuple[str, ...],
        writes: str,
        keeps: tuple[str, ...] = (),
        forward_adds: int = 0,
        backward_adds: int = 0,
        is_sum: bool = False,
        variables: tuple[str, ...] = (),
        weighs: bool = False,
        codes: int = 0,
    ) -> None:
        recomputed, replay = _REPLAYS.get(name, ("", ""))
        self.operations.append(
            Operation(
                name=name,
                reads=reads,
                writes=writes,
                keeps=keeps,
                forward_adds=forward_adds,
                backward_adds=backward_adds,
                is_sum=is_sum,
                variables=variables,
                replay=replay if recomputed in self.work.operations else "",
                weighs=weighs,
                codes=codes,
            )
        )
