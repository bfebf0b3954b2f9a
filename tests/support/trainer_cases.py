"""Cases of `terrace.Trainer` on the ranks of a pool."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import terrace
from terrace.launch.start import World
from tests.support.toys import cluster_of
from tests.support.user_models import ADAMW, HIDDEN, MODELS, NUM_STEPS, SEQUENCE, Trained, batch_of

TOLERANCE = 1e-10
KEYS = {"beta1": ADAMW.beta1, "beta2": ADAMW.beta2, "weight_decay": ADAMW.weight_decay}


@dataclass(frozen=True)
class Case:
    """A run of the trainer."""

    model: str
    plan: str | dict[str, Any]
    sizes: tuple[int, ...]
    num_micros: int = 1
    local: bool = False


def make(case: Case, **options: Any) -> "terrace.Trainer":
    """A trainer of a case on this rank."""
    model = MODELS[case.model]
    return terrace.Trainer(
        [block.double() for block in model.build()],
        plan=case.plan,
        cluster=cluster_of(*case.sizes),
        loss=model.loss,
        lr=ADAMW.lr,
        optimizer=KEYS,
        num_micros=case.num_micros,
        local_batches=case.local,
        activation=(SEQUENCE, HIDDEN) if case.model == "tied" else None,
        **{"predict": False, **options},
    )


def steps(trainer: "terrace.Trainer", case: Case, first: int, last: int, found: Trained) -> None:
    """Train on the batches of some steps."""
    for step in range(first, last):
        inputs, labels = batch_of(case.model, step)
        if case.local:  # of different sizes, which the division by all labels makes right
            parts = [slice(0, 2), slice(2, 8)] if trainer.cluster.world_size == 2 else [slice(0, 8)]
            inputs, labels = inputs[parts[trainer.rank]], labels[parts[trainer.rank]]
        result = trainer.step(inputs, labels)
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)


def train(world: World, case: Case) -> Trained:
    """The figures of a case, from this rank."""
    found = Trained()
    if world.rank:
        torch.manual_seed(world.rank)
    with make(case) as trainer:
        steps(trainer, case, 0, NUM_STEPS, found)
        found.parameters = trainer.state_dict()
    return found


def simple(**options: Any) -> "terrace.Trainer":
    """A trainer in this process."""
    given = {"blocks": [nn.Linear(3, 4), nn.Linear(4, 2)], "loss": MODELS["regression"].loss, "lr": 0.1, **options}
    return terrace.Trainer(given.pop("blocks"), **{"predict": False, **given})
