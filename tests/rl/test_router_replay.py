"""Experts of a response are kept when it is drawn, and used again where it is scored and learned from."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ConfigError, ModelError
from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Request, Sampling
from terrace.generation.routes import Routes
from terrace.launch.start import LocalPool, World
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice
from terrace.model.experts.mixture import Router
from terrace.model.init import initialise
from terrace.plan.presets import preset
from terrace.rl.algorithms.algorithm import algorithm_of
from terrace.rl.algorithms.metrics import of_rows
from terrace.rl.making import check_roles
from terrace.rl.resolve import resolve
from terrace.rl.sort_task import END, SortPrompts
from terrace.rl.values.prompts import rows_of
from terrace.rl.values.rows import ROUTES, Rows
from terrace.rl.workers.policy import Actor
from terrace.rl.workers.settings import EngineSettings
from tests.support.generation import MODELS, make
from tests.support.role_workers import MODEL as DENSE
from tests.support.role_workers import NUM_PROMPTS, NUM_TOKENS, TOLERANCE, settings_of, spoken_to
from tests.support.toys import cluster_of, run_blocks

EXPERTS = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=24, dense_layers=())
MODEL = replace(DENSE, family="mixtral", intermediate_size=24, experts=EXPERTS, init_std=0.3)


DRAWS = Sampling(temperature=1.0, top_k=0)


def of_mixture(num_ranks: int, **more: Any) -> EngineSettings:
    return settings_of(num_ranks, model=MODEL, **more)


def prompts(seed: int = 0) -> Rows:
    asked = rows_of([SortPrompts().prompt(place) for place in range(NUM_PROMPTS)], first_group=0)
    return asked | Rows({"seeds": torch.arange(NUM_PROMPTS) + seed})


def actor_of(world: World | None, settings: EngineSettings, *, replays: bool, rows: int = 1) -> Actor:
    common: dict[str, Any] = {"num_tokens": NUM_TOKENS, "stops": frozenset({END}), "keeps_routes": replays}
    return Actor(world, settings=settings, algorithm=algorithm_of({}), rows=rows, **common)


def shifted(rows: Rows) -> Rows:
    """The rows with experts that no router has chosen."""
    routes = rows.ragged(ROUTES)
    return rows.drop(ROUTES) | Rows({ROUTES: routes.with_values((routes.values + 3) % EXPERTS.num_experts)})


def forced(config: ModelConfig, rows: Rows, settings: EngineSettings) -> list[Tensor]:
    """Log-probabilities of the responses by the definition, row by row: the routes' experts, weighed by the router."""
    blocks = build_blocks(config, "cpu", torch.float64)
    initialise(blocks, config, settings.seed, torch.float64)
    routers = [module for block in blocks for module in block.modules() if isinstance(module, Router)]
    found = []
    columns = (rows.ragged(name).rows() for name in ("prompts", "responses", ROUTES))
    for prompt, response, routes in zip(*columns, strict=True):
        for router, experts in zip(routers, routes.long().view(len(routes), len(routers), -1).unbind(1), strict=True):

            def choose(x: Tensor, _: object, router: Router = router, experts: Tensor = experts) -> Choice:
                likely = (x @ router.weight.t()).softmax(-1).gather(-1, experts)
                return Choice(experts, likely / likely.sum(-1, keepdim=True))

            router.forward = choose  # type: ignore[assignment,method-assign]
        text = torch.cat([prompt, response])
        logits = run_blocks(blocks, text[None, :-1])[0].log_softmax(-1)
        found.append(logits[len(prompt) - 1 :].gather(-1, response[:, None]).squeeze(-1))
    return found


def played(world: World | None, num_ranks: int) -> dict[str, Any]:
    """Responses, their routes, and what other experts make of them, drawn and scored by `num_ranks` ranks."""
    settings, rows = of_mixture(num_ranks), 1 if num_ranks == 1 else 2
    actor = actor_of(world, settings, replays=True, rows=rows)
    say = spoken_to(world, actor, Actor.layout(num_ranks, settings=settings, rows=rows))
    say("hand_over", version=0)
    drawn = prompts() | say("generate", prompts())
    own, other = (say("logprobs", each).ragged("old") for each in (drawn, shifted(drawn)))
    gains = other.with_values(torch.sin(torch.arange(len(other.values), dtype=torch.float64)))
    learn = shifted(drawn) | Rows({"old": other, "advantages": gains})
    norm = say("update", learn, lr=1e-2, columns=("old", "advantages"))["grad_norm"]
    again = say("logprobs", shifted(drawn)).ragged("old")
    names = {"responses": drawn.ragged("responses"), ROUTES: drawn.ragged(ROUTES), "own": own, "other": other}
    return {name: ragged.values for name, ragged in (names | {"again": again}).items()} | {"norm": norm, "rows": drawn}


