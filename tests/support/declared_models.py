"""Declared models of `transformers` on the ranks of a pool, and in one process."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import terrace
from terrace.launch.start import World
from terrace.model.decoder import token_loss
from tests.support.families import Wide, randomise, transformers
from tests.support.toys import cluster_of

SEQUENCE, VOCAB, STEPS = 12, 61, 3
DIMS = {
    "*embed_tokens.weight": ("vocab", "hidden"),
    "lm_head.weight": ("vocab", "hidden"),
    "*.q_proj.weight": ("heads", "hidden"),
    "*.k_proj.weight": ("kv_heads", "hidden"),
    "*.v_proj.weight": ("kv_heads", "hidden"),
    "*.o_proj.weight": ("hidden", "heads"),
    "*.q_proj.bias": ("heads",),
    "*.[kv]_proj.bias": ("kv_heads",),
    "*.gate_proj.weight": ("intermediate", "hidden"),
    "*.up_proj.weight": ("intermediate", "hidden"),
    "*.down_proj.weight": ("hidden", "intermediate"),
    "*layernorm.weight": ("hidden",),
    "model.norm.weight": ("hidden",),
    "*.[qk]_norm.weight": ("head_dim",),
}
_SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 40}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "num_key_value_heads": 2},
    "qwen3, tied": _SIZES
    | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "qwen2, 1 kv head": _SIZES | {"model_type": "qwen2", "num_key_value_heads": 1},
    "olmo2, norms of all heads": _SIZES | {"model_type": "olmo2", "num_key_value_heads": 2, "pad_token_id": None},
    "mistral, window": _SIZES | {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 5},
}


@dataclass(frozen=True)
class Declared:
    """A run of the trainer; `plan` None: one process, without a declaration."""

    model: str
    sizes: tuple[int, ...] = (1,)
    plan: Any = None
    packed: bool = False


def model_of(name: str) -> Any:
    """A model in fp64, whose rotary tables are fp64 too while `Wide` is on."""
    config = transformers.AutoConfig.for_model(**MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    randomise(model.parameters())
    return model


def declaration_of(name: str) -> "terrace.Declaration":
    """The declaration of a model."""
    table, dims = MODELS[name], DIMS
    if "norms of all heads" in name:
        dims = {key: value for key, value in DIMS.items() if key != "*.[qk]_norm.weight"}
        dims |= {"*.q_norm.weight": ("heads",), "*.k_norm.weight": ("kv_heads",)}
    return terrace.Declaration(heads=table["num_attention_heads"], kv_heads=table["num_key_value_heads"], dims=dims)


def batch_of(step: int, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, labels, and positions of two documents in each row."""
    tokens = torch.randint(0, VOCAB, (4, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    labels[0, :3] = -100
    places = torch.arange(SEQUENCE).expand(4, SEQUENCE)
    return tokens[:, :-1], labels, torch.where(places < 5, places, places - 5) if packed else None


def trained(case: Declared) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms, parameters."""
    with Wide():
        model = model_of(case.model)
        blocks = terrace.blocks_of(model, None if case.plan is None else declaration_of(case.model))
        options: dict[str, Any] = {"loss": token_loss, "lr": 1e-2, "predict": False, "say": lambda line: None}
        options |= {"cluster": cluster_of(*case.sizes), "activation": (SEQUENCE, 24)}
        losses, norms = [], []
        with terrace.Trainer(blocks, plan=case.plan or "ddp", **options) as trainer:
            for step in range(STEPS):
                result = trainer.step(*batch_of(step, case.packed))
                losses.append(result.loss)
                norms.append(result.grad_norm)
            trainer.engine.check_bytes()
            found = trainer.state_dict()
            if "tensor" not in str(case.plan):  # which replaces the model's modules
                trainer.unload()
                assert all(torch.equal(param, found[name]) for name, param in model.named_parameters())
            return losses, norms, found


def train_on_ranks(world: World, cases: list[Declared]) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    """The cases on this rank."""
    return [trained(case) for case in cases]


def alone(case: Declared) -> Declared:
    """The same in one process, by the model's own attention."""
    return replace(case, sizes=(1,), plan=None)
