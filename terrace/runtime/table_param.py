"""A table of which this rank has some rows (terrace.plan.tables): look-ups, gradients of used rows, row-wise updates.

`F.embedding` of the parameter takes ids of the whole table and returns vectors of any rows: a `RowDispatcher` sends ids
to the ranks that have their rows, and returns their vectors. Model code is unchanged.

The gradient of a step is sparse: a list of rows and the sum of each, without a buffer of the table's size. A row is
*used* in a step if its gradient is not zero. An update changes used rows alone; all others keep their bits and their
moments, as under `torch.optim.SparseAdam`. So AdamW decays the moments and the weights of a row only in steps that use
it, and corrects the bias of moments by the number of all steps.

Shape legend: R rows of this rank, H elements of a row, n distinct rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terrace.base.errors import ModelError
from terrace.comm.collectives import DTYPES
from terrace.comm.lane import DONE, Ticket
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.plan.flats import FlatParamSpec
from terrace.plan.plan import Plan
from terrace.plan.state_bytes import rests_rows
from terrace.runtime.elementwise import Elementwise
from terrace.runtime.flat_gradient import FlatGradient
from terrace.runtime.flat_param import FlatParam, Initial
from terrace.runtime.kept.host_update import Scale
from terrace.runtime.kept.offloaded import Resident
from terrace.runtime.kept.rows import KeptRows, RowState, RowStorage
from terrace.runtime.kept.states import RESIDENT, Passages
from terrace.runtime.kept.whole import Whole
from terrace.runtime.linear import Matrix
from terrace.runtime.noise import Noise
from terrace.runtime.optimizer import NoOptimizer, make_optimizer
from terrace.runtime.outer_state import OuterState
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.stored import Storage, opened

IdRoute = Sequence[Any]  # the hops that ids took to their rows, in a form that their dispatcher alone reads


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct elements of `ids` (m) in ascending order, and for each of `ids` its index among them (m)."""
    found, inverse = torch.unique(ids, return_inverse=True)
    return found, inverse


