"""Every controller teaches a policy that is a table of logits, by the loss that its algorithm gives.

A response has up to four tokens of five; token 0 ends it. Each 1 is worth 1/4; each 2 is worth 1/2 and costs 1.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.rl.algorithms.advantages import gae
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.algorithm import algorithm_of
from terrace.rl.algorithms.batches import WEIGHTS
from terrace.rl.algorithms.kl import token_rewards
from terrace.rl.algorithms.lagrange import Multiplier
from terrace.rl.algorithms.losses import value_loss
from terrace.rl.algorithms.metrics import Metrics, Sums
from terrace.rl.algorithms.policy_loss import aggregation_of, policy_loss
from terrace.rl.controllers.controllers import CONTROLLERS
from terrace.rl.controllers.setup import Progress, Roles, Setup, Sizes
from terrace.rl.resolve import resolve
from terrace.rl.stream.stream import Drawing, stream_of
from terrace.rl.values.prompts import Prompt
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from tests.support.nightly import nightly

LENGTH, VOCAB, NUM_RESPONSES = 4, 5, 64
# Beside its paper's values: a KL that is counted, where there is a place for it, and clips that let a table move.
TABLES: dict[str, dict[str, Any]] = {
    "ppo": {"kl_coefficient": 0.01, "dual_clip": 3.0},
    "grpo": {"kl_coefficient": 0.01},
    "dr-grpo": {},
    "rloo": {"kl_coefficient": 0.01},
    "reinforce++": {"kl_coefficient": 0.01},
    "reinforce++-baseline": {"kl_coefficient": 0.01},
    "remax": {"kl_coefficient": 0.01},
    "dapo": {"overlong_window": 2},
    "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"importance_bound": 2.0, "entropy": 0.001},
    "distill": {},
    "safe-rlhf": {"kl_coefficient": 0.01, "cost_threshold": 0.2, "multiplier_rate": 0.5, "multiplier_largest": 5.0},
}


def place_of_each(tokens: Ragged) -> Tensor:
    return torch.cat([torch.arange(length) for length in tokens.lengths.tolist()])


class Table:
    """An actor."""

    def __init__(self, name: str, **more: Any) -> None:
        self.algorithm = algorithm_of({"name": name, **TABLES[name], **more})
        self.theta = torch.zeros(LENGTH, VOCAB, requires_grad=True)
        self.optimizer, self.num_hand_overs = torch.optim.Adam([self.theta]), 0
        self.num_scored = 0
        self.lag = 0  # steps between the weights that draw and the present ones
        self.version = 0
        self.given: list[dict[str, Tensor]] = []  # columns of each update

    def hand_over(self, version: int) -> Metrics:
        self.num_hand_overs += 1
        self.version = version
        return {}

    def generate(self, rows: Rows, *, leave: Fraction = Fraction(0)) -> Rows:
        generator = torch.Generator().manual_seed(int(rows.tensor("seeds")[0]))
        odds = self.theta.detach().softmax(-1)
        drawn = torch.multinomial(odds, len(rows), replacement=True, generator=generator).t()
        if "greedy" in rows.columns:
            drawn = torch.where(rows.tensor("greedy")[:, None], odds.argmax(-1), drawn)
        ends = (drawn == 0).int().argmax(-1) + 1  # the first 0, which is a token of the response
        lengths = torch.where((drawn == 0).any(-1), ends, LENGTH)
        tokens = Ragged.of([row[:length] for row, length in zip(drawn, lengths.tolist(), strict=True)])
        finish = tuple("length" if length == LENGTH else "stop" for length in lengths.tolist())
        versions = tokens.with_values(torch.full_like(tokens.values, self.version - self.lag))
        made = Rows({"responses": tokens, "finish": finish, "versions": versions})
        return made | Rows({"rollout": self._logprobs(made)})

    def _logprobs(self, rows: Rows) -> Ragged:
        tokens = rows.ragged("responses")
        x = self.theta.detach().log_softmax(-1)[place_of_each(tokens), tokens.values]
        return tokens.with_values(x)

    def logprobs(self, rows: Rows) -> Rows:
        self.num_scored += 1
        return Rows({"old": self._logprobs(rows)})

    def update(self, rows: Rows, *, lr: float, columns: tuple[str, ...]) -> dict[str, float]:
        tokens, sums = rows.ragged("responses"), Sums()
        aggregation = aggregation_of(self.algorithm, LENGTH)
        given = {name: rows.ragged(name).values for name in columns}
        self.given.append(given)
        logs = self.theta.log_softmax(-1)[place_of_each(tokens)]
        weights = aggregation.weights(tokens.lengths, torch.float32)
        x = tokens.with_values(logs.gather(-1, tokens.values[:, None])[:, 0])
        entropies = -(logs.exp() * logs).sum(-1)
        total = policy_loss(self.algorithm, sums)(x, entropies, {**given, WEIGHTS: weights})
        self.optimizer.zero_grad()
        torch.autograd.backward(total / aggregation.counts(tokens.lengths).sum())
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        read = sums.read()
        return {"entropy": read["entropy"] / read["tokens"]}


class Uniform:
    """The reference."""

    def logprobs(self, rows: Rows) -> Rows:
        tokens = rows.ragged("responses")
        return Rows({"reference": tokens.with_values(torch.full((len(tokens.values),), 1 / VOCAB).log())})


class Values:
    """A critic that has a value for each place."""

    def __init__(self) -> None:
        self.table = torch.zeros(LENGTH, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.table])

    def values(self, rows: Rows) -> Rows:
        tokens = rows.ragged("responses")
        return Rows({"values": tokens.with_values(self.table.detach()[place_of_each(tokens)])})

    def update(self, rows: Rows, *, lr: float) -> dict[str, float]:
        tokens, old, returns = (rows.ragged(name) for name in ("responses", "old_values", "returns"))
        x, weights = self.table[place_of_each(tokens)], torch.ones(len(tokens.values))
        self.optimizer.zero_grad()
        loss = value_loss(x, old.values, returns.values, weights, clip=0.2) / len(x)
        torch.autograd.backward(loss)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return {"vf_loss": float(loss.detach())}


class Worth:
    """Rewards, or costs, by the worth of each token."""

    def __init__(self, column: str, worth: Mapping[int, float], shuffle: bool = False) -> None:
        self.column, self.worth, self.generator = column, worth, torch.Generator().manual_seed(1) if shuffle else None

    def rewards(self, rows: Rows) -> Rows:
        tokens = rows.ragged("responses")
        table = torch.tensor([self.worth.get(token, 0.0) for token in range(VOCAB)])
        total = tokens.with_values(table[tokens.values]).sums()
        if self.generator is not None:
            total = total[torch.randperm(len(total), generator=self.generator)]
        return Rows({self.column: total})


class Asking:
    """One prompt, again and again."""

    def prompt(self, place: int) -> Prompt:
        return Prompt("?", (0,))

    def held_out(self) -> tuple[Prompt, ...]:
        return ()


def setup_of(name: str, shuffle: bool = False, max_lag: int = 0, responses: int | None = None, **more: Any) -> Setup:
    actor, single = Table(name, **more), name in ("ppo", "reinforce++", "remax", "safe-rlhf")
    algorithm, is_safe = actor.algorithm, name == "safe-rlhf"
    responses = responses or (1 if single else 8)
    drawing = Drawing(source=Asking(), prompts=NUM_RESPONSES // responses, responses=responses, max_lag=max_lag)
    return Setup(
        roles=Roles(
            actor=actor,
            rewards=((0.5, Worth("reward", {1: 0.5, 2: 1.0}, shuffle)), (1.0, Worth("reward", {}))),
            reference=Uniform(),
            critic=Values(),
            cost=Worth("cost", {2: 1.0}),
            cost_critic=Values(),
        ),
        algorithm=algorithm,
        stream=stream_of(replace(drawing, has_greedy=name == "remax"), actor),
        sizes=Sizes(
            prompts=drawing.prompts,
            responses=drawing.responses,
            mini_batch=NUM_RESPONSES // 2,
            num_tokens=LENGTH,
        ),
        progress=Progress(
            kl_coefficient=algorithm.kl_coefficient,
            multiplier=Multiplier(
                threshold=algorithm.cost_threshold or 0.0,
                rate=algorithm.multiplier_rate,
                window=NUM_RESPONSES,
                largest=algorithm.multiplier_largest,
            )
            if is_safe
            else None,
        ),
        lr=lambda step: 0.1,
        critic_lr=lambda step: 0.5,
    )


def learned(name: str, num_steps: int = 25, shuffle: bool = False) -> tuple[list[Metrics], Setup]:
    setup = setup_of(name, shuffle)
    return list(islice(CONTROLLERS[name](setup), num_steps)), setup


FEW = ("ppo", "grpo", "remax")


REWARDED = tuple(name for name in CONTROLLERS if name != "distill")
OTHERS = tuple(name for name in REWARDED if name not in (*FEW, "safe-rlhf"))


@pytest.mark.parametrize("name", [*FEW, *nightly(*OTHERS)])
def test_every_algorithm_raises_the_reward(name: str) -> None:
    steps, setup = learned(name)
    # DAPO's penalty, from 0 to -1, is in the rewards.
    less = 1 if name == "dapo" else 0
    assert steps[0]["reward/mean"] < 0.6
    assert steps[-1]["reward/mean"] > 1.2 - less
    assert steps[0]["rollout/logprob_diff_max"] < 1e-6
    assert steps[-1]["actor/entropy"] < steps[0]["actor/entropy"]
    assert setup.progress.step == len(steps)
    assert setup.roles.actor.num_hand_overs >= len(steps)


def test_the_policy_that_drew_is_not_scored_again() -> None:
    def learnt(is_exact: bool, lag: int = 0) -> Table:
        setup = replace(setup_of("grpo", max_lag=9 * lag), rollout_is_exact=is_exact)
        table: Table = setup.roles.actor
        table.lag = lag
        list(islice(CONTROLLERS["grpo"](setup), 3))
        return table

    scored, own, late = learnt(False), learnt(True), learnt(True, lag=1)
    assert (scored.num_scored, own.num_scored, late.num_scored) == (3, 0, 3)
    assert torch.equal(own.theta, scored.theta)
    # The first update of a step alone compares.
    assert [("rollout" in columns) for columns in own.given] == [True, False] * 3
    assert not any("rollout" in columns for columns in (*scored.given, *late.given))


@pytest.mark.parametrize("place", ["reward", "loss"])
@pytest.mark.parametrize("name", REWARDED)
def test_kl_counts_once_and_where_it_is_asked_for(name: str, place: str) -> None:
    def columns(coefficient: float) -> dict[str, Tensor]:
        where: dict[str, Any] = {"kl": place, "kl_estimator": "k2"} if coefficient else {}
        setup = setup_of(name, **where, kl_coefficient=coefficient)
        # Away from the reference, and otherwise at each place.
        setup.roles.actor.theta.data = torch.sin(torch.arange(LENGTH * VOCAB).view(LENGTH, VOCAB).float())
        next(CONTROLLERS[name](setup))
        first: dict[str, Tensor] = setup.roles.actor.given[0]
        return first

    without, counted = columns(0.0), columns(0.1)
    in_reward = not torch.equal(without["advantages"], counted["advantages"])
    assert (in_reward, "kl_weight" in counted) == (place == "reward", place == "loss")


def test_a_distilled_policy_comes_near_its_reference_and_no_reward_moves_it() -> None:
    setup = setup_of("distill")
    reference = Table("distill")
    reference.theta.data = torch.sin(torch.arange(LENGTH * VOCAB).view(LENGTH, VOCAB).float())
    setup = replace(setup, roles=replace(setup.roles, reference=reference, rewards=()))
    reference.logprobs = lambda rows: Rows({"reference": reference._logprobs(rows)})  # type: ignore[method-assign]
    steps = list(islice(CONTROLLERS["distill"](setup), 25))

    def kl() -> float:
        own, other = (table.theta.detach().log_softmax(-1) for table in (setup.roles.actor, reference))
        return float((own.exp() * (own - other)).sum(-1).mean())

    assert steps[0]["actor/kl"] > 0.1
    assert kl() < 0.02, "over all tokens, not only those that were drawn"
    assert {step["reward/mean"] for step in steps} == {0.0}


def test_rewards_of_others_teach_nothing() -> None:
    assert learned("grpo", shuffle=True)[0][-1]["reward/mean"] < 0.8


def test_safe_rlhf_takes_the_reward_that_costs_nothing() -> None:
    steps, setup = learned("safe-rlhf", num_steps=40)
    assert steps[-1]["safe/cost"] < 0.2
    assert steps[-1]["reward/mean"] > 0.8
    assert max(step["safe/lambda"] for step in steps) > steps[-1]["safe/lambda"] > 0, "rises, then settles"
    assert setup.progress.multiplier is not None
    assert setup.progress.multiplier.value == steps[-1]["safe/lambda"]


@pytest.mark.parametrize("name", ["dapo", *nightly("cispo")])
def test_groups_of_equal_rewards_are_drawn_again_until_the_batch_is_full(name: str) -> None:
    """Near its end the table answers alike, so groups of equal rewards leave and more prompts are taken."""
    steps, setup = learned(name, num_steps=40)
    rounds = [step["group/rounds"] for step in steps]
    assert rounds[0] == 1
    assert max(rounds) > 1
    assert setup.stream.state()[0] == sum(rounds) * setup.sizes.prompts
    assert all(step["group/kept"] == NUM_RESPONSES for step in steps if step["group/rounds"] < 8)
    # The reward of what was drawn is another than that of what stays.
    assert any(step["group/reward"] != pytest.approx(step["reward/mean"]) for step in steps)
    # Prompts have one token. All that was drawn counts, kept or not.
    assert steps[0]["group/tokens"] == pytest.approx(NUM_RESPONSES * (1 + steps[0]["response_length/mean"]))
    assert all(step["group/tokens"] >= 2 * NUM_RESPONSES * turns for step, turns in zip(steps, rounds, strict=True))


def test_a_critic_learns_the_returns() -> None:
    """Values of each place, by the clipped loss, come near the mean return there under a uniform policy."""
    rows, critic = Table("ppo").generate(Rows({"seeds": torch.zeros(NUM_RESPONSES).long()})), Values()
    rewards = token_rewards(
        Worth("reward", {1: 0.25, 2: 0.5}).rewards(rows).tensor("reward"),
        rows.ragged("rollout").with_values(torch.zeros(len(rows.ragged("rollout").values))),
        0.0,
    )
    for _ in range(100):
        old = critic.values(rows).ragged("values")
        _, returns = gae(rewards, old, gamma=1.0, lam=1.0)
        critic.update(Rows({"responses": rows.ragged("responses"), "old_values": old, "returns": returns}), lr=0.5)
    places = place_of_each(rows.ragged("responses"))
    expected = [float(returns.values[places == place].mean()) for place in range(LENGTH)]
    assert critic.table.tolist() == pytest.approx(expected, abs=0.02)


def test_an_aggregation_over_a_constant_length_knows_it() -> None:
    assert aggregation_of(algorithm_of({"name": "dr-grpo"}), 7) == Aggregation("seq-mean-token-sum-norm", 7)


@pytest.mark.parametrize("name", REWARDED)
def test_groups_of_one_are_refused_where_they_would_teach_nothing(name: str) -> None:
    """By what the algorithm makes of a group of one, a run with it is refused or not."""
    seen = list[Ragged]()

    def observe(rows: Rows, advantages: Ragged) -> None:
        seen.append(advantages)

    next(CONTROLLERS[name](replace(setup_of(name, responses=1), observe=observe)))
    teaches = any(bool(each.values.abs().max() > 1e-6) for each in seen)
    algorithm: dict[str, Any] = {"name": name} | ({"cost_threshold": 0.5} if name == "safe-rlhf" else {})
    table: dict[str, Any] = {"algorithm": algorithm, "run": {"responses": 1, "mini_batch": 64}}
    table["plan"] = {"micro_batch": 16}
    table |= {"cost": {"function": "terrace.rl.sort_task:length_cost"}} if name == "safe-rlhf" else {}
    if teaches:
        assert resolve("sort", None, {}, table).run.responses == 1
    else:
        with pytest.raises(ConfigError, match=re.escape(f"run.responses = 1: algorithm.name = '{name}' compares")):
            resolve("sort", None, {}, table)
