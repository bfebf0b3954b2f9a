"""Blocks of matrices that are zero: steps equal plain PyTorch in one process, under every placement that takes them.

The reference has its own masks and penalty, written block by block, and autograd's gradient of the penalty.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from terrace.base.errors import ConfigError, PlanError
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.cli.overrides import parse_overrides
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.init import initialise
from terrace.plan.keep import Keep
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.pruning import BlockPruning, check_pruning, pruned_params
from terrace.runtime import pruned_blocks
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.pruned_blocks import in_blocks, in_parts, penalty_gradient, smallest_blocks, zero_
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from terrace.train.adapted import _zeroed, pruned_fact
from terrace.train.effects import check_effects
from terrace.train.resolve import resolve
from tests.support.nightly import nightly
from tests.support.parity import exact, flatten, gathered, trainable
from tests.support.tiny_runs import metrics, terrace, write_run
from tests.support.toy_tables import VOCAB
from tests.support.toys import SEQUENCE, cluster_of, make_batch, run_blocks

ROWS, NUM_STEPS, TOLERANCE = 8, 6, 1e-10
ADAMW = OptimizerConfig(lr=3e-2)
SETTINGS = BlockPruning(blocks=(2, 4), share=0.4, after=2)
DENSE: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12, "tie_word_embeddings": True}
MIXTURE: dict[str, Any] = DENSE | {"model_type": "qwen3_moe", "head_dim": 2, "num_experts": 4, "num_experts_per_tok": 2}
MIXTURE |= {"moe_intermediate_size": 4}
SQUARE, ONE = cluster_of(2, 2), cluster_of(1)
PIPELINE = {"node": {"pipeline": 2}}


@dataclass(frozen=True)
class Place:
    plan: Plan
    table: str = "dense"
    cluster: Cluster = SQUARE
    weight: float = 0.03


TABLES = {"dense": DENSE, "mixture": MIXTURE}
PLACES = {
    "one rank": Place(exact("ddp", ONE), cluster=ONE),
    "zero3": Place(exact("zero3", SQUARE)),
    "zero3 in a pipeline": Place(exact("zero3", SQUARE, mapping=PIPELINE, schedule="1f1b", micro_batch=2)),
    "ddp": Place(exact("ddp", SQUARE, micro_batch=2)),
    "zero1": Place(exact("zero1", SQUARE)),
    "zero2": Place(exact("zero2", SQUARE)),
    "hsdp": Place(exact("hsdp", SQUARE)),
    "secondary": Place(exact("zero++", SQUARE)),
    "three-level": Place(exact("three-level", SQUARE)),
    "split backwards": Place(exact("zero3", SQUARE, mapping=PIPELINE, schedule="zb-h1")),
    "recomputed": Place(exact("zero3", SQUARE, recompute=("layers.*",), micro_batch=2)),
    "a mixture": Place(exact("zero3", SQUARE), "mixture"),
    "experts on ranks": Place(exact("zero3", SQUARE, experts={"package": {"expert": 2}}), "mixture", weight=0.0),
}
BY_DAY = ("zero3 in a pipeline", "zero1")


def config_of(table: dict[str, Any]) -> ModelConfig:
    return replace(parse_model(table), init_std=0.3)


def blocks_of(table: dict[str, Any]) -> list[nn.Module]:
    blocks = build_blocks(config_of(table), dtype=torch.float64)
    initialise(blocks, config_of(table), seed=0, dtype=torch.float64)
    return blocks


def engine_of(world: World, place: Place, blocks: Sequence[nn.Module]) -> Engine:
    specs, plan = block_specs(config_of(TABLES[place.table])), replace(place.plan, master_apart=True)
    num_micros = ROWS // (Layout.of(place.cluster, plan).data_degree * plan.micro_batch)
    return Engine(
        Blocks(blocks, names=[spec.name for spec in specs], declared=specs),
        Workload(cluster=place.cluster, plan=plan, num_micros=num_micros, sequence=SEQUENCE),
        token_loss,
        Training(optimizer=ADAMW, pruning=replace(SETTINGS, weight=place.weight)),
        RankSetup(rank=world.rank),
    )


Found = tuple[list[float], list[float], list[float], Tensor]


def on_rank(world: World, place: Place) -> Found:
    """Losses, norms, losses of evaluations before the steps, and the working copy after the last."""
    blocks = blocks_of(TABLES[place.table])
    engine = engine_of(world, place, blocks)
    layout, size = engine.program.layout, engine.program.plan.micro_batch
    losses, norms, evaluated = [], [], []
    for step in range(NUM_STEPS):
        inputs, labels = make_batch(step, ROWS)
        places = [
            micro * layout.data_degree + layout.data_rank(engine.rank) for micro in range(engine.program.num_micros)
        ]
        own = [Batch(inputs[size * at : size * (at + 1)], labels[size * at : size * (at + 1)]) for at in places]
        evaluated.append(engine.evaluate(own).loss)
        result = engine.step(own, ADAMW.lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    engine.drain()
    engine.check_bytes()
    parameters = gathered(engine, blocks).clone()
    assert engine.comm.meter.peak()["optimizer"] == engine.program.state_bytes["optimizer"]
    engine.close()
    return losses, norms, evaluated, parameters


def blocks_in(matrix: Tensor) -> list[tuple[slice, slice]]:
    height, width = SETTINGS.blocks
    rows, columns = matrix.shape
    return [
        (slice(top, top + height), slice(left, left + width))
        for top in range(0, rows, height)
        for left in range(0, columns, width)
    ]


def matrices_of(value: Tensor) -> list[Tensor]:
    """A matrix, or those of a stack."""
    return [value] if value.dim() == 2 else list(value.unbind())


def masked(value: Tensor) -> Tensor:
    """A copy whose smallest blocks are zero."""
    found = value.detach().clone()
    for matrix in matrices_of(found):
        parts = blocks_in(matrix)
        order = sorted(range(len(parts)), key=lambda index: float(matrix[parts[index]].pow(2).sum()))
        for index in order[: round(0.4 * len(parts))]:
            matrix[parts[index]] = 0
    return found


@cache
def directly(table: str, weight: float) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses, norms, and working copies after each step, of the same steps in one process.

    Working copies are made of masters, which torch's AdamW updates.
    """
    blocks = blocks_of(TABLES[table])
    names = {id(p): name for block in blocks[1:-1] for name, p in block.named_parameters()}
    working = trainable(blocks)
    pruned = [p.dim() >= 2 and "router" not in names.get(id(p), "router") for p in working]
    masters = [nn.Parameter(p.detach().clone()) for p in working]
    decays = {"params": [p for p in masters if p.dim() >= 2], "weight_decay": ADAMW.weight_decay}
    others = {"params": [p for p in masters if p.dim() < 2], "weight_decay": 0.0}
    adamw = torch.optim.AdamW(
        [decays, others], lr=ADAMW.lr, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps, fused=True
    )

    def publish(step: int) -> None:
        for own, master, is_pruned in zip(working, masters, pruned, strict=True):
            own.data.copy_(masked(master) if is_pruned and step >= SETTINGS.after else master)

    losses, norms, parameters = [], [], []
    for step in range(NUM_STEPS):
        publish(step)
        tokens, labels = make_batch(step, ROWS)
        loss = F.cross_entropy(run_blocks(blocks, tokens).flatten(0, 1), labels.flatten())
        losses.append(loss.item())
        if step < SETTINGS.after and weight:
            for own, is_pruned in zip(working, pruned, strict=True):
                for matrix in matrices_of(own) if is_pruned else ():
                    sizes = [matrix[part].norm() for part in blocks_in(matrix)]
                    loss = loss + weight * torch.stack([n / (n.detach() + 1e-2) for n in sizes]).sum()
        for own in working:
            own.grad = None
        torch.autograd.backward(loss)
        for master, own in zip(masters, working, strict=True):
            master.grad = own.grad if own.grad is not None else torch.zeros_like(own)
        norms.append(float(nn.utils.clip_grad_norm_(masters, ADAMW.clip)))
        adamw.step()
        publish(step + 1)
        parameters.append(flatten(blocks))
    return losses, norms, parameters


