"""Measurements at the start of a run of links that only stages of a pipeline use."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import tomli_w
import torch

from terrace.cluster.cluster import Cluster
from terrace.comm.stage_p2p import StageP2P
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import forward_flops
from terrace.model.decoder import build_blocks, token_loss
from terrace.program.report import StepReport
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, RankSetup, Workload
from terrace.train import calibrate as calibrate_module
from terrace.train.calibrate import calibrate, predict_once
from terrace.train.config import RunConfig
from terrace.train.prediction import predict
from terrace.train.resolve import resolve
from tests.support.generation import MODELS
from tests.support.nightly import nightly
from tests.support.tiny_runs import write_run

NO_FLAGS = dict.fromkeys(("model", "cluster", "plan", "data"))
LATENCY_S, S_PER_BYTE = 0.004, 2e-8  # of every message between stages: far above what a process needs for it

pytestmark = pytest.mark.timeout(200)


class Measured(NamedTuple):
    """A rank's cluster, its messages while it measured, the predicted steps, and the number that it simulated."""

    cluster: Cluster
    told: list[str]
    predicted: list[StepReport]
    num_played: int


def slow_calibration(world: World, run: RunConfig) -> Measured:
    """One rank, which measures while messages between stages take as long as above."""
    engine = Engine(
        Blocks(
            build_blocks(run.model),
            names=[spec.name for spec in run.blocks()],
            declared=run.blocks(),
            initial=lambda block, name, shape: torch.zeros(shape),
        ),
        Workload(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros(), sequence=run.train.sequence),
        token_loss,
        setup=RankSetup(rank=world.rank),
    )
    send, told = StageP2P.send, list[str]()

    def slow(self: StageP2P, message: Any, values: Any, stage: int) -> Any:
        sleep(LATENCY_S + S_PER_BYTE * values.nbytes)
        return send(self, message, values, stage)

    with patch.object(StageP2P, "send", slow):
        cluster = calibrate(engine, run, told.append)
    with patch.object(calibrate_module, "predict", wraps=predict) as played:
        predicted = predict_once(engine, run, cluster)
    engine.check_bytes()  # what was measured is no step's
    engine.close()
    return Measured(cluster, told, predicted, played.call_count)


def run_of(folder: Path, sizes: tuple[int, ...], mapping: dict[str, dict[str, int]], stages: list[int]) -> RunConfig:
    config = write_run(folder, *sizes)
    table = tomllib.loads(config.read_text())
    table["plan"] |= {"preset": "ddp", "mapping": mapping, "stages": stages}
    config.write_text(tomli_w.dumps(table))
    return resolve(str(config), NO_FLAGS, {})


@pytest.mark.parametrize(
    ("mapping", "stages", "edges"),
    [
        *nightly(({"node": {"pipeline": 2}}, [2, 2], ["node"]), ({"package": {"pipeline": 2}}, [2, 2], ["package"])),
        # The first and the last stage have no neighbour on another node.
        ({"package": {"pipeline": 2}, "node": {"pipeline": 2}}, [1, 1, 1, 1], ["package", "node"]),
    ],
    ids=["between nodes", "inside", "both"],
)
def test_edges_are_measured(
    pool: LocalPool, tmp_path: Path, mapping: dict[str, dict[str, int]], stages: list[int], edges: list[str]
) -> None:
    run = run_of(tmp_path, (2, 2), mapping, stages)
    results: list[Measured] = pool.run(4, slow_calibration, run, timeout_s=120.0)
    clusters = [each.cluster for each in results]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert [what for what in results[0].told if "stages" in what] == [f"{name} between stages" for name in edges]
    assert [each.num_played for each in results] == [1, 0, 0, 0]
    assert all(each.predicted == list(predict(run, clusters[0]).reports) for each in results)
    for tier, told in zip(clusters[0].tiers, run.cluster.tiers, strict=True):
        assert tier.marks == {"latency_s": "measured", "bandwidth_bytes_per_s": "measured"}
        assert math.isfinite(tier.latency_s)
        assert replace(tier, latency_s=told.latency_s) != told
        if tier.name in edges:
            assert tier.latency_s > 0.8 * LATENCY_S
            assert 0.2 / S_PER_BYTE < tier.bandwidth_bytes_per_s < 1.5 / S_PER_BYTE


def test_the_layer_whose_rate_is_measured_has_the_models_experts() -> None:
    """Where the first layers of a model have none."""
    model = MODELS["glm4_moe"]
    assert model.experts is not None
    assert model.experts.dense_layers == (0,)
    run = replace(resolve(None, NO_FLAGS, {}), model=model)
    on_a_cpu: Any = SimpleNamespace(device="cpu")
    work, flops = calibrate_module._layer(on_a_cpu, run)
    out: Any = work()
    assert flops == forward_flops(model, 2, run.plan.micro_batch, run.train.sequence)
    assert out.shape == (run.plan.micro_batch, run.train.sequence, model.hidden_size)
