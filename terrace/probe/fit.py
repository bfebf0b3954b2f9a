"""Fits of constants to measurements: pure, no torch.

Every fit is relative: an error of 10 % weighs the same for a message of a kilobyte and one of a gigabyte. Large
deviations count linearly, so that one disturbed measurement does not distort a constant. Constants have hard bounds:
where the optimum is outside them, only the error grows. Kernels and layers are priced by the simulator's own functions
(`terrace.simulate`), so the fitted model is the one used for predictions.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from terrace.base.errors import ProbeError
from terrace.cluster.cluster import Device, Kernels
from terrace.model.attention_kernel import AttentionKernel
from terrace.simulate.kernels import attention_s, gemm_s, memory_s
from terrace.simulate.layers import block_seconds, optimizer_s
from terrace.simulate.work import Work

_TOLERATED = 0.2  # relative deviations beyond this count by their size, not by its square
_NOTHING = 1e-3  # smallest intercept, as a share of the shortest time: as good as none
_NO_RISE = 0.05  # a line that rises by less than this share of its intercept is noise
_SMALLEST_SHARE = 1e-3
_DEEPEST = 4.0  # largest half depth, in the largest inner size measured: beyond, it cannot be told from the share
_MOST_LAUNCH = 100.0  # largest launch cost of a layer's kernel, in launches of the smallest operation
_PRIOR = 0.005  # weight of the measured value in the fit of layers; one measured layer has weight 1
_GRID, _FINEST = 13, 5e-5
_NOISE = 0.1  # smallest share of a bus that is told from none

Loss = Callable[[float, float], float]


@dataclass(frozen=True, kw_only=True)
class GemmSample:
    """Seconds of a product of (m, k) and (k, n)."""

    dtype: str
    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops_per_s(self) -> float:
        return 2.0 * self.m * self.k * self.n / self.seconds


@dataclass(frozen=True, kw_only=True)
class PassSample:
    """Seconds of one kernel that reads and writes `num_bytes` and computes little."""

    num_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AttentionSample:
    """Seconds of causal attention over `sequence` positions, forward and backward."""

    dtype: str
    batch: int
    heads: int
    head_dim: int
    sequence: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class LayerSample:
    """Seconds of one decoder layer, forward and backward (which accumulates into existing gradients)."""

    work: Work
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class OptimizerSample:
    """Seconds of one optimizer step over `num_shards` shards of `numel` parameters each."""

    num_shards: int
    numel: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LinkSample:
    """Seconds of a collective among `degree` ranks in which each sends `sent_bytes`."""

    kind: str
    degree: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """Constants of a tier, and the mean relative error of their predicted times.

    `is_bound`: times did not grow with message sizes, so the bandwidth is a lower bound.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    half_bytes: float
    error: float
    is_bound: bool = False


def fit_gemm(device: Device, samples: Sequence[GemmSample]) -> tuple[float, float, float]:
    """(Share of the peak, half depth, mean relative error) of matrix products.

    Everything else is the device's: peaks, memory, launch, tiles. The share lies in (0, 1], the half depth between 0
    and four times the largest inner size. Raises `ProbeError` when the inner size does not vary.
    """
    _check([sample.seconds for sample in samples], "matrix products")
    depths = {sample.k for sample in samples}
    if len(depths) < 2:
        raise ProbeError("the matrix products all have one inner size: measure two at least to tell share from depth")

    def priced(share: float, half_depth: float) -> list[float]:
        tried = _with(device, gemm=share, gemm_half_depth=half_depth)
        return [gemm_s(tried, each.m, each.k, each.n, dtype=each.dtype) for each in samples]

    measured = [sample.seconds for sample in samples]
    deepest = _DEEPEST * max(depths)
    # The half depth is searched as the cube root of its share of the deepest, which spreads small ones out.
    share, spread = _minimise(
        lambda share, spread: _loss(priced(share, _depth(spread, deepest)), measured),
        (_SMALLEST_SHARE, 1.0),
        (0.0, 1.0),
    )
    return share, _depth(spread, deepest), mean_error(priced(share, _depth(spread, deepest)), measured)