def test_the_reference_has_blocks_that_come_back() -> None:
    """Else whole masters would not be told from masters whose blocks are zero."""
    after = directly("dense", 0.03)[2]
    zero = [each == 0 for each in after[SETTINGS.after - 1 :]]
    assert any(bool((before & ~then).any()) for before, then in pairwise(zero))


@pytest.mark.parametrize("name", [*BY_DAY, *nightly(*(name for name in PLACES if name not in BY_DAY))])
def test_a_step_equals_plain_torch(pool: LocalPool, name: str) -> None:
    place = PLACES[name]
    wanted = directly(place.table, place.weight)
    for found in pool.run(place.cluster.world_size, on_rank, place, timeout_s=120.0):
        for mine, theirs in zip(found[:3], (wanted[0], wanted[1], wanted[0]), strict=True):
            assert mine == pytest.approx(theirs, rel=TOLERANCE)
        torch.testing.assert_close(found[3], wanted[2][-1], rtol=0, atol=TOLERANCE)
        assert torch.equal(found[3] == 0, wanted[2][-1] == 0)


LOCAL = {"preset": "zero3", "compute": "fp32"}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"mapping": {"node": {"tensor": 2}}}, {}, "the tensor axis cuts them: give the tier to the data axis"),
    ({"mapping": {"node": {"context": 2}}}, {}, "is not implemented beside a context axis or balance"),
    ({"experts": {"node": {"expert": 2}}}, {}, r"set prune\.weight = 0, or leave plan\.experts out"),
    ({"experts": {"node": {"rows": 2}}}, {"weight": 0.0}, "the axis rows of plan.experts cuts them"),
    ({"compute": "fp16"}, {}, "is not implemented beside plan.compute = 'fp16'"),
    ({"products": "fp8"}, {}, "is not implemented beside plan.products = 'fp8'"),
    ({"keep": Keep(optimizer="disk")}, {}, r"is not implemented beside states below the device \(plan.keep\)"),
    ({"wire": {"gather": {"node": "int8"}}}, {}, "and gather on tier 'node' travels in int8: send it in a dtype"),
    (
        {"compute": "fp64", "wire": {"gather": {"node": "fp32", "package": "bf16"}}},
        {},
        "messages of parameters travel in bf16, fp32: give all the same dtype",
    ),
    (
        {},
        {"blocks": (3, 4)},
        r"prune.blocks = \[3, 4\] does not divide layers.0.attention.query.weight, which is 8 x 8",
    ),
    ({}, {"blocks": (4,)}, r"prune.blocks = \[4\] must be the rows and columns of a block"),
    ({}, {"share": 1.0}, "prune.share = 1.0 must be above 0 and below 1"),
    ({}, {"share": 0.0}, "prune.share = 0.0 must be above 0 and below 1"),
    ({}, {"share": 0.1}, r"share = 0.1 of the 4 blocks of layers.0.attention.key.weight is none of them: give smaller"),
    ({}, {"share": 0.9}, r"share = 0.9 of the 4 blocks of layers.0.attention.key.weight is all of them: give smaller"),
    ({}, {"weight": -1.0}, "prune.weight = -1.0 must be at least 0"),
    ({}, {"after": 0}, "prune.after = 0 must be a number of updates, at least 1"),
]


