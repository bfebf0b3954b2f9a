"""Orders of offloading on a rehearsed device: seconds of a step over those without offloading, executed and predicted.

    python -m bench.offload_orders                 executed at the paper's ratios, and predicted for its model
    python -m bench.offload_orders --layers 4 --steps 2
    python -m bench.offload_orders --slower 5 --only host

With `--slower` device, link and host are all as many times slower, so that a busy machine matters less; `--only`
executes the rows with a word in their names.

The ratios are those that LSP-Offload (2406.10181) gives for a layer of Llama-7B on an RTX 4090: 12.2 + 28.1 ms of
forward and backward (here in shares of 1 and 2, as predictions have them), 60 ms of Adam on the host, and 10 to 20 GB/s
over PCIe for 202 M parameters. A rehearsed layer is a matrix whose passes sleep until these seconds are over. Copies
are a file's, held to `--gb-per-s` times the matrix's parameters over 202 M, so that a copy of a layer takes as long as
the paper's. Everything else runs as in training: the ring, its lanes and files, AdamW, clipping.

`at the end` is ZeRO-Offload's order (2101.06840) as a loop of its own: gradients in 16 bits leave in the backward, the
host updates layer by layer when the norm is known, and parameters in 16 bits return while the next layer is updated.
`layer-wise` is the least that lanes of fp32 states allow if updates run in the order of backwards. The other rows are
plans. `predicted` plays the same plans; a second table does so for Llama-7B itself.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bench.common import ADAMW, engine_with, local_cluster
from bench.models import llama_of
from bench.offload_limit import Predicted, forward_seconds
from terrace.cluster.below import Medium
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.comm.pace import UNPACED
from terrace.lab.pace import Pacer
from terrace.model.blocks import block_specs
from terrace.plan.keep import Keep
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.update import parse_update
from terrace.runtime.batch import Batch
from terrace.runtime.settings import OptimizerConfig
from terrace.simulate.step import Step, predict_step

SIDE, HIDDEN = 512, 4096  # of a rehearsed matrix, and of the paper's
FORWARD_S, BACKWARD_S, HOST_UPDATE_S = 40.3e-3 / 3, 40.3e-3 * 2 / 3, 60e-3  # of a layer, on the device and the host
NUMEL = 202.4e6  # parameters of a layer of Llama-7B
UPDATED_BYTES = 28  # a parameter: master copy and moments both ways, gradient, and the parameter in bf16
LLAMA = llama_of(HIDDEN, 32, 32, 32, 11008, 32000)
RATES = 10.0, 15.0, 20.0  # GB/s of the paper's link
_WARMUP, _DENSITY = 1, 4
# Of a rehearsed plan: a ring with few of the states, as that of a large model.
_PIECE, _RING = 1 << 16, 2


class _Slept(torch.autograd.Function):
    """Passes a tensor on when the seconds of a forward, and of a backward, are over."""

    @staticmethod
    def forward(context: Any, values: Tensor, slower: float) -> Tensor:
        context.slower = slower
        time.sleep(FORWARD_S * slower)
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD_S * context.slower)
        return gradient.clone(), None


class Layer(nn.Module):
    """A matrix whose passes take `slower` times the seconds of a layer."""

    def __init__(self, seed: int, slower: float) -> None:
        super().__init__()
        self.slower = slower
        values = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)) / SIDE**0.5
        self.weight = nn.Parameter(values)

    def forward(self, values: Tensor) -> Tensor:
        """(B, D) -> (B, D)."""
        found = values + torch.tanh(values @ self.weight.to(values.dtype))
        return cast(Tensor, _Slept.apply(found, self.slower))  # type: ignore[no-untyped-call]


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """A sum over samples."""
    return output.float().square().sum() / SIDE


def rate_of(options: argparse.Namespace) -> float:
    """Bytes per second each way of the rehearsed link."""
    return float(options.gb_per_s) * 1e9 * SIDE * SIDE / NUMEL / float(options.slower)


class Point(NamedTuple):
    """What a row changes of the plan `ddp` in bf16; `d` is the width of LSP at the paper's sizes, 0 for AdamW."""

    below: tuple[str, ...] = ()  # states that are kept below the device
    update: Any = "device"  # whose cores update
    order: Any = "forward"  # of updates; without clipping if they run in the backward
    formats: tuple[tuple[str, Any], ...] = ()
    d: int = 0


ON_DEVICE, AT_THE_END, LAYER_WISE = "on the device", "at the end, on the host", "ring, layer-wise, from its lanes"
POINTS = {
    ON_DEVICE: Point(),
    "updates on the host": Point(("optimizer", "grads"), "host"),
    "updates on the host, layer-wise": Point(("optimizer", "grads"), "host", "backward"),
    "ring, states in fp32": Point(("optimizer",)),
    "ring, states in 8 bits": Point(("optimizer",), formats=(("master", "bf16"), ("optimizer_states", "int8"))),
    "ring and gradients": Point(("optimizer", "grads")),
    "lsp, d = 256": Point(d=256),
    "lsp, d = 512": Point(d=512),
    "lsp, d = 256, ring": Point(("optimizer",), d=256),
    "lsp, d = 512, ring": Point(("optimizer",), d=512),
}


