"""PPO with every role on a pool of its own, each under another plan, takes the steps that one process takes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from terrace.rl.algorithms.algorithm import algorithm_of
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.calls.local import LocalRuntime
from terrace.rl.calls.runtime import Runtime
from terrace.rl.controllers.controllers import CONTROLLERS
from terrace.rl.controllers.setup import Progress, Roles, Setup, Sizes
from terrace.rl.resolve import resolve
from terrace.rl.sort_task import END, SortPrompts, SortTokenizer
from terrace.rl.stream.stream import Drawing, stream_of
from terrace.rl.workers.critic import Critic
from terrace.rl.workers.policy import Actor, Reference
from terrace.rl.workers.reward_function import RewardFunction
from terrace.rl.workers.settings import EngineSettings
from tests.support.parity import exact
from tests.support.toys import cluster_of

PROMPTS, RESPONSES, NUM_TOKENS, MINI_BATCH, STEPS = 4, 2, 5, 4, 2
MODEL = replace(
    resolve("sort", None, {}, {}).model, hidden_size=32, num_layers=2, intermediate_size=48, head_dim=8, rotary_dim=8
)
ALGORITHM = algorithm_of({"name": "ppo", "kl_coefficient": 0.05})
ALONE = cluster_of(1)
PAIR = cluster_of(2)
STAGES = {PAIR.tiers[0].name: {"pipeline": 2}}
PLANS = {
    "actor": (PAIR, exact("zero3", PAIR)),
    "critic": (PAIR, exact("ddp", PAIR, mapping=STAGES, schedule="1f1b")),
    "reference": (ALONE, exact("ddp", ALONE)),
}


def settings_of(name: str, is_split: bool) -> EngineSettings:
    cluster, plan = PLANS[name] if is_split else PLANS["reference"]
    plan = replace(plan, micro_batch=1)
    num_micros = MINI_BATCH // (2 if is_split and name == "actor" else 1)
    model = replace(MODEL, scalar_head=name == "critic")
    sequence = 11 + NUM_TOKENS - 1
    return EngineSettings(model=model, cluster=cluster, plan=plan, num_micros=num_micros, sequence=sequence, seed=3)


def stepped(runtime: Runtime, is_split: bool) -> Iterator[Metrics]:
    """PPO, of a policy that begins with values from the seed."""
    actor = {"algorithm": ALGORITHM, "num_tokens": NUM_TOKENS, "stops": frozenset({END})}
    judge = {"function": "examples.grpo_by_hand:sevens", "tokenizer": SortTokenizer()}
    workers: dict[str, tuple[type, dict[str, Any]]] = {
        "actor": (Actor, {**actor, "settings": settings_of("actor", is_split)}),
        "critic": (Critic, {"settings": settings_of("critic", is_split), "value_clip": 0.2}),
        "reference": (Reference, {"settings": settings_of("reference", is_split)}),
        "judge": (RewardFunction, judge),
    }
    if is_split:
        sizes = {name: cluster.world_size for name, (cluster, _) in PLANS.items()}
        made = [runtime.pool(sizes.get(name, 1)).host(**{name: worker}) for name, worker in workers.items()]
        roles = {name: group for each in made for name, group in each.items()}
    else:
        roles = runtime.pool(1).host(**workers)
    drawing = Drawing(source=SortPrompts(), prompts=PROMPTS, responses=RESPONSES)
    setup = Setup(
        roles=Roles(
            actor=roles["actor"],
            rewards=((1.0, roles["judge"]),),
            reference=roles["reference"],
            critic=roles["critic"],
        ),
        algorithm=ALGORITHM,
        stream=stream_of(drawing, roles["actor"]),
        sizes=Sizes(prompts=PROMPTS, responses=RESPONSES, mini_batch=MINI_BATCH, num_tokens=NUM_TOKENS),
        progress=Progress(kl_coefficient=ALGORITHM.kl_coefficient),
        lr=lambda step: 1e-3,
        critic_lr=lambda step: 1e-3,
    )
    yield from islice(CONTROLLERS["ppo"](setup), STEPS)


@pytest.mark.nightly
def test_roles_on_pools_of_their_own_learn_as_one_process() -> None:
    with InlineRuntime() as inline:
        alone = list(stepped(inline, is_split=False))
    with LocalRuntime(timeout_s=120.0) as runtime:
        split = list(stepped(runtime, is_split=True))
    assert len(split) == STEPS
    assert alone[0]["critic/vf_loss"] > 0
    assert alone[1]["actor/ppo_kl"] != 0
    for mine, expected in zip(split, alone, strict=True):
        assert mine.keys() == expected.keys()
        assert mine == pytest.approx(expected, rel=1e-10, abs=1e-12)
