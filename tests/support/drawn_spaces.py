"""Small spaces drawn at random: clusters, links, models, batches and memories, of dozens to thousands of plans each."""

import random
from dataclasses import replace

from terrace.cluster.presets import load_cluster
from terrace.planner.pins import Pins
from terrace.planner.space import Space
from terrace.planner.task import Task
from tests.support.mixtures import mixture
from tests.support.planner_cases import gpt, sized

AXES = (("data", "tensor"), ("data", "pipeline"), ("data", "context"), ("data", "tensor", "pipeline"))
CLUSTERS = {"dgx-a100": (2, 2), "dgx-h100": (4, 2), "ethernet": (2, 2), "frontier": (2, 1, 2), "lab": (2, 2, 1)}


def drawn_space(seed: int) -> Space:
    """The space of a seed, and a device with room for most, some or few of its plans."""
    draw = random.Random(seed)
    name = draw.choice(sorted(CLUSTERS))
    cluster = sized(name, *CLUSTERS[name])
    outermost = cluster.tiers[-1]
    slower = replace(outermost, bandwidth_bytes_per_s=outermost.bandwidth_bytes_per_s * 10 ** draw.uniform(-1.5, 0.3))
    cluster = replace(cluster, tiers=(*cluster.tiers[:-1], slower))
    layers, hidden, batch = draw.choice((4, 6)), draw.choice((512, 1024)), draw.choice((8, 12, 16))
    if draw.random() < 0.25:
        model = mixture(layers=layers, vocab_size=8000, hidden_size=hidden, intermediate_size=hidden)
    else:
        model = gpt(layers, hidden, 4, vocab=draw.choice((1000, 32000)), positions=1024)
    task = Task(model=model, cluster=cluster, batch=batch, sequence=draw.choice((256, 512)), operations=())
    if draw.random() < 0.5:
        states = 16 * sum(block.num_trainable for block in task.blocks) / cluster.world_size
        room = states * draw.uniform(1.5, 4) + load_cluster(name).device.memory_bytes / 40
        task = replace(task, cluster=replace(cluster, device=replace(cluster.device, memory_bytes=room, headroom="0%")))
    pins = Pins({"micro_batch": (1, draw.choice((1, 2))), "chunks": (1, 2)})
    return Space(task=task, axes=draw.choice(AXES), pins=pins)
