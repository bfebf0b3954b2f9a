"""Loads of experts: their figures by hand, which passes count, and rows that are lost."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terrace.base.boxes import to_text, whole
from terrace.base.errors import ProgramError
from terrace.checkpoint.layout import Files, encode, manifest_of
from terrace.checkpoint.parts import CHOICES
from terrace.checkpoint.reading import Checkpoint, lacks_choices
from terrace.model.balance import BalanceConfig
from terrace.model.blocks import block_specs
from terrace.model.decoder import build_blocks
from terrace.model.experts.config import Gate
from terrace.model.experts.mixture import Mixture, Router, Tally
from terrace.plan.presets import preset
from terrace.program.loads import Loads
from terrace.program.lowering import build
from terrace.runtime.batch import Batch
from terrace.runtime.routing.load import Load
from terrace.runtime.routing.passages import Passages
from terrace.runtime.settings import OptimizerConfig
from tests.support.mixtures import PLAIN, mixture
from tests.support.toys import cluster_of

CPU = torch.device("cpu")


def test_figures() -> None:
    loads = Loads(layers=("a", "b"), counts=((4, 4, 4, 4), (8, 0, 6, 2)), num_ranks=2)
    entropy = -(math.log(1 / 2) / 2 + math.log(3 / 8) * 3 / 8 + math.log(1 / 8) / 8) / math.log(4)
    assert loads.figures == pytest.approx(
        {"busiest_expert": 2.0, "busiest_rank": 1.0, "max_vio": 0.5, "entropy": (1 + entropy) / 2, "idle": 1}
    )
    alone = replace(loads, counts=((0, 0, 0, 0), (12, 0, 0, 0)), num_ranks=1).figures
    assert alone == {"busiest_expert": 4.0, "max_vio": 3.0, "entropy": 0.0, "idle": 7}
    assert replace(loads, counts=((0, 0), (0, 0))).figures == {}


def test_a_tally_counts_while_it_is_open() -> None:
    numbers = torch.zeros(4 + 3, dtype=torch.int64)
    tally = Tally(numbers)
    for tally.is_open in (False, True):
        tally.choose(torch.tensor([[0, 3], [3, 1], [3, -1]]))
        tally.move(5, 4)
        tally.multiply([1, 0, 4])
    assert numbers.tolist() == [1, 1, 0, 3, 5, 4, 5]


def test_a_row_that_was_not_multiplied_stops_the_run() -> None:
    model = mixture(layers=2, dense_layers=(0,))
    cluster = cluster_of(1)
    program = build(cluster, preset("ddp", cluster), block_specs(model), 1, 4)
    blocks = dict(enumerate(build_blocks(model)))
    load = Load(program, blocks, BalanceConfig(), {2: torch.zeros(8, dtype=torch.int64)}, CPU)
    (mixed,) = (module for module in blocks[2].modules() if isinstance(module, Mixture))
    torch.nn.init.normal_(mixed.router.weight)
    load.begin()
    x = torch.randn(1, 4, 64)
    with load.counting(1), load.counting(2):
        mixed(x)
    mixed(x)  # a recomputation
    load.settle(load.sums.tolist())
    assert load.loads is not None
    assert sum(load.loads.counts[0]) == 4 * 2
    load._numbers[-1] -= 1  # no numbers follow: one rank pads nothing
    with pytest.raises(ProgramError, match=r"layers.1: .* experts multiplied 7 of 8; every row"):
        load.settle(load.sums.tolist())


@pytest.mark.parametrize(
    ("balance", "gate", "needed"),
    [
        (BalanceConfig(step=0.1, z=0.1), "softmax", False),
        (BalanceConfig(sequence=0.1), "softmax", True),
        (BalanceConfig(capacity=1.5), "softmax", True),
        (BalanceConfig(), "expert_choice", True),
    ],
)
def test_sequences_of_tokens_are_found_where_something_goes_by_them(
    balance: BalanceConfig, gate: Gate, needed: bool
) -> None:
    model, cluster = mixture(replace(PLAIN, gate=gate, normalized=gate == "softmax"), layers=1), cluster_of(1)
    program = build(cluster, preset("ddp", cluster), block_specs(model), 1, 4)
    blocks = build_blocks(model)
    passages = Passages(blocks, program, balance, 0, CPU)
    tokens = torch.arange(4).unsqueeze(0)
    passages.take([Batch(tokens, tokens).with_places(0)], trains=True)
    passages.begin(0, 1)
    (gating,) = (module.gating for module in blocks[1].modules() if isinstance(module, Router))
    assert gating is not None
    assert gating.passage is not None
    assert (len(gating.passage.sequences) > 0) == needed


def test_loads_are_missed_in_any_block_of_the_model(tmp_path: Path) -> None:
    """Whatever stage a rank has: one of dense layers has no loads of its own."""
    blocks = block_specs(mixture(layers=2, dense_layers=(0,)))
    box = to_text(whole([8]))
    stored: Files = {"a": {"pieces": {blocks[2].name: {CHOICES: [box]}}}}
    for files, lacks in (({}, True), (stored, False)):
        checkpoint = Checkpoint(tmp_path, encode(manifest_of(blocks, OptimizerConfig(), 1, 1, {}, files)))
        assert lacks_choices(checkpoint, blocks) == lacks
        assert not lacks_choices(checkpoint, blocks[:2])