def fit_memory(device: Device, samples: Sequence[PassSample]) -> tuple[float, float]:
    """(share of the memory bandwidth, mean relative error) of passes over memory."""
    measured = [sample.seconds for sample in samples]

    def price(tried: Device) -> list[float]:
        return [memory_s(tried, sample.num_bytes) for sample in samples]

    return _fit_share(device, "memory", price, measured, "passes over memory")


def fit_attention(
    device: Device, samples: Sequence[AttentionSample], kernel: AttentionKernel = "sdpa"
) -> tuple[float, float, float]:
    """(Share of the peak that attention by `kernel` reaches forward, the same backward, mean relative error).

    The dependence on head size and row length is the device's.
    """
    name = "attention" if kernel == "sdpa" else "flash2"

    def price(tried: Device, way: int) -> list[float]:
        return _attention_s(tried, samples, kernel)[way]

    ways = [[each.forward_s for each in samples], [each.backward_s for each in samples]]
    forward, error = _fit_share(device, name, lambda tried: price(tried, 0), ways[0], "attention")
    device = _with(device, **{name: forward})  # a share backward counts only beside one forward
    backward, worse = _fit_share(device, f"{name}_backward", lambda tried: price(tried, 1), ways[1], "attention")
    return forward, backward, (error + worse) / 2


def fit_rows(device: Device, samples: Sequence[AttentionSample]) -> tuple[dict[str, float], float]:
    """Attention's share of the peak on long rows, and the numbers of keys that reach half of it.

    Returns constants by name (forward and backward fitted separately) and their mean relative error. Numbers of keys
    lie between 1 (0 backward would mean the forward's) and the longest row.
    """
    forward, error = _fit_way(device, samples, 0, [each.forward_s for each in samples])
    backward, worse = _fit_way(device, samples, 1, [each.backward_s for each in samples])
    return forward | {f"{name}_backward": value for name, value in backward.items()}, (error + worse) / 2


def _fit_way(
    device: Device, samples: Sequence[AttentionSample], way: int, measured: Sequence[float]
) -> tuple[dict[str, float], float]:
    # Constants of attention forward (way 0) or backward (1), under the names of the former, and their error.
    _check(measured, "attention")
    longest, suffix = max(each.sequence for each in samples), ("", "_backward")[way]

    def constants(share: float, spread: float) -> dict[str, float]:
        return {"attention": share, "attention_half_keys": max(1.0, _depth(spread, longest))}

    def priced(share: float, spread: float) -> list[float]:
        tried = _with(device, **{f"{name}{suffix}": value for name, value in constants(share, spread).items()})
        return _attention_s(tried, samples, "sdpa")[way]

    best = _minimise(lambda a, b: _loss(priced(a, b), measured), (_SMALLEST_SHARE, 1.0), (0.0, 1.0))
    return constants(*best), mean_error(priced(*best), measured)


def _attention_s(
    device: Device, samples: Sequence[AttentionSample], kernel: AttentionKernel
) -> tuple[list[float], list[float]]:
    # Modelled seconds of each sample, forward and backward.
    priced = [
        attention_s(
            device,
            batch=each.batch,
            heads=each.heads,
            queries=each.sequence,
            keys=each.sequence,
            head_dim=each.head_dim,
            dtype=each.dtype,
            kernel=kernel,
        )
        for each in samples
    ]
    return [ways[0] for ways in priced], [ways[1] for ways in priced]


def fit_layers(device: Device, samples: Sequence[LayerSample]) -> tuple[float, float, float]:
    """(Share of the memory bandwidth, launch seconds, mean relative error) of whole layers.

    A layer runs more kernels than the model counts, and their results may stay in a cache. So the two constants of the
    kernels between the products are fitted to layers, the share within (0, 1], the launch within 1 to 100 times the
    launch measured alone, with weak regularisation towards the device's values.
    """
    measured = [seconds for sample in samples for seconds in (sample.forward_s, sample.backward_s)]
    _check(measured, "layers")
    least_s = device.kernels.launch_s
    if not least_s > 0:
        raise ProbeError(
            f"the launch of a kernel was measured as {least_s} s: it must be positive before layers are fitted"
        )
    before = math.log(device.kernels.memory)

    def loss(share: float, launches: float) -> float:
        prior = (math.log(share) - before) ** 2 + launches**2
        return _loss(price_layers(_layered(device, share, launches), samples), measured) + _PRIOR * prior

    share, launches = _minimise(loss, (_SMALLEST_SHARE, 1.0), (0.0, math.log(_MOST_LAUNCH)))
    fitted = _layered(device, share, launches)
    return share, fitted.kernels.launch_s, mean_error(price_layers(fitted, samples), measured)


