"""Maps each parameter of a decoder to tensors in the weight files of its family. Needs no torch.

A parameter is a whole tensor there, a slice of one, or a stack of several:

- experts have one tensor each, and are one parameter (experts, out, in) in Terrace;
- gpt-oss has one tensor of all experts (experts, in, out), and the outputs of gate and up alternate in it;
- GPT-2 stores matrices as (in, out), and query, key and value concatenated in `c_attn`;
- GPT-NeoX stores query, key and value in `query_key_value`, interleaved by head;
- Phi-3 stores query, key and value concatenated in `qkv_proj`, gate and up in `gate_up_proj`;
- Qwen3-Next stores query and gate of attention in `q_proj`, interleaved by head, and the inputs of linear layers in two
  tensors, interleaved by key head.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from terrace.model.block_operations import SCORE
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.experts.config import GATE_BIAS
from terrace.model.hf.keys import PROJECTION
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec

# Buffers in files of older releases, masks and frequencies, which follow from config.json.
DERIVED = re.compile(r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """The location of a parameter in weight files.

    It is slice number `part` of the fused tensor `name`, whose slices have `parts` rows; if `parts` is empty, it is the
    whole tensor. Rows consist of `num_groups` groups, each with its share of all slices in order. With `num_stacked`,
    it is a stack of tensors, with the index in place of "{}" in names. If it `is_stack`, the first dim of the tensor
    counts the parts of a stack, and the rest holds for each of them.
    """

    name: str
    shape: tuple[int, ...]  # of the stored tensor, or of each stacked one
    num_stacked: int = 0
    is_stack: bool = False
    is_flat: bool = False  # its dims of one are left out here
    wide: bool = False  # at least fp32, whatever the dtype of other tensors
    transposed: bool = False  # stored as (in, out)
    part: int = 0
    parts: tuple[int, ...] = ()
    num_groups: int = 1

    @property
    def num_parts(self) -> int:
        return max(1, len(self.parts))

    @property
    def place_in_group(self) -> tuple[int, int]:
        """(First row, number of rows) of the slice in each group."""
        return sum(self.parts[: self.part]) // self.num_groups, self.parts[self.part] // self.num_groups

    def nbytes(self, dtype_bytes: int) -> int:
        """Bytes of one of its tensors in files with `dtype_bytes` per element."""
        return (max(4, dtype_bytes) if self.wide else dtype_bytes) * math.prod(self.shape)

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(self.name.format(index) for index in range(self.num_stacked)) if self.num_stacked else (self.name,)


@dataclass(frozen=True, kw_only=True)
class Names:
    """Module names of a family, to which `.weight` or `.bias` is appended."""

    base: str  # prefix of all names except the output matrix; missing in files of a model without its head
    layers: str
    embedding: str
    output: str
    final_norm: str
    layer: Mapping[str, str]
    stacked: Mapping[str, str] = field(default_factory=dict)  # modules with one tensor per expert
    whole: Mapping[str, str] = field(default_factory=dict)  # parameter -> its full name in a layer
    positions: str = ""
    fused: Mapping[str, int] = field(default_factory=dict)  # projection -> its slice of the fused tensor
    by_head: tuple[str, ...] = ()  # fused tensors whose slices are interleaved by head
    by_row: bool = False  # slices of stacks are interleaved by row
    transposed: bool = False
    flat: tuple[str, ...] = ()  # vectors that files have with dims of one around them, as (1, 1, N, 1)
    resaved: tuple[str, str] = ("", "")  # a part of names, and what a save by transformers has in its place
    beyond: str = "-"  # prefix of tensors that are no part of the decoder


_LLAMA = Names(
    base="model.",
    layers="layers",
    embedding="embed_tokens",
    output="lm_head",
    final_norm="norm",
    layer={
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
_MLP = ("gate", "up", "down")


def _mixture(block: str, experts: Sequence[str], shared: str = "") -> Names:
    # `experts` are the names of gate, up and down.
    layer = {**_LLAMA.layer, "mlp.router": f"{block}.gate", "mlp.shared_gate": "mlp.shared_expert_gate"}
    layer |= {f"mlp.shared.{name}": f"{block}.{shared}.{name}_proj" for name in _MLP}
    stacked = {f"mlp.{name}": f"{block}.experts.{{}}.{theirs}" for name, theirs in zip(_MLP, experts, strict=True)}
    return replace(_LLAMA, layer=layer, stacked=stacked)


_LATENT = {
    "attention.query": "self_attn.q_proj",
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_latent_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_norm": "self_attn.kv_a_layernorm",
    "attention.key_value_up": "self_attn.kv_b_proj",
}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PARTS = {"attention.query": 0, "attention.key": 1, "attention.value": 2}

_AFTER = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_GEMMA = replace(_LLAMA, layer={**_LLAMA.layer, **_AFTER, "mlp_norm": "pre_feedforward_layernorm"})
_OUTPUT_NORM = "output_norm"  # of the last layer, the model's final norm; and of layers that predict further tokens
_FURTHER_TOKENS = {
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "combine": PROJECTION,
    _OUTPUT_NORM: "shared_head.norm",
}
_SIGMOID_ROUTED = _mixture("mlp", _PROJECTIONS, "shared_experts")
_SIGMOID = replace(
    _SIGMOID_ROUTED,
    layer={**_SIGMOID_ROUTED.layer, **_FURTHER_TOKENS},
    whole={GATE_BIAS: "mlp.gate.e_score_correction_bias"},
)
_SUNK = {
    "attention.sinks": "self_attn.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.logit_bias": "mlp.router.bias",
    **dict.fromkeys(("mlp.gate.weight", "mlp.up.weight"), "mlp.experts.gate_up_proj"),
    **dict.fromkeys(("mlp.gate.bias", "mlp.up.bias"), "mlp.experts.gate_up_proj_bias"),
    "mlp.down.weight": "mlp.experts.down_proj",
    "mlp.down.bias": "mlp.experts.down_proj_bias",
}
# Queries and the gate of attention's output are one tensor; a linear layer has other modules in its place.
_HYBRID = {"attention.query": "self_attn.q_proj", "attention.gate": "self_attn.q_proj"}
_HYBRID_PARTS = {"attention.query": 0, "attention.gate": 1}
_BY_HEAD = ("self_attn.q_proj", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")
_CONVOLVED = {f"{name}_conv": part for name, part in _PARTS.items()}
_LINEAR = {
    **dict.fromkeys(_CONVOLVED, "linear_attn.conv1d"),
    "attention.norm": "linear_attn.norm",
    "attention.output": "linear_attn.out_proj",
}
_LINEAR_WHOLE = {"attention.log_decay": "linear_attn.A_log", "attention.decay_bias": "linear_attn.dt_bias"}


def _hybrid(names: Names) -> Names:
    return replace(names, layer={**names.layer, **_HYBRID}, fused=_HYBRID_PARTS, by_head=_BY_HEAD, beyond="mtp.")


def _linear(names: Names, entering: Mapping[str, str], fused: Mapping[str, int]) -> Names:
    names = _hybrid(names)
    return replace(
        names,
        layer={**names.layer, **_LINEAR, **entering},
        fused={**_CONVOLVED, **fused},
        whole=_LINEAR_WHOLE,
    )


_APART = {
    **dict.fromkeys(_PARTS, "linear_attn.in_proj_qkv"),
    "attention.gate": "linear_attn.in_proj_z",
    "attention.beta": "linear_attn.in_proj_b",
    "attention.decay": "linear_attn.in_proj_a",
}
_QWEN_MOE = _mixture("mlp", _PROJECTIONS, "shared_expert")

_KIMI_MIXTURE = _mixture("block_sparse_moe", ("w1", "w3", "w2"), "shared_experts")
_KIMI = replace(
    _KIMI_MIXTURE,
    layer={**_KIMI_MIXTURE.layer, **_LATENT},
    whole={GATE_BIAS: "block_sparse_moe.gate.e_score_correction_bias"},
    resaved=(".mlp.", ".block_sparse_moe."),
)
_KIMI_LINEAR = {
    **{f"{name}_conv": f"self_attn.{name.removeprefix('attention.')[0]}_conv1d" for name in _PARTS},
    "attention.gate_down": "self_attn.g_a_proj",
    "attention.gate": "self_attn.g_b_proj",
    "attention.beta": "self_attn.b_proj",
    "attention.decay_down": "self_attn.f_a_proj",
    "attention.decay": "self_attn.f_b_proj",
    "attention.norm": "self_attn.o_norm",
}
_KIMI_WHOLE = {"attention.log_decay": "self_attn.A_log", "attention.decay_bias": "self_attn.dt_bias"}

NAMES: Mapping[str, Names] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite"), _LLAMA),
    "olmo2": replace(_LLAMA, layer={**_LLAMA.layer, **_AFTER}),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": replace(
        _LLAMA,
        layer={
            **_LLAMA.layer,
            **dict.fromkeys(_PARTS, "self_attn.qkv_proj"),
            **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
        },
        fused={**_PARTS, "mlp.gate": 0, "mlp.up": 1},
    ),
    "gpt_neox": Names(
        base="gpt_neox.",
        layers="layers",
        embedding="embed_in",
        output="embed_out",
        final_norm="final_layer_norm",
        layer={
            "attention_norm": "input_layernorm",
            **dict.fromkeys(_PARTS, "attention.query_key_value"),
            "attention.output": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        fused=_PARTS,
        by_head=("attention.query_key_value",),
    ),
    "gpt2": Names(
        base="transformer.",
        layers="h",
        embedding="wte",
        output="lm_head",
        final_norm="ln_f",
        positions="wpe",
        layer={
            "attention_norm": "ln_1",
            **dict.fromkeys(_PARTS, "attn.c_attn"),
            "attention.output": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        fused=_PARTS,
        transposed=True,
    ),
    "mixtral": _mixture("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen2_moe": _QWEN_MOE,
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), _hybrid(_QWEN_MOE)),
    "qwen3_5_text": _hybrid(_LLAMA),
    "qwen3_moe": _mixture("mlp", _PROJECTIONS),
    "glm4_moe": _SIGMOID,
    "kimi_linear": _KIMI,
    "gpt_oss": replace(_LLAMA, whole=_SUNK, fused={"mlp.gate": 0, "mlp.up": 1}, by_row=True),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), replace(_SIGMOID, layer={**_SIGMOID.layer, **_LATENT})),
}
# Of layers with the gated delta rule, in families that have some.
LINEAR_NAMES: Mapping[str, Names] = {
    "qwen3_next": _linear(
        _QWEN_MOE,
        {
            **dict.fromkeys((*_PARTS, "attention.gate"), "linear_attn.in_proj_qkvz"),
            **dict.fromkeys(("attention.beta", "attention.decay"), "linear_attn.in_proj_ba"),
        },
        {**_PARTS, "attention.gate": 3, "attention.beta": 0, "attention.decay": 1},
    ),
    "qwen3_5_text": _linear(_LLAMA, _APART, _PARTS),
    "qwen3_5_moe_text": _linear(_QWEN_MOE, _APART, _PARTS),
    "kimi_linear": replace(
        _KIMI,
        layer={**_KIMI_MIXTURE.layer, **_KIMI_LINEAR},
        whole={**_KIMI.whole, **_KIMI_WHOLE},
        flat=("attention.log_decay",),
    ),
}


def sources(config: ModelConfig) -> dict[tuple[str, str], StoredTensor]:
    """(block, parameter) -> its location in the files, in the order of blocks; a tied head is not stored."""
    return {
        (block.name, param.name): _source(config, _names(config, block.name), block, param)
        for block in block_specs(config)
        for param in block.params
    }


def _names(config: ModelConfig, block: str) -> Names:
    index = block.removeprefix("layers.")
    is_linear = index.isdigit() and config.of_layer(int(index)).is_linear
    return (LINEAR_NAMES if is_linear else NAMES)[config.family]


def copies_of_shared(config: ModelConfig) -> frozenset[str]:
    """Names of copies of embedding and output matrix that released files have in layers that predict further tokens."""
    shared = f"{NAMES[config.family].embedding}.weight", "shared_head.head.weight"
    return frozenset(f"{layer}{name}" for layer in further_layers(config, config.num_mtp_layers) for name in shared)


def further_layers(config: ModelConfig, number: int) -> tuple[str, ...]:
    """Prefixes of the tensors of `number` layers behind the last one, which predict further tokens."""
    names, first = NAMES[config.family], config.num_layers
    return tuple(f"{names.base}{names.layers}.{first + index}." for index in range(number))


def output_name(config: ModelConfig) -> str:
    """Name of the output matrix, which a file may contain even if it is tied to the embedding."""
    return f"{NAMES[config.family].output}.weight"


def _source(config: ModelConfig, names: Names, owner: BlockSpec, spec: ParamSpec) -> StoredTensor:
    block, param, shape = owner.name, spec.name, spec.shape
    module, _, ending = param.rpartition(".")
    if block == "embedding":
        return StoredTensor(
            name=f"{names.base}{names.positions if param == 'positions' else names.embedding}.weight", shape=shape
        )
    if block == "head":
        own = {"weight": f"{names.output}.weight", SCORE: SCORE}  # the score has one name in all families
        name = own.get(param, f"{names.base}{names.final_norm}.{ending}")
        return StoredTensor(name=name, shape=shape)
    index = block.removeprefix("layers.")
    layer = f"{names.base}{names.layers}.{index}."
    if module == _OUTPUT_NORM and int(index) < config.num_layers:
        return StoredTensor(name=f"{names.base}{names.final_norm}.{ending}", shape=shape)
    if param in names.whole:
        return _whole(names, spec, f"{layer}{names.whole[param]}")
    if spec.is_stack:
        name = f"{layer}{names.stacked[module]}.{ending}"
        return StoredTensor(name=name, shape=spec.part_shape, num_stacked=shape[0])
    parts = _parts(names, owner, module, ending)
    # GPT-2 stores Conv1D weights as (in, out); biases have one dim.
    transposed = names.transposed and len(shape) == 2
    stored = (sum(parts) or shape[0], *shape[1:])
    return StoredTensor(
        name=f"{layer}{names.layer[module]}.{ending}",
        shape=stored[::-1] if transposed else stored,
        transposed=transposed,
        part=names.fused.get(module, 0),
        parts=parts,
        num_groups=_heads(config, names.layer[module]) if parts and names.layer[module] in names.by_head else 1,
    )


def _heads(config: ModelConfig, tensor: str) -> int:
    return config.delta.key_heads if tensor.startswith("linear") else config.num_heads


def _whole(names: Names, spec: ParamSpec, name: str) -> StoredTensor:
    if not spec.is_stack:
        is_flat = spec.name in names.flat
        shape = (1, 1, *spec.shape, 1) if is_flat else spec.shape
        return StoredTensor(name=name, shape=shape, is_flat=is_flat, wide=spec.name == GATE_BIAS)
    module, (rows, *others) = spec.name.rpartition(".")[0], spec.part_shape
    parts = (rows, rows) if module in names.fused else ()
    stored = (sum(parts) or rows, *others)[::-1]  # (in, out), as in a product x W
    return StoredTensor(
        name=name,
        shape=(spec.num_parts, *stored),
        is_stack=True,
        transposed=bool(others),
        part=names.fused.get(module, 0),
        parts=parts,
        num_groups=rows if parts and names.by_row else 1,
    )


def _parts(names: Names, owner: BlockSpec, module: str, ending: str) -> tuple[int, ...]:
    # Rows of the parameters of a block that are slices of one fused tensor, in their order there.
    if module not in names.fused:
        return ()
    together = sorted(
        (each for each in names.fused if names.layer[each] == names.layer[module]), key=names.fused.__getitem__
    )
    rows = {param.name: param.shape[0] for param in owner.params}
    return tuple(rows[f"{each}.{ending}"] for each in together)


def stored_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes of all tensors in the weight files of a model, with `dtype_bytes` per element."""
    tensors = {name: source for source in sources(config).values() for name in source.tensors}
    return sum(source.nbytes(dtype_bytes) for source in tensors.values())
