"""GRPO written by hand: a controller is ordinary Python, to be read and changed.

    python -m examples.grpo_by_hand

An actor with fresh weights learns to answer with the digit 7. It has two processes, which train under ZeRO-3 and
generate with a replica each; the reward has a process of its own, so it works while the actor scores its responses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from terrace.cluster.presets import load_cluster
from terrace.plan.presets import preset
from terrace.rl.algorithms.advantages import grpo
from terrace.rl.algorithms.algorithm import Algorithm
from terrace.rl.calls.local import LocalRuntime
from terrace.rl.calls.runtime import Group, Runtime
from terrace.rl.resolve import resolve
from terrace.rl.sort_task import END, LONGEST_PROMPT, SortPrompts, SortTokenizer
from terrace.rl.values.prompts import Sample, rows_of
from terrace.rl.values.rows import Rows
from terrace.rl.workers.policy import Actor
from terrace.rl.workers.reward_function import RewardFunction
from terrace.rl.workers.settings import EngineSettings

PROMPTS, RESPONSES, NUM_TOKENS = 8, 8, 6


def sevens(samples: Sequence[Sample]) -> Iterator[float]:
    """The reward: how much of a response is the digit 7."""
    for sample in samples:
        yield sample.response.count("7") / NUM_TOKENS


def controller(roles: Mapping[str, Group], steps: int, lr: float) -> Iterator[float]:
    """The mean reward of each step."""
    actor, judge, prompts = roles["actor"], roles["judge"], SortPrompts()
    for step in range(steps):
        asked = rows_of([prompts.prompt(step * PROMPTS + each) for each in range(PROMPTS)]).repeat(RESPONSES)
        asked = asked | Rows({"seeds": torch.arange(len(asked)) + step * len(asked)})
        actor.hand_over(version=step)
        # Calls with `.remote` leave their rows where they were made, and calls of other pools run meanwhile.
        responses = actor.generate.remote(asked)
        old = actor.logprobs.remote(asked, responses)
        rewards = judge.rewards(asked, responses).tensor("reward")
        gains = grpo(rewards, asked.tensor("groups"))
        advantages = Rows({"advantages": old.get().ragged("old").spread(gains)})
        actor.update(asked, responses, old, advantages, lr=lr, columns=("old", "advantages"))
        yield float(rewards.mean())


def placed(runtime: Runtime, num_ranks: int) -> dict[str, Group]:
    """An actor on `num_ranks` ranks, and the reward on a rank of its own."""
    machine = load_cluster("local")
    cluster = replace(machine, tiers=(replace(machine.tiers[0], size=num_ranks),))
    settings = EngineSettings(
        model=replace(resolve("sort", None, {}, {}).model, num_layers=2),
        cluster=cluster,
        plan=replace(preset("zero3", cluster), micro_batch=PROMPTS * RESPONSES // num_ranks),
        num_micros=1,
        sequence=LONGEST_PROMPT + NUM_TOKENS - 1,
    )
    actor = {"settings": settings, "algorithm": Algorithm(), "num_tokens": NUM_TOKENS, "stops": frozenset({END})}
    judge = {"function": "examples.grpo_by_hand:sevens", "tokenizer": SortTokenizer()}
    roles = runtime.pool(num_ranks).host(actor=(Actor, actor))
    return roles | runtime.pool(1).host(judge=(RewardFunction, judge))


if __name__ == "__main__":
    with LocalRuntime() as runtime:
        for step, reward in enumerate(controller(placed(runtime, 2), steps=20, lr=1e-3), start=1):
            print(f"step {step:2}: reward {reward:.3f}")
