"""Weights in a folder for servers: the bits of the trained model under any plan, and every byte in the formula."""

from pathlib import Path

import pytest
import torch

from terrace.base.errors import TrainingError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.config import parse_model
from terrace.model.hf.names import stored_bytes
from terrace.model.hf.pretrained import Pretrained
from terrace.plan.plan import Plan
from terrace.rl.algorithms.algorithm import Algorithm
from terrace.rl.hand_over.seconds import predict_hand_over
from terrace.rl.hand_over.transition import to_writer
from terrace.rl.workers.handing import transition_of, weights_folder
from terrace.rl.workers.policy import Actor
from terrace.rl.workers.settings import EngineSettings
from tests.support.nightly import nightly
from tests.support.parity import exact, wholes
from tests.support.pipelines import OUTER, pipelined
from tests.support.toys import cluster_of

SIZES = (2, 2)
MODEL = parse_model({
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "tie_word_embeddings": True,
})  # fmt: skip
PLANS = {
    "zero3": exact("zero3", cluster_of(*SIZES)),
    "rows": exact("zero3", cluster_of(*SIZES), mapping={"package": {"tensor": 2}}),
    "stages": pipelined("zero3", OUTER, "1f1b"),
    "ddp": exact("ddp", cluster_of(*SIZES)),
}


def written(world: World, cluster: Cluster, plan: Plan, handed: str) -> tuple[dict[str, float], list[str]]:
    """The numbers of a hand-over, and the parameters that the folder has otherwise than the engine."""
    settings = EngineSettings(model=MODEL, cluster=cluster, plan=plan, num_micros=2, sequence=8, seed=3)
    actor = Actor(world, settings=settings, algorithm=Algorithm(), num_tokens=4, stops=frozenset(), handed=handed)
    numbers = actor.write(version=7)
    again = actor.write(version=7)
    engine = actor.engine
    engine.check_bytes()
    engine.state.gather(engine.comm.collectives)
    read, wrong = Pretrained(weights_folder(handed, 7), MODEL), ["written twice"] if again else []
    for block, whole in enumerate(wholes(engine)):
        name = engine.state.specs[block].name
        wrong += [
            f"{name}.{param}" for param, value in whole.items() if not torch.equal(read.value(name, param), value)
        ]
    if world.rank == 0:
        weights_folder(handed, 8).mkdir()
        (weights_folder(handed, 8) / "notes.txt").touch()
    try:
        actor.write(version=8)
        wrong.append("no error")
    except TrainingError as error:
        wrong += [str(error)] if "cannot hand weights over to servers: " not in str(error) else []
    engine.close()
    return numbers, wrong


@pytest.mark.parametrize("name", ["zero3", "stages", *nightly("rows", "ddp")])
def test_a_folder_has_the_bits_of_the_trained_model(pool: LocalPool, name: str, tmp_path: Path) -> None:
    cluster, plan = cluster_of(*SIZES), PLANS[name]
    outcomes = pool.run(4, written, cluster, plan, str(tmp_path / "handed" / "0a1b2c3d"), timeout_s=120.0)
    settings = EngineSettings(model=MODEL, cluster=cluster, plan=plan, num_micros=2, sequence=8)
    cost = predict_hand_over(cluster, to_writer(transition_of(settings, 1)))
    size = stored_bytes(MODEL, 8)
    for numbers, wrong in outcomes:
        assert not wrong
        assert numbers["bytes_planned"] == numbers["bytes_sent"] == size + sum(cost.sent_bytes.values())
    if name == "ddp":
        assert not sum(cost.sent_bytes.values())
    else:
        assert 0 < cost.received_bytes < size
