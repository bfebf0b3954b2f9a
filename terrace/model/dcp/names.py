"""Parameter names of other programs in DCP folders.

A DCP folder stores a program's state dict, so names have a prefix: `model.` if it was saved as `{"model": ...}`, none
in torchtitan. The rest is the Hugging Face name or torchtitan's own. RoPE in torchtitan's Llama rotates adjacent
elements of a head, in Hugging Face's Llama elements of its two halves, so the rows of query and key are permuted.
torchtitan's Qwen 3 uses halves as well.

Source: `state_dict_adapter.py` of torchtitan's llama3 and qwen3; newer releases call the output matrix `lm_head`, and
put `qkv_linear` before `wq`, `wk` and `wv`.

Shape legend: N heads, D head size, H hidden.
"""

import re
from collections.abc import Collection, Mapping

from torch import Tensor

from terrace.base.errors import ModelError
from terrace.base.printable import printable
from terrace.model.config import ModelConfig
from terrace.model.hf.names import NAMES

HUGGING_FACE, TORCHTITAN = "hf", "torchtitan"
OPTIMIZER = "optimizer"  # key of the optimizer states in a state dict

_EMBEDDING = "model.embed_tokens.weight"
_TITAN_ENDS = {
    _EMBEDDING: "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
_TITAN_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
# Other entries next to a model that was saved without a prefix.
_OTHERS = (f"{OPTIMIZER}.", "optim.", "lr_scheduler.", "train_state", "dataloader")
_TITAN_FAMILIES = ("llama", "qwen3")
# Modules that are renamed in transformers 5, but not in its files: the output matrix of GPT-NeoX.
_IN_FILES = {"lm_head.weight": "embed_out.weight"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def _titan_name(name: str) -> str | None:
    """torchtitan's name of the parameter with the Hugging Face name `name`, or None."""
    if name in _TITAN_ENDS:
        return _TITAN_ENDS[name]
    found = _LAYER.fullmatch(name)
    theirs = None if found is None else _TITAN_LAYER.get(found[2])
    return None if found is None or theirs is None else f"layers.{found[1]}.{theirs}.weight"


def program_name(name: str, naming: str) -> str:
    """Convert the name of a tensor in Hugging Face files to `naming`. Raises `ModelError` if there is none."""
    if naming == HUGGING_FACE:
        return next((own for own, in_files in _IN_FILES.items() if in_files == name), name)
    found = _titan_name(name)
    if found is None:
        raise ModelError(f"torchtitan has no name for {name}: use the names of Hugging Face ({HUGGING_FACE})")
    return found


def check_dense(config: ModelConfig) -> None:
    """Raise `ModelError` for a mixture, whose experts have different names in different releases."""
    if config.experts is not None:
        raise ModelError(
            f"DCP folders are read and written for dense models alone, and this {config.family} has experts: use "
            "safetensors (save_pretrained, terrace export --format hf)"
        )


def check_titan(config: ModelConfig) -> None:
    """Raise `ModelError` for a family whose torchtitan names are not known."""
    if config.family not in _TITAN_FAMILIES:
        raise ModelError(
            f"torchtitan's names are known for {' and '.join(_TITAN_FAMILIES)} models alone, and this is "
            f"{config.family}: use the names of Hugging Face ({HUGGING_FACE})"
        )


def heads_of(config: ModelConfig, name: str) -> int:
    """Number of heads of the tensor with the Hugging Face name `name` if torchtitan permutes its rows; else 0."""
    if config.family != "llama":
        return 0
    module = name.rpartition(".")[0].rpartition(".")[2]
    return {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(module, 0)


def to_titan(value: Tensor, num_heads: int) -> Tensor:
    """Permute rows from RoPE pairs in halves (N 2 D/2, H) to adjacent pairs (N D/2 2, H); 0 heads: unchanged."""
    rows = value.reshape(num_heads, 2, -1, value.shape[-1]) if num_heads else value  # (N, 2, D/2, H)
    return rows.transpose(1, 2).flatten(0, 2) if num_heads else value


def from_titan(value: Tensor, num_heads: int) -> Tensor:
    rows = value.reshape(num_heads, -1, 2, value.shape[-1]) if num_heads else value  # (N, D/2, 2, H)
    return rows.transpose(1, 2).flatten(0, 2) if num_heads else value


def model_names(names: Collection[str], where: str) -> tuple[str, dict[str, str]]:
    """Find the model among the `names` of the DCP folder `where`. Returns (naming, Hugging Face name -> name).

    Raises `ModelError` if there is no model, or more than one.
    """
    # A model that was saved without its head has short names, without the base prefix; these are the second choice.
    found = next(filter(None, (_embeddings(names, short=short) for short in (False, True))), [])
    if not found:
        raise ModelError(
            f"{where} has no embedding under a name of Hugging Face or torchtitan, but {_some(names)}: save the state "
            "dict of the whole model"
        )
    if len(found) > 1:
        keys = [prefix or "no key" for _, prefix in found]
        raise ModelError(f"{where} has more than one model, under {_some(keys)}: save only the one to load")
    naming, prefix = found[0]
    own = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    own = {name: whole for name, whole in own.items() if not name.startswith(_OTHERS)}
    if naming == TORCHTITAN:
        return naming, _from_titan_names(own)
    if any(name.endswith(NAMES["gpt_neox"].embedding + ".weight") for name in own):
        own = {_IN_FILES.get(name, name): whole for name, whole in own.items()}
    return naming, own


def _embeddings(names: Collection[str], *, short: bool) -> list[tuple[str, str]]:
    bases = {f"{'' if short else each.base}{each.embedding}.weight" for each in NAMES.values()}
    known = [*((HUGGING_FACE, base) for base in sorted(bases)), (TORCHTITAN, _TITAN_ENDS[_EMBEDDING])]
    return [
        (naming, name.removesuffix(embedding))
        for naming, embedding in known
        for name in names
        if name == embedding or name.endswith(f".{embedding}")
    ]


def _from_titan_names(own: Mapping[str, str]) -> dict[str, str]:
    ends = {theirs: ours for ours, theirs in _TITAN_ENDS.items()}
    layer = {theirs: ours for ours, theirs in _TITAN_LAYER.items()}
    found = {}
    for name, whole in own.items():
        plain = name.replace(".attention.qkv_linear.", ".attention.")
        plain = ends.get("output.weight" if plain == "lm_head.weight" else plain, plain)
        parts = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", plain)
        if parts is not None and parts[2] in layer:
            plain = f"model.layers.{parts[1]}.{layer[parts[2]]}.weight"
        found[plain] = whole
    return found


def _some(names: Collection[str], most: int = 3) -> str:
    return ", ".join(printable(name) for name in sorted(names)[:most]) + (" ..." if len(names) > most else "")
