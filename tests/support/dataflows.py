"""Small dataflows and placements of roles."""

from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.config import ModelConfig, parse_model
from terrace.plan.plan import Plan
from terrace.rl.placement.dataflow import Dataflow, ppo
from terrace.rl.placement.placement import PlacedRole, Pool, RolePlacement


def llama(
    hidden_size: int = 4096, num_layers: int = 32, num_heads: int = 32, intermediate_size: int = 11008
) -> ModelConfig:
    """A model with Llama's layers; by default Llama 2's with 7B parameters (2307.09288)."""
    return parse_model(
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "intermediate_size": intermediate_size,
            "hidden_act": "silu",
        }
    )


def small() -> ModelConfig:
    """A fraction of a billion parameters."""
    return llama(1024, 12, 8, 2816)


def nodes(count: int) -> Cluster:
    """Nodes of eight A100."""
    return load_cluster("dgx-a100").resized(count)


def ppo_flow(model: ModelConfig, prompts: int = 64, *, standalone: bool = False, updates: int = 4) -> Dataflow:
    """PPO of four models of one size, and a role that generates for the actor if `standalone`."""
    return Dataflow(
        roles=ppo(model, model, model, standalone=standalone),
        prompts=prompts,
        prompt_tokens=256,
        response_tokens=256,
        updates=updates,
    )


def plan(tensor: int = 1, place: str = "device", micro_batch: int = 1) -> Plan:
    """A plan in bf16 with tensor ranks in a node, all states on one tier."""
    mapping = {"node": {"tensor": tensor, "data": 8 // tensor}} if tensor > 1 else {}
    return Plan(params=place, grads=place, optimizer=place, mapping=mapping, compute="bf16", micro_batch=micro_batch)


def together(devices: int, own: Plan, rows: int = 1) -> RolePlacement:
    """All roles of `ppo_flow` on one pool, under one plan."""
    roles = [PlacedRole(name="actor", plan=own, rows=rows)]
    roles += [PlacedRole(name=name, plan=own) for name in ("reference", "critic", "reward")]
    return RolePlacement(pools=(Pool(devices=devices, roles=tuple(roles)),))


def apart(first: int, second: int, own: Plan, rows: int = 1) -> RolePlacement:
    """Actor and reference of `ppo_flow` on one pool, critic and reward on another."""
    actor, reference, critic, reward = together(first, own, rows).pools[0].roles
    return RolePlacement(
        pools=(Pool(devices=first, roles=(actor, reference)), Pool(devices=second, roles=(critic, reward)))
    )
