"""Two updates of a step of each algorithm on the task `sort` equal formulas of its paper in plain PyTorch.

Nothing of Terrace is on the other side but the responses that it drew: the model, log-probabilities, greedy responses,
advantages, losses and the optimizer are written out here, a response at a time.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.base.schema import merge
from terrace.checkpoint.reading import Checkpoint
from terrace.model.blocks import block_specs
from terrace.model.hf.written import write_pretrained
from terrace.model.init import initial_value
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.controllers.controllers import CONTROLLERS
from terrace.rl.making import started
from terrace.rl.resolve import resolve
from terrace.rl.run import RunInputs
from terrace.rl.sort_task import END, LONGEST_RESPONSE, SortPrompts, SortTokenizer
from terrace.rl.values.prompts import Sample
from terrace.rl.values.rows import Rows

LAYERS, HEADS, WIDTH, ROWS, MINI_BATCH = 2, 2, 16, 16, 8
LR = 0.25  # of SGD: large, so that the second update finds ratios beyond clips
EXACT = {"compute": "fp64", "master": "fp64"}
MODEL = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
KEYS: dict[str, Any] = {
    "cluster": {"tiers": {name: {"size": 1} for name in ("package", "node", "system")}},
    "plan": {"mapping": {"system": {"pipeline": 1}}, "schedule": None, "micro_batch": 4, **EXACT},
    "model": {**MODEL, "num_key_value_heads": HEADS, "initializer_range": 0.3},
    "run": {"rows": 1, "prompts": 4, "responses": 4, "mini_batch": MINI_BATCH, "start_steps": 0, "warmup_steps": 1},
    "optimizer": {"name": "sgd", "lr": LR, "clip": 0.0},
    "reward": [{"function": "tests.rl.test_sort_updates:small_digits"}],
}
SAFE = {
    "algorithm": {"cost_threshold": 0.1, "multiplier": 0.5},
    "cost": {"function": "terrace.rl.sort_task:length_cost"},
}
MORE = {"safe-rlhf": SAFE}
TOKEN_MEAN = ("ppo", "reinforce++", "reinforce++-baseline", "dapo", "cispo", "safe-rlhf", "distill")
OF_STANDARD_GROUPS = ("grpo", "dapo", "gspo", "cispo")


def small_digits(samples: list[Sample]) -> list[float]:
    return [float(each.response.count("1") + each.response.count("2")) for each in samples]


def reward_of(response: list[int]) -> float:
    return float(sum(token in (1, 2) for token in response))


class Recording:
    """A role whose updates and values are kept."""

    def __init__(self, role: Any) -> None:
        self.role, self.updates, self.found = role, list[tuple[Rows, tuple[str, ...]]](), list[Rows]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.role, name)

    def update(self, rows: Rows, **more: Any) -> Any:
        self.updates.append((rows, more.get("columns", ())))
        return self.role.update(rows, **more)

    def values(self, rows: Rows) -> Any:
        self.found.append(self.role.values(rows))
        return self.found[-1]


Parameters = Mapping[tuple[str, str], Tensor]


def parameters_of(folder: str) -> Parameters:
    read = Checkpoint(Path(folder)).parameters()
    return {(block, name): value.double().requires_grad_() for block, name, value in read}


def logits(given: Parameters, tokens: list[int]) -> Tensor:
    """Of a llama, after each token (T, V)."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    num, of_head = len(tokens), WIDTH // HEADS
    angles = torch.arange(num)[:, None] / 10_000 ** (torch.arange(0, of_head, 2) / of_head)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        turned = torch.complex(left, right) * turn
        return torch.cat([turned.real, turned.imag], -1)

    x = given["embedding", "weight"][torch.tensor(tokens)]
    later = torch.ones(num, num).triu(1).bool()
    for layer in range(LAYERS):
        own = {name: value for (block, name), value in given.items() if block == f"layers.{layer}"}
        h = normed(x, own["attention_norm.weight"])
        query, key, value = (
            (h @ own[f"attention.{name}.weight"].T).view(num, HEADS, of_head).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = rotated(query) @ rotated(key).transpose(1, 2) / math.sqrt(of_head)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        x = x + mixed.transpose(0, 1).reshape(num, WIDTH) @ own["attention.output.weight"].T
        h = normed(x, own["mlp_norm.weight"])
        x = x + (F.silu(h @ own["mlp.gate.weight"].T) * (h @ own["mlp.up.weight"].T)) @ own["mlp.down.weight"].T
    return normed(x, given["head", "norm.weight"]) @ given["head", "weight"].T


def logprobs(given: Parameters, prompt: list[int], response: list[int]) -> Tensor:
    after = logits(given, [*prompt, *response][:-1]).log_softmax(-1)[len(prompt) - 1 :]
    return after[torch.arange(len(response)), torch.tensor(response)]


@torch.no_grad()
def greedy(given: Parameters, prompt: list[int]) -> list[int]:
    response = list[int]()
    while len(response) < LONGEST_RESPONSE and response[-1:] != [END]:
        response.append(int(logits(given, [*prompt, *response])[-1].argmax()))
    return response


def whitened(tokens: list[list[float]]) -> list[Tensor]:
    flat = torch.tensor([x for row in tokens for x in row], dtype=torch.float64)
    return [(torch.tensor(row, dtype=torch.float64) - flat.mean()) / flat.std() for row in tokens]


def of_gae(outcome: float, values: list[float]) -> list[float]:
    found, following, value = list[float](), 0.0, 0.0
    for place in reversed(range(len(values))):
        own = outcome if place == len(values) - 1 else 0.0
        following = own + value - values[place] + 0.95 * following
        value = values[place]
        found.insert(0, following)
    return found


def advantages_of(
    name: str,
    start: Parameters,
    texts: list[tuple[list[int], list[int]]],
    values: list[list[list[float]]],
    teacher: Parameters,
) -> list[Tensor]:
    """By token of each response, for a whole step."""
    if name == "distill":
        with torch.no_grad():
            return [logprobs(teacher, *text) - logprobs(start, *text) for text in texts]
    rewards = [reward_of(response) for _, response in texts]
    groups = [[y for y, (other, _) in zip(rewards, texts, strict=True) if other == prompt] for prompt, _ in texts]
    lengths = [len(response) for _, response in texts]
    means, sizes = [sum(group) / len(group) for group in groups], [len(group) for group in groups]
    if name in ("ppo", "safe-rlhf"):
        of_reward = whitened([of_gae(x, row) for x, row in zip(rewards, values[0], strict=True)])
        if name == "ppo":
            return of_reward
        costs = [sum(token < 11 for token in response) / 10 for _, response in texts]
        of_cost = whitened([of_gae(x, row) for x, row in zip(costs, values[1], strict=True)])
        # ln lambda rises by rate x lambda x (mean cost - threshold), before the step.
        multiplier = 0.5 * math.exp(0.1 * 0.5 * (sum(costs) / len(costs) - 0.1))
        return [(x - multiplier * y) / (1 + multiplier) for x, y in zip(of_reward, of_cost, strict=True)]
    if name == "reinforce++":
        return whitened([[x] * num for x, num in zip(rewards, lengths, strict=True)])
    if name == "reinforce++-baseline":
        return whitened([[x - mean] * num for x, mean, num in zip(rewards, means, lengths, strict=True)])
    if name == "remax":
        outcomes = [x - reward_of(greedy(start, prompt)) for x, (prompt, _) in zip(rewards, texts, strict=True)]
    elif name == "rloo":
        others = [(mean * size - x) / (size - 1) for x, mean, size in zip(rewards, means, sizes, strict=True)]
        outcomes = [x - other for x, other in zip(rewards, others, strict=True)]
    else:
        outcomes = [x - mean for x, mean in zip(rewards, means, strict=True)]
        if name in OF_STANDARD_GROUPS:
            deviations = [float(torch.tensor(group, dtype=torch.float64).std()) for group in groups]
            outcomes = [x / (deviation + 1e-6) for x, deviation in zip(outcomes, deviations, strict=True)]
    return [torch.full((num,), x, dtype=torch.float64) for x, num in zip(outcomes, lengths, strict=True)]


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def loss_of(name: str, new: list[Tensor], old: list[Tensor], advantages: list[Tensor], clips: bool = True) -> Tensor:
    """Of a mini-batch; without `clips` that of the same samples whatever the policy that drew them: REINFORCE."""
    by_row = list[Tensor]()
    for x, y, a in zip(new, old, advantages, strict=True):
        if not clips:
            by_row.append(-(a * x).sum() / (len(x) if name in ("grpo", "gspo") else 1))
        elif name == "rloo":
            by_row.append(clipped((x - y).sum().exp(), a[0], 0.2, 0.2))
        elif name == "gspo":
            by_row.append(clipped((x - y).mean().exp(), a[0], 3e-4, 4e-4))
        elif name == "cispo":
            by_row.append(-((x - y).exp().clamp(max=1.2).detach() * a * x).sum())
        else:
            tokens = clipped((x - y).exp(), a, 0.2, 0.28 if name == "dapo" else 0.2)
            by_row.append(tokens.mean() if name == "grpo" else tokens.sum())
    if name in TOKEN_MEAN:
        return torch.stack(by_row).sum() / sum(map(len, new))
    return torch.stack(by_row).mean() / (LONGEST_RESPONSE if name == "dr-grpo" else 1)


def stepped(
    name: str, start: Parameters, texts: list[tuple[list[int], list[int]]], advantages: list[Tensor], clips: bool
) -> Parameters:
    """Parameters after the two updates of a step."""
    given: Parameters = {key: value.detach().clone().requires_grad_() for key, value in start.items()}
    with torch.no_grad():
        old = [logprobs(start, *text) for text in texts]
    for first in range(0, len(texts), MINI_BATCH):
        part = slice(first, first + MINI_BATCH)
        new = [logprobs(given, *text) for text in texts[part]]
        loss = loss_of(name, new, old[part], advantages[part], clips)
        gradients = torch.autograd.grad(loss, list(given.values()))
        with torch.no_grad():
            for value, gradient in zip(given.values(), gradients, strict=True):
                value -= LR * gradient
    return given


def texts_of(parts: list[tuple[Rows, tuple[str, ...]]]) -> Iterator[tuple[list[int], list[int]]]:
    for rows, _ in parts:
        for prompt, response in zip(rows.ragged("prompts").rows(), rows.ragged("responses").rows(), strict=True):
            yield prompt.tolist(), response.tolist()


def teacher_in(folder: Path) -> Parameters:
    """The parameters of a model of the same sizes and another seed, written to a folder."""
    config = resolve("sort", None, {}, KEYS).model
    values = {
        (spec.name, one.name): initial_value(config, spec.name, one.name, one.shape, 7)
        for spec in block_specs(config)
        for one in spec.params
    }
    write_pretrained(folder, config, lambda block, name: values[block, name], "fp32")
    return {key: value.float().double() for key, value in values.items()}


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_step_on_the_task_equals_its_formulas(name: str, tmp_path: Path) -> None:
    table = merge(merge(KEYS, {"algorithm": {"name": name}}), MORE.get(name, {}))
    teacher: Parameters = {}
    if name == "distill":  # no reward at all, and a reference that is another model
        teacher = teacher_in(tmp_path / "teacher")
        table = merge(table, {"reward": [], "run": {"reference": str(tmp_path / "teacher")}})
    config, task = resolve("sort", None, {}, table), SortPrompts(0)
    inputs = RunInputs(config=config, prompts=task, tokenizer=SortTokenizer(), stops=frozenset({END}))
    with InlineRuntime() as runtime:
        run = started(inputs, runtime, tmp_path / "run", print)
        roles = run._setup.roles
        actor = Recording(roles.actor)
        critics = [Recording(role) for role in (roles.critic, roles.cost_critic) if role is not None]
        named: dict[str, Any] = dict(zip(("critic", "cost_critic"), critics, strict=False))
        before = parameters_of(actor.save(folder=tmp_path / "before", step=0, facts={}, keep=1))
        setup = replace(run._setup, roles=replace(roles, actor=actor, **named))
        next(CONTROLLERS[name](setup))
        after = parameters_of(actor.save(folder=tmp_path / "after", step=ROWS // MINI_BATCH, facts={}, keep=1))
    texts = list(texts_of(actor.updates))
    assert len(texts) == ROWS
    if name in ("dapo", "cispo"):
        of_prompt = Counter(tuple(prompt) for prompt, _ in texts)
        alike = Counter((tuple(prompt), reward_of(response)) for prompt, response in texts)
        assert all(num < of_prompt[prompt] for (prompt, _), num in alike.items()), "groups of equal rewards leave"
    values = [[row.tolist() for row in critic.found[0].ragged("values").rows()] for critic in critics]
    advantages = advantages_of(name, before, texts, values, teacher)
    given = torch.cat([rows.ragged("advantages").values for rows, _ in actor.updates])
    torch.testing.assert_close(given.double(), torch.cat(advantages), rtol=1e-5, atol=1e-5)
    wanted, unbounded = (stepped(name, before, texts, advantages, clips) for clips in (True, False))
    far = max(float((wanted[key] - unbounded[key]).detach().abs().max()) for key in wanted)
    assert far > 0.01, "the second update is another where nothing holds it to the policy that drew"
    torch.testing.assert_close(after, wanted, rtol=1e-6, atol=1e-6)
