"""Builds a cluster from samples: every constant with its mark and the value it replaces.

Constants are fitted in an order in which each depends only on earlier ones: memory, products, attention, layers,
optimizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from terrace.cluster.below import Mark
from terrace.cluster.cluster import Cluster, Device, Kernels, Tier
from terrace.cluster.width import share
from terrace.probe.below import with_medium
from terrace.probe.fit import (
    AttentionSample,
    bus_share,
    fit_attention,
    fit_gemm,
    fit_layers,
    fit_link,
    fit_memory,
    fit_optimizer,
    fit_rows,
    overlap_penalty,
)
from terrace.probe.members import with_speeds
from terrace.probe.samples import Samples, TierSamples
from terrace.simulate.links import wired

_SOURCE = "terrace probe"
_UNITS = {"gemm_half_depth": "elements", "attention_half_keys": "keys", "attention_half_keys_backward": "keys"}
# Slow-down of attention for small heads and short rows, and its rate with the kernel for documents.
_OF_ATTENTION = (
    "attention_half_head",
    "attention_half_keys",
    "attention_half_keys_backward",
    "flash2",
    "flash2_backward",
)
_LONG_TO_SHORT = 4  # rows that differ by as much at least tell a share from the keys that reach half of it
_SAME_KERNEL = 0.05  # two measurements of one kernel differ by less: assumed
_OPTIMIZER_BYTES = 44  # a parameter, as `terrace.simulate.layers` counts an Adam step


@dataclass(frozen=True)
class Constant:
    """One constant: the value in the starting cluster and the value that the probe found.

    `unit` belongs to both values, empty for a share. `error` is the mean relative error of the measured times under
    this constant and earlier ones; None if nothing was fitted. `is_bound`: the value is a lower bound.
    """

    name: str
    unit: str
    before: float | None
    now: float
    mark: Mark
    error: float | None = None
    is_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The cluster with measured constants, and the table of them."""

    cluster: Cluster
    rows: tuple[Constant, ...]
    optimizer_bytes_per_s: float  # of a step on the largest shards, at 44 bytes per parameter


def assemble(start: Cluster, samples: Samples) -> Probed:
    """The cluster `start` with every constant that the samples determine.

    Raises `ProbeError` if a fit has no solution.
    """
    device, rows = _device(start.device, samples)
    found = {each.tier: each for each in samples.tiers}
    tiers = []
    for tier in start.tiers:
        if tier.name not in found:
            tiers.append(replace(tier, marks=_tier_marks(tier.marks, {})))
            continue
        probed, of_tier = _tier(tier, found[tier.name], device.overlap_penalty)
        tiers.append(probed)
        rows += of_tier
    tiers, of_buses = _buses(tiers, samples)
    tiers = [*tiers[:-1], with_speeds(tiers[-1], samples.rates)]
    rows += [
        Constant(f"speed of member {index}", "", None, member.speed, "measured")
        for index, member in enumerate(tiers[-1].members if samples.rates else ())
    ]
    rows += [*of_buses, *_shown(device, samples)]
    for name, sample in (("host", samples.host), ("disk", samples.disk)):
        device = with_medium(start, device, name, sample)
        rows += _of_medium(start.device, device, name) if sample.bytes_per_s else []
    largest = max(samples.optimizer, key=lambda each: each.numel)
    return Probed(
        cluster=replace(start, device=device, tiers=tuple(tiers)),
        rows=tuple(rows),
        optimizer_bytes_per_s=_OPTIMIZER_BYTES * largest.num_shards * largest.numel / largest.seconds,
    )


def _of_medium(start: Device, device: Device, medium: str) -> list[Constant]:
    before, now = start.below.get(medium), device.below[medium]
    return [
        Constant(
            f"below.{medium}.{name}",
            "B" if name == "memory_bytes" else "B/s",
            None if before is None else getattr(before, name),
            getattr(now, name),
            "measured",
        )
        for name in now.marks
    ]