def plan_of(cluster: Cluster, point: Point, medium: str, side: int) -> Plan:
    """The plan of a row, for matrices of `side` rows."""
    keep: Any = dict.fromkeys(point.below, "host" if point.update == "host" else medium)
    if keep and side == SIDE:
        keep |= {"piece": _PIECE} if point.update == "host" else {"piece": _PIECE, "ring": _RING}
    update = f"lsp:{point.d * side // HIDDEN}:{_DENSITY}" if point.d else "adamw"
    return replace(
        preset("ddp", cluster),
        compute="bf16",
        update=update,
        keep=Keep(update=point.update, order=point.order, **keep),
        **dict(point.formats),
    )


def optimizer_of(plan: Plan) -> OptimizerConfig:
    """The settings of a plan's optimizer."""
    rule = parse_update(plan.update)
    if plan.keep.layer_wise:
        return replace(ADAMW, clip=0.0)
    return OptimizerConfig(lr=1e-4, name="lsp", rank=rule.rank, density=rule.density) if rule.projects else ADAMW


def executed(options: argparse.Namespace, name: str) -> tuple[float, float]:
    """Median seconds of a step of a plan, and as predicted."""
    base = local_cluster({"node": 1})
    link = Medium(memory_bytes=1e12, read_bytes_per_s=rate_of(options), write_bytes_per_s=rate_of(options))
    host = replace(link, update_bytes_per_s=UPDATED_BYTES * SIDE * SIDE / HOST_UPDATE_S / options.slower)
    cluster = replace(base, device=replace(base.device, below={"disk": link, "host": host}))
    plan = plan_of(cluster, POINTS[name], "disk", SIDE)
    engine = engine_with(
        [Layer(seed, options.slower) for seed in range(options.layers)],
        objective=loss_of,
        cluster=cluster,
        plan=plan,
        num_micros=1,
        optimizer=optimizer_of(plan),
        keep_folder=options.folder if "disk" in plan.keep.media else None,
        pacer=Pacer(cluster, 1.0) if plan.keep.is_below else UNPACED,
    )
    inputs = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(0)).bfloat16()
    batches, seconds = [Batch(inputs, torch.ones(4, dtype=torch.int64))], list[float]()
    engine.step(batches, 1e-4)
    forward_s = forward_seconds(engine, lambda: engine.step(batches, 1e-4))
    predicted_s = Predicted(engine, forward_s).step(rate_of(options), rate_of(options)).step_s
    for number in range(_WARMUP + options.steps):
        begin_s = time.perf_counter()
        engine.step(batches, 1e-4)
        if number >= _WARMUP:
            seconds.append(time.perf_counter() - begin_s)
    engine.drain()
    engine.close()
    return statistics.median(seconds), predicted_s


class Link:
    """One direction of a link: copies one after the other, each for its seconds at least."""

    def __init__(self, rate: float) -> None:
        self._rate, self._queue = rate, SimpleQueue[tuple[Tensor, Tensor, threading.Event] | None]()
        threading.Thread(target=self._run, daemon=True).start()

    def copy(self, source: Tensor, target: Tensor) -> threading.Event:
        """Copy when all copies before are over."""
        done = threading.Event()
        self._queue.put((source, target, done))
        return done

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            source, target, done = item
            end_s = time.perf_counter() + source.nbytes / self._rate
            target.copy_(source)
            time.sleep(max(0.0, end_s - time.perf_counter()))
            done.set()


def at_the_end(options: argparse.Namespace) -> float:
    """Median seconds of a step in ZeRO-Offload's order."""
    layers = [Layer(seed, options.slower).bfloat16() for seed in range(options.layers)]
    masters = [nn.Parameter(layer.weight.detach().float()) for layer in layers]
    optimizers = [torch.optim.AdamW([master], lr=1e-4, fused=True) for master in masters]
    down, up = Link(rate_of(options)), Link(rate_of(options))
    host = [torch.empty(SIDE, SIDE, dtype=torch.bfloat16) for _ in layers]
    left: dict[int, threading.Event] = {}
    for index, layer in enumerate(layers):

        def leave(weight: Tensor, index: int = index) -> None:
            assert weight.grad is not None, "called when its gradient is complete"
            left[index] = down.copy(weight.grad, host[index])

        layer.weight.register_post_accumulate_grad_hook(leave)  # type: ignore[no-untyped-call]
    seconds = []
    for number in range(_WARMUP + options.steps):
        inputs = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(number)).bfloat16()
        begin_s = time.perf_counter()
        output = inputs
        for layer in layers:
            output = layer(output)
        (loss_of(output, inputs) / 4).backward()  # type: ignore[no-untyped-call]
        for event in left.values():
            event.wait()
        norm = torch.stack([each.float().norm() for each in host]).norm()
        scale = min(1.0, 1.0 / float(norm))
        parts = zip(masters, optimizers, host, layers, strict=True)
        back = [_host_update(*each, scale, up, HOST_UPDATE_S * options.slower) for each in parts]
        for event in back:
            event.wait()
        if number >= _WARMUP:
            seconds.append(time.perf_counter() - begin_s)
    for link in (down, up):
        link.close()
    return statistics.median(seconds)