@pytest.mark.parametrize(("plan", "settings", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_carry_blocks_is_refused(plan: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    made = replace(preset("zero3", SQUARE), **{"wire": {}, "compute": "fp32", **plan})
    with pytest.raises((ConfigError, PlanError), match=message):
        check_pruning(SQUARE, made, block_specs(config_of(DENSE)), replace(SETTINGS, **settings))


def test_masters_in_the_memory_of_the_working_copy_are_refused() -> None:
    with pytest.raises(PlanError, match=r"set plan\.master_apart = true"):
        check_pruning(SQUARE, exact("ddp", SQUARE), block_specs(config_of(DENSE)), SETTINGS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plan.master_apart false", r"plan.master_apart = false leaves \[prune\] no working copy"),
        (
            "--lora.rank 2",
            r"\[prune\] sets blocks of matrices to zero, and \[lora\] leaves them as they are: leave",
        ),
        ("--prune.after 6", r"prune.after = 6 sets no block to zero in train.steps = 6: make it smaller"),
        ("--prune.blocks []", r"\[prune\] has no effect without prune.blocks: give rows and columns"),
    ],
)
def test_options_of_a_run_that_blocks_contradict_are_refused(words: str, message: str, tmp_path: Path) -> None:
    file = write_run(tmp_path, 1, 2, plan="ddp")
    own = ("--prune.blocks", "[4, 4]", "--prune.share", "0.5", "--prune.after", "2")
    assert resolve(str(file), {}, parse_overrides(own)).plan.master_apart
    with pytest.raises(ConfigError, match=message) as refused:
        resolve(str(file), {}, parse_overrides((*own, *words.split())))
    assert "\n" not in str(refused.value)


def test_masters_apart_without_blocks_are_refused(tmp_path: Path) -> None:
    given = parse_overrides(("--plan.master_apart", "true"))
    run = resolve(str(write_run(tmp_path, 1, 2, plan="ddp")), {}, given)
    with pytest.raises(ConfigError, match=r"plan.master_apart = True has no effect: it only takes memory without \["):
        check_effects(run, {}, given)


def test_exported_blocks_are_zero_from_the_step_on_that_zeroes_them(tmp_path: Path) -> None:
    """Where the checkpoint holds masters: after as many updates as `prune.after`, not one later, in matrices alone."""
    file = write_run(tmp_path, 1, 2, plan="ddp")
    own = ("--prune.blocks", "[4, 4]", "--prune.share", "0.5", "--prune.after", "2", "--train.freeze", '["layers.0.*"]')
    run = resolve(str(file), {}, parse_overrides(own))
    torch.manual_seed(0)
    values = [
        (block.name, param.name, torch.randn(param.shape)) for block in block_specs(run.model) for param in block.params
    ]
    for step, zeroed in ((1, False), (2, True)):
        for (block, name, was), (_, _, value) in zip(
            values, _zeroed(values, pruned_fact(run), run.model, step), strict=True
        ):
            is_pruned = zeroed and block == "layers.1" and was.dim() == 2
            assert int((value == 0).sum()) == is_pruned * was.numel() // 2, name
            assert torch.equal(torch.where(value == 0, was, value), was)


def test_the_gradient_of_the_penalty_has_memory_for_a_part_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruned_blocks, "_PART", 48)
    torch.manual_seed(0)
    for shape in ((12, 8), (3, 10, 8), (2, 64)):
        matrix, settings = torch.randn(shape), replace(SETTINGS, weight=0.5)
        whole, parts = penalty_gradient(matrix, settings), torch.zeros(shape)
        found = list(in_parts(matrix, settings.blocks))
        for part in found:
            parts[part] += penalty_gradient(matrix[part], settings)
        assert torch.equal(parts, whole)
        assert len(found) > 1 or shape == (2, 64)  # of one row of blocks
        assert all(matrix[part].numel() <= 48 for part in found if shape != (2, 64))


def test_a_share_of_every_matrix_is_zero() -> None:
    """As asked to a block, whatever its size; those of a stack by matrix."""
    torch.manual_seed(0)
    for shape in ((320, 160), (3, 96, 160)):
        for share in (0.1, 0.5, 0.731):
            settings, matrix = BlockPruning(blocks=(16, 16), share=share), torch.randn(shape)
            zero_(matrix, smallest_blocks(matrix, settings), settings)
            norms = in_blocks(matrix, (16, 16)).abs().sum((-3, -1))
            zeros = (norms == 0).flatten(-2).sum(-1)
            assert (zeros == round(share * norms[..., :, :].flatten(-2).shape[-1])).all()


@pytest.mark.nightly
@pytest.mark.parametrize("messages", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_run_resumes_bitwise_and_exports_zeros(plan: str, messages: str, tmp_path: Path) -> None:
    write_run(tmp_path, 2, 1, plan=plan)
    words = ["train", "--config", "run.toml", "--prune.blocks", "[4, 4]", "--prune.share", "0.5", "--prune.after", "2"]
    words += ["--data.holdout", "8", "--train.eval_every", "6", "--train.checkpoint_every", "4"]
    words += ["--plan.messages", messages]
    whole = terrace(*words, "--folder", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    part = terrace(*words, "--folder", "part", "--train.keep_checkpoints", "9", cwd=tmp_path)
    assert part.returncode == 0, part.stderr
    (last,) = [path for path in (tmp_path / "part" / "checkpoints").iterdir() if path.name.endswith("6")]
    for path in sorted(last.iterdir(), reverse=True):
        path.unlink()
    last.rmdir()
    again = terrace("train", "--resume", "part", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    folders = [latest(tmp_path / name) for name in ("whole", "part")]
    values = [{(b, n): v for b, n, v in Checkpoint(folder).parameters()} for folder in folders if folder]
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][key], values[1][key]) for key in values[0])
    assert metrics(tmp_path / "whole")[-1]["eval"] == metrics(tmp_path / "part")[-1]["eval"]
    done = terrace("export", "whole", "out", "--dtype", "fp32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = parse_model(json.loads((tmp_path / "config.json").read_text()))
    assert len(list(pruned_params(block_specs(config)))) == sum(
        "layers" in name and "norm" not in name for name in tensors
    )
    for name, value in tensors.items():
        if "layers" in name and "norm" not in name:
            norms = value.view(value.shape[0] // 4, 4, -1, 4).abs().sum((1, 3))
            assert int((norms == 0).sum()) == round(0.5 * norms.numel()), name
    own = terrace("eval", "whole", "--json", cwd=tmp_path)
    loss = json.loads(own.stdout)["holdout"]["loss"]
    # `terrace eval` has the masters, without the rounding of messages.
    within = 1e-6 if messages == "fp32" else 1e-3
    assert loss == pytest.approx(metrics(tmp_path / "whole")[-1]["eval"]["holdout"]["loss"], rel=within)
