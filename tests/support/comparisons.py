"""Random cases trained by Terrace and by the independent reference, and how far they are apart.

A model goes in and out as a Hugging Face folder, or is one of `transformers` itself, so no name of a parameter is
translated here.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tomli_w
import torch
from torch import Tensor, nn

import terrace
from terrace.base.errors import ConfigError, ModelError, PlanError
from terrace.base.schema import dump
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.cli import worker
from terrace.cli.main import main
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs
from terrace.model.config import load_model
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.hf.names import sources
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from terrace.plan.plan import Plan
from terrace.plan.presets import parse_plan
from tests.support.independent import Document, Reference, StepResult, causal_model, learning_rate
from tests.support.independent_experts import BIAS, from_files, parameters_of, to_files
from tests.support.random_plans import Case
from tests.support.random_runs import NUM_STEPS, Run
from tests.support.toys import cluster_of

TOLERANCE = 1e-9

# What a draw may be refused for; anything else is a failure.
RULES = (
    "virtual stages",
    "shards weights over",
    "multiple of",
    "passes micro-batches in groups",
    "cannot split",
    "has no effect",
    "do not divide",
)


@dataclass(frozen=True)
class Trained:
    """Results of a rank: of every step, and the whole parameters under the names of its blocks."""

    steps: list[StepResult]
    values: dict[str, Tensor]


@dataclass(frozen=True)
class Compared:
    """The largest relative differences over all ranks and steps, or the rule by which the plan was refused."""

    differences: Mapping[str, float]
    refused: str = ""

    @property
    def largest(self) -> float:
        return max(self.differences.values())


def plan_of(case: Case) -> Plan:
    """The plan with every message in fp64: the reference has no rounding of narrower formats."""
    plan = parse_plan({**case.plan, "update": case.optimizer["name"]}, cluster_of(*case.sizes))
    return replace(plan, wire={message: dict.fromkeys(row, "fp64") for message, row in plan.wire.items()})


def train(world: World, case: Case, folder: str) -> Trained | str:
    """The case under its plan on this rank, or the rule by which it was refused before the first step."""
    torch.manual_seed(world.rank)
    try:
        trainer = terrace.Trainer(
            own_blocks(case, Path(folder)) if case.own else terrace.blocks_of(model_of(case)),
            plan=plan_of(case),
            cluster=cluster_of(*case.sizes),
            loss=token_loss,
            lr=case.lrs[0],
            optimizer=case.optimizer,
            num_micros=case.num_micros,
            activation=(case.sequence, int(case.model.get("n_embd", case.model.get("hidden_size")))),
            declared=block_specs(load_model(folder)) if case.own else (),
            predict=False,
        )
    except (ConfigError, PlanError, ModelError) as error:
        return str(error)
    steps = []
    with trainer:
        for batch, lr in zip(case.batches(), case.lrs, strict=True):
            result = trainer.step(batch.tokens, batch.labels, batch.positions if case.packed else None, lr)
            steps.append(StepResult(result.loss, result.grad_norm))
        return Trained(steps, trainer.state_dict())


def own_blocks(case: Case, folder: Path) -> dict[str, nn.Module]:
    """Terrace's own decoder with the weights of a folder."""
    config, weights = load_model(str(folder)), Pretrained(folder)
    names = (spec.name for spec in block_specs(config))
    blocks = dict(zip(names, build_blocks(config, "cpu", torch.float64), strict=True))
    for (block, name), stored in sources(config).items():
        parameter = blocks[block].get_parameter(name)
        parameter.data.copy_(weights.value(block, name))
        parameter.requires_grad_(case.trains(stored.name) and not stored.name.endswith(BIAS))
    return blocks


def model_of(case: Case) -> nn.Module:
    """The case's model of `transformers`, the same whenever it is made."""
    model = causal_model(case.family, case.model, case.seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.trains(name))
    return model


