"""Actor, reference, critic: four ranks in two stages, generating in replicas of two, find the same as one process."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.base.errors import TrainingError
from terrace.generation.engine import GenerationEngine
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs
from terrace.rl.algorithms.algorithm import Algorithm, algorithm_of
from terrace.rl.algorithms.batches import objective_of
from terrace.rl.algorithms.metrics import ROLLOUT, Sums, of_rows
from terrace.rl.algorithms.policy_loss import policy_loss
from terrace.rl.sort_task import END, SortPrompts
from terrace.rl.values.prompts import rows_of
from terrace.rl.values.rows import Rows
from terrace.rl.workers import drawing
from terrace.rl.workers.critic import Critic
from terrace.rl.workers.engine_rows import engine_of, scores
from terrace.rl.workers.policy import Actor, Reference, Student
from terrace.rl.workers.reward_model import RewardModel
from tests.support.role_workers import MINI_BATCH, MODEL, NUM_PROMPTS, NUM_TOKENS, TOLERANCE, settings_of, spoken_to


def played(world: World | None, num_ranks: int) -> dict[str, Any]:
    """Two rounds of drawing, scoring and learning; every number that comes out."""
    settings = settings_of(num_ranks)
    common: dict[str, Any] = {"settings": settings, "rows": 1 if num_ranks == 1 else 2}
    # A coefficient of the entropy, so that it is in the gradient.
    algorithm = algorithm_of({"entropy": 0.01, "kl_coefficient": 0.1})
    actor = Actor(world, **common, algorithm=algorithm, num_tokens=NUM_TOKENS, stops=frozenset({END}))
    ask = spoken_to(world, actor, Actor.layout(num_ranks, **common))
    reference = spoken_to(world, Reference(world, settings=settings), Reference.layout(num_ranks, settings=settings))
    of_critic = replace(settings, model=replace(MODEL, scalar_head=True))
    critic = Critic(world, settings=of_critic, value_clip=0.2)
    judge = spoken_to(world, critic, Critic.layout(num_ranks, settings=of_critic))
    found: dict[str, Any] = {}
    for turn in range(2):
        prompts = rows_of([SortPrompts().prompt(place) for place in range(NUM_PROMPTS)], first_group=0)
        prompts = prompts | Rows({"seeds": torch.arange(NUM_PROMPTS) + 100 * turn})
        handed = ask("hand_over", version=turn)
        assert handed["bytes_sent"] == handed["bytes_planned"]
        assert (handed["bytes_sent"] > 0) == (num_ranks > 1)
        rows = prompts | ask("generate", prompts)
        assert set(rows.ragged("versions").values.tolist()) == {turn}
        rows = rows | ask("logprobs", rows) | reference("logprobs", rows) | judge("values", rows)
        old = rows.ragged("old")
        torch.testing.assert_close(rows.ragged("rollout").values.double(), old.values.double(), rtol=0, atol=1e-5)
        assert torch.equal(old.values, rows.ragged("reference").values) == (turn == 0)
        gains = old.with_values(torch.sin(torch.arange(len(old.values), dtype=torch.float64)))
        weight = old.with_values(torch.full_like(old.values, 0.1))
        learn = rows | Rows({"advantages": gains, "kl_weight": weight, "returns": gains})
        columns = ("old", "advantages", "reference", "kl_weight")
        numbers = ask("update", learn, lr=1e-2, columns=columns)
        wanted = learn.drop("values") | Rows({"old_values": rows.ragged("values")})
        numbers |= {f"critic/{name}": value for name, value in judge("update", wanted, lr=1e-2).items()}
        found |= {f"{turn}/{name}": value for name, value in numbers.items()}
        found |= {f"{turn}/{name}": rows.ragged(name).values for name in ("responses", "old", "values")}
    return found


@cache
def alone() -> dict[str, Any]:
    return played(None, 1)


def test_one_process_draws_scores_and_learns() -> None:
    found = alone()
    assert found["0/ppo_kl"] == pytest.approx(0, abs=1e-12), "the first update begins at the policy that drew"
    assert found["0/pg_clipfrac"] == 0
    assert found["0/entropy"] > 1
    assert not torch.equal(found["0/responses"], found["1/responses"])
    assert found["1/critic/vf_loss"] < found["0/critic/vf_loss"] * 2
    assert found["1/critic/vf_clipfrac"] == 0


def test_four_ranks_find_what_one_process_finds(pool: LocalPool) -> None:
    by_rank = pool.run(4, played, 4, timeout_s=300.0)
    for found in by_rank:
        for name, value in alone().items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=name)
            else:
                assert found[name] == pytest.approx(value, abs=TOLERANCE), name


def test_a_student_leaves_the_start_of_other_roles(tmp_path: Path) -> None:
    examples, settings = SortPrompts().examples(0, MINI_BATCH), replace(settings_of(1), sequence=21)
    student = Student(None, settings=settings)
    losses = [student.update(examples, lr=1e-2)["loss"] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    folder = student.finish(tmp_path, 3)
    before, after = (
        Reference(None, settings=replace(settings, weights=weights)).logprobs(examples).ragged("reference")
        for weights in ("", folder)
    )
    assert float(before.values.mean()) == pytest.approx(-losses[0], abs=1e-9)
    assert float(after.values.mean()) > -losses[2]
    # A critic begins as the policy, with an output of its own.
    of_critic = replace(settings, weights=folder, model=replace(MODEL, scalar_head=True))
    values = Critic(None, settings=of_critic).values(examples).ragged("values")
    assert values.lengths.tolist() == examples.ragged("responses").lengths.tolist()


def test_keys_and_values_have_pages_for_the_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    class Counted(GenerationEngine):
        def __init__(self, *given: Any, num_pages: int, **more: Any) -> None:
            sizes.append(num_pages)
            super().__init__(*given, num_pages=num_pages, **more)

    monkeypatch.setattr(drawing, "GenerationEngine", Counted)
    settings = settings_of(1)
    actor = Actor(None, settings=settings, algorithm=algorithm_of({}), num_tokens=NUM_TOKENS, stops=frozenset({END}))
    prompts = rows_of([SortPrompts().prompt(place) for place in range(3)]) | Rows({"seeds": torch.arange(3)})
    actor.hand_over(version=0)
    for num in (3, 1):
        assert len(actor.generate(prompts.take(range(num)))) == num
    assert sizes == [3, 1], "a context of 16 tokens is one page"
    # No former slices live beside the new ones.
    assert actor._hand_over is not None
    hand_over, held = actor._hand_over.run, list[object]()

    def watched(**given: bool) -> Any:
        held.append(actor._blocks)
        return hand_over(**given)

    monkeypatch.setattr(actor._hand_over, "run", watched)
    actor.hand_over(version=1)
    assert held == [None]


def test_roles_that_only_score_hold_parameters_alone() -> None:
    settings, examples = settings_of(1, sequence=21), SortPrompts().examples(0, MINI_BATCH)
    learner = engine_of(None, settings, objective_of(policy_loss(Algorithm(), Sums())), "cpu")
    reference = Reference(None, settings=settings)
    wanted, found = scores(learner, examples), reference.logprobs(examples).ragged("reference")
    assert torch.equal(found.values, wanted.values)
    model = RewardModel(None, settings=replace(settings, model=replace(MODEL, scalar_head=True)))
    for engine, config in ((reference.engine, MODEL), (model._engine, replace(MODEL, scalar_head=True))):
        held, num = engine.comm.meter.peak(), sum(block.num_trainable for block in block_specs(config))
        assert held["params"] == 8 * num
        assert not any(held.get(name) for name in ("grads", "grads_full", "optimizer"))
    assert learner.comm.meter.peak()["optimizer"] > 0


def test_a_resumed_actor_has_the_same_bits(tmp_path: Path) -> None:
    def made() -> Actor:
        algorithm, settings = algorithm_of({}), replace(settings_of(1), sequence=21)
        return Actor(None, settings=settings, algorithm=algorithm, num_tokens=11, stops=frozenset({END}))

    def turn(actor: Actor, number: int) -> Rows:
        prompts = rows_of([SortPrompts().prompt(place) for place in range(MINI_BATCH)])
        prompts = prompts | Rows({"seeds": torch.arange(MINI_BATCH) + number})
        actor.hand_over(version=number)
        rows = prompts | actor.generate(prompts)
        rows = rows | actor.logprobs(rows)
        gains = rows.ragged("old").with_values(torch.cos(torch.arange(len(rows.ragged("old").values))))
        # As if rollout and training were further apart.
        other = rows.ragged("rollout").with_values(rows.ragged("rollout").values + gains.values.float() / 8)
        rows = rows.drop("rollout") | Rows({"rollout": other, "advantages": gains, "reward": torch.zeros(len(rows))})
        found = actor.update(rows, lr=1e-2, columns=("old", "advantages", "rollout"))
        wanted = of_rows(rows, num_tokens=11)
        assert {name for name in found if name.startswith("rollout/")} == set(ROLLOUT)
        assert wanted["rollout/logprob_diff_max"] > 0.1
        for name in ROLLOUT:
            assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
        return rows

    first = made()
    turn(first, 0)
    folder = Path(first.save(tmp_path, 1, {"note": 1}, 2))
    wanted = turn(first, 1)
    second = made()
    second.resume(folder)
    found = turn(second, 1)
    for name in ("responses", "rollout", "versions", "old"):
        assert torch.equal(found.ragged(name).values, wanted.ragged(name).values), name
    with pytest.raises(TrainingError, match="generation has no weights: call hand_over first"):
        second.generate(rows_of([SortPrompts().prompt(0)]) | Rows({"seeds": torch.zeros(1).long()}))
