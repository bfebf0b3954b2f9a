"""The configuration of a decoder, its blocks and its cost. Pure: needs no torch.

A `ModelConfig` describes the computation, under the same names for every family; the Hugging Face `config.json` is its
file format. The blocks are "embedding", "layers.0" ... and "head", in this order, and their parameters are named and
shaped exactly as the modules of `terrace.model.decoder`.

Shape legend: B batch, S sequence, H hidden, V vocabulary, I intermediate, D head_dim, E experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from terrace.base.errors import ConfigError, ModelError, did_you_mean
from terrace.base.hashing import hashed_once
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.params import router_params
from terrace.model.hf.config import read_fields, without_training, write_table
from terrace.model.hf.families import FAMILIES
from terrace.model.hf.keys import ACTIVATIONS
from terrace.model.kinds import LayerKind, Scales, check_kinds, with_scaling
from terrace.model.param_lists import head_norm_params, linear_params, norm_params
from terrace.model.rope_scaling import RopeScaling
from terrace.model.sizes import check_sizes
from terrace.model.spec import STACKED, BlockSpec, Computes, ParamSpec

SCORE = "score.weight"  # of a scalar head, here and in weight files


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The computation of a decoder. Raises `ModelError` for a configuration of no possible model.

    Layers are alike with two exceptions (`of_layer`): with `experts` most of them have a mixture in place of the MLP,
    and with `kinds` they differ in window and RoPE.
    """

    family: str  # one of FAMILIES: the layout of its config.json and of its weight files
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # num_heads is a multiple of it
    head_dim: int
    intermediate_size: int
    max_positions: int  # a limit only where positions are learned; RoPE has none
    norm: Literal["rms", "layer"]  # a layer norm has a bias, an rms norm none
    norm_eps: float
    activation: str  # silu, gelu, gelu_tanh or relu
    gated_mlp: bool  # down(act(gate(x)) * up(x)) instead of down(act(up(x)))
    rope_theta: float  # 0: no RoPE
    rotary_dim: int  # leading elements of a head that RoPE turns; 0: no RoPE, or learned positions
    parallel_residual: bool  # x + attention(norm(x)) + mlp(norm'(x)) instead of one after the other
    attention_bias: bool  # of query, key, value and output
    mlp_bias: bool
    tied_embeddings: bool  # the output matrix is the embedding
    init_std: float
    qkv_bias: bool = False  # of query, key and value alone
    qk_norm: bool = False  # an rms norm over every head of query and key, before RoPE
    whole_qk_norm: bool = False  # the same over all heads as one
    norms: Literal["before", "after", "both"] = "before"  # of attention and MLP: on their input, on their output
    norm_offset: bool = False  # rms norms multiply by 1 + weight
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0  # a position sees itself and the window - 1 before it; 0: all before it
    kinds: tuple[LayerKind, ...] = ()  # one for each layer, where they differ; sliding_window is then the widest
    scales: Scales = field(default_factory=Scales)
    experts: ExpertsConfig | None = None  # None: every layer has an MLP
    scalar_head: bool = False  # one number a token in place of logits: a reward model or a critic

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ModelError(f"family {self.family!r} is not implemented{did_you_mean(self.family, FAMILIES)}")
        names = FAMILIES[self.family].names
        # Sizes are checked first: later rules divide by them.
        check_sizes(self, names)
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ModelError(
                f"RoPE would turn {self.rotary_dim} elements of a head of {self.head_dim}: "
                f"make the number even and at most the head"
            )
        if (self.rotary_dim > 0) != bool(FAMILIES[self.family].theta_key and self.rope_theta):
            # Zero stands for no positions, so a head too small to turn must not read as such.
            raise ModelError(
                f"RoPE would turn {self.rotary_dim} elements of a head of {self.head_dim}, which "
                f"{self.family} does not do: change the heads or the rotated fraction"
            )
        if self.rotary_dim and not 0 < self.rope_theta < 1e15:
            raise ModelError(f"rope_theta = {self.rope_theta} must be positive and below 1e15, where no pair turns")
        self._check_attention()
        self._check_experts(names)
        if not 0 < self.norm_eps < 1e3:
            raise ModelError(f"{names['norm_eps']} = {self.norm_eps} must be positive and below 1e3")
        if not 0 < self.init_std < 1e3:
            raise ModelError(f"{names['init_std']} = {self.init_std} must be positive and below 1e3")
        if self.norm not in ("rms", "layer"):
            raise ModelError(f"norm = {self.norm!r} is not implemented: use 'rms' or 'layer'")
        if self.activation not in ACTIVATIONS.values():
            known = did_you_mean(self.activation, set(ACTIVATIONS.values()))
            raise ModelError(f"activation = {self.activation!r} is not implemented{known}")

    def _check_attention(self) -> None:
        if self.rope_scaling is not None and not self.rotary_dim:
            raise ModelError("rope_scaling has no effect where positions are learned: leave it out")
        check_kinds(self)
        # Two ways to say one thing would make equal models compare unequal.
        if self.qkv_bias and self.attention_bias:
            raise ModelError("attention_bias covers qkv_bias: set one of them to false")
        if self.whole_qk_norm and not self.qk_norm:
            raise ModelError("whole_qk_norm needs qk_norm: set both or neither")
        if self.norms != "before" and (self.parallel_residual or self.norm != "rms"):
            raise ModelError(f"norms = {self.norms!r} is implemented for rms norms and serial residuals alone")
        if self.norm_offset and self.norm != "rms":
            raise ModelError("norm_offset needs rms norms: set it to false")

    def _check_experts(self, names: Mapping[str, str]) -> None:
        if self.experts is None:
            return
        # Experts are gated and without biases; where a weight goes in front of `down` relies on it.
        if not self.gated_mlp or self.mlp_bias:
            raise ModelError("experts are gated MLPs without biases: use gated_mlp and no mlp_bias")
        fields = {name.removeprefix("experts."): key for name, key in names.items() if name.startswith("experts.")}
        self.experts.check(self.num_layers, fields)

    def of_layer(self, index: int) -> "ModelConfig":
        """The configuration of one layer: without `experts` where it has an MLP, and of its own kind."""
        changes: dict[str, Any] = {}
        if self.experts is not None and index in self.experts.dense_layers:
            changes["experts"] = None
        if self.kinds:
            kind = self.kinds[index]
            turned = self.rotary_dim if kind.rope_theta else 0
            changes |= {"kinds": (), "rotary_dim": turned, "rope_theta": kind.rope_theta}
            changes |= {"rope_scaling": kind.rope_scaling, "sliding_window": kind.sliding_window}
        return replace(self, **changes) if changes else self

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding windows of its layers, each once, ascending; 0: none."""
        return tuple(sorted({kind.sliding_window for kind in self.kinds} or {self.sliding_window}))

    @property
    def rope_limit(self) -> int:
        """The longest row that has the same RoPE frequencies as all shorter ones; 0: rows of any length."""
        scalings = [kind.rope_scaling for kind in self.kinds] or [self.rope_scaling]
        limits = [0 if each is None else each.limit(self.max_positions) for each in scalings]
        return min((limit for limit in limits if limit), default=0)

    @property
    def most_positions(self) -> int:
        """The most positions of a text whose length is not known yet; 0: no limit.

        Learned positions end, and some kinds of RoPE change their frequencies with the length.
        """
        return self.max_positions if self.learned_positions else self.rope_limit

    @property
    def query_factor(self) -> float:
        """The factor of queries: kernels of attention divide scores by sqrt(head_dim), whatever `scales.attention`."""
        return self.scales.attention * math.sqrt(self.head_dim) if self.scales.attention else 1.0

    @property
    def mlp_size(self) -> int:
        """Inner size of the MLP that every token of a layer passes; 0 for a mixture without a shared expert."""
        return self.intermediate_size if self.experts is None else self.experts.shared_size

    @property
    def learned_positions(self) -> bool:
        """Whether the embedding block owns a matrix of positions."""
        return not FAMILIES[self.family].theta_key

    @property
    def num_blocks(self) -> int:
        """Number of blocks: the layers, the embedding and the head."""
        return self.num_layers + 2


@dataclass(frozen=True, kw_only=True)
class DecoderBlock(BlockSpec):
    """A block with the sizes it computes with; blocks of one model may differ in them."""

    config: ModelConfig

    def active(self, param: ParamSpec) -> int:
        """Elements of one of its parameters that a token meets: of a stack, the parts that it passes."""
        return active_numel(self.config, param)

    def forward_flops(self, batch_size: int, sequence: int) -> int:
        """FLOPs of the matrix products in one forward pass on (B, S) tokens; see the function of this name."""
        return _forward_flops(self.config, self.computes, batch_size, sequence)


def parse_model(table: Mapping[str, Any]) -> ModelConfig:
    """Read the table of a Hugging Face `config.json`; absent keys get the defaults of `transformers`.

    Raises `ModelError` for a key or value that is missing, unknown or not implemented.
    """
    fields = read_fields(table)
    experts, scales = fields.pop("experts", None), Scales(**fields.pop("scales"))
    kinds = tuple(LayerKind(**with_scaling(kind)) for kind in fields.pop("kinds", ()))
    experts = None if experts is None else ExpertsConfig(**experts)
    return ModelConfig(**with_scaling(fields), kinds=kinds, scales=scales, experts=experts)


def load_model(path: str, *, training: bool = True) -> ModelConfig:
    """Read a `config.json`, or the one in a folder; without `training` its dropout and losses of routers do not count.

    Raises `ModelError` as `parse_model` does, and for a file that is missing or is not JSON.
    """
    from terrace.model.hf.folder import config_file, read_model_table  # here, since few commands read a model

    file = config_file(path)
    if file.suffix != ".json":
        raise ModelError(f"{path} is not a model: give a config.json or a folder that holds one")
    try:
        table = read_model_table(path)
        return parse_model(table if training else without_training(table))
    except ConfigError as error:
        raise ModelError(str(error)) from error
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error


def to_table(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` table that `parse_model` reads back as the same configuration.

    Raises `ModelError` when the family cannot express the configuration (a GPT-2 with grouped heads).
    """
    if (config.experts is not None) != FAMILIES[config.family].is_mixture:
        said, others = ("no", True) if config.experts is not None else ("only models with", False)
        named = ", ".join(sorted(name for name, family in FAMILIES.items() if family.is_mixture == others))
        raise ModelError(f"a {config.family} config.json has {said} experts: use one of {named}")
    table = write_table(asdict(config))
    # Read back and compared: a family may silently give a field another meaning.
    back, wanted = _fields(parse_model(table)), _fields(config)
    for name, value in wanted.items():
        if back[name] != value:
            raise ModelError(
                f"a {config.family} config.json cannot say {name} = {value!r} (it means {back[name]!r}): "
                f"use that value, or another family"
            )
    return table


