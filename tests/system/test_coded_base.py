"""A frozen base in 4 bits under adapters: its codes, the numbers of plain PyTorch, its bytes, saving and merging."""

import json
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError, PlanError
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.launch.start import LocalPool, World
from terrace.model.base_formats import BASE_FORMATS
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.decoder import token_loss
from terrace.model.init import initial_value
from terrace.model.lora.config import LoraConfig, with_adapters
from terrace.plan.flats import block_flats
from terrace.plan.keep import Keep
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.slices import slice_blocks
from terrace.plan.state_bytes import slice_bytes
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build_stages
from terrace.runtime.base_codes import decode, decoded, encode
from tests.support.adapted_blocks import blocks_with, values_of
from tests.support.nightly import nightly
from tests.support.parity import Case, Outcome, case_words, check, exact, train
from tests.support.tiny_runs import losses, one_line, terrace, write_run
from tests.support.toys import MODELS, Model, cluster_of

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
POINTS = np.array(BASE_FORMATS["nf4"].points, dtype=np.float32)
BASE = LoraConfig(rank=2, alpha=3.0, base="nf4")
TABLE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def nf4_points() -> Floats:
    """Quantiles of the normal distribution, scaled to [-1, 1]: 8 above zero, 7 below, and zero (2305.14314, eq. 4)."""
    quantile, most = statistics.NormalDist().inv_cdf, (1 - 1 / 30 + 1 - 1 / 32) / 2
    above = [quantile(p) for p in np.linspace(most, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(most, 0.5, 8)[:-1]]
    found = np.array(sorted([*above, 0.0, *below]))
    points: Floats = (found / np.abs(found).max()).astype(np.float32)
    return points


def dynamic_points() -> Floats:
    """Magnitudes of the signed 8-bit code of scales: midpoints of equal parts of every decade, and 1 (2110.02861)."""
    found = [0.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2**decade + 1)
        found += list(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    return np.array([*found[:-1], 1.0]).astype(np.float32)


def nearest(values: Floats, points: Floats) -> Integers:
    """Index of the nearest point to each value, the lower one of two at the same distance, by trying all of them."""
    middles = ((points[1:] + points[:-1]) / np.float32(2)).astype(np.float32)
    found: Integers = (values[..., None] > middles).sum(-1)
    return found


def coded(matrix: Floats) -> tuple[Integers, Integers, Floats, np.float32]:
    """Indices of elements, signed codes of scales, constants of groups and the mean, from the definition."""
    blocks = matrix.reshape(-1, 64)
    scales: Floats = np.abs(blocks).max(1)
    indices = nearest(np.clip(blocks * (np.float32(1) / np.maximum(scales, np.float32(1e-38)))[:, None], -1, 1), POINTS)
    mean = np.float32(scales.astype(np.float64).mean())
    codes, constants = [], []
    for start in range(0, len(scales), 256):
        rest = scales[start : start + 256] - mean
        constants.append(np.abs(rest).max())
        share = rest / constants[-1] if constants[-1] else rest
        magnitudes = dynamic_points()
        upper = np.append(((magnitudes[1:].astype(np.float64) + magnitudes[:-1]) / 2).astype(np.float32), np.inf)
        codes += [int(np.sign(each)) * int((abs(each) >= upper).sum()) for each in share]
    return indices, np.array(codes), np.array(constants, dtype=np.float32), mean


def plain(matrix: Floats) -> Floats:
    """The matrix after encoding and decoding."""
    indices, codes, constants, mean = coded(matrix)
    found = dynamic_points()[np.abs(codes)] * np.sign(codes).astype(np.float32)
    scales = found * np.repeat(constants, 256)[: len(codes)] + mean
    values: Floats = POINTS[indices] * scales[:, None]
    return values.reshape(matrix.shape)


def matrices() -> list[Tensor]:
    """Of one group, of many with a short last one, with blocks of zeros, and with blocks of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(shape, generator=generator) for shape in ((3, 64), (300, 192), (64, 512), (130, 256))]
    found[2][:5] = 0
    found[3] *= torch.logspace(-6, 3, 130)[:, None]
    return [*found, torch.zeros(2, 64)]


def test_points_are_quantiles_of_the_normal_distribution() -> None:
    assert np.allclose(nf4_points(), POINTS, atol=1e-6)


@pytest.mark.parametrize("matrix", matrices(), ids=lambda each: "x".join(map(str, each.shape)))
def test_codes_are_those_of_the_definition(matrix: Tensor) -> None:
    records, constants = encode(matrix, "nf4")
    indices, codes, groups, mean = coded(matrix.numpy())
    found = records.view(-1, 33).numpy()
    assert np.array_equal(found[:, 1:], indices[:, ::2] << 4 | indices[:, 1::2])
    assert np.array_equal(found[:, 0].view(np.int8), codes)
    assert np.array_equal(constants.numpy(), np.append(groups, mean))
    assert np.array_equal(decoded(records, constants, "nf4").numpy(), plain(matrix.numpy()))


def test_slices_decode_to_slices() -> None:
    matrix = matrices()[1]
    records, constants = encode(matrix, "nf4")
    whole = decoded(records, constants, "nf4")
    for rows, columns in (
        (slice(100, 200), slice(0, 192)),
        (slice(7, 290), slice(64, 128)),
    ):
        out = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.float64)
        part = records[rows, columns.start // 64 * 33 : columns.stop // 64 * 33]
        decode(part, constants, "nf4", out, (rows.start, columns.start), 192)
        assert torch.equal(out, whole[rows, columns].double())


def coded_model(**table: Any) -> tuple[Model, Model]:
    """A model with adapters over matrices as they are, and the same over matrices that were encoded and decoded."""
    config = parse_model(TABLE | table)
    values, specs = values_of(config, BASE), with_adapters(block_specs(config), BASE)
    held = dict(values)
    for spec in specs:
        for param in spec.params:
            if param.code:
                matrix = values[spec.name, param.name].float().numpy()
                held[spec.name, param.name] = torch.from_numpy(plain(matrix)).double()

    def build_of(of: dict[tuple[str, str], Tensor]) -> Model:
        def build() -> list[nn.Module]:
            return blocks_with(config, BASE, lambda block, param: of[block, param])

        return Model(build, token_loss, specs)

    return build_of(values), build_of(held)


_NAMES: dict[str, dict[str, Any]] = {"coded base": {}, "deep coded base": {"num_hidden_layers": 4}}
_RAW = {name: coded_model(**table) for name, table in _NAMES.items()}
MODELS |= {name: held for name, (_, held) in _RAW.items()}  # of the reference in one process


def train_coded(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """Run the cases on this rank, from the matrices as they are."""
    MODELS.update({name: raw for name, (raw, _) in _RAW.items()})
    return train(world, cluster, cases)


def case(name: str, sizes: tuple[int, ...], model: str = "coded base", num_micros: int = 2, **changes: Any) -> Case:
    return Case(exact(name, cluster_of(*sizes), **changes), model=model, num_micros=num_micros)


ROWS = {"package": {"tensor": {"rows": 2}}}
GRID: list[tuple[tuple[int, ...], Case]] = [
    ((2,), case("zero3", (2,), recompute=("block.1: attention, mlp, norms",), unit=2)),
    ((2,), case("zero3", (2,), mapping={"package": {"tensor": {"columns": 2}}})),
    ((2, 2), case("three-level", (2, 2))),
    *nightly(
        ((1,), case("ddp", (1,))),
        ((1,), case("zero3", (1,), recompute=("*",), prefetch=0)),
        ((2,), case("ddp", (2,))),
        ((2,), case("zero3", (2,), mapping=ROWS)),
        ((2, 2), case("zero++", (2, 2))),
        ((2, 2), case("zero3", (2, 2), "deep coded base", 4, mapping={"node": {"pipeline": 2}})),
        (
            (2, 2),
            case("zero1", (2, 2), "deep coded base", 4, mapping=ROWS | {"node": {"pipeline": 2}}, schedule="zb-h1"),
        ),
        ((2, 2), case("zero3", (2, 2), mapping=ROWS)),
    ),
]


@pytest.mark.parametrize(("sizes", "tried"), GRID, ids=case_words)
def test_steps_equal_plain_pytorch_over_decoded_matrices(pool: LocalPool, sizes: tuple[int, ...], tried: Case) -> None:
    """Losses, gradient norms, parameters; bytes and memory are those of the program."""
    check(pool, cluster_of(*sizes), [tried], train_coded)


def test_a_gather_has_33_bytes_for_64_elements_on_every_tier() -> None:
    """Also of slices that are cut twice; one rank sends nothing and holds the same bytes."""
    cluster, specs = cluster_of(2, 4), with_adapters(block_specs(parse_model(TABLE)), BASE)
    matrices = sum(param.numel for param in specs[1].params if param.code)
    assert matrices == 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256
    plan = replace(preset("zero3", cluster), compute="bf16", messages=None)
    (program,) = build_stages(cluster, plan, specs, 1, sequence=8)
    message = program.model.message_of_block(MessageClass.GATHER, 1)
    (transfer,) = (each for each in message.transfers if each.ranks.code)
    assert [(hop.tier, hop.wire.name, hop.sent_bytes) for hop in transfer.gathering] == [
        (1, "nf4", 3 * matrices // 8 // 64 * 33),
        (0, "nf4", matrices // 2 // 64 * 33),
    ]
    alone = preset("ddp", cluster_of(1))
    constants = 4 * sum(-(-param.numel // 64 // 256) + 1 for param in specs[1].params if param.code)
    flats = block_flats(cluster_of(1), alone, specs)[1]
    (base,) = (flat for flat in flats if flat.layout.code)
    assert slice_bytes(alone, [base]) == {"params": matrices // 64 * 33 + constants}
    assert not any(flat.travels_in(MessageClass.REDUCE) for flat in flats if not flat.trainable)


REFUSED = [
    ({"hidden_size": 96}, {}, r"rows of 96: leave lora\.base out"),
    ({}, {"mapping": {"package": {"tensor": {"rows": 4}}}}, r"into 128 x 32: use a smaller degree"),
    ({}, {"keep": Keep(params="disk")}, r"keep\.params = 'disk' beside frozen matrices in nf4"),
]


def _sliced(cluster: Cluster, plan: Plan, table: dict[str, Any]) -> None:
    specs = with_adapters(block_specs(parse_model(TABLE | table)), BASE)
    validate(cluster, plan, specs)
    slice_blocks(specs, Mesh.of(cluster, plan))


@pytest.mark.parametrize(("table", "changes", "message"), REFUSED, ids=["rows", "tensor", "keep"])
def test_what_no_base_can_be_is_refused(table: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    below = {"disk": load_cluster("workstation").device.below["disk"]}
    cluster = replace(cluster_of(4), device=replace(cluster_of(4).device, below=below))
    with pytest.raises((ModelError, PlanError), match=message) as caught:
        _sliced(cluster, replace(preset("zero3", cluster), **changes), table)
    assert "\n" not in str(caught.value)


@pytest.mark.nightly
def test_a_run_goes_on_with_the_same_bits_and_is_written_merged(tmp_path: Path) -> None:
    path, every = write_run(tmp_path, 2, plan="zero3", steps=4), ["--train.checkpoint_every", "2"]
    model = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"hidden_size": 64, "intermediate_size": 128}))
    words = ["--config", str(path), "--lora.rank", "4", "--lora.base", "nf4", "--optimizer.lr", "0.05", *every]
    done = terrace("train", *words, "--folder", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted, last = losses(tmp_path / "run"), latest(tmp_path / "run")
    assert last is not None
    checkpoint = Checkpoint(last)
    assert checkpoint.layout["layers.0"]["mlp.down.weight"] == ("nf4", [64, 66])
    held = {(block, name): value for block, name, value in checkpoint.parameters()}
    initial = initial_value(parse_model(checkpoint.facts["model"]), "layers.0", "mlp.down.weight", (64, 128), 0)
    assert np.array_equal(held["layers.0", "mlp.down.weight"].numpy(), plain(initial.numpy()))
    export = terrace("export", "run", "out", cwd=tmp_path)
    said = "held in nf4: they are decoded, and the adapters are merged into them"
    assert said in export.stdout
    for asked in (("generate", "run", "--prompt", "The", "--tokens", "1"), ("eval", "run", "--data", "text.txt")):
        assert said in terrace(*asked, cwd=tmp_path).stderr
    shutil.rmtree(last)
    again = terrace("train", "--resume", "run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "run") == wanted
    for block, name, value in Checkpoint(last).parameters():
        assert torch.equal(value, held[block, name]), (block, name)
    other = terrace("train", "--resume", "run", "--train.steps", "9", "--lora.rank", "2", cwd=tmp_path)
    assert "lora" in one_line(other.stderr)
