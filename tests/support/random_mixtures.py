"""Random plans and runs of mixtures of experts, drawn by a number: a drawn case of a dense model, with experts.

Some things have no equal and are never drawn: Lion, and Muon where a token passes one expert of weight 1, would magnify
the rounding errors that are all of a router's gradient where weights sum to 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.support.random_plans import TIERS, Case, draw
from tests.support.random_runs import Run, draw_run

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
GATES = ("softmax", "sigmoid", "noisy", "cosine", "expert_choice")
BALANCE = ("sequence", "z", "bias", "capacity")
_DENSE_ONLY: tuple[str, ...] = ("intermediate_size", "head_dim", "mlp_bias", "attention_bias", "use_parallel_residual")
_DENSE_ONLY += ("sliding_window", "use_sliding_window", "max_window_layers", "n_inner", "rms_norm_eps")
_HEADS = ("num_attention_heads", "n_head")


def draw_mixture(seed: int) -> Case:
    """The case of a number, as it was drawn: its plan may be one that validation refuses."""
    random = Random(f"mixture {seed}")
    return _with_experts(random, _first(seed, draw), GATES)


def draw_mixture_run(seed: int) -> Run:
    """A run of `terrace train` with experts and a section `[balance]`."""
    random = Random(f"mixture run {seed}")
    runs = (found for found in map(draw_run, range(100 * seed, 100 * seed + 100)) if _can_route(found.case))
    if seed % 2:
        run = next(runs)
    else:  # one whose routers may go by whole sequences
        run = next(each for each in runs if each.documents != "whole" and not _splits_sequences(each.case))
        plan = {**run.case.plan, "balance": "tokens"}
        run = replace(run, case=replace(run.case, plan=plan), documents="join")
    # Gates whose router has the matrix of a folder; a row is one document to the reference where texts are joined.
    gates = ("softmax", "sigmoid", "expert_choice") if run.documents == "join" else ("softmax", "sigmoid")
    case = replace(_with_experts(random, run.case, gates), frozen=())
    names = [name for name in BALANCE if random.random() < 0.8]
    is_whole = run.documents == "join" and not _splits_sequences(case) and case.plan["balance"] == "tokens"
    if not is_whole or gate_of(case.model) == "expert_choice":
        names = [name for name in names if name not in ("sequence", "capacity")]
    if case.family != "glm4_moe":
        names = [name for name in names if name != "bias"]
    factors = {"sequence": 0.02, "z": 0.01, "bias": 0.05, "capacity": random.choice((0.6, 0.9))}
    most = _num_experts(case.model) / case.model["num_experts_per_tok"]
    balance = {name: factors[name] for name in names if name != "capacity" or factors[name] < most}
    return replace(run, case=case, balance=balance)


def mixture_kinds(case: Case) -> set[str]:
    """The choices of a case that are about experts, in words."""
    model, plan, found = case.model, case.plan, set[str]()
    found |= {f"gate {gate_of(model)}", "experts here" if not plan["experts"] else "experts spread"}
    table, chunks = plan["experts"].values(), plan.get("expert_chunks", {})
    choices = {
        "expert ranks": any(row.get("expert", 1) > 1 for row in table),
        "rows of experts": any(row.get("rows", 1) > 1 for row in table),
        "experts on several tiers": len(table) > 1,
        "copies of experts": bool(table)
        and math.prod(d for row in table for d in row.values()) < math.prod(case.sizes),
        "chunks": max(chunks.values(), default=1) > 1,
        "other chunks in a backward": len({*chunks.values()}) > 1,
        "formats of rows": bool({"dispatch", "combine"} & plan.get("wire", {}).keys()),
        "groups of experts": model.get("n_group", 1) > 1,
        "shared expert": case.family in ("qwen2_moe", "glm4_moe"),
        "dense layers": bool(model.get("mlp_only_layers") or model.get("first_k_dense_replace")),
        "all experts": model["num_experts_per_tok"] == _num_experts(model),
        "one expert": model["num_experts_per_tok"] == 1,
        "frozen experts": "*experts*" in case.frozen,
        "weights divided": bool(model.get("norm_topk_prob", case.family in ("mixtral", "glm4_moe"))),
    }
    return found | {name for name, chosen in choices.items() if chosen}


def gate_of(model: Mapping[str, Any]) -> str:
    return "sigmoid" if "n_group" in model else str(model.get("gate", "softmax"))


def _first(seed: int, drawn: Callable[[int], Case]) -> Case:
    return next(case for case in map(drawn, range(1000 * seed, 1000 * seed + 1000)) if _can_route(case))


def _can_route(case: Case) -> bool:
    tensor = [row.get("tensor", {}) for row in case.plan["mapping"].values()]
    is_whole = not any("columns" in each for each in tensor)
    # Lion takes the sign of rounding errors, and heads of 6 do not halve into pairs that rotate.
    return bool(case.own and is_whole and case.optimizer["name"] != "lion" and _head_size(case.model) % 4 == 0)


def _head_size(model: Mapping[str, Any]) -> int:
    hidden, heads = (model.get(one, model.get(other)) for one, other in (("hidden_size", "n_embd"), _HEADS))
    return int(hidden) // int(heads)


def _with_experts(random: Random, case: Case, gates: Sequence[str]) -> Case:
    takes_whole = case.optimizer["name"] == "muon"
    table = _table(random, case)
    plan = {**case.plan, "experts": table} | _messages(random, table)
    if _splits_sequences(case) or case.plan.get("balance") == "cost":
        gates = [gate for gate in gates if gate != "expert_choice"]
    family, model = _model(random, case, table, gates)
    if takes_whole and model["num_experts_per_tok"] == 1:
        model["num_experts_per_tok"] = 2
    frozen = random.choice(((), (), (), ("*norm*",), ("*experts*",), ("*.gate.weight",), ("*embed_tokens*",)))
    packed = case.packed and gate_of(model) != "expert_choice"  # it goes by whole rows
    return replace(case, family=family, model=model, plan=plan, packed=packed, frozen=frozen)


def _splits_sequences(case: Case) -> bool:
    return any("context" in row or "rows" in row.get("tensor", {}) for row in case.plan["mapping"].values())


def _table(random: Random, case: Case) -> dict[str, dict[str, int]]:
    """Degrees of the table `experts`, each of whose factors of 2 is given to rows, to expert or to neither."""
    table: dict[str, dict[str, int]] = {}
    if random.random() < 0.15:
        return table
    for tier, size in zip(TIERS, case.sizes, strict=False):
        left = size // case.plan["mapping"].get(tier, {}).get("pipeline", 1)
        while left > 1:
            left //= 2
            axis = random.choice(("expert", "expert", "rows", ""))
            if axis:
                row = table.setdefault(tier, {})
                row[axis] = 2 * row.get(axis, 1)
    return table


def _messages(random: Random, table: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Chunks and formats of the messages of experts."""
    found: dict[str, Any] = {}
    if table and random.random() < 0.6:
        forward, backward = random.choice(((2, 2), (1, 2), (2, 1), (4, 2), (2, 4), (1, 4), (3, 3)))
        found["expert_chunks"] = {"forward": forward, "backward": backward}
        if sum(map(len, table.values())) > 1 and max(forward, backward) > 2 and random.random() < 0.5:
            found["expert_chunks"]["ahead"] = max(forward, backward) - 1
    wire = {name: dict.fromkeys(table, "fp64") for name in ("dispatch", "combine") if table and random.random() < 0.4}
    return found | ({"wire": wire} if wire else {})