def _device(start: Device, samples: Samples) -> tuple[Device, list[Constant]]:
    device, rows = _peaks(start, samples)
    before = start.kernels

    def learn(errors: float | None, mark: Mark, **constants: float) -> None:
        nonlocal device
        kernels: Kernels = replace(device.kernels, **constants)  # type: ignore[arg-type]  # all of these are floats
        device = replace(device, kernels=kernels)
        for name, value in constants.items():
            unit = "s" if name.endswith("_s") else _UNITS.get(name, "")
            rows.append(Constant(f"kernels.{name}", unit, getattr(before, name), value, mark, errors))

    on_cpu = samples.device == "cpu"
    tiles, num_cores = ((), 0) if on_cpu else (before.tiles, samples.num_cores)
    # Codecs are not measured, so their constants are kept, as are those of a GPU's attention unless it is measured.
    blank = Kernels(tiles=tiles, num_cores=num_cores, source=_SOURCE, launch_s=samples.launch_s, codec=before.codec)
    if not on_cpu:
        blank = replace(blank, **{name: getattr(before, name) for name in _OF_ATTENTION})
    on_gpu = "cuda" if device.backend == "cpu" else device.backend
    device = replace(device, kernels=blank, backend="cpu" if on_cpu else on_gpu)
    memory, _ = fit_memory(device, [*samples.norms, *(() if on_cpu else samples.copies)])
    device = replace(device, kernels=replace(blank, memory=memory))
    if on_cpu:  # a CPU's norm is bound by compute as much as by reading: streams get a constant of their own
        stream, error = fit_memory(device, samples.copies)
        learn(error, "fitted", stream=stream)
    share, half_depth, error = fit_gemm(device, samples.gemms)
    learn(error, "fitted", gemm=share, gemm_half_depth=half_depth)
    # 8-bit products are not measured: their ratio to the others is kept from the preset.
    of_fp8 = 0.0 if on_cpu else share * before.gemm_fp8 / before.gemm
    device = replace(device, kernels=replace(device.kernels, gemm_fp8=of_fp8))
    constants, error = _attention(device, samples)
    learn(error, "fitted", **constants)
    if (found := _flash2(device, samples)) is not None:
        learn(found[2], "fitted", flash2=found[0], flash2_backward=found[1])
    learn(None, "measured", host_layer_s=samples.host_layer_s)
    # Last, because whole layers correct two constants fitted to single kernels: memory and launch.
    memory, launch_s, error = fit_layers(device, samples.layers)
    learn(error, "fitted", memory=memory, launch_s=launch_s)
    constant_s, error = fit_optimizer(device, samples.optimizer)
    learn(error, "fitted", optimizer_s=constant_s)
    marks = {row.name: row.mark for row in rows}
    marks |= {"kernels.num_cores": "measured", "kernels.tiles": "measured" if on_cpu else "preset"}
    return replace(device, marks=_device_marks(device, start.marks, marks), source=_SOURCE), rows


def _attention(device: Device, samples: Samples) -> tuple[dict[str, float], float]:
    """Constants of causal attention over whole rows by name, and the error of their fit."""
    lengths = [each.sequence for each in samples.attention]
    if samples.device != "cpu" and max(lengths, default=0) >= _LONG_TO_SHORT * min(lengths, default=1):
        return fit_rows(device, samples.attention)
    forward, backward, error = fit_attention(device, samples.attention)
    return {"attention": forward, "attention_backward": backward}, error


def _flash2(device: Device, samples: Samples) -> tuple[float, float, float] | None:
    """(Share forward, share backward, error) of flash attention 2; None if not measured, or if it is torch's
    default.
    """
    sample = samples.attention_kernels.get("flash")
    if samples.device == "cpu" or sample is None:
        return None
    if not device.kernels.flash2 and any(_is_same(sample, each) for each in samples.attention):
        return None
    return fit_attention(device, [sample], "varlen")


def _is_same(one: AttentionSample, other: AttentionSample) -> bool:
    """Whether two measurements have one shape and are probably of one kernel."""
    seconds = ((one.forward_s, other.forward_s), (one.backward_s, other.backward_s))
    near = all(abs(a - b) <= _SAME_KERNEL * b for a, b in seconds)
    return near and one == replace(other, forward_s=one.forward_s, backward_s=one.backward_s)


def _peaks(start: Device, samples: Samples) -> tuple[Device, list[Constant]]:
    # A CPU has no stated peak, so the fastest product and the fastest pass over memory become the peaks. A GPU keeps
    # the peaks of the starting cluster unless a measurement exceeds them: then they are of another device.
    rows, peaks = [], dict(start.peak_flops_per_s)
    for dtype in sorted({sample.dtype for sample in samples.gemms}):
        best = max(sample.flops_per_s for sample in samples.gemms if sample.dtype == dtype)
        rows.append(_peak(f"peak_flops_per_s.{dtype}", "FLOP/s", peaks.get(dtype), best, samples.device))
        peaks[dtype] = rows[-1].now
    best = max(sample.num_bytes / sample.seconds for sample in samples.copies)
    rows.append(_peak("memory_bandwidth_bytes_per_s", "B/s", start.memory_bandwidth_bytes_per_s, best, samples.device))
    return replace(start, peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=rows[-1].now), rows


def _peak(name: str, unit: str, before: float | None, best: float, kind: str) -> Constant:
    if kind == "cpu" or before is None or best > before:
        return Constant(name, unit, before, best, "measured")
    return Constant(name, unit, before, before, "preset")


