"""Configuration of a decoder. Needs no torch.

A `ModelConfig` describes the computation with the same field names for every family. Its file format is the Hugging
Face `config.json`. terrace.model.blocks derives the blocks from it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from terrace.base.errors import ConfigError, ModelError, did_you_mean
from terrace.base.hashing import hashed_once
from terrace.model.experts.config import ExpertsConfig
from terrace.model.hf.config import read_fields, without_training, write_table
from terrace.model.hf.families import FAMILIES
from terrace.model.hf.keys import ACTIVATIONS, CLAMPED
from terrace.model.hf.kinds import delta_keys
from terrace.model.hf.latent import KEYS as LATENT_KEYS
from terrace.model.kinds import DeltaSizes, LayerKind, Scales, check_kinds, with_scaling
from terrace.model.latent import Latent
from terrace.model.rope_scaling import RopeScaling
from terrace.model.sizes import check_sizes

MOST_FURTHER_TOKENS = 8  # more than any published model has


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a decoder. Raises `ModelError` for invalid values.

    All layers are alike, with two exceptions (`of_layer`): with `experts`, all but the dense ones have a mixture in
    place of an MLP; with `kinds`, layers differ in window and RoPE, or are linear.
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
    rotary_dim: int  # leading elements of a head that RoPE rotates; 0: no RoPE, or learned positions
    parallel_residual: bool  # x + attention(norm(x)) + mlp(norm'(x)) instead of one after the other
    attention_bias: bool  # of query, key, value and output
    mlp_bias: bool
    tied_embeddings: bool  # the output matrix is the embedding
    init_std: float
    qkv_bias: bool = False  # of query, key and value alone
    qk_norm: bool = False  # an rms norm over every head of query and key, before RoPE
    whole_qk_norm: bool = False  # the same over all heads as one
    norms: Literal["before", "after", "both"] = "before"  # of attention and MLP: on their input, on their output
    has_sinks: bool = False  # attention has a learned logit per head (terrace.model.sinks)
    attention_gate: bool = False  # the output of attention is multiplied by the sigmoid of a gate, elementwise
    norm_offset: bool = False  # rms norms multiply by 1 + weight
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0  # a position sees itself and the window - 1 before it; 0: all before it
    kinds: tuple[LayerKind, ...] = ()  # one for each layer, where they differ; sliding_window is then the widest
    is_linear: bool = False  # layers have the gated delta rule in place of attention; with `kinds`, they say it
    delta: DeltaSizes = field(default_factory=DeltaSizes)  # of layers that are linear
    scales: Scales = field(default_factory=Scales)
    latent: Latent = field(default_factory=Latent)
    experts: ExpertsConfig | None = None  # None: every layer has an MLP
    scalar_head: bool = False  # one number a token in place of logits: a reward model or a critic
    num_mtp_layers: int = 0  # layers behind the others that predict further tokens (terrace.model.decoder)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ModelError(f"family {self.family!r} is not implemented{did_you_mean(self.family, FAMILIES)}")
        names = FAMILIES[self.family].names
        # Sizes are checked first: later rules divide by them.
        check_sizes(self, names)
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ModelError(
                f"RoPE would rotate {self.rotary_dim} elements of a head of {self.head_dim}: "
                f"make the number even and at most the head"
            )
        if (self.rotary_dim > 0) != bool(FAMILIES[self.family].theta_key and self.rope_theta):
            # 0 means no RoPE, so a fraction that rounds to 0 must not be accepted silently.
            raise ModelError(
                f"RoPE would rotate {self.rotary_dim} elements of a head of {self.head_dim}, which "
                f"{self.family} does not do: change the heads or the rotated fraction"
            )
        if self.rotary_dim and not 0 < self.rope_theta < 1e15:
            raise ModelError(f"rope_theta = {self.rope_theta} must be positive and below 1e15, where no pair rotates")
        self._check_attention()
        self._check_experts(names)
        self._check_further_tokens()
        if not 0 < self.norm_eps < 1e3:
            raise ModelError(f"{names['norm_eps']} = {self.norm_eps} must be positive and below 1e3")
        if not 0 < self.init_std < 1e3:
            raise ModelError(f"{names['init_std']} = {self.init_std} must be positive and below 1e3")
        if self.norm not in ("rms", "layer"):
            raise ModelError(f"norm = {self.norm!r} is not implemented: use 'rms' or 'layer'")
        if self.activation not in ACTIVATIONS.values() and self.activation != CLAMPED:
            known = did_you_mean(self.activation, set(ACTIVATIONS.values()))
            raise ModelError(f"activation = {self.activation!r} is not implemented{known}")

    def _check_attention(self) -> None:
        if self.rope_scaling is not None and not self.rotary_dim:
            raise ModelError("rope_scaling has no effect where positions are learned: leave it out")
        check_kinds(self)
        self.latent.check(LATENT_KEYS, self.head_dim, self.rotary_dim)
        if self.is_linear or any(kind.is_linear for kind in self.kinds):
            self.delta.check(delta_keys(FAMILIES[self.family].table))
        if self.has_sinks and (self.latent.key_value_rank or self.scales.attention_cap):
            raise ModelError("attention sinks are not implemented beside latent attention or capped scores")
        # Redundant settings are rejected, since equal models must compare equal.
        if self.qkv_bias and self.attention_bias:
            raise ModelError("attention_bias covers qkv_bias: set one of them to false")
        if self.whole_qk_norm and not self.qk_norm:
            raise ModelError("whole_qk_norm needs qk_norm: set both or neither")
        if self.norms != "before" and (self.parallel_residual or self.norm != "rms"):
            raise ModelError(f"norms = {self.norms!r} is implemented for rms norms and serial residuals alone")
        if self.norm_offset and self.norm != "rms":
            raise ModelError("norm_offset needs rms norms: set it to false")

    def _check_experts(self, names: Mapping[str, str]) -> None:
        clamped = self.activation == CLAMPED
        if self.experts is None:
            if clamped:
                raise ModelError(f"activation = {CLAMPED!r} is of experts alone: use 'silu'")
            return
        if not self.gated_mlp or self.mlp_bias:
            raise ModelError("experts are gated MLPs with biases of their own: use gated_mlp and no mlp_bias")
        if clamped and (self.experts.shared_size or self.experts.dense_layers):
            raise ModelError(f"activation = {CLAMPED!r} is of experts alone: leave shared and dense MLPs out")
        fields = {name.removeprefix("experts."): key for name, key in names.items() if name.startswith("experts.")}
        self.experts.check(self.num_layers, fields)

    def _check_further_tokens(self) -> None:
        key, number = "num_nextn_predict_layers", self.num_mtp_layers
        if not 0 <= number <= MOST_FURTHER_TOKENS:
            raise ModelError(f"{key} = {number} must lie between 0 and {MOST_FURTHER_TOKENS}")
        if number and (self.kinds or self.scalar_head or self.norms != "before" or self.scales.logit_divisor != 1.0):
            raise ModelError(
                f"{key} = {number} is not implemented for layers of several kinds or with norms of their outputs, nor "
                "beside a scalar head or a logit divisor: set it to 0"
            )

    def of_layer(self, index: int) -> "ModelConfig":
        """Configuration of one layer, with its own window and RoPE, and without `experts` if the layer has an MLP.

        It has `num_mtp_layers` if it is the last layer before these, which ends with the model's final norm.
        """
        changes: dict[str, Any] = {"num_mtp_layers": 0} if self.num_mtp_layers and index + 1 < self.num_layers else {}
        if self.experts is not None and index in self.experts.dense_layers:
            changes["experts"] = None
        if self.kinds:
            kind = self.kinds[index]
            rotated = self.rotary_dim if kind.rope_theta else 0
            changes |= {"kinds": (), "rotary_dim": rotated, "rope_theta": kind.rope_theta}
            changes |= {"rope_scaling": kind.rope_scaling, "sliding_window": kind.sliding_window}
            changes["is_linear"] = kind.is_linear
        return replace(self, **changes) if changes else self

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct sliding windows of the layers, ascending; 0: none."""
        return tuple(sorted({kind.sliding_window for kind in self.kinds} or {self.sliding_window}))

    @property
    def rope_limit(self) -> int:
        """Largest row length up to which RoPE frequencies do not depend on the length; 0: no limit."""
        scalings = [kind.rope_scaling for kind in self.kinds] or [self.rope_scaling]
        limits = [0 if each is None else each.limit(self.max_positions) for each in scalings]
        return min((limit for limit in limits if limit), default=0)

    @property
    def most_positions(self) -> int:
        """Largest number of positions of a sequence that is still being generated; 0: no limit.

        Learned positions have a last one, and some kinds of RoPE change their frequencies with the sequence length.
        """
        return self.max_positions if self.learned_positions else self.rope_limit

    @property
    def query_factor(self) -> float:
        """Factor applied to queries, since attention kernels always divide scores by sqrt(head_dim)."""
        factor = self.latent.score_factor(self.rope_scaling)
        return factor * self.scales.attention * math.sqrt(self.head_dim) if self.scales.attention else factor

    @property
    def own_experts(self) -> ExpertsConfig:
        assert self.experts is not None, "a layer without experts has no mixture"
        return self.experts

    @property
    def mlp_size(self) -> int:
        """Inner size of the MLP or shared expert that every token passes; 0 for a mixture without a shared expert."""
        return self.intermediate_size if self.experts is None else self.experts.shared_size

    @property
    def learned_positions(self) -> bool:
        return FAMILIES[self.family].learns_positions

    @property
    def num_blocks(self) -> int:
        return self.num_layers + self.num_mtp_layers + 2