def reference_of(case: Case, folder: Path, balance: Mapping[str, float] | None = None) -> Reference:
    """The case's reference, whose initial weights are written to `folder`."""
    model: Any = model_of(case)
    if case.has_experts:
        folder.mkdir(parents=True)
        safetensors.torch.save_file(to_files(model, case.family), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": case.family, **case.model}), encoding="utf-8")
    else:
        model.save_pretrained(folder)
    return Reference(model, {**case.optimizer, "lr": case.lrs[0]}, splits_heads=case.own, balance=balance)


def read_weights(folder: Path, case: Case, like: nn.Module) -> dict[str, Tensor]:
    """The parameters of a folder, under the names of `transformers`."""
    if case.has_experts:  # gates of Terrace's own are unknown to `transformers`
        return from_files(safetensors.torch.load_file(folder / "model.safetensors"), like, case.family)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return {name: value.detach() for name, value in model.named_parameters()}


def compare(
    reference: Reference,
    batches: Sequence[Sequence[Document]],
    lrs: Sequence[float],
    steps: Sequence[StepResult],
    values: Mapping[str, Tensor],
) -> dict[str, float]:
    """The largest differences of steps, in order, and of the parameters after them."""
    before = {name: value.clone() for name, value in parameters_of(reference.model).items()}
    wanted = [reference.step(documents, lr) for documents, lr in zip(batches, lrs, strict=True)]
    after = parameters_of(reference.model)
    assert any(not torch.equal(before[name], value) for name, value in after.items()), "nothing was trained"
    assert values.keys() == after.keys(), values.keys() ^ after.keys()
    of_routers = [
        abs(one.router_losses[name] / value - 1)
        for one, other in zip(steps, wanted, strict=True)
        for name, value in other.router_losses.items()
    ]
    assert [one.dropped for one in steps] == [other.dropped for other in wanted], "other choices were dropped"
    return {
        "routers": max(of_routers, default=0.0),
        "loss": max(abs(one.loss / other.loss - 1) for one, other in zip(steps, wanted, strict=True)),
        "norm": max(abs(one.grad_norm / other.grad_norm - 1) for one, other in zip(steps, wanted, strict=True)),
        "parameters": max(difference(values[name], value) for name, value in after.items()),
    }


def difference(value: Tensor, wanted: Tensor) -> float:
    """The largest difference of an element, relative to the largest magnitude."""
    return float((value - wanted).abs().max() / wanted.abs().max())


def compare_plan(pool: LocalPool, case: Case, folder: Path, like: Case | None = None) -> Compared:
    """The case trained by `terrace.Trainer` on its ranks, compared with its reference, or with that of `like`."""
    reference = reference_of(like or case, folder / "before")
    found = pool.run(cluster_of(*case.sizes).world_size, train, case, str(folder / "before"), timeout_s=300.0)
    if isinstance(found[0], str):
        assert set(found) == {found[0]}, found
        return Compared({}, found[0])
    values = found[0].values
    between_ranks = max(difference(each.values[name], value) for each in found for name, value in values.items())
    between_ranks = max(between_ranks, *(steps_apart(each.steps, found[0].steps) for each in found))
    if "gate" in case.model:  # which export refuses
        values = in_files(case, folder / "before", values, reference.model)
    elif case.own:
        config, whole = load_model(str(folder / "before")), found[0].values
        write_pretrained(folder / "after", config, lambda block, name: whole[f"{block}.{name}"], "fp64")
        values = read_weights(folder / "after", case, reference.model)
    batches = [batch.documents() for batch in case.batches()]
    return Compared(compare(reference, batches, case.lrs, found[0].steps, values) | {"ranks": between_ranks})


def steps_apart(found: Sequence[StepResult], wanted: Sequence[StepResult]) -> float:
    pairs = [(one.loss, other.loss) for one, other in zip(found, wanted, strict=True)]
    pairs += [(one.grad_norm, other.grad_norm) for one, other in zip(found, wanted, strict=True)]
    return max(abs(one / other - 1) for one, other in pairs)


def compare_run(
    pool: LocalPool, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Compared:
    """`terrace train` and `terrace export`, whose ranks are the pool's, compared with the reference."""

    def on_the_pool(world_size: int, target: Callable[..., Any], arguments: tuple[Any, ...], **_: object) -> Any:
        return pool.run(world_size, target, *arguments, timeout_s=300.0)[0]

    case = run.case
    reference = reference_of(case, folder / "model", run.balance)
    texts = "".join(json.dumps({"text": text}) + "\n" for text in run.texts)
    (folder / "texts.jsonl").write_text(texts, encoding="utf-8")
    optimizer = {**case.optimizer, "lr": case.lrs[0]}
    data = {"path": "texts.jsonl", "tokenizer": "bytes", "documents": run.documents, "cache": "cache"}
    table = {"cluster": dump(cluster_of(*case.sizes)), "model": "model", "data": data, "optimizer": optimizer}
    table |= {"balance": dict(run.balance)} if run.balance else {}
    try:
        table["plan"] = dump(plan_of(case))
    except (ConfigError, PlanError) as error:
        return Compared({}, str(error))
    (folder / "run.toml").write_text(tomli_w.dumps({**table, "train": dict(run.train)}), encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(worker, "launch_local", on_the_pool)
    if main(["train", "--config", "run.toml", "--folder", str(folder / "run")]):
        return Compared({}, capsys.readouterr().err)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lrs = [learning_rate(step, run.train, case.lrs[0]) for step in range(NUM_STEPS)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(lrs, rel=1e-12)
    steps = [
        StepResult(line["loss"], line["grad_norm"], line.get("router_losses", {}), line.get("dropped") or 0)
        for line in lines
    ]
    values = exported(case, folder, reference.model)
    return Compared(compare(reference, [run.epoch()] * NUM_STEPS, lrs, steps, values))


def exported(case: Case, folder: Path, like: nn.Module) -> dict[str, Tensor]:
    """The parameters after a run: by `terrace export`, or from its checkpoint if the gate is Terrace's own."""
    if "gate" not in case.model:
        assert main(["export", str(folder / "run"), "exported", "--dtype", "fp64"]) == 0
        return read_weights(folder / "exported", case, like)
    newest = latest(folder / "run")
    assert newest is not None
    whole = {f"{block}.{name}": value for block, name, value in Checkpoint(newest).parameters()}
    return in_files(case, folder / "model", whole, like)


def in_files(case: Case, folder: Path, values: Mapping[str, Tensor], like: nn.Module) -> dict[str, Tensor]:
    """Values of Terrace's parameters under the names of `transformers`, by way of the names that files have."""
    found = dict[str, Tensor]()
    for (block, name), source in sources(load_model(str(folder))).items():
        whole = values[f"{block}.{name}"]
        found |= dict(zip(source.tensors, whole if source.num_stacked else [whole], strict=True))
    return from_files(found, like, case.family)


@dataclass(frozen=True)
class Drawn:
    """The call that draws it again, the choices in it, and its comparison."""

    name: str
    kinds: set[str]
    compare: Callable[[], Compared]


def until(wanted: int, draws: Iterator[Drawn]) -> Counter[str]:
    """Choices in the draws that ran, until `wanted` have run and are equal; refused draws do not count."""
    kinds, refused, wrong, largest = Counter[str](), Counter[str](), list[str](), Counter[str]()
    num_ran = 0
    for drawn in draws:
        try:
            found = drawn.compare()
        except Exception as error:  # the others still run
            found = Compared({}, f"{type(error).__name__}: {error}")
        if found.refused:
            rule = next((rule for rule in RULES if rule in found.refused), "")
            refused[rule] += 1
            wrong += [] if rule else [f"{drawn.name}: {found.refused}"]
            continue
        num_ran += 1
        kinds.update(drawn.kinds)
        largest |= Counter(found.differences)
        wrong += [] if found.largest < TOLERANCE else [f"{drawn.name}: {found.differences}"]
        if num_ran == wanted:
            break
    print(f"{num_ran} ran, {refused.total()} refused: {dict(refused)}; largest differences: {dict(largest)}")
    print(*(f"{kind:24} {number}" for kind, number in sorted(kinds.items())), sep="\n")
    assert not wrong, "\n".join(wrong)
    return kinds
