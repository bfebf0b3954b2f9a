"""GaLore and LSP as their papers write them down, in numpy and fp64, for one matrix at a time.

Nothing is shared with the runtime but the stream of random numbers: GaLore takes the full singular value decomposition,
LSP forms its bias b = P P^T G Q Q^T - G and the gradient of its norm by the product rule.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from terrace.runtime.projections.interface import generator
from terrace.runtime.settings import OptimizerConfig

Array = NDArray[np.float64]


def adam(state: dict[str, Any], gradient: Array, config: OptimizerConfig, step: int) -> Array:
    """AdamW's direction, without its rate and decay; `step` from 1."""
    state["m"] = config.beta1 * state.get("m", 0.0) + (1 - config.beta1) * gradient
    state["v"] = config.beta2 * state.get("v", 0.0) + (1 - config.beta2) * gradient**2
    mean, square = state["m"] / (1 - config.beta1**step), state["v"] / (1 - config.beta2**step)
    direction: Array = mean / (np.sqrt(square) + config.eps)
    return direction


@dataclass
class Galore:
    """Algorithm 2 of arXiv 2403.03507."""

    config: OptimizerConfig
    state: dict[str, Any] = field(default_factory=dict)

    def direction(self, gradient: Array, name: str, step: int) -> Array:
        if gradient.shape[0] > gradient.shape[1]:
            return self._wide(gradient.T, name, step).T
        return self._wide(gradient, name, step)

    def _wide(self, gradient: Array, name: str, step: int) -> Array:
        if (step - 1) % self.config.check_every == 0:
            self.state["p"] = leading(gradient, self.config.rank, name, step - 1)
        projector = self.state["p"]
        result: Array = projector @ adam(self.state, projector.T @ gradient, self.config, step)
        return result


def leading(gradient: Array, rank: int, name: str, step: int) -> Array:
    """The leading left singular vectors of a wide matrix; random ones, made orthonormal, where it has no more."""
    vectors, sizes, _ = np.linalg.svd(gradient)
    found, real = list[Array](), sizes > gradient.shape[1] * np.finfo(float).eps * sizes[0]
    random = generator(name, step)
    torch.randn(gradient.shape[1], min(len(gradient), rank + 10), generator=random, dtype=torch.float64)
    others = torch.randn(len(gradient), rank, generator=random, dtype=torch.float64).numpy()
    for index in range(rank):
        if real[index]:
            vector = vectors[:, index] * np.sign(vectors[np.argmax(np.abs(vectors[:, index])), index])
        else:  # Gram and Schmidt, twice
            vector = others[:, index]
            for each in (*found, *found):
                vector = vector - each * (each @ vector)
        found.append(vector / np.linalg.norm(vector))
    return np.stack(found, axis=1)


BETA, STEPS, RATE, ONE, TWO, EPS = 1e-3, 40, 0.03, 0.9, 0.99, 1e-8


@dataclass
class Lsp:
    """LSP-Offload, arXiv 2406.10181, with the choices of docs/optimizers.md."""

    config: OptimizerConfig
    state: dict[str, Any] = field(default_factory=dict)
    num_learned: int = 0

    def direction(self, gradient: Array, name: str, step: int) -> Array:
        if (step - 1) % self.config.check_every == 0:
            self._check(gradient, name, step)
        left, right = self.state["p"], self.state["q"]
        result: Array = left @ adam(self.state, left.T @ gradient @ right, self.config, step) @ right.T
        return result

    def _check(self, gradient: Array, name: str, step: int) -> None:
        norm, before = np.linalg.norm(gradient), None
        if "p" in self.state:
            before = self.state["p"], self.state["q"]
            if norm == 0 or np.linalg.norm(bias(gradient, *before)) <= self.config.alpha * norm:
                return
        left, right = draw(self.config, gradient.shape, name, step - 1)
        if norm > 0:
            left, right = learned(gradient / norm, left, right, self.config.alpha)
        self.num_learned += 1
        if before is not None:
            one, two = left.T @ before[0], before[1].T @ right
            self.state["m"], self.state["v"] = one @ self.state["m"] @ two, one**2 @ self.state["v"] @ two**2
        self.state |= {"p": left, "q": right}


def draw(config: OptimizerConfig, shape: tuple[int, ...], name: str, step: int) -> tuple[Array, Array]:
    """P and Q before they learn: N(0, 1/sqrt(r)) at the places of the r largest of uniform numbers, row by row."""
    random, found = generator(name, step), list[Array]()
    for size in shape:
        uniform = torch.rand(size, config.rank, generator=random, dtype=torch.float64).numpy()
        values = torch.randn(size, config.density, generator=random, dtype=torch.float64).numpy()
        matrix = np.zeros((size, config.rank))
        for row in range(size):
            for place, value in zip(np.argsort(-uniform[row])[: config.density], values[row], strict=True):
                matrix[row, place] = value / np.sqrt(config.density)
        found.append(matrix)
    return found[0], found[1]


def bias(gradient: Array, left: Array, right: Array) -> Array:
    result: Array = left @ left.T @ gradient @ right @ right.T - gradient
    return result


def objective(gradient: Array, left: Array, right: Array) -> float:
    penalty = np.sum(left**2) / len(left) + np.sum(right**2) / len(right)
    return float(np.linalg.norm(bias(gradient, left, right)) + BETA * penalty)


def slopes(gradient: Array, left: Array, right: Array) -> tuple[Array, Array]:
    """Gradients of the objective by P and Q, by the product rule on b."""
    b = bias(gradient, left, right)
    norm, a, c = np.linalg.norm(b), left @ left.T, right @ right.T
    # <b, dA G C> with dA = dP P^T + P dP^T, and <b, A G dC> alike.
    by_a, by_c = b @ c @ gradient.T / norm, gradient.T @ a @ b / norm
    return (
        (by_a + by_a.T) @ left + 2 * BETA * left / len(left),
        (by_c + by_c.T) @ right + 2 * BETA * right / len(right),
    )


def learned(gradient: Array, left: Array, right: Array, alpha: float) -> tuple[Array, Array]:
    """P and Q after at most STEPS steps of Adam on their non-zeros, for a gradient of norm 1."""
    image = bias(gradient, left, right) + gradient
    scale = (np.sum(image * gradient) / np.sum(image**2)) ** 0.25
    pair = [left * scale, right * scale]
    masks = [each != 0 for each in pair]
    means, squares = [np.zeros_like(each) for each in pair], [np.zeros_like(each) for each in pair]
    for step in range(1, STEPS + 1):
        if np.linalg.norm(bias(gradient, *pair)) <= alpha:
            break
        for index, slope in enumerate(slopes(gradient, *pair)):
            slope = slope * masks[index]
            means[index] = ONE * means[index] + (1 - ONE) * slope
            squares[index] = TWO * squares[index] + (1 - TWO) * slope**2
            root = np.sqrt(squares[index] / (1 - TWO**step)) + EPS
            pair[index] = pair[index] - RATE * (means[index] / (1 - ONE**step)) / root
    return pair[0], pair[1]