def _tier(start: Tier, samples: TierSamples, before: float) -> tuple[Tier, list[Constant]]:
    fit, overlap = fit_link(samples.messages), samples.overlap
    # In a step a message waits for neighbours that compute longer, or for a core: the larger delay is added to the
    # latency.
    latency_s = fit.latency_s + max(samples.skew_s, overlap.late_s)
    penalty = overlap_penalty(overlap.compute_s, overlap.message_s, overlap.together_s)
    was = before if start.overlap_penalty is None else start.overlap_penalty
    name, before_bytes_per_s = start.name, start.bandwidth_bytes_per_s * start.efficiency
    rate, half = fit.bandwidth_bytes_per_s, fit.half_bytes
    # Unmeasured fields are kept: the wiring of fewer members, and contention on a fabric. With these, a bandwidth is
    # that of one link and few members.
    if not start.direct:
        rate /= wired(start, 0) * share(start.contention, start.size)
    rows = [
        Constant(f"{name}.latency_s", "s", start.latency_s, latency_s, "measured"),
        Constant(f"{name}.bandwidth_bytes_per_s", "B/s", before_bytes_per_s, rate, "fitted", fit.error, fit.is_bound),
        Constant(f"{name}.half_bytes", "B", start.half_bytes, half, "fitted", fit.error),
        Constant(f"{name}.overlap_penalty", "", was, penalty, "measured"),
    ]
    marks: dict[str, Mark] = {row.name.removeprefix(f"{start.name}."): row.mark for row in rows}
    tier = replace(
        start,
        latency_s=latency_s,
        bandwidth_bytes_per_s=rate,
        half_bytes=half,
        overlap_penalty=penalty,
        efficiency=1.0,  # the fitted bandwidth is already the one messages reach
        direct=False,  # and it covers all members together, however they are wired
        source=_SOURCE,
    )
    return replace(tier, marks=_tier_marks(start.marks, marks | {"efficiency": "fitted"})), rows


def _buses(tiers: Sequence[Tier], samples: Samples) -> tuple[list[Tier], list[Constant]]:
    """The tiers with the bus shares found by measurements of pairs."""
    found, rows = {tier.name: tier for tier in tiers}, []
    for pair in samples.pairs:
        inner, outer = (found[name] for name in pair.tiers)
        # On a CPU messages need cores, which two tiers also share.
        needs = (inner.overlap_penalty or 0.0, outer.overlap_penalty or 0.0) if samples.device == "cpu" else (0.0, 0.0)
        share = bus_share(pair.seconds, pair.together_s, needs)
        rows.append(Constant(f"{outer.name}.bus.{inner.name}", "", outer.bus.get(inner.name, 0.0), share, "measured"))
        bus = {name: each for name, each in outer.bus.items() if name != inner.name}
        bus |= {inner.name: share} if share else {}
        marks: dict[str, Mark] = {**outer.marks, "bus": "measured"}
        found[outer.name] = replace(outer, bus=bus, marks=marks)
    return list(found.values()), rows


def _shown(device: Device, samples: Samples) -> list[Constant]:
    """Findings without a constant in a cluster file.

    Sustained rates of products, attention by kernel, products beside messages.
    """
    rows = []
    if samples.sustained is not None:
        name = f"products after {samples.sustained.seconds:g} s / at once"
        rows.append(Constant(name, "", None, samples.sustained.share, "measured"))
    for name, sample in samples.attention_kernels.items():
        forward, backward, _ = fit_attention(device, [sample])
        for way, found in (("forward", forward), ("backward", backward)):
            rows.append(Constant(f"attention {way} by {name}", "", None, found, "fitted"))
    for tier in samples.tiers:
        if tier.concurrent is not None:
            name = f"{tier.tier}: products beside messages / alone"
            rows.append(Constant(name, "", None, tier.concurrent.slowdown, "measured"))
    return rows


def _device_marks(device: Device, before: Mapping[str, Mark], found: Mapping[str, Mark]) -> dict[str, Mark]:
    names = ["memory_bytes", "memory_bandwidth_bytes_per_s", "overlap_penalty"]
    names += [f"peak_flops_per_s.{dtype}" for dtype in device.peak_flops_per_s]
    names += [f"kernels.{each.name}" for each in fields(Kernels) if each.name != "source"]
    return {name: found.get(name, before.get(name, "preset")) for name in names}


def _tier_marks(before: Mapping[str, Mark], found: Mapping[str, Mark]) -> dict[str, Mark]:
    names = ["bandwidth_bytes_per_s", "latency_s", "efficiency", "half_bytes"]
    # A tier's penalty is optional: without one, the device's applies and carries the mark.
    names += ["overlap_penalty"] if "overlap_penalty" in found or "overlap_penalty" in before else []
    return {name: found.get(name, before.get(name, "preset")) for name in names}
