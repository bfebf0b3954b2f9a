"""Memory of attention under documents and windows, against torch's saved tensors and allocations."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.model import attention
from terrace.model.attention import MaskPieces
from terrace.model.attention_kernel import AttentionKernel
from terrace.model.attention_plans import AttentionPlans, make_plan
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.decoder import build_blocks
from terrace.model.fused_attention import BLOCK
from terrace.model.init import initialise
from terrace.plan.kinds import Kinds
from terrace.plan.presets import preset
from terrace.sequence.pairs import SHORT_PIECE
from terrace.simulate.footprint import footprint
from terrace.simulate.layers import block_seconds
from terrace.simulate.masks import CPU_SHORT_PIECE, FLEX_BLOCK, core_keys, has_flash_attention, mask_bytes
from terrace.simulate.work import Work
from tests.support.activations import BATCH, DTYPES, HIDDEN, MODELS, layer_activations, rotary_tables
from tests.support.adopted import as_in_a_run
from tests.support.allocations import addresses, allocated, saved_bytes, seeded
from tests.support.nightly import in_turns
from tests.support.toys import cluster_of


class Measured:
    """A layer that runs forward and backward on rows with these documents."""

    def __init__(self, name: str, window: int, compute: str, sequence: int, rows: list[list[int]] | None) -> None:
        config, dtype = replace(MODELS[name], sliding_window=window), DTYPES[compute]
        blocks = build_blocks(config, device="cpu", dtype=dtype)
        initialise(blocks, config, seed=0, dtype=dtype)
        block, recorded = as_in_a_run(blocks[1])
        self.block: Any = block
        inputs = torch.randn(BATCH, sequence, HIDDEN, dtype=dtype, generator=seeded(0)).requires_grad_()
        positions = None if rows is None else torch.tensor([[i for n in row for i in range(n)] for row in rows])

        def forward() -> Tensor:
            output: Tensor = self.block(inputs, positions)
            return output

        gradient = torch.randn_like(forward())  # fills tables and plans
        self.masks = self._masks()
        ignored = addresses([inputs, *self.block.parameters(), *self.masks, *self._tables()])
        self.saved = saved_bytes(forward, ignored)
        forward_peak, left, output = allocated(forward)
        with recorded:
            backward_peak, _, _ = allocated(lambda: torch.autograd.backward(output, gradient))
        self.forward_peak = forward_peak + inputs.nbytes
        self.backward_peak = backward_peak + left + inputs.nbytes + gradient.nbytes
        self.work = Work(
            layer=layer_operations(config),
            sequence=sequence,
            micro_batch=BATCH,
            compute=compute,  # type: ignore[arg-type]
            flash=has_flash_attention(layer_operations(config).core, sequence, compute, "cpu", rows is not None),
            documents=rows is not None,
        )
        self.predicted = layer_activations(self.work, "cpu")

    def _masks(self) -> list[Tensor]:
        plans = self.block.attention.plans
        made = [plan for each in plans._packed._made.values() for plan in each.values()]
        found: dict[int, Tensor] = {}
        for plan in [*made, *plans._whole.values()]:
            assert isinstance(plan, MaskPieces)
            found |= {piece.mask.data_ptr(): piece.mask for piece in plan.pieces if piece.mask is not None}
        return list(found.values())

    def _tables(self) -> list[Tensor]:
        rotary = self.block.attention.rotary
        packed = [] if rotary is None else [*rotary._packed._made.values()]
        return rotary_tables(self.block) + [table for made in packed for pair in made.values() for table in pair]

    @property
    def mask_bytes(self) -> int:
        """Bytes of the masks that all layers share."""
        return sum(mask.nbytes for mask in self.masks)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize(("window", "sequence"), [(96, 256), (64, 256), (20, 200), (40, 60)])
def test_a_window(name: str, window: int, sequence: int) -> None:
    """Saved bytes and masks exactly; the peaks within 3 %."""
    found = Measured(name, window, "fp32", sequence, None)
    assert sum(found.predicted.saved.values()) == found.saved
    assert mask_bytes(found.work, "cpu") == found.mask_bytes
    assert found.predicted.forward_peak_bytes == pytest.approx(found.forward_peak, rel=0.03)
    assert found.predicted.backward_peak_bytes == pytest.approx(found.backward_peak, rel=0.03)


ROWS: list[list[list[int]]] = [
    [[100, 156], [80, 176]],
    [[256], [3] * 84 + [4]],
    [[1] * 256, [7, 249]],
    [[130, 126]] * 2,
]


@pytest.mark.parametrize(("window", "rows"), in_turns(2, [0, 70], ROWS), ids=str)
def test_documents_keep_at_most_what_is_predicted(rows: list[list[int]], window: int) -> None:
    for compute in ("fp32", "bf16"):
        found = Measured("llama", window, compute, 256, rows)
        assert found.saved <= sum(found.predicted.saved.values())
        assert found.mask_bytes <= mask_bytes(found.work, "cpu")
        assert found.backward_peak <= 1.1 * found.predicted.backward_peak_bytes
        if compute == "fp32" and not window:  # nothing but masks depends on the documents
            assert found.saved == sum(found.predicted.saved.values())


def test_the_constants_are_those_of_attention() -> None:
    assert attention._SHORT_PIECE == CPU_SHORT_PIECE == SHORT_PIECE


def test_the_footprint_has_positions_and_masks() -> None:
    cluster = cluster_of(1)
    plan = replace(preset("ddp", cluster), compute="bf16")

    def batch(documents: bool, backend: Any, window: int = 0) -> int:
        kinds = Kinds.of(block_specs(replace(MODELS["llama"], sliding_window=window)))
        return footprint(cluster, plan, kinds, 512, 3, backend=backend, documents=documents)["batch"]

    tokens = 3 * 512 * 8
    assert batch(False, "cuda") == batch(False, "cpu") == 2 * tokens
    assert batch(True, "cuda") == 3 * tokens + 3 * 513 * 4
    assert batch(False, "cuda", window=100) == 2 * tokens + 2 * 4
    assert batch(True, "cpu") == 3 * tokens + 3 * 512 * CPU_SHORT_PIECE * 2


def test_grouped_heads_that_are_repeated_are_kept() -> None:
    work = Work(layer=layer_operations(MODELS["llama"]), sequence=256, micro_batch=BATCH)
    plain, masked, varlen = (
        layer_activations(one, "cuda").kept_bytes
        for one in (work, replace(work, documents=True, attention="sdpa"), replace(work, documents=True))
    )
    assert masked - plain == 2 * work.tokens * HIDDEN * 2
    assert varlen == plain


@pytest.mark.parametrize(("window", "rows"), [(0, [[300], [100, 200]]), (150, None), (40, [[1, 299], [300]])])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen", "flex"])
def test_plans_of_kernels_take_what_is_predicted(
    kernel: AttentionKernel, window: int, rows: list[list[int]] | None
) -> None:
    """To the byte; where documents begin, at most."""
    sequence = 300
    model = replace(MODELS["llama"], sliding_window=window)
    work = Work(
        layer=layer_operations(model),
        sequence=sequence,
        micro_batch=BATCH,
        compute="bf16",
        documents=bool(rows),
        attention=kernel,
    )
    begins = torch.zeros(BATCH if rows or kernel == "varlen" else 1, sequence, dtype=torch.bool)
    begins[:, 0] = True
    for index, sizes in enumerate(rows or ()):
        begins[index, torch.tensor([0, *sizes[:-1]]).cumsum(0)] = True
    plan: Any = make_plan(kernel, begins, window, torch.device("cpu"), torch.bfloat16)
    if kernel == "sdpa":
        assert plan.nbytes == mask_bytes(work, "cuda")
    elif kernel == "varlen":
        assert plan.starts.nbytes <= mask_bytes(work, "cuda")
        assert rows or plan.starts.nbytes == mask_bytes(work, "cuda")
    else:
        kinds = [f"{full}{side}" for full in ("", "full_") for side in ("q", "kv")]
        tensors = [getattr(plan.mask, f"{kind}_{what}") for kind in kinds for what in ("num_blocks", "indices")]
        first = plan.mask.mask_mod.__closure__[0].cell_contents
        assert sum(each.untyped_storage().nbytes() for each in [*tensors, first]) == mask_bytes(work, "cuda")


def test_a_window_of_a_lean_kernel_is_priced_by_what_it_sees() -> None:
    model = replace(MODELS["llama"], sliding_window=256)
    for kernel in ("varlen", "flex"):
        work = Work(layer=layer_operations(model), sequence=4096, attention=kernel)
        seen = sum(min(place + 1, 256) for place in range(4096)) / 4096
        keys, causal = core_keys(work, "cuda")
        assert causal
        assert keys == pytest.approx(2 * seen + FLEX_BLOCK, abs=2)
        assert core_keys(replace(work, sequence=320), "cuda") == (320, True), "never more than the row"
    assert FLEX_BLOCK == BLOCK


def test_a_window_is_priced_by_the_keys_that_are_multiplied() -> None:
    """Pairs that the pieces of a plan multiply, in all; whole rows under a mask."""
    for window, sequence in ((96, 960), (20, 640), (0, 512), (600, 512), (40, 60)):
        model = replace(MODELS["llama"], sliding_window=window)
        work = Work(layer=layer_operations(model), sequence=sequence)
        query = torch.empty(1, 1, sequence, 4)
        plan = AttentionPlans(window).plan(None, query)
        keys, causal = core_keys(work, "cpu")
        masked = core_keys(replace(work, attention="sdpa"), "cuda")
        assert causal == (plan is None) == masked[1]
        assert masked[0] == sequence
        if isinstance(plan, MaskPieces):
            sizes = [piece.size for piece in plan.pieces]
            before = [size if piece.sees_before else 0 for size, piece in zip([0, *sizes], plan.pieces, strict=False)]
            assert keys == sum(size * (size + more) for size, more in zip(sizes, before, strict=True)) // sequence
    cpu = cluster_of(1).device
    model = MODELS["llama"]
    whole, cut = (
        block_seconds(cpu, Work(layer=layer_operations(replace(model, sliding_window=window)), sequence=4096)).forward_s
        for window in (0, 128)
    )
    assert cut < 0.7 * whole