def _fields(config: ModelConfig) -> dict[str, Any]:
    fields = asdict(config)
    experts = fields.pop("experts") or {}
    return fields | {f"experts.{name}": value for name, value in experts.items()}


def block_specs(config: ModelConfig) -> tuple[DecoderBlock, ...]:
    """The blocks in order, their parameters in the order of `named_parameters`.

    With tied embeddings the head borrows block 0 and does not list the output matrix; a scalar head has its own.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    lookup = ParamSpec(name="weight", shape=(vocab, hidden), dims=(("vocab", vocab), ("features", hidden)))
    embedding = [lookup]
    if config.learned_positions:
        places = config.max_positions
        dims = (("positions", places), ("hidden", hidden))
        embedding.append(ParamSpec(name="positions", shape=(places, hidden), dims=dims))
    # One tuple for all layers of a kind: caches recognise alike blocks by its identity.
    kinds = {of: tuple(_layer_params(of)) for of in {config.of_layer(index) for index in range(config.num_layers)}}
    layers = [config.of_layer(index) for index in range(config.num_layers)]
    # Every tensor rank has the score whole, as it has the hidden states before it.
    score = ParamSpec(name=SCORE, shape=(1, hidden), dims=(("scores", 1), ("features", hidden)))
    borrows = config.tied_embeddings and not config.scalar_head
    output = [score] if config.scalar_head else [] if borrows else [lookup]
    return (
        DecoderBlock(name="embedding", params=tuple(embedding), computes=Computes.LOOK_UP, config=config),
        *(
            DecoderBlock(name=f"layers.{index}", params=kinds[layer], computes=Computes.RESIDUAL, config=layer)
            for index, layer in enumerate(layers)
        ),
        DecoderBlock(
            name="head",
            params=(*output, *_norm_params(config, "norm")),
            borrows=(0,) if borrows else (),
            computes=_computed_by_head(config),
            config=config,
        ),
    )


def model_of(blocks: Sequence[BlockSpec]) -> ModelConfig:
    """The sizes of a model that its blocks share: of the first layer with experts, else of the first layer, else any.

    Raises `ModelError` where no block has any.
    """
    known = [block for block in blocks if isinstance(block, DecoderBlock)]
    if not known:
        raise ModelError("no block declares what it computes: give specs of block_specs, or the seconds of each block")
    layers = [block.config for block in known if block.computes is Computes.RESIDUAL]
    return next((config for config in layers if config.experts is not None), (layers or [known[0].config])[0])


def num_params(config: ModelConfig) -> int:
    """Number of parameters; a tied matrix counts once."""
    return sum(param.numel for block in block_specs(config) for param in block.params)


def num_active_params(config: ModelConfig) -> int:
    """Number of parameters that a token meets: of a mixture's experts, those that it passes."""
    return sum(block.active(param) for block in block_specs(config) for param in block.params)