@cache
def alone() -> dict[str, Any]:
    return played(None, 1)


def test_one_process_equals_the_definition() -> None:
    found = alone()
    rows = found["rows"]
    for name, given in (("own", rows), ("other", shifted(rows))):
        torch.testing.assert_close(found[name], torch.cat(forced(MODEL, given, of_mixture(1))), rtol=0, atol=TOLERANCE)
    assert (found["own"] - found["other"]).abs().max() > 1e-3
    assert (found["own"] - rows.ragged("rollout").values).abs().max() < 1e-5
    # A byte for each expert of each token but the last, in each layer.
    tokens = sum(len(each) - 1 for name in ("prompts", "responses") for each in rows.ragged(name).rows()) + len(rows)
    assert rows.ragged(ROUTES).values.nbytes == tokens * MODEL.num_layers * EXPERTS.per_token


def test_four_ranks_equal_one_process(pool: LocalPool) -> None:
    for found in pool.run(4, played, 4, timeout_s=300.0):
        for name in ("responses", ROUTES, "own", "other", "again"):
            torch.testing.assert_close(found[name], alone()[name], rtol=0, atol=TOLERANCE, msg=name)
        assert found["norm"] == pytest.approx(alone()["norm"], abs=TOLERANCE)


def test_in_bf16_training_finds_what_was_drawn() -> None:
    """The largest difference in four layers of many experts is below a third of that without; measured, a ninth."""
    plan = replace(preset("ddp", cluster_of(1)), compute="bf16", micro_batch=settings_of(1).plan.micro_batch)
    many = replace(MODEL, num_layers=4, init_std=0.1, experts=replace(EXPERTS, num_experts=64, per_token=4))
    worst, mean = defaultdict[bool, float](float), defaultdict[bool, float](float)
    for replays in (False, True):
        actor = actor_of(None, settings_of(1, model=many, plan=plan), replays=replays)
        actor.hand_over(version=0)
        for seed in range(6):
            rows = prompts(100 * seed)
            rows |= actor.generate(rows)
            rows |= actor.logprobs(rows)
            found = of_rows(rows | Rows({"reward": torch.zeros(len(rows))}), NUM_TOKENS)
            worst[replays] = max(worst[replays], found["rollout/logprob_diff_max"])
            mean[replays] += found["rollout/logprob_diff_mean"]
            assert ("rollout/route_bytes" in found) == replays
    assert worst[True] < worst[False] / 3
    assert mean[True] < mean[False]


_LINEAR = replace(MODELS["linear"], family="qwen3_next", experts=MODELS["mixtral"].experts)


@pytest.mark.parametrize("config", [MODELS["mixtral"], MODELS["glm4_moe"], _LINEAR], ids=lambda each: each.family)
def test_routes_do_not_depend_on_company(config: ModelConfig) -> None:
    texts = [(5, 6, 7), (5, 6, 7), (9,), (5, 6, 7, 8, 1, 2)]
    asked = [Request(prompt=text, num_tokens=6, seed=seed, sampling=DRAWS) for seed, text in enumerate(texts)]

    def engine() -> GenerationEngine:
        blocks = make(config)
        return GenerationEngine(blocks, config, context=32, num_pages=64, page_tokens=4, routes=Routes(blocks))

    together = engine().run(asked)
    for one, made in zip(asked, together, strict=True):
        assert made.routes == engine().run([one])[0].routes
    chosen: list[Tensor] = []
    blocks = make(config)
    routers = [module for block in blocks for module in block.modules() if isinstance(module, Router)]
    hooks = [each.register_forward_hook(lambda _, __, choice: chosen.append(choice.experts)) for each in routers]
    for one, made in zip(asked, together, strict=True):
        chosen.clear()
        run_blocks(blocks, torch.tensor([[*one.prompt, *made.tokens[:-1]]]))
        assert [list(token) for token in made.routes] == torch.cat(chosen, -1).tolist()
    for hook in hooks:
        hook.remove()


def test_what_is_refused() -> None:
    with pytest.raises(ModelError, match=r"run.router_replay repeats the choice of experts, and the model has none"):
        check_roles(resolve("sort", None, {}, {"run": {"router_replay": True}}))
    with pytest.raises(ConfigError, match=r"run.router_replay keeps .* run.max_lag = 1 takes older ones"):
        resolve("sort", None, {}, {"run": {"router_replay": True, "max_lag": 1}})
    with pytest.raises(ConfigError, match=r"run.router_replay keeps .* of one turn, and an \[environment\] answers"):
        resolve("sort", None, {}, {"run": {"router_replay": True}, "environment": {"name": "environments.py:Digits"}})