def _model(
    random: Random, case: Case, table: Mapping[str, Mapping[str, int]], gates: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    family = random.choice(FAMILIES)
    expert, rows = (math.prod(row.get(axis, 1) for row in table.values()) for axis in ("expert", "rows"))
    num_experts = expert * random.choice([times for times in (1, 2, 3, 4) if 4 <= expert * times <= 8] or [1])
    per_token = random.choice((1, 2, 2, 3, num_experts))
    inner, dense = rows * random.choice((1, 3) if rows > 2 else (3, 4)), random.choice((18, 24))
    kept = {name: value for name, value in case.model.items() if name not in _DENSE_ONLY}
    old, size = case.model, _head_size(case.model)
    heads = int(old.get("num_attention_heads", old.get("n_head")))
    layers = int(old.get("num_hidden_layers", old.get("n_layer")))
    model: dict[str, Any] = {
        "vocab_size": kept["vocab_size"],
        "tie_word_embeddings": kept["tie_word_embeddings"],
        "initializer_range": 0.2,
        "hidden_size": heads * size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kept.get("num_key_value_heads", heads),
        "max_position_embeddings": 32,
        "rms_norm_eps": random.choice((1e-6, 1e-5)),
        "rope_parameters": {"rope_type": "default", "rope_theta": random.choice((100.0, 10000.0))},
        "num_experts_per_tok": per_token,
    }
    # A dense layer beside those with experts.
    one_dense = layers > 1 and random.random() < 0.4
    if family == "glm4_moe":
        return family, model | _groups(random, num_experts, per_token) | {
            "head_dim": size,
            "intermediate_size": dense,
            "moe_intermediate_size": inner,
            "n_shared_experts": random.choice((1, 2)),
            "routed_scaling_factor": random.choice((1.0, 1.5)),
            "norm_topk_prob": random.random() < 0.7,
            "first_k_dense_replace": int(one_dense),
            "use_qk_norm": random.random() < 0.5,
            "attention_bias": False,
            "rope_parameters": model["rope_parameters"] | {"partial_rotary_factor": random.choice((0.5, 1.0))},
        }
    gate = random.choice(gates)
    model |= {} if gate == "softmax" else {"gate": gate}
    if gate == "cosine":
        model["router_size"] = random.choice((2, 3))
    if family == "mixtral":
        window = random.choice((None, 3, 5))
        return family, model | {"num_local_experts": num_experts, "intermediate_size": inner, "sliding_window": window}
    divides = {"noisy": True, "expert_choice": False}.get(gate, random.random() < 0.5)
    model |= {"num_experts": num_experts, "moe_intermediate_size": inner, "intermediate_size": dense}
    model |= {"norm_topk_prob": divides, "mlp_only_layers": [layers - 1] if one_dense else []}
    if family == "qwen2_moe":
        return family, model | {"shared_expert_intermediate_size": random.choice((6, 8))}
    return family, model | {"head_dim": size, "attention_bias": random.random() < 0.4}


def _groups(random: Random, num_experts: int, per_token: int) -> dict[str, int]:
    """Groups of two experts or more, of which those that are kept have enough for a token."""
    sizes = [number for number in (1, 2, 3, 4) if num_experts % number == 0 and num_experts // number >= 2]
    groups = random.choice(sizes)
    least = -(-per_token * groups // num_experts)
    return {"n_routed_experts": num_experts, "n_group": groups, "topk_group": random.randint(least, groups)}


def _num_experts(model: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next(model[name] for name in names if name in model))