def summed(rows: Tensor, index: Tensor, number: int) -> Tensor:
    """Segment sums (`number`, H): row i of `rows` (m, H) is added to sum `index[i]`, in order, in fp32 or wider."""
    total = rows.new_zeros(number, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    rows = rows.to(total.dtype)
    if rows.device.type == "cpu":
        return total.index_add_(0, index, rows)
    # On CUDA `index_add_` adds atomically, in no fixed order; this sorts first.
    return total.index_put_((index,), rows, accumulate=True)


class RowDispatcher(Protocol):
    """Sends ids to the ranks that have their rows, their vectors back, and gradients of the vectors to the rows."""

    def dispatch(self, ids: Tensor, num_rows: int) -> tuple[Tensor, IdRoute]:
        """Send distinct ascending `ids` of a table of `num_rows`. Returns the ids that arrived here, and the route."""

    def combine(self, route: IdRoute, vectors: Tensor) -> Tensor:
        """Send `vectors` of the ids that arrived here back. Returns the vectors of the ids that this rank sent."""

    def dispatch_gradients(self, route: IdRoute, gradients: Tensor) -> Tensor:
        """Send `gradients` of the ids that this rank sent. Returns the sum for each id that arrived here."""


class _LocalRows:
    """The dispatcher of a rank that has all rows, which sends nothing."""

    def dispatch(self, ids: Tensor, num_rows: int) -> tuple[Tensor, IdRoute]:
        return ids, ()

    def combine(self, route: IdRoute, vectors: Tensor) -> Tensor:
        return vectors

    def dispatch_gradients(self, route: IdRoute, gradients: Tensor) -> Tensor:
        return gradients


def _nothing() -> None:
    """Do nothing."""


class RowGradient(FlatGradient):
    """The sparse gradient of a step: `owned` (n H) has the sums of `rows` (n), which ascend from 0, this rank's first.

    It has no buffer that is reduced: gradients are summed as they are dispatched (`RowDispatcher.dispatch_gradients`).
    """

    rows: Tensor
    forget: Callable[[], None] = staticmethod(_nothing)  # called when a step has no gradient yet, or is given up

    def allocate(self, dtype: torch.dtype, below: Sequence[Whole] = ()) -> None:
        """Begin the first step, with sums in `dtype`, which stay on the device."""
        self.owned = torch.empty(0, dtype=dtype, device=self._device)
        self.begin()

    @property
    def has_elements(self) -> bool:
        """Whether it has rows, or had some when its norm was noted: then an update has taken them."""
        return self._is_noted or super().has_elements

    def begin(self) -> None:
        self.rows = torch.empty(0, dtype=torch.int64, device=self._device)
        self.owned = self.owned.new_empty(0)
        self.forget()

    def add(self, rows: Tensor, values: Tensor) -> None:
        """Add the sums `values` (n, H) of distinct ascending `rows` (n)."""
        values = values.to(self.owned.dtype)
        if len(self.rows):
            rows, inverse = distinct(torch.cat([self.rows, rows]))
            values = summed(torch.cat([self.owned.view(-1, values.shape[1]), values]), inverse, len(rows))
        self.rows, self.owned = rows, values.reshape(-1)

    def used(self, width: int) -> tuple[Tensor, Tensor]:
        """Rows whose gradient is not zero, and their gradients (n, H)."""
        values = self.owned.view(-1, width)
        used = (values != 0).any(1)
        return self.rows[used], values[used]


@dataclass(frozen=True)
class LookUp:
    """What the backward of a look-up needs: `inverse` has for each token its index among `num_ids` distinct ids.

    `rows` are the rows of this rank that were read, by their index from its first, and `route` the hops to them.
    """

    inverse: Tensor
    num_ids: int
    route: IdRoute
    rows: Tensor


class TableParam(FlatParam):
    """The flat buffer of one spread table. `dispatcher` reaches the rows of other ranks.

    If rows are kept below the device (terrace.runtime.kept.rows), `full` and `shard` are empty, and the parameter is
    one zero, expanded to its shape: look-ups and updates go to `_below`.
    """

    dispatcher: RowDispatcher = _LocalRows()
    gradient: RowGradient
    _updated: Tensor | None = None  # rows whose working copy is stale since the last update; None: all
    _row_wise: Elementwise

    def __init__(
        self, name: str, spec: FlatParamSpec, rank: int, plan: Plan, device: torch.device, meter: Meter, **others: Any
    ) -> None:
        self._below: list[KeptRows] = []
        super().__init__(name, spec, rank, plan, device, meter, **others)
        self._first = self.layout.ranks.part(rank, "expert") * spec.params[0].shape[0]  # this rank's first row
        self.gradient = RowGradient(self, self.parameters, self._values, device, self._pages, meter, self.origin)

    def initialise(
        self, initial: Initial, config: OptimizerConfig, noise: Noise | None = None, below: Passages = RESIDENT
    ) -> None:
        if not below.rows:
            super().initialise(initial, config, noise, below)
            return
        self._below, (spec,) = [*below.rows], self.spec.params
        (rows,), value = self._below, initial(spec)
        for window in rows.windows:
            # In fp32 at least, as above.
            part = value[window].to(torch.float64 if self._values == torch.float64 else torch.float32)
            if part.count_nonzero():  # rows that were never written are zero
                rows.begin(window, part)
        rows.drain()
        if spec.trainable:
            self.gradient.forget = rows.forget
            values = torch.zeros(1, dtype=DTYPES[self._plan.master], device=self.full.device)
            self._make_optimizer(values.expand(self.padded), config, noise, below)
        else:
            self.optimizer = NoOptimizer(RowState(rows, 0, self.full.device))

    @property
    def working(self) -> Resident:
        """This rank's rows as look-ups return them; of rows below, a copy of all."""
        if not self._below:
            return super().working
        return Resident(self.optimizer.states[0].tensor.to(self.full.dtype))

    def windows(self) -> Iterator[AbstractContextManager[None]]:
        if not self._below:
            yield from super().windows()
        for rows in self._below:
            for window in rows.windows:
                yield self._opened(rows, window)

    @contextmanager
    def _opened(self, rows: KeptRows, window: slice) -> Iterator[None]:
        with rows.within(window), opened(self.optimizer.states):
            yield

    def detach(self) -> None:
        """Look rows up on this rank alone from now on."""
        self.dispatcher = _LocalRows()

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.spec.params[0].shape[1]

    @property
    def num_rows(self) -> int:
        param = self.spec.params[0]
        return (param.whole or param.shape)[0]

    def look_up(self, tokens: Tensor, *, trains: bool = False) -> tuple[Tensor, LookUp]:
        """Vectors (..., H) of `tokens` (...) in the working dtype; if it `trains`, their gradients will be added.

        Raises `ModelError` for an id outside the table.
        """
        ids, inverse = distinct(tokens.reshape(-1).long())
        if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < self.num_rows):
            wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
            raise ModelError(f"id {wrong} is looked up in {self.name}, whose table has rows 0 to {self.num_rows - 1}")
        size = self.spec.params[0].shape[0]
        arrived, route = self.dispatcher.dispatch(ids, size * self.layout.ranks.total("expert"))
        rows = arrived - self._first
        found = [each.look_up(rows, self.full.dtype, holds=trains) for each in self._below]
        own = found[0] if found else self._of_rows(self.full.detach()).index_select(0, rows)
        vectors = self.dispatcher.combine(route, own)
        return vectors.index_select(0, inverse).view(*tokens.shape, self.width), LookUp(inverse, len(ids), route, rows)

    def add_gradient(self, look_up: LookUp, gradient: Tensor) -> None:
        """Add the gradient (..., H) of a look-up's vectors to those of the rows, on the ranks that have them."""
        sums = summed(gradient.reshape(-1, self.width), look_up.inverse, look_up.num_ids)
        self.gradient.observe(sums)
        self.gradient.add(look_up.rows, self.dispatcher.dispatch_gradients(look_up.route, sums))

    def update(self, scale: Tensor, lr: float) -> None:
        """Scale the gradients and step the optimizer on used rows. Their working copy is stale until `publish`."""
        rows, values = self.gradient.used(self.width)
        values.mul_(scale.to(values.dtype))
        for part in self._below[0].parts(len(rows)) if self._below else (slice(0, len(rows)),):
            self._row_wise.update_rows(rows[part], self.width, values[part].view(-1), lr)
        self._row_wise.num_steps += 1
        for each in self._below:
            each.store(rows)
        # An exchange of islands changes every row.
        self._updated = None if self._plan.outer.has_islands else rows
        self.gradient.begin()

    def publish(self) -> None:
        """Round the masters of updated rows into the working copy; those of all rows if there was no update.

        Rows that are kept below have no working copy: look-ups round.
        """
        if self.spec.trainable and self._keeps_master and not self._below:
            master, working = self._of_rows(self.optimizer.master), self._of_rows(self.shard)
            if self._updated is None:
                working.copy_(master)
            else:
                working.index_copy_(0, self._updated, master.index_select(0, self._updated).to(working.dtype))
        self._updated = None  # without an update in between, the next call follows the restore of a checkpoint

    def update_on_host(self, scale: Scale, lr: float) -> Ticket:
        """As `update`, at once: rows are updated on the device."""
        for each in scale():
            self.update(each, lr)
        return DONE

    def _of_rows(self, values: Tensor) -> Tensor:
        # Without the padding of the buffer, which the slices of islands need.
        return values[: len(values) // self.width * self.width].view(-1, self.width)

    def _make_optimizer(self, values: Tensor, config: OptimizerConfig, noise: Noise | None, below: Passages) -> None:
        plan, device, sums, working = self._plan, self.full.device, DTYPES[self._plan.sums], self.shard
        master, storage = working, Storage(sums, plan.optimizer_states, noise)
        self.gradient.allocate(sums)
        if self._below:
            master, storage = values, RowStorage(self._below[0], sums)
        elif self._keeps_master:
            master = values.to(device=device, dtype=DTYPES[plan.master])
        optimizer = make_optimizer(master, self.gradient.owned, 0, (), len(master), config, self._values, storage)
        assert isinstance(optimizer, Elementwise), "without matrices every update is element by element"
        self.optimizer = self._row_wise = optimizer
        if plan.outer.has_islands:
            # Elsewhere the changes of an island take the memory of the gradient, which is sparse here.
            change = torch.zeros(len(master), dtype=sums, device=device)
            self._meter.add("grads", change.nbytes)
            self.outer_states = [OuterState(plan.outer, master, change, Origin(self.name, device, self._meter))]
        kept = master.nbytes if self._keeps_master and not self._below else 0
        self._meter.add("optimizer", optimizer.nbytes + kept)

    def _make_full(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if rests_rows(self._plan, self.spec):
            return torch.empty(0, dtype=dtype, device=device)
        return super()._make_full(dtype, device)

    def _make_parameters(self) -> list[nn.Parameter]:
        if rests_rows(self._plan, self.spec):
            zero = torch.zeros((), dtype=self.full.dtype, device=self.full.device).expand(self.spec.params[0].shape)
            parameter = nn.Parameter(zero, requires_grad=self.spec.trainable)
        else:
            (parameter,) = super()._make_parameters()
        parameter.__class__ = Table
        assert isinstance(parameter, Table)
        parameter.table = self
        return [parameter]


_plain: Callable[..., Any] = nn.Parameter.__torch_function__
# Functions that would take this rank's rows for the whole table and give wrong results, even of a frozen table.
_PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm)
_REFUSED: frozenset[Any] = frozenset(
    (*_PRODUCTS, F.embedding_bag, Tensor.__getitem__, torch.index_select, Tensor.index_select, torch.einsum)
)


class Table(Matrix):
    """This rank's rows (R, H) of a table, for `F.embedding`."""

    table: TableParam

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`; `F.embedding` of a table looks up rows on all ranks. Raises `ModelError` for other look-ups."""
        if func is F.embedding:
            return _embedding(*args, **(kwargs or {}))
        result = None if func in _REFUSED else _plain(func, (), args, kwargs or {})
        # Any other function of the parameter that autograd follows has taken this rank's rows for the whole table.
        if func in _REFUSED or (isinstance(result, Tensor) and result.grad_fn is not None):
            raise ModelError(
                f"{func.__name__} of a table whose rows plan.vocabulary spreads over ranks: look rows up with "
                "torch.nn.functional.embedding, or leave vocabulary out"
            )
        return result


def _embedding(
    input: Tensor,
    weight: Table,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or scale_grad_by_freq:
        raise ModelError("plan.vocabulary takes tables without max_norm and scale_grad_by_freq: leave these out")
    # `sparse` changes nothing: the gradient is a list of rows whatever it says.
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return weight.table.look_up(input)[0]
    if padding_idx is not None and padding_idx < 0:  # counted from the end of the whole table
        padding_idx += weight.table.num_rows
    # The table is no operand, since its gradient is sparse. Autograd calls the backward for an operand with a gradient.
    anchor = weight.table.full.new_empty(0).requires_grad_()
    vectors: Tensor = _Embedding.apply(anchor, input, weight.table, padding_idx)  # type: ignore[no-untyped-call]
    return vectors


class _Embedding(torch.autograd.Function):
    """tokens (...) -> vectors (..., H)."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, table: TableParam, padding_idx: int | None) -> Tensor:
        vectors, ctx.look_up = table.look_up(tokens, trains=True)
        ctx.table, ctx.padding = table, None if padding_idx is None else tokens == padding_idx
        return vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        if ctx.padding is not None:
            gradient = gradient.masked_fill(ctx.padding.unsqueeze(-1), 0.0)
        ctx.table.add_gradient(ctx.look_up, gradient)
        return None, None, None, None
