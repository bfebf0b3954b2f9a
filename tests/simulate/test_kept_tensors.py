"""Rules by type of operation: lists that no model here has, by hand."""

from dataclasses import dataclass

import pytest

from terrace.model.block_operations import layer_operations
from terrace.model.operations import (
    INPUT,
    OUTPUT,
    Core,
    Dim,
    Enter,
    Norm,
    Operation,
    Operations,
    Product,
    Sum,
    Tensor,
    Tokens,
)
from terrace.simulate.activations import block_activation_bytes
from terrace.simulate.work import Work
from tests.support.activations import HIDDEN, MODELS

SEQUENCE, HEADS, HEAD_DIM, LATENT = 256, 4, 12, 24


def latent_attention() -> Operations:
    """Queries, keys and values from one small vector of each token, which no axis cuts."""
    stream = Tensor(INPUT, Dim("hidden", HIDDEN))
    entered = stream._replace(name="whole input", tokens=Tokens.ALL)
    latent = Tensor("latent", Dim("latent", LATENT), Tokens.ALL)
    normalised = latent._replace(name="normalised")
    query, key, value, mixed = (
        Tensor(name, Dim("heads", HEADS, HEAD_DIM), Tokens.ALL) for name in ("query", "key", "value", "mixed")
    )
    attended = stream._replace(name="attended")
    return Operations(
        (
            Enter("gather", (stream,), (entered,)),
            Product("down", (entered,), (latent,), "attention.down"),
            Norm("latent norm", (latent,), (normalised,), "attention.norm", latent.features),
            *(Product(each.name, (normalised,), (each,), f"attention.{each.name}") for each in (query, key, value)),
            Core("attention", (query, key, value), (mixed,), HEADS, HEADS, HEAD_DIM, value_dim=8),
            Product("attention output", (mixed,), (attended,), "attention.output"),
            Sum("residual", (stream, attended), (stream._replace(name=OUTPUT),)),
        )
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_a_latent_vector_is_whole_on_every_tensor_row(rows: int) -> None:
    work = Work(layer=layer_operations(MODELS["llama"]), sequence=SEQUENCE, tensor=rows)
    found = block_activation_bytes(work, latent_attention(), "cuda")
    heads = HEADS // rows
    assert found.saved == {
        "latent norm": SEQUENCE * (2 * LATENT + 4),  # and a root
        "query": SEQUENCE * 2 * LATENT,  # normalised, once for three products
        "attention": SEQUENCE * heads * (4 * 2 * HEAD_DIM + 4),  # its operands, its output and log-sums
    }
    assert found.input_bytes == SEQUENCE * 2 * HIDDEN // rows
    # Under sequence parallelism the product gathers the whole input.
    whole = SEQUENCE * 2 * HIDDEN if rows > 1 else 0
    assert found.forward_peak_bytes >= found.input_bytes + whole + SEQUENCE * 2 * LATENT


def test_an_operation_without_a_rule_is_refused() -> None:
    @dataclass(frozen=True)
    class Join(Operation):
        """Two tensors side by side."""

    tensor = Tensor(INPUT, Dim("hidden", HIDDEN))
    operations = Operations((Join("join", (tensor, tensor), (tensor._replace(name=OUTPUT),)),))
    with pytest.raises(KeyError, match="Join"):
        block_activation_bytes(Work(layer=layer_operations(MODELS["llama"]), sequence=SEQUENCE), operations, "cuda")