def forward_flops(config: ModelConfig, block_index: int, batch_size: int, sequence: int) -> int:
    """FLOPs of the matrix products in one forward pass of a block on (B, S) tokens.

    A product of (m, k) and (k, n) counts 2mnk; of experts those that a token passes count. Attention counts the full
    S x S square, 4 B S^2 per query element, as published FLOP counts do, although a causal kernel may skip half of it.
    Biases, norms, activations, RoPE and the embedding's look-up are not products and count nothing.
    Raises `IndexError` for a block that does not exist.
    """
    if not 0 <= block_index < config.num_blocks:
        raise IndexError(f"block {block_index} of a model with {config.num_blocks} blocks")
    ends = {0: Computes.LOOK_UP, config.num_blocks - 1: _computed_by_head(config)}
    of = config if block_index in ends else config.of_layer(block_index - 1)
    return _forward_flops(of, ends.get(block_index, Computes.RESIDUAL), batch_size, sequence)


def _computed_by_head(config: ModelConfig) -> Computes:
    return Computes.VALUES if config.scalar_head else Computes.LOGITS


def _forward_flops(config: ModelConfig, computes: Computes | None, batch_size: int, sequence: int) -> int:
    tokens = batch_size * sequence
    # A look-up is no product.
    if computes is Computes.LOOK_UP:
        return 0
    if computes is Computes.LOGITS:
        return 2 * tokens * config.hidden_size * config.vocab_size
    if computes is Computes.VALUES:
        return 2 * tokens * config.hidden_size
    # Each element of a matrix is one multiplication and one addition per token that meets it.
    matrices = sum(active_numel(config, param) for param in _layer_params(config) if param.is_matrix)
    return 2 * tokens * matrices + 4 * tokens * sequence * config.num_heads * config.head_dim


