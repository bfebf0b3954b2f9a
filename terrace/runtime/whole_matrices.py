"""Base of the optimizers that update the matrices of layers as wholes: Muon, GaLore and LSP.

A rank owns a slice of one flat buffer, which may begin and end in the middle of a matrix. So `prepare` replaces the
gradient of the slice by the input of the direction. The ranks of the optimizer tier gather that (ORTHOGONALISE), in the
compute dtype, and then the ranks of the tensor axis that cut the matrices. `update` computes the direction D of every
matrix that reaches into the slice, and applies the part of D that lies in the slice:

    W = W - lr (scale D + weight_decay W)

Ranks that share a matrix compute the same direction from the same bits. Parameters other than the matrices of layers
take AdamW.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from terrace.plan.keep import MATRICES, STATES
from terrace.runtime.elementwise import Elementwise, StatePart, whole_part
from terrace.runtime.flat_slices import Matrix
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.stored import State, Storage, passing


class ShardedMatrices:
    """Updates `matrices` in `master` as wholes, and the elements after them by `others`, which is AdamW.

    `master` is the slice of the flat buffer from `start` on, whose first `num_decayed` elements decay. `gradient` holds
    the finished gradient of the same elements when `prepare` is called. `compute` is the dtype of products, `storage`
    how states are stored.
    """

    group = ""  # name of the group of its matrices (terrace.runtime.states)

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        start: int,
        matrices: Sequence[Matrix],
        num_decayed: int,
        config: OptimizerConfig,
        compute: torch.dtype,
        storage: Storage,
        others: type[Elementwise],
    ) -> None:
        self.num_steps_made = 0
        self._gradient, self._start, self._config, self._compute = gradient, start, config, compute
        # Matrices stand at the beginning of the buffer; behind them AdamW's elements follow.
        self._num_matrix = min(max(matrices[-1].stop - start, 0), master.numel())
        stop = start + self._num_matrix
        # Only matrices that overlap this rank's slice are updated here.
        self._matrices = [each for each in matrices if each.start < stop and each.stop > start]
        whole, rest = slice(0, self._num_matrix), slice(self._num_matrix, master.numel())
        self._parameters = storage.group(MATRICES, self._num_matrix, start).parameters(master[whole], start)
        self._own = self._make_states(storage, master.device)
        self._master = [] if self._parameters.rests_below else [master]
        self._rest: Elementwise | None = None
        if rest.start < rest.stop or storage.passes(STATES):
            self._rest = others(
                master[rest], gradient[rest], num_decayed, config, start=start + rest.start, storage=storage
            )

    def _make_states(self, storage: Storage, device: torch.device) -> tuple[State, ...]:
        """Make the states of the slice's elements that belong to matrices, besides the parameters."""
        return ()

    def prepare(self) -> None:
        """Replace the gradient of the slice by the input of `_direction`, in place. By default it is that input."""

    def _direction(self, matrix: Tensor, number: int) -> tuple[Tensor, float]:
        """The direction (m, n) of matrix `number` of this rank, without weight decay, and its scale.

        `matrix` (m, n) is the gathered input, in the dtype of products. Called once a step for each matrix.
        """
        raise NotImplementedError

    @property
    def master(self) -> Tensor:
        """The parameters that it updates; a copy if they are kept below the device."""
        if self._master:
            return self._master[0]
        rest = () if self._rest is None else (self._rest.master,)
        return torch.cat([self._parameters.tensor, *rest])

    @property
    def masters(self) -> list[tuple[int, State]]:
        """The states of the parameters, of matrices and of the rest, each with its first element."""
        rest = () if self._rest is None else self._rest.states[:1]
        return [(0, self._parameters), *((self._num_matrix, state) for state in rest)]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._own) + (self._rest.nbytes if self._rest is not None else 0)

    @property
    def states(self) -> tuple[State, ...]:
        return (self._parameters, *self._own, *(self._rest.states if self._rest is not None else ()))

    @property
    def num_steps(self) -> int:
        return self.num_steps_made

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.num_steps_made = value
        if self._rest is not None:
            self._rest.num_steps = value

    @property
    def parts(self) -> list[StatePart]:
        found = []
        if self._num_matrix:
            found.append(whole_part(self.group, self._parameters.tensor, *(state.tensor for state in self._own)))
        for part in self._rest.parts if self._rest is not None and self._num_matrix < len(self._gradient) else ():
            elements = slice(self._num_matrix + part.elements.start, self._num_matrix + part.elements.stop)
            found.append(StatePart(group=part.group, elements=elements, values=part.values))
        return found

    @torch.no_grad()
    def update(self, lr: float, gathered: Tensor | None = None) -> None:
        """Take one step. `gathered` is what ORTHOGONALISE gathered; None if the slice is the whole buffer."""
        source = self._gradient if gathered is None else gathered
        direction, scale, now = torch.empty(0), 1.0, -1  # of matrix `now`
        for piece in passing([self._parameters], self._num_matrix):
            for number, each in enumerate(self._matrices):
                # What lies in this piece of the rank's slice.
                start, stop = each.start, each.stop
                low, high = max(start, self._start + piece.start), min(stop, self._start + piece.stop)
                if low >= high:
                    continue
                if now != number:
                    whole, scale = self._direction(_joined(each, source, self._compute), number)
                    direction, now = _own_part(each, whole).reshape(-1), number
                part = slice(low - self._start, high - self._start)
                parameters = self._parameters.read(part)
                # Decoupled weight decay, as in AdamW.
                parameters.mul_(1 - lr * self._config.weight_decay)
                parameters.add_(direction[low - start : high - start].to(parameters.dtype), alpha=-lr * scale)
                self._parameters.write(part, parameters, self.num_steps_made + 1)
        if self._rest is not None:
            self._rest.update(lr)
        self.num_steps_made += 1


def _joined(matrix: Matrix, source: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole matrix from the parts of all ranks that cut it; a view of `source` if it is there in one part."""
    size = matrix.stop - matrix.start
    parts = [source[part.start : part.start + size].to(dtype).view(matrix.held) for part in matrix.parts]
    if len(parts) == 1:
        return parts[0]
    whole = source.new_empty(matrix.shape, dtype=dtype)
    for (_, place), values in zip(matrix.parts, parts, strict=True):
        target = whole[place]
        target.copy_(values[tuple(slice(0, length) for length in target.shape)])  # without padding
    return whole


def _own_part(matrix: Matrix, whole: Tensor) -> Tensor:
    """This rank's part of a whole matrix, filled up with zeros."""
    own = whole[matrix.own]
    (rows, columns), (wide, long) = matrix.held, own.shape
    return pad(own, (0, columns - long, 0, rows - wide)) if own.shape != matrix.held else own
