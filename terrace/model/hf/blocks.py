"""`terrace.blocks_of`: an unmodified decoder of `transformers` as a list of blocks.

The blocks call the model's own modules: the embedding (with learned positions, if any), each layer, and the final norm
with the output matrix. Position ids, rotary tables and the causal or sliding mask, which the model's forward passes to
every layer, are computed by each block with the model's rotary module and the masks of `transformers`.

No family is recognised by name. A model is accepted if its parts are found, its layers need no other arguments, its
configuration has no setting that the loss would ignore (capped or scaled logits, router losses), and the blocks
reproduce the model's logits on a few tokens. For this comparison the output matrix is scaled up until a cap would show.

Shape legend: B batch, S sequence, H hidden, V vocabulary.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.attention_plans import DeclaredAttention
from terrace.model.hf.declared import Declaration, attend_as_declared, check_modules, declared_specs
from terrace.model.spec import BlockSpec
from terrace.model.windows import SLIDING

# Arguments of a layer that a block can pass; all others must have a default.
_GIVEN = ("hidden_states", "attention_mask", "position_ids", "position_embeddings")
_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layer_norm", "ln_f", "final_layernorm")
_LEARNED = ("wpe",)
_EMBEDDED_DROPOUTS = ("drop", "emb_dropout", "embd_dropout", "dropout")
# Accepted children of the decoder; any other would do something in its forward that no block does.
_KNOWN = {*_LAYERS, *_NORMS, *_LEARNED, *_EMBEDDED_DROPOUTS, "rotary_emb"}

_CHECK_TOKENS = 12
_LARGE_LOGIT = 100.0  # in the comparison: above all caps in use
_CHECK_TOLERANCE = 1e-5  # relative to the largest logit; blocks and model call the same kernels
_DOCUMENT_TOLERANCE, _DOCUMENT_TOLERANCE_16 = 1e-4, 1e-2  # wider: kernels depend on the row length
_CHECK_TOLERANCE_16 = 1e-3  # for 16 bits, where kernels may use other shapes


def blocks_of(model: nn.Module, declaration: Declaration | None = None) -> list[nn.Module]:
    """Convert a causal language model of `transformers` to blocks for `terrace.Trainer`.

    Blocks share the model's modules: training them trains the model, and `trainer.unload()` restores its plain
    parameters. A tied output matrix stays tied. Blocks take tokens (B, S), optionally with positions within documents
    (B, S), and return logits (B, S, V); labels are already shifted, as in `terrace.model.decoder.token_loss`. Layers
    with a recurrent state (Mamba, linear attention) raise an error in the first step that has positions.

    With a `declaration` of the parameters' dims (terrace.model.hf.declared), blocks support tensor and context axes,
    and use terrace.model.attention.

    Runs the model on a few tokens. Raises `ModelError`, naming the missing part, for a model that is not a decoder of
    this form, has parameters outside its blocks, is in training mode with dropout or noise, or computes more than its
    blocks.
    """
    what = type(model).__name__
    decoder, output = _decoder_of(model, what)
    lookup = decoder.get_input_embeddings()  # type: ignore[operator]
    layers = _first(decoder, _LAYERS, nn.ModuleList)
    norm = _first(decoder, _NORMS, nn.Module)
    for part, found in {"layers": layers, "final norm": norm, "input embedding": lookup}.items():
        if found is None:
            raise ModelError(f"{what} has no {part} where a decoder has it: write its blocks by hand (docs/python.md)")
    # Unknown modules are rejected, since no block would run them.
    for name, child in decoder.named_children():
        if name not in _KNOWN and child is not lookup:
            raise ModelError(
                f"{what} has a module {name!r} ({type(child).__name__}) in its decoder, which no block would run: "
                "write its blocks by hand (docs/python.md)"
            )
    _check_dropout(model, what)
    context = _Context(model.config, getattr(decoder, "rotary_emb", None))
    learned = _first(decoder, _LEARNED, nn.Module)
    embedding = EmbeddingBlock(lookup, learned, _first(decoder, _EMBEDDED_DROPOUTS, nn.Module))
    count = getattr(model.config, "num_hidden_layers", len(layers))
    middle = [LayerBlock(layer, index, context, what) for index, layer in enumerate(list(layers)[:count])]
    blocks: list[nn.Module] = [embedding, *middle, HeadBlock(norm, output)]
    # Names first: the comparison runs complete blocks.
    _name(model, blocks, what)
    _check_loss(model.config, what)
    _compare(model, blocks, output, what)
    reason = _unfit_for_documents(model, blocks, what)
    for block in blocks if reason else ():
        block.refuses_positions = reason  # type: ignore[assignment]
    if declaration is not None:
        _declare(model, blocks, output, declaration, what)
    return blocks


def _declare(model: nn.Module, blocks: list[nn.Module], output: nn.Module, declaration: Declaration, what: str) -> None:
    lookup = getattr(blocks[0], "lookup", None)
    has_bias = getattr(output, "bias", None) is not None
    if type(lookup) is not nn.Embedding or type(output) is not nn.Linear or has_bias:
        raise ModelError(
            f"a declaration of {what} needs an nn.Embedding and an nn.Linear without bias at its ends, not "
            f"{type(lookup).__name__} and {type(output).__name__}{' with bias' * has_bias}: leave it out"
        )
    for block, spec in zip(blocks, declared_specs(blocks, declaration), strict=True):
        block.declared = spec  # type: ignore[assignment]
        block.epsilons = check_modules(block, spec, what)  # type: ignore[assignment]
        if isinstance(block, LayerBlock):
            block.declare(spec, what)
    _compare(model, blocks, output, what)
    if _unfit_for_documents(model, blocks, what):
        raise ModelError(
            f"the layers of {what} mix tokens outside of the declared attention: leave the declaration out"
        )


class _Context:
    """Computes the arguments of a layer other than hidden states.

    Not an nn.Module, since its rotary module is already a child of every block.
    """

    def __init__(self, config: Any, rotary: nn.Module | None) -> None:
        self.config = config
        self.rotary = rotary

    def is_sliding(self, layer: int) -> bool:
        # Newer configurations list a type for each layer; older ones have one window for all.
        kind = self.kind(layer)
        if kind is not None:
            return kind == SLIDING
        return getattr(self.config, "sliding_window", None) is not None

    def kind(self, layer: int) -> str | None:
        """Type of a layer in `layer_types`, or None if the configuration has none."""
        kinds = getattr(self.config, "layer_types", None)
        return None if kinds is None else str(kinds[layer])

    def rope_tables(self, rotary: nn.Module, x: Tensor, places: Tensor, layer: int) -> Any:
        """Rotary tables of a layer, which may depend on its type (Gemma 3, OLMo 3)."""
        asks = "layer_type" in inspect.signature(rotary.forward).parameters
        return rotary(x, places, self.kind(layer)) if asks else rotary(x, places)

    def mask(self, x: Tensor, places: Tensor, sliding: bool) -> Any:
        """Mask of `transformers` for x (B, S, H): causal, within documents and the window."""
        # Imported here, since transformers is needed only for its own models.
        masks = importlib.import_module("transformers.masking_utils")
        make = masks.create_sliding_window_causal_mask if sliding else masks.create_causal_mask
        return make(config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=places)


class EmbeddingBlock(nn.Module):
    block_name = "embedding"

    def __init__(self, lookup: nn.Module, learned: nn.Module | None, dropout: nn.Module | None) -> None:
        super().__init__()
        self.lookup, self.learned, self.dropout = lookup, learned, dropout

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed tokens (B, S), and add learned positions if there are any."""
        x: Tensor = self.lookup(tokens)
        if self.learned is not None:
            x = x + self.learned(_places(tokens, positions))
        return x if self.dropout is None else self.dropout(x)