def fit_optimizer(device: Device, samples: Sequence[OptimizerSample]) -> tuple[float, float]:
    """(seconds of an optimizer step beyond its memory traffic, mean relative error)."""
    measured = [sample.seconds for sample in samples]
    _check(measured, "optimizer steps")

    def priced(constant_s: float) -> list[float]:
        tried = _with(device, optimizer_s=0.0)
        return [constant_s + optimizer_s(tried, sample.num_shards * sample.numel) for sample in samples]

    constant_s, _ = _minimise(lambda tried_s, _: _loss(priced(tried_s), measured), (0.0, max(measured)), (0.0, 0.0))
    return constant_s, mean_error(priced(constant_s), measured)


def price_layers(device: Device, samples: Sequence[LayerSample]) -> list[float]:
    """Modelled seconds of these layers: forward and backward of each, interleaved."""
    seconds = (block_seconds(device, sample.work, accumulate=True) for sample in samples)
    return [way for each in seconds for way in (each.forward_s, each.backward_s)]


def fit_link(samples: Sequence[LinkSample]) -> LinkFit:
    """Latency, bandwidth and half size of a tier from its collectives.

    B bytes among n ranks cost (n - 1) latency + (B + half (n - 1) / n) / bandwidth: linear in B, with a slope and an
    intercept. The part of the intercept already visible in the smallest message is latency; the rest, which only
    affects larger messages, is the half size. Where times do not grow with sizes, as on a machine busy with other work,
    the largest messages bound the bandwidth from below. Raises `ProbeError` when sizes do not vary.
    """
    _check([sample.seconds for sample in samples], "messages")
    degree = samples[0].degree
    if degree < 2 or any(sample.degree != degree for sample in samples):
        raise ProbeError(f"messages among {sorted({each.degree for each in samples})} ranks: give one degree above 1")
    if len({sample.sent_bytes for sample in samples}) < 2:
        raise ProbeError("the messages all have one size: measure two at least to tell latency from bandwidth")
    intercept, rise = _line(samples)
    least, most = (pick(each.sent_bytes for each in samples) for pick in (min, max))
    smallest_s, largest_s = (
        statistics.median(each.seconds for each in samples if each.sent_bytes == size) for size in (least, most)
    )
    is_bound = rise * most < _NO_RISE * intercept
    if is_bound:  # all that the largest take counts as their bytes; what is more than that, as latency
        intercept, rise = max(0.0, smallest_s - least * largest_s / most), largest_s / most
    first_s = min(intercept, smallest_s)
    neighbours = degree - 1
    priced = [intercept + rise * each.sent_bytes for each in samples]
    return LinkFit(
        latency_s=first_s / neighbours,
        bandwidth_bytes_per_s=1.0 / rise,
        half_bytes=(intercept - first_s) / rise * degree / neighbours,
        error=mean_error(priced, [each.seconds for each in samples]),
        is_bound=is_bound,
    )


def overlap_penalty(compute_s: float, message_s: float, together_s: float) -> float:
    """Share of the messages' time by which they slow compute, between 0 and 1.

    From T = max(C (1 + penalty min(1, N / C)), N), with C seconds of compute, N of messages, T of both together: the
    unhidden share of the shorter of C and N.
    """
    _check([compute_s, message_s, together_s], "computing and messages")
    return min(1.0, max(0.0, (together_s - max(compute_s, message_s)) / min(compute_s, message_s)))