def parse_model(table: Mapping[str, Any]) -> ModelConfig:
    """Parse the table of a Hugging Face `config.json`; missing keys get the defaults of `transformers`.

    Raises `ModelError` for a key or value that is missing, unknown or not implemented.
    """
    fields = read_fields(table)
    experts, scales = fields.pop("experts", None), Scales(**fields.pop("scales"))
    latent, delta = Latent(**fields.pop("latent", {})), DeltaSizes(**fields.pop("delta", {}))
    kinds = tuple(LayerKind(**with_scaling(kind)) for kind in fields.pop("kinds", ()))
    experts = None if experts is None else ExpertsConfig(**experts)
    return ModelConfig(**with_scaling(fields), kinds=kinds, scales=scales, latent=latent, delta=delta, experts=experts)


def load_model(path: str, *, training: bool = True) -> ModelConfig:
    """Read a `config.json`, or the one in a folder. Without `training`, dropout and router losses in it are ignored.

    Raises `ModelError` as `parse_model` does, and for a file that is missing or is not JSON.
    """
    from terrace.model.hf.folder import config_file, read_model_table  # imported here, since few commands read a model

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
    """Table of a `config.json` that `parse_model` reads back as the same configuration.

    Raises `ModelError` if the family cannot express the configuration, for example a GPT-2 with grouped heads.
    """
    if (config.experts is not None) != FAMILIES[config.family].is_mixture:
        number, others = ("no", True) if config.experts is not None else ("only models with", False)
        named = ", ".join(sorted(name for name, family in FAMILIES.items() if family.is_mixture == others))
        raise ModelError(f"a {config.family} config.json has {number} experts: use one of {named}")
    table = write_table(asdict(config))
    # Parsed again and compared, since a family may give a field another meaning.
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