class LayerBlock(nn.Module):
    def __init__(self, layer: nn.Module, index: int, context: _Context, what: str) -> None:
        super().__init__()
        self.block_name = f"layers.{index}"
        self.layer, self.rotary = layer, context.rotary
        self._context, self._index, self._sliding = context, index, context.is_sliding(index)
        self._wants = _wanted(layer, context, what)
        self.attending: DeclaredAttention | None = None  # of a model with a declaration
        self.whole_shape: Callable[[], Sequence[int]] | None = None  # returns (B, S), if an axis changes the shape of x

    def declare(self, spec: BlockSpec, what: str) -> None:
        """Use terrace.model.attention whenever this block runs."""
        window = int(self._context.config.sliding_window) if self._sliding else 0
        self.attending = attend_as_declared(self.layer, spec, "layer.", window, what)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run the layer on x (B, S, H)."""
        if positions is None and self.whole_shape is not None:
            places = torch.arange(self.whole_shape()[1], device=x.device).unsqueeze(0)
        else:
            places = _places(x, positions)
        # Pass only arguments that the layer's forward declares.
        given: dict[str, Any] = {}
        if "attention_mask" in self._wants and self.attending is None:
            given["attention_mask"] = self._context.mask(x, places, self._sliding)
        if "position_ids" in self._wants:
            given["position_ids"] = places
        if "position_embeddings" in self._wants and self.rotary is not None:
            given["position_embeddings"] = self._context.rope_tables(self.rotary, x, places, self._index)
        # Some releases of transformers return a tuple, others a tensor.
        with nullcontext() if self.attending is None else self.attending.on(positions):
            out = self.layer(x, **given)
        result: Tensor = out if isinstance(out, Tensor) else out[0]
        return result


class HeadBlock(nn.Module):
    block_name = "head"

    def __init__(self, norm: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.norm, self.output = norm, output

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of x (B, S, H)."""
        logits: Tensor = self.output(self.norm(x))
        return logits


