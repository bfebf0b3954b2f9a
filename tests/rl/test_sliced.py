"""Blocks of a replica's slices have the logits of the whole blocks, and write the same tokens."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrace.base.errors import ModelError, PlanError
from terrace.comm.process_group import OrderedGroup
from terrace.generation.cache_shape import cache_shape
from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Request, Sampling
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.rl.hand_over.reshard import HandOver
from terrace.rl.hand_over.transition import generation_slices
from terrace.rl.workers.sliced import sliced_blocks
from tests.support import toys
from tests.support.generation import MODELS, VOCAB, cached_logits, make
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, Case, engine_of, exact, wholes
from tests.support.pipelines import OUTER, pipelined
from tests.support.toys import cluster_of

PROMPTS = [[3, 5, 7, 1], [9], [0, 6, 2]]
FREE = Sampling(temperature=1.0, top_k=0)
REQUESTS = [
    Request(prompt=tuple(prompt), num_tokens=6, seed=row, sampling=FREE if row else Sampling(temperature=0.0))
    for row, prompt in enumerate(PROMPTS)
]
TOLERANCE = 1e-10
CONFIGS = MODELS | {
    "biased heads": replace(MODELS["llama"], num_kv_heads=4, qkv_bias=True, family="qwen2"),
    "tied": replace(MODELS["llama"], tied_embeddings=True, num_kv_heads=4),
    "small inner size": replace(MODELS["gpt2"], intermediate_size=5),
}


def slices_of(config: ModelConfig, blocks: Sequence[nn.Module], rows: int, row: int) -> list[dict[str, Tensor]]:
    """A row's slices of whole blocks, cut by the boxes of the hand-over."""
    found = []
    for spec, block in zip(block_specs(config), blocks, strict=True):
        values = dict(block.named_parameters())
        boxes = generation_slices(spec, rows)[row].items()
        found.append({name: values[name].detach()[tuple(slice(*side) for side in box)] for name, (box,) in boxes})
    return found


def logits_of(config: ModelConfig, blocks: Sequence[nn.Module], rows: int = 1) -> Tensor:
    """Logits (4, V): after two texts of different lengths, and after one more token of each."""
    return cached_logits(config, blocks, [PROMPTS[0], PROMPTS[2]], rows)


def compared(world: World, names: Sequence[str], members: tuple[int, ...]) -> list[tuple[float, bool, list[float]]]:
    """For each model: the distance of its logits from the whole blocks', whether tokens agree, the first logits.

    `members` are the ranks by the slices they have.
    """
    assert dist.group.WORLD is not None
    group, found = OrderedGroup(members, dist.group.WORLD), []
    for name in names:
        config = CONFIGS[name]
        blocks, rows = make(config), world.world_size
        sliced = sliced_blocks(config, slices_of(config, blocks, rows, group.position), group)
        own, whole = logits_of(config, sliced, rows), logits_of(config, blocks)
        written = [
            GenerationEngine(each, config, rows=of, context=10, num_pages=16, page_tokens=4, token_budget=5).run(
                REQUESTS
            )
            for each, of in ((sliced, rows), (blocks, 1))
        ]
        same = [one.tokens == other.tokens for one, other in zip(*written, strict=True)]
        found.append((float((own - whole).abs().max()), all(same), own[0].tolist()))
    return found


@pytest.mark.parametrize("members", [(1, 0), *nightly(((0, 1),), ((0, 1, 2, 3),), ((2, 0, 3, 1),))])
def test_rows_have_the_logits_and_greedy_tokens_of_whole_blocks(pool: LocalPool, members: tuple[int, ...]) -> None:
    names = list(CONFIGS)
    by_rank = pool.run(len(members), compared, names, members, timeout_s=120.0)
    for name, outcomes in zip(names, zip(*by_rank, strict=True), strict=True):
        for deviation, same, logits in outcomes:
            assert deviation < TOLERANCE, (name, deviation)
            assert same, name
            assert logits == outcomes[0][2], "ranks that draw alike need the same bits"


def test_one_row_has_plain_blocks() -> None:
    config = CONFIGS["tied"]
    whole = make(config)
    blocks = sliced_blocks(config, slices_of(config, whole, 1, 0))
    assert torch.equal(logits_of(config, blocks), logits_of(config, whole))
    assert not any(parameter.requires_grad for block in blocks for parameter in block.parameters())


WIDE = "wide llama, 2 kv heads"
CASES = {
    "zero3 x pipeline": Case(pipelined("zero3", OUTER, "1f1b"), num_micros=3, model="deep llama tied"),
    "rows": Case(exact("zero3", cluster_of(2, 2), mapping={"package": {"tensor": 2}}), model=WIDE),
}


def handed_over(world: World, case: Case, rows: int) -> float:
    """How far logits of blocks after a hand-over are from those of the trained blocks."""
    engine = engine_of(world, cluster_of(2, 2), case)
    hand_over = HandOver(engine, rows)
    engine.step(case.batches(engine, case, 0), ADAMW.lr)
    config = toys.MODELS[case.model].config
    assert config is not None
    own = logits_of(config, sliced_blocks(config, hand_over.run(), hand_over.group), rows)
    engine.state.gather(engine.comm.collectives)
    whole = logits_of(config, sliced_blocks(config, wholes(engine)))
    engine.close()
    return float((own - whole).abs().max())


@pytest.mark.parametrize(("name", "rows"), [("zero3 x pipeline", 2), *nightly(("rows", 1), ("rows", 2), ("rows", 4))])
def test_a_replica_computes_as_the_trained_model(pool: LocalPool, name: str, rows: int) -> None:
    assert max(pool.run(4, handed_over, CASES[name], rows, timeout_s=120.0)) < TOLERANCE


def test_rows_that_cannot_share_heads_are_refused() -> None:
    with pytest.raises(PlanError, match=r"rows = 3 .* 4 heads and 2 key-value heads: use 2"):
        cache_shape(block_specs(MODELS["llama"]), 3)
    with pytest.raises(PlanError, match="rows = 0"):
        cache_shape(block_specs(MODELS["llama"]), 0)


def test_slices_of_another_model_or_row_are_refused() -> None:
    config = MODELS["llama"]
    whole = make(config)
    slices = slices_of(config, whole, 1, 0)
    with pytest.raises(ModelError, match="slices are of 3 blocks, the model has 4"):
        sliced_blocks(config, slices[1:])
    with pytest.raises(ModelError, match=rf"slice of embedding.weight is \(129, 16\), this row's is \({VOCAB}, 16\)"):
        sliced_blocks(config, slices_of(config, whole, 2, 0))
    slices[1]["attention.query.bias"] = torch.zeros(16)
    with pytest.raises(ModelError, match=r"layers.0 has no parameter attention.query.bias"):
        sliced_blocks(config, slices)
