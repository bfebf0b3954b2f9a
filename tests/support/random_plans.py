"""Random models, plans, optimizers and batches, drawn by a number, for comparison with the independent reference.

A draw may be refused by validation; `cases` leaves such draws out. Two things have no equal and are never drawn: wire
formats narrower than fp64, and Lion on keys whose bias softmax cancels: such a bias has a gradient of rounding errors
alone, of which Lion would take the sign.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.support.independent import IGNORED, Document

PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "mics", "zero++", "three-level", "three-level-compressed")
TIERS = ("package", "node", "system")
SIZES = ((2,), (4,), (8,), (2, 2), (4, 2), (2, 4), (2, 2, 2), (1, 4), (2, 1, 2))
MOST_IMPORTING = 4  # ranks that may have blocks of `transformers`, whose import takes seconds for each
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 0, "breadth-first": 0, "zb-h1": 1, "zb-h2": 1, "zb-auto:3": 1}
SCHEDULES |= {"zb-1p": 1, "zb-2p": 1, "zbv": 2, "zeropp": 0}  # chunks of a stage; 0: to be chosen
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2")
UNCANCELLED = ("llama", "mistral", "qwen2", "qwen3")  # all dims of a key rotate, so softmax cancels no bias


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents, each (rows, tokens): a document begins where its positions begin again at 0."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor

    def documents(self) -> list[Document]:
        found = []
        for tokens, labels, positions in zip(self.tokens, self.labels, self.positions, strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
            found += [(tokens[start:end], labels[start:end]) for start, end in pairwise(starts)]
        return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random training run. `own` is whether the blocks are Terrace's own, else the modules of `transformers`."""

    seed: int
    own: bool
    family: str
    model: Mapping[str, Any]
    sizes: tuple[int, ...]
    plan: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    lrs: tuple[float, ...]
    num_micros: int
    batch: int
    sequence: int
    packed: bool
    frozen: tuple[str, ...]

    @property
    def has_experts(self) -> bool:
        return "num_experts_per_tok" in self.model

    def trains(self, name: str) -> bool:
        """Whether the parameter of this name in a Hugging Face folder is trained."""
        return not any(fnmatch(name, pattern) for pattern in self.frozen)

    def kinds(self) -> set[str]:
        """Axes of more than one rank, and the other choices that this case has, in words."""
        plan, model, rope = self.plan, self.model, self.model.get("rope_parameters", {})
        found = {f"{math.prod(self.sizes)} ranks", f"family {self.family}", f"optimizer {self.optimizer['name']}"}
        for tier, size in zip(TIERS, self.sizes, strict=False):
            for axis, degree in plan["mapping"].get(tier, {"data": size}).items():
                degrees = degree if isinstance(degree, dict) else {axis: degree}
                found |= {factor for factor, number in degrees.items() if number > 1}
        choices = {
            f"preset {plan.get('preset')}": "preset" in plan,
            f"schedule {plan.get('schedule', '').partition(':')[0]}": "schedule" in plan,
            f"balance {plan.get('balance')}": "balance" in plan,
            f"rope {rope.get('rope_type')}": bool(rope),
            "blocks of transformers": not self.own,
            "uneven stages": len(set(plan.get("stages", ()))) > 1,
            "secondary copy": "params_backward" in plan
            or (plan.get("preset") == "zero++" and len(self.sizes) > 2),  # else no tier is outside the node
            "recomputed": bool(plan["recompute"]),
            "prefetched": plan["prefetch"] > 0,
            "accumulated": self.num_micros > 1,
            "units": min(plan["unit"], self.num_micros) > 1,
            "packed": self.packed,
            "frozen": bool(self.frozen),
            "tied": model["tie_word_embeddings"],
            "biases": bool(model.get("attention_bias") or model.get("mlp_bias")) or self.family in ("qwen2", "gpt2"),
            "grouped heads": model.get("num_key_value_heads", 0) not in (0, model.get("num_attention_heads")),
            "window": bool(model.get("sliding_window")),
        }
        return found | {name for name, chosen in choices.items() if chosen}

    def batches(self) -> list[Batch]:
        return [self._batch(step) for step in range(len(self.lrs))]

    def _batch(self, step: int) -> Batch:
        random = Random(f"batch {self.seed} {step}")
        vocabulary = self.model["vocab_size"]
        tokens = torch.tensor([[random.randrange(vocabulary) for _ in range(self.sequence)] for _ in range(self.batch)])
        labels, positions = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
        for row in range(self.batch):
            start = 0
            while start < self.sequence:
                most = self.sequence - start
                # one document always trains: without, gradients would be rounding errors, which AdamW would magnify
                trains = start + row == 0
                length = random.randint(6 if trains else 1, most) if self.packed else most
                end = start + length
                positions[row, start:end] = torch.arange(length)
                labels[row, start : end - 1] = tokens[row, start + 1 : end]
                if not trains:  # the beginning of a document may be a prompt, or all of it
                    labels[row, start : start + random.choice((0, 0, length // 3, length))] = IGNORED
                start = end
        return Batch(tokens, labels, positions)


def draw(seed: int) -> Case:
    """The case of a number, as it was drawn: its plan may be one that validation refuses."""
    random = Random(seed)
    own = random.random() < 0.75
    family, model = _model(random)
    sizes = random.choice([sizes for sizes in SIZES if own or math.prod(sizes) <= MOST_IMPORTING])
    mapping = {tier: _row(random, size, own) for tier, size in zip(TIERS, sizes, strict=False) if random.random() < 0.8}
    plan = _plan(random, sizes, mapping, _num_layers(model) + 2, own)
    num_micros = random.randint(1, 5)
    optimizer = _optimizer(random, family)
    return Case(
        seed=seed,
        own=own,
        family=family,
        model=model,
        sizes=sizes,
        plan=plan,
        optimizer=optimizer,
        lrs=tuple(random.choice((0.003, 0.01, 0.02)) for _ in range(3)),
        num_micros=num_micros,
        batch=num_micros * plan["micro_batch"] * _num_data_ranks(sizes, mapping),
        sequence=random.choice((7, 8, 12, 16, 17)),
        packed=random.random() < 0.6,
        frozen=random.choice(
            ((), (), (), ("*norm*", "*ln_*"), ("*mlp*",), ("*embed_tokens*", "*embed_in*", "*wte*", "*wpe*"))
        ),
    )


def _num_data_ranks(sizes: Sequence[int], mapping: Mapping[str, Any]) -> int:
    count = 1
    for tier, size in zip(TIERS, sizes, strict=False):
        row = mapping.get(tier, {"data": size})
        tensor = row.get("tensor", 1)
        # depth is the data axis with weights sharded over it
        count *= row.get("data", 1) * (tensor.get("depth", 1) if isinstance(tensor, dict) else 1)
    return count


def _row(random: Random, size: int, own: bool) -> dict[str, Any]:
    """Degrees of a tier: its prime factors (all of them 2), each given to an axis."""
    row: dict[str, Any] = {}
    while size > 1:
        size //= 2
        axis = random.choice(("data", "tensor", "context", "pipeline", "pipeline") if own else ("data", "pipeline"))
        factor = {
            "tensor": random.choice(("rows", "rows", "columns", "depth")),
            "context": random.choice(("ring", "ulysses")),
        }
        if axis in factor:
            row.setdefault(axis, {})
            row[axis][factor[axis]] = 2 * row[axis].get(factor[axis], 1)
        else:
            row[axis] = 2 * row.get(axis, 1)
    return row


def _plan(random: Random, sizes: Sequence[int], mapping: dict[str, Any], num_blocks: int, own: bool) -> dict[str, Any]:
    tiers = TIERS[: len(sizes)]
    plan: dict[str, Any] = {
        "mapping": mapping,
        "compute": "fp64",
        "master": "fp64",
        "micro_batch": random.randint(1, 2),
        "unit": random.randint(1, 4),
        "prefetch": random.randint(0, 3),
        "recompute": random.choice(([], [], ["*"], ["layers.*"], ["layers.1", "head"]) if own else ([], [], ["*"])),
    }
    if random.random() < 0.7:
        plan["preset"] = random.choice(PRESETS)
    else:
        places = sorted(random.choices(range(len(tiers) + 1), k=3))
        names = ("device", *tiers)
        plan |= {state: names[place] for state, place in zip(("params", "grads", "optimizer"), places, strict=True)}
        if places[0] > 1 and random.random() < 0.5:
            plan["params_backward"] = names[random.randint(1, places[0] - 1)]
    tensor = [row.get("tensor", {}) for row in mapping.values()]
    if any(tensor):
        plan["sequence_parallel"] = random.random() < 0.7
    if plan.get("sequence_parallel") and any("rows" in each for each in tensor):
        plan["tensor_chunks"] = random.randint(1, 3)
    stages = math.prod(row.get("pipeline", 1) for row in mapping.values())
    if stages > 1:
        plan |= _pipeline(random, stages, num_blocks)
    return plan


def _pipeline(random: Random, stages: int, num_blocks: int) -> dict[str, Any]:
    name = random.choice(sorted(SCHEDULES))
    chunks = SCHEDULES[name] or random.randint(1 if name == "zeropp" else 2, 3)
    found: dict[str, Any] = {"schedule": name if SCHEDULES[name] else f"{name}:{chunks}"}
    virtual = stages * chunks
    if virtual <= num_blocks and random.random() < 0.7:  # uneven on purpose
        cuts = [0, *sorted(random.sample(range(1, num_blocks), virtual - 1)), num_blocks]
        found["stages"] = [end - start for start, end in pairwise(cuts)]
    return found


def _optimizer(random: Random, family: str) -> dict[str, Any]:
    name = random.choice(("adamw", "lion" if family in UNCANCELLED else "adamw", "muon"))
    table = {
        "name": name,
        "beta1": random.choice((0.8, 0.9)),
        "beta2": random.choice((0.95, 0.99)),
        "weight_decay": random.choice((0.0, 0.1, 0.5)),
        "clip": random.choice((0.0, 0.1, 1.0, 100.0)),
    }
    if name != "lion":
        table["eps"] = random.choice((1e-8, 1e-4))
    if name == "muon":
        table |= {"momentum": random.choice((0.9, 0.95)), "newton_schulz_steps": random.randint(1, 6)}
    return table


def _num_layers(model: Mapping[str, Any]) -> int:
    return int(model["n_layer"] if "n_layer" in model else model["num_hidden_layers"])


def _model(random: Random) -> tuple[str, dict[str, Any]]:
    family = random.choice(FAMILIES)
    heads, groups = random.choice(((4, 4), (4, 2), (4, 1), (8, 4), (2, 2)))
    size, layers = random.choice((4, 6)), random.randint(2, 6)
    vocabulary, tied = random.choice((16, 23, 40)), random.random() < 0.5
    if family == "gpt2":
        table: dict[str, Any] = {
            "n_embd": heads * size,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": 24,
            "n_inner": 20,
        }
        table |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        return family, table | {"vocab_size": vocabulary, "tie_word_embeddings": tied, "initializer_range": 0.2}
    model: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": heads * size,
        "intermediate_size": random.choice((18, 24)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "rope_parameters": _rope(random, family, size),
    }
    if family == "gpt_neox":
        return family, model | {"use_parallel_residual": random.random() < 0.5, "attention_bias": random.random() < 0.7}
    model |= {"num_key_value_heads": groups, "rms_norm_eps": random.choice((1e-6, 1e-5))}
    if family == "llama":
        model |= {"attention_bias": random.random() < 0.4, "mlp_bias": random.random() < 0.4}
    if family in ("llama", "mistral", "qwen3"):
        model["head_dim"] = random.choice((size, 8))
    window = random.choice((None, 3, 5))
    if family == "mistral":
        model["sliding_window"] = window
    elif family != "llama" and window:
        model |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return family, model


def _rope(random: Random, family: str, size: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": random.choice((100.0, 10000.0))}
    if family == "gpt_neox":
        return rope | {"partial_rotary_factor": random.choice((0.5, 1.0)) if size % 4 == 0 else 1.0}
    kind = random.choice(("default", "linear", "llama3"))
    if kind == "linear":
        return rope | {"rope_type": kind, "factor": 4.0}
    if kind == "llama3":
        factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return rope | factors | {"rope_type": kind, "original_max_position_embeddings": 16}
    return rope