def bus_share(seconds: tuple[float, float], together_s: float, penalties: tuple[float, float] = (0.0, 0.0)) -> float:
    """Extra time of two concurrent messages as a share of the shorter one (`Tier.bus`), between 0 and 1.

    `penalties` are the shares of a CPU's cores that each needs: a shortage of cores is not attributed to the bus
    (terrace.simulate.rank). A share below a tenth counts as noise, which is a guess.
    """
    _check([*seconds, together_s], "messages on two tiers at once")
    longer_s = max(seconds)
    cores_s = sum(penalty * each_s for penalty, each_s in zip(penalties, seconds, strict=True))
    share = (together_s - max(longer_s, cores_s)) / min(seconds)
    return min(1.0, share) if share >= _NOISE else 0.0


def mean_error(priced: Sequence[float], measured: Sequence[float]) -> float:
    return sum(abs(a - b) / b for a, b in zip(priced, measured, strict=True)) / len(measured)


def _check(seconds: Sequence[float], what: str) -> None:
    if not seconds:
        raise ProbeError(f"no {what} were measured: there is nothing to fit")
    for value in seconds:
        if not (math.isfinite(value) and value > 0):
            raise ProbeError(
                f"{what} were measured to take {value} s: times are positive; give the probe more --seconds"
            )


def _with(device: Device, **constants: float) -> Device:
    kernels: Kernels = replace(device.kernels, **constants)  # type: ignore[arg-type]  # every constant here is a float
    return replace(device, kernels=kernels)


def _layered(device: Device, share: float, launches: float) -> Device:
    return _with(device, memory=share, launch_s=device.kernels.launch_s * math.exp(launches))


def _fit_share(
    device: Device, name: str, price: Callable[[Device], list[float]], measured: Sequence[float], what: str
) -> tuple[float, float]:
    # (the share of the device called `name`, mean relative error); `price` is the modelled seconds on a device.
    _check(measured, what)

    def priced(share: float) -> list[float]:
        return price(_with(device, **{name: share}))

    share = _minimise(lambda share, _: _loss(priced(share), measured), (_SMALLEST_SHARE, 1.0), (0.0, 0.0))[0]
    return share, mean_error(priced(share), measured)


def _depth(spread: float, deepest: float) -> float:
    # Inverse of the search variable: see `fit_gemm`.
    return deepest * spread**3


def _loss(priced: Sequence[float], measured: Sequence[float]) -> float:
    # Huber: squared log ratios, linear beyond the tolerated deviation.
    total = 0.0
    for a, b in zip(priced, measured, strict=True):
        off = abs(math.log(a / b))
        total += off * off if off <= _TOLERATED else _TOLERATED * (2 * off - _TOLERATED)
    return total


def _line(samples: Sequence[LinkSample]) -> tuple[float, float]:
    # A line a + b x with relative errors. Both are searched as logarithms: the intercept down to a thousandth of the
    # shortest time, the slope as the time that it adds to the largest message.
    measured = [sample.seconds for sample in samples]
    largest = max(sample.sent_bytes for sample in samples)
    bounds = math.log(_NOTHING * min(measured)), math.log(2 * max(measured))

    def priced(intercept: float, rise: float) -> list[float]:
        return [math.exp(intercept) + math.exp(rise) / largest * each.sent_bytes for each in samples]

    intercept, rise = _minimise(lambda a, b: _loss(priced(a, b), measured), bounds, bounds)
    return math.exp(intercept), math.exp(rise) / largest


def _minimise(loss: Loss, first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    # The losses are smooth but not convex: start at the best point of a grid, then take ever smaller steps.
    grids = [[low + (high - low) * step / (_GRID - 1) for step in range(_GRID)] for low, high in (first, second)]
    best = min((loss(a, b), a, b) for a in grids[0] for b in grids[1])
    step = 1.0 / (_GRID - 1)
    while step > _FINEST:
        moves = [(da, db) for da in (-step, 0.0, step) for db in (-step, 0.0, step) if da or db]
        tried = [(_within(best[1], da, first), _within(best[2], db, second)) for da, db in moves]
        found = min((loss(a, b), a, b) for a, b in tried)
        if found < best:
            best = found
        else:
            step /= 2
    return best[1], best[2]


def _within(value: float, step: float, bounds: tuple[float, float]) -> float:
    return min(bounds[1], max(bounds[0], value + step * (bounds[1] - bounds[0])))