def active_numel(config: ModelConfig, param: ParamSpec) -> int:
    """Elements of a parameter that a token meets: of a stack of experts, those of `per_token`."""
    if param.num_parts == 1 or config.experts is None:
        return param.numel
    return param.numel // param.num_parts * config.experts.per_token


def _layer_params(config: ModelConfig) -> list[ParamSpec]:
    hidden = ("hidden", config.hidden_size)
    heads, kv_heads = ("heads", config.num_heads), ("kv_heads", config.num_kv_heads)
    entering = [("query", heads, hidden), ("key", kv_heads, hidden), ("value", kv_heads, hidden)]
    bias, size = config.attention_bias, config.head_dim
    normed = head_norm_params(config.num_heads, config.num_kv_heads, size, config.whole_qk_norm)
    feed = _mlp_params("mlp", config, config.intermediate_size) if config.experts is None else _mixture_params(config)
    before, after = config.norms != "after", config.norms != "before"
    # The order of `named_parameters` in the module, and of the messages that a tensor axis sends.
    return [
        *(_norm_params(config, "attention_norm") if before else ()),
        *linear_params("attention", entering, bias or config.qkv_bias, size),
        *linear_params("attention", [("output", hidden, heads)], bias, size),
        *(normed if config.qk_norm else ()),
        *(_norm_params(config, "attention_output_norm") if after else ()),
        *(_norm_params(config, "mlp_norm") if before else ()),
        *feed,
        *(_norm_params(config, "mlp_output_norm") if after else ()),
    ]


def _norm_params(config: ModelConfig, name: str) -> list[ParamSpec]:
    return norm_params(name, config.hidden_size, config.norm == "layer")


def _mlp_params(parent: str, config: ModelConfig, size: int) -> list[ParamSpec]:
    hidden, inner = ("hidden", config.hidden_size), ("intermediate", size)
    gate = [("gate", inner, hidden)] if config.gated_mlp else []
    return linear_params(parent, [*gate, ("up", inner, hidden), ("down", hidden, inner)], config.mlp_bias, 1)


def _mixture_params(config: ModelConfig) -> list[ParamSpec]:
    """The parameters of terrace.model.experts.mixture; a stack has a matrix for each expert."""
    experts = config.experts
    assert experts is not None
    hidden, inner = ("hidden", config.hidden_size), ("expert_intermediate", experts.intermediate_size)
    params = router_params(experts, hidden)
    for name, outputs, inputs in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        dims = ((STACKED, experts.num_experts), outputs, inputs)
        params.append(ParamSpec(name=f"mlp.{name}.weight", shape=tuple(size for _, size in dims), dims=dims))
    if experts.shared_size:
        params += _mlp_params("mlp.shared", config, experts.shared_size)
    if experts.shared_gate:
        params += linear_params("mlp", [("shared_gate", ("shared_gate", 1), hidden)], False, 1)
    return params