def _places(x: Tensor, positions: Tensor | None) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0) if positions is None else positions


def _decoder_of(model: nn.Module, what: str) -> tuple[nn.Module, nn.Module]:
    if not (hasattr(model, "get_decoder") and hasattr(model, "get_output_embeddings") and hasattr(model, "config")):
        raise ModelError(
            f"{what} is no causal language model of transformers (it has no get_decoder): give a model such as "
            "LlamaForCausalLM, or a list of blocks of your own"
        )
    decoder, output = model.get_decoder(), model.get_output_embeddings()  # type: ignore[operator]
    if decoder is None or decoder is model or output is None:
        raise ModelError(f"{what} has no decoder with an output matrix: give the ...ForCausalLM model of its family")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{what} has an encoder too: blocks run one after the other, so only decoders are taken")
    return decoder, output


def _first(parent: nn.Module, names: tuple[str, ...], kind: type[nn.Module]) -> Any:
    return next((child for name in names if isinstance(child := getattr(parent, name, None), kind)), None)


def _wanted(layer: nn.Module, context: _Context, what: str) -> set[str]:
    parameters = inspect.signature(layer.forward).parameters
    named = {name for name, each in parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
    # A forward with **kwargs may pass position ids on to attention.
    open_ended = len(named) < len(parameters)
    for name in list(parameters)[1:]:
        if name in named and name not in _GIVEN and parameters[name].default is inspect.Parameter.empty:
            raise ModelError(
                f"{type(layer).__name__}.forward of {what} asks for {name!r}, which no block has: write its blocks by "
                "hand (docs/python.md)"
            )
    wants = {name for name in _GIVEN[1:] if name in named or (open_ended and name == "position_ids")}
    asks = "position_embeddings" in wants and parameters["position_embeddings"].default is inspect.Parameter.empty
    if asks and context.rotary is None:
        raise ModelError(f"the layers of {what} ask for rotary tables, but its decoder has no module rotary_emb")
    return wants


def _check_dropout(model: nn.Module, what: str) -> None:
    # Attention, and routers with jitter, have their rate in a float attribute instead of a Dropout module.
    for name, module in model.named_modules():
        found = {key: value for key, value in vars(module).items() if isinstance(value, float)}
        rates = {key: value for key, value in found.items() if "dropout" in key or key == "jitter_noise"}
        if isinstance(module, nn.Dropout):
            rates["p"] = module.p
        for key, rate in rates.items():
            if rate > 0 and module.training:
                raise ModelError(
                    f"{name}.{key} = {rate} of {what} is random, which ranks and plans would draw differently: set it "
                    "to 0 in the model's config, or call model.eval() to train without"
                )


def _name(model: nn.Module, blocks: list[nn.Module], what: str) -> None:
    full = {id(param): name for name, param in model.named_parameters()}
    held = {id(param) for block in blocks for param in block.parameters()}
    # A parameter outside the blocks would never train.
    for key, name in full.items():
        if key not in held:
            raise ModelError(f"{what} has a parameter {name!r} that no block holds: write its blocks by hand")
    for block in blocks:
        names: Mapping[str, str] = {name: full[id(param)] for name, param in block.named_parameters()}
        block.original_names = names  # type: ignore[assignment]


def _check_loss(config: Any, what: str) -> None:
    # Settings of the model's forward or loss that blocks, which return plain logits, do not implement.
    lacking = {
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "logits_scaling": getattr(config, "logits_scaling", 1.0) != 1.0,
        "logit_scale": getattr(config, "logit_scale", 1.0) != 1.0,
        "output_router_logits": getattr(config, "output_router_logits", False),
    }
    for name, present in lacking.items():
        if present:
            raise ModelError(
                f"{what} has {name} = {getattr(config, name)} in its config, which the loss of its blocks would lack: "
                "write its blocks by hand (docs/python.md), or train without it"
            )


@torch.no_grad()
def _compare(model: nn.Module, blocks: list[nn.Module], output: nn.Module, what: str) -> None:
    first = next(model.parameters())
    if first.device.type == "meta":
        raise ModelError(f"{what} is on the meta device: load its values first")
    config: Any = model.config
    limit = getattr(config, "max_position_embeddings", _CHECK_TOKENS)
    vocabulary = int(config.vocab_size)
    # Distinct, scattered tokens, without using the random generator.
    tokens = (torch.arange(min(_CHECK_TOKENS, limit), device=first.device) * 7919 + 1) % vocabulary
    tokens = torch.stack([tokens, (tokens * 31 + 3) % vocabulary])
    weight: Any = getattr(output, "weight", None)
    before = None if weight is None else weight.detach().clone()
    try:
        if weight is not None:
            # A cap shows only for large logits, and those of a new model are small.
            weight.mul_(_LARGE_LOGIT / max(float(_own_logits(model, tokens, what).abs().max()), 1e-6))
        wanted = _own_logits(model, tokens, what)
        x = _logits(blocks, tokens, what)
    finally:
        if before is not None:
            weight.copy_(before)
    difference, largest = float((x - wanted).abs().max()), float(wanted.abs().max())
    tolerance = _CHECK_TOLERANCE if torch.finfo(first.dtype).bits >= 32 else _CHECK_TOLERANCE_16
    if x.shape != wanted.shape or not difference <= tolerance * max(largest, 1e-6):
        raise ModelError(
            f"the blocks of {what} do not give its logits (they differ by {difference:.3g}, the largest is "
            f"{largest:.3g}): its forward does more than embedding, layers, norm and output matrix; write its "
            "blocks by hand (docs/python.md)"
        )


def _own_logits(model: nn.Module, tokens: Tensor, what: str) -> Tensor:
    try:
        logits: Tensor = model(tokens, use_cache=False).logits
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"{what} itself fails on a few tokens ({reason}); experts in fp64, or with rows of odd sizes, "
            "need model.set_experts_implementation('eager')"
        ) from error
    return logits