def _host_update(
    master: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    gradient: Tensor,
    layer: Layer,
    scale: float,
    up: Link,
    seconds: float,
) -> threading.Event:
    end_s = time.perf_counter() + seconds
    master.grad = gradient.float() * scale
    optimizer.step()
    time.sleep(max(0.0, end_s - time.perf_counter()))
    return up.copy(master.detach().bfloat16(), layer.weight.data)


def at_the_end_s(layers: int, gb_per_s: float) -> float:
    """Seconds of a step in ZeRO-Offload's order, from those of its parts."""
    copy_s = 2 * NUMEL / (gb_per_s * 1e9)  # of a layer in 16 bits
    # A backward hides the copies of the layers before, and an update the copy of the layer before.
    last_s = layers * max(BACKWARD_S, copy_s) - layers * BACKWARD_S + copy_s
    return layers * (FORWARD_S + BACKWARD_S) + last_s + layers * max(HOST_UPDATE_S, copy_s) + copy_s


def layer_wise_s(layers: int, gb_per_s: float) -> float:
    """Seconds of a step whose ring passes a layer's states when its backward is over, without clipping: a least value.

    Forwards wait for all updates, since the first layer's is the last one.
    """
    return layers * (FORWARD_S + max(BACKWARD_S, 12 * NUMEL / (gb_per_s * 1e9)))


def predicted_of(name: str, gb_per_s: float) -> tuple[float, float]:
    """Seconds of a step of Llama-7B with a plan, and bytes of its state on the device."""
    found = load_cluster("workstation")
    link, cores = gb_per_s * 1e9, UPDATED_BYTES * NUMEL / HOST_UPDATE_S
    host = Medium(memory_bytes=1e12, read_bytes_per_s=link, write_bytes_per_s=link, update_bytes_per_s=cores)
    # Memory for the plan that keeps nothing below, too.
    cluster = replace(found, device=replace(found.device, memory_bytes=1e12, below={"host": host}))
    plan, blocks = plan_of(cluster, POINTS[name], "host", HIDDEN), block_specs(LLAMA)
    peak = cluster.device.peak_flops_per_s["bf16"]
    layer = sum(param.numel for param in blocks[1].params)
    work = tuple(peak * FORWARD_S * sum(param.numel for param in block.params) / layer for block in blocks[1:])
    step = Step(cluster=cluster, plan=plan, blocks=blocks, num_micros=1, sequence=2048, work=(0.0, *work))
    report = predict_step(step).reports[0]
    return report.step_s, sum(report.memory_bytes.values())


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gb-per-s", type=float, default=15.0, help="of the paper's link, each way")
    parser.add_argument("--slower", type=float, default=1.0, help="how many times slower all is than the paper's layer")
    parser.add_argument("--only", default="", help="execute the rows with this in their names alone")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    print("executed on a rehearsed device")
    native_s = 0.0
    for name in [ON_DEVICE, *(name for name in POINTS if options.only in name and name != ON_DEVICE)]:
        found_s, predicted_s = executed(options, name)
        native_s = native_s or found_s
        print(f"{name:34}{found_s:9.3f} s {found_s / native_s:6.2f}x   predicted {predicted_s:9.3f} s", flush=True)
    found_s = at_the_end(options)
    predicted_s = options.slower * at_the_end_s(options.layers, options.gb_per_s)
    print(f"{AT_THE_END:34}{found_s:9.3f} s {found_s / native_s:6.2f}x   predicted {predicted_s:9.3f} s", flush=True)
    least_s = options.slower * layer_wise_s(options.layers, options.gb_per_s)
    print(f"{LAYER_WISE:34}{'':20}   predicted {least_s:9.3f} s")
    print("predicted for Llama-7B on one card; GB/s of the link, then seconds over those on the device")
    for name in POINTS:
        of_rates = [predicted_of(name, rate) for rate in RATES]
        slowdowns = ", ".join(f"{s / predicted_of(ON_DEVICE, 15)[0]:.2f}x" for s, _ in of_rates)
        print(f"{name:34}{slowdowns:>24}   state on the device {of_rates[0][1] / 1e9:6.1f} GB")
    native_s = predicted_of(ON_DEVICE, 15)[0]
    for name, seconds_of in ((AT_THE_END, at_the_end_s), (LAYER_WISE, layer_wise_s)):
        print(f"{name:34}{', '.join(f'{seconds_of(32, rate) / native_s:.2f}x' for rate in RATES):>24}")


if __name__ == "__main__":
    main(sys.argv[1:])
