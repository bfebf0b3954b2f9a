"""The tensor axis in declared blocks of a `transformers` model (terrace.model.hf.declared).

The model's layers keep their own forwards; their projections, norms, embedding and output matrix are replaced under
their own names. Rows cut heads and inner features, so that a layer's own code sees fewer heads; whole tokens enter
attention and MLP by a hook.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.hf.blocks import EmbeddingBlock, HeadBlock, LayerBlock
from terrace.model.params import ParamSpec
from terrace.plan.dims import is_norm
from terrace.runtime.tensor.modules import ColumnLinear, HeadNorm, Norm, RowLinear, TensorAxis, VocabParallelEmbedding

MakeLinear = Callable[[int, str, nn.Linear], nn.Module]  # (block, name, module) -> its stand-in
MakeParameter = Callable[[int, str], nn.Parameter]  # (block, name) -> this rank's part, on meta


class Output(nn.Module):
    """In the place of an output matrix: gathers the normalised stream; the product is the loss's own."""

    def __init__(self, weight: nn.Parameter, axis: TensorAxis) -> None:
        super().__init__()
        self.weight = weight
        self._axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (B, S, H) of x, wherever its tokens stand."""
        return self._axis.whole(x)


def are_declared(blocks: Sequence[nn.Module]) -> bool:
    """Whether all blocks come from a model with a declaration."""
    return all(hasattr(block, "declared") for block in blocks)


class DeclaredCutter:
    """Replaces modules of declared blocks in place; `specs` are the parameters of each block by name."""

    def __init__(
        self,
        specs: Sequence[Mapping[str, ParamSpec]],
        axis: TensorAxis,
        make_linear: MakeLinear,
        make_parameter: MakeParameter,
    ) -> None:
        if axis.columns.degree > 1:
            raise ModelError(
                f"columns = {axis.columns.degree} would cut the residual stream of declared blocks, whose own code "
                "adds to it: declared blocks are cut by rows alone"
            )
        self._specs, self._axis = specs, axis
        self._linear, self._parameter = make_linear, make_parameter

    def embedding(self, block: EmbeddingBlock, part: slice) -> nn.Parameter:
        """Cut the table of an embedding; returns this rank's part."""
        if block.learned is not None or getattr(block.lookup, "padding_idx", None) is not None:
            raise ModelError(
                "declared blocks under a tensor axis have neither learned positions nor a padding token in their "
                "embedding: give the tier to the data or the context axis, or set padding_idx to None"
            )
        weight = self._parameter(0, "lookup.weight")
        block.lookup = VocabParallelEmbedding(weight, None, part, self._axis)
        return weight

    def head(self, index: int, block: HeadBlock, tied: nn.Parameter | None) -> Output:
        """Cut an output matrix and replace the norm before it; returns its stand-in."""
        weight = self._parameter(index, "output.weight") if tied is None else tied
        self._norms(index, block)
        block.output = output = Output(weight, self._axis)
        return output

    def layer(self, index: int, block: LayerBlock) -> None:
        """Cut a layer."""
        block.whole_shape = lambda: self._axis.shape
        self._norms(index, block)
        entered, entering = set(), []
        for name, child in list(block.named_modules()):
            if isinstance(child, nn.Linear):
                stand_in, (place, _, own) = self._linear(index, name, child), name.rpartition(".")
                parent = block.get_submodule(place)
                setattr(parent, own, stand_in)
                if isinstance(stand_in, RowLinear):
                    entered.add(place)
                    parent.register_forward_pre_hook(self._enter, with_kwargs=True)
                elif isinstance(stand_in, ColumnLinear):
                    entering.append(name)
        for name in entering:
            # Else it would read a part of the tokens, or pass on a part of their gradient.
            if name.rpartition(".")[0] not in entered:
                raise ModelError(
                    f"{name} leads out of the residual stream, and no projection of the same module leads back: a "
                    "tensor axis enters and leaves by one module; give the tier to the data or the context axis"
                )

    def _enter(self, region: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # transformers gives its attention hidden states by name, and its MLP by place.
        if inputs:
            return (self._axis.enter(inputs[0], region), *inputs[1:]), options
        return inputs, options | {"hidden_states": self._axis.enter(options["hidden_states"], region)}

    def _norms(self, index: int, block: nn.Module) -> None:
        epsilons: Any = block.epsilons
        for name, eps in epsilons.items():
            spec = self._specs[index][f"{name}.weight"]
            weight, bias = self._parameter(index, f"{name}.weight"), None
            if f"{name}.bias" in self._specs[index]:
                bias = self._parameter(index, f"{name}.bias")
            stand_in: nn.Module
            if spec.dims[0][0] == "head_dim":
                stand_in = HeadNorm(weight, eps, self._axis)
            elif is_norm(spec):
                stand_in = Norm(weight, bias, eps, self._axis)
            else:
                raise ModelError(f"{name} is declared as a norm, and its name does not say so: call it ...norm")
            parent = block.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], stand_in)