@torch.no_grad()
def _unfit_for_documents(model: nn.Module, blocks: list[nn.Module], what: str) -> str:
    # Why blocks do not support rows of several documents, or "". Compares two documents in one row with each alone.
    config: Any = model.config
    first = next(model.parameters())
    limit = max(1, min(_CHECK_TOKENS, getattr(config, "max_position_embeddings", _CHECK_TOKENS)) // 2)
    tokens = ((torch.arange(2 * limit, device=first.device) * 7919 + 1) % int(config.vocab_size)).unsqueeze(0)
    positions = (torch.arange(2 * limit, device=first.device) % limit).unsqueeze(0)
    alone = torch.cat([_logits(blocks, part, what) for part in (tokens[:, :limit], tokens[:, limit:])], 1)
    together = tokens
    try:
        for block in blocks:
            together = block(together, positions)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return f"the layers of {what} take no rows of several documents"
    difference, largest = float((together - alone).abs().max()), float(alone.abs().max())
    tolerance = _DOCUMENT_TOLERANCE if torch.finfo(first.dtype).bits >= 32 else _DOCUMENT_TOLERANCE_16
    if difference <= tolerance * max(largest, 1e-6):
        return ""
    return f"the layers of {what} carry a state from one document of a row to the next"


def _logits(blocks: list[nn.Module], tokens: Tensor, what: str) -> Tensor:
    x = tokens
    for block in blocks:
        try:
            x = block(x)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            raise ModelError(
                f"{getattr(block, 'block_name', 'a block')} of {what} cannot run by itself ({reason}): its parts ask "
                "for more than positions, masks and rotary tables; write its blocks by hand (docs/python.md)"
            ) from error
    return x
