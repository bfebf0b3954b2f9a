"""Ranks of another program: a model of `transformers` under FSDP2, whose checkpoints are DCP folders."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard

from terrace.launch.start import World
from tests.support.families import TOKENS, Wide, randomise, transformers

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@contextmanager
def group(world: World) -> Iterator[None]:
    """torch's default group, as such a program has it."""
    own = not dist.is_initialized()
    if own:
        store = PrefixStore("dcp", world.store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
    try:
        yield
    finally:
        if own:
            dist.destroy_process_group()


def sharded(table: dict[str, Any], world: World) -> Any:
    """A model in fp64 with random values, sharded layer by layer."""
    config = transformers.AutoConfig.for_model(**table)
    with Wide():  # of the frequencies, too
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    randomise(model.parameters())
    mesh = init_device_mesh("cpu", (world.world_size,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no averages
    return model


def adamw(model: Any) -> torch.optim.AdamW:
    """Matrices decay, norms do not, as in Terrace. All settings differ from those that a checkpoint has."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    norms = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.7}, {"params": norms, "weight_decay": 0.6}]
    return torch.optim.AdamW(groups, lr=0.5, betas=(0.1, 0.2), eps=0.3)


def stepped(model: Any, optimizer: torch.optim.AdamW, inputs: Tensor, labels: Tensor, world: World) -> None:
    """One step on this rank's rows of a batch."""
    rows = slice(world.rank, None, world.world_size)
    with Wide():
        logits = model(inputs[rows]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def whole(table: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, gathered."""
    found = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in table.items()}
    return {name: value.detach().clone() for name, value in found.items() if isinstance(value, Tensor)}


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Logits in fp64."""
    with Wide():
        logits: Tensor = model(tokens).logits
    return logits


def saves(world: World, folder: str, table: dict[str, Any]) -> Tensor:
    """Train a step, save model and optimizer, and return the logits of the saved model."""
    with group(world):
        model = sharded(table, world)
        optimizer = adamw(model)
        stepped(model, optimizer, TOKENS[:2, :-1], TOKENS[:2, 1:], world)
        state: Any = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
            "steps": 1,
        }
        save(state, checkpoint_id=folder)
        return logits_of(model, TOKENS)


def loads(
    world: World, folder: str, table: dict[str, Any], inputs: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], list[dict[str, Any]]]:
    """Load a folder and train a step: logits and states as loaded, parameters after it, and the optimizer's groups."""
    with group(world):
        model = sharded(table, world)
        optimizer = adamw(model)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # adds the key that schedules have
        state: Any = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        }
        load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
        states = whole(get_optimizer_state_dict(model, optimizer, options=FLAT))
        logits = logits_of(model, inputs)
        model.reshard()  # which FSDP2 leaves to the backward pass
        groups = [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
        stepped(model, optimizer, inputs, labels, world)
        return logits, states, whole(get_model_state_dict(model)), groups
