"""Plain formulas of optimizers on whole parameters, and a training run with them in one process."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from terrace.runtime.settings import OptimizerConfig
from tests.support.parity import Outcome, flatten
from tests.support.projected_reference import Galore, Lsp
from tests.support.toys import MODELS, count_tokens, make_batch, run_blocks

Rule = Callable[[Tensor, Tensor, dict[str, Tensor], OptimizerConfig, int], None]

PROJECTED = ("galore", "lsp")
NUM_STEPS = 4


def plain_newton_schulz(g: Tensor, num_steps: int = 5) -> Tensor:
    """As Jordan writes it down, for the transposed of a tall matrix."""
    x: Tensor = (g.T if g.shape[0] > g.shape[1] else g) / (g.norm() + 1e-7)
    for _ in range(num_steps):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def lion_step(p: Tensor, g: Tensor, state: dict[str, Tensor], config: OptimizerConfig, step: int) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    decay = config.weight_decay if p.dim() >= 2 else 0.0
    p -= config.lr * (torch.sign(config.beta1 * m + (1 - config.beta1) * g) + decay * p)
    m.copy_(config.beta2 * m + (1 - config.beta2) * g)


def each_part(rule: Rule, p: Tensor, g: Tensor, state: dict[str, Any], config: OptimizerConfig, step: int) -> None:
    """A rule for one part of a stack, applied to every part."""
    for part, (value, gradient) in enumerate(zip(p, g, strict=True)):
        rule(value, gradient, state.setdefault(str(part), {"name": state["name"], "part": part}), config, step)


def muon_step(p: Tensor, g: Tensor, state: dict[str, Tensor], config: OptimizerConfig, step: int) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    momentum = config.momentum_or_default
    m.copy_(momentum * m + g)
    direction = plain_newton_schulz(g + momentum * m)
    p -= config.lr * (0.2 * max(p.shape) ** 0.5 * direction + config.weight_decay * p)


def projected_step(p: Tensor, g: Tensor, state: dict[str, Any], config: OptimizerConfig, step: int) -> None:
    rule = state.setdefault("rule", (Galore if config.name == "galore" else Lsp)(config))
    direction = torch.from_numpy(rule.direction(g.numpy(), f"{state['name']}%{state.get('part', 0)}", step))
    scale = config.scale or (0.25 if config.name == "galore" else 1.0)
    p -= config.lr * (scale * direction + config.weight_decay * p)


def sgd_step(p: Tensor, g: Tensor, state: dict[str, Any], config: OptimizerConfig, step: int) -> None:
    """torch's; its weight decay is coupled, which without momentum is the decoupled one."""
    decay, momentum = config.weight_decay if p.dim() >= 2 else 0.0, config.momentum_or_default
    if "torch" not in state:
        coupled = 0.0 if momentum else decay
        state["torch"] = torch.optim.SGD([p], lr=config.lr, momentum=momentum, weight_decay=coupled)
    if momentum:
        p *= 1 - config.lr * decay
    (group,) = state["torch"].param_groups
    group["params"][0].grad = g
    state["torch"].step()


def own_step(p: Tensor, g: Tensor, state: dict[str, Any], config: OptimizerConfig, step: int) -> None:
    """A class of torch on one parameter."""
    if "torch" not in state:
        decay = {"weight_decay": config.arguments.get("weight_decay", 0.0) if p.dim() >= 2 else 0.0}
        kind = getattr(torch.optim, config.name.partition(":")[2])
        state["torch"] = kind([p], lr=config.lr, **{**config.arguments, **decay})
    (group,) = state["torch"].param_groups
    group["params"][0].grad = g
    state["torch"].step()


def adamw_step(p: Tensor, g: Tensor, state: dict[str, Tensor], config: OptimizerConfig, step: int) -> None:
    m, v = (state.setdefault(name, torch.zeros_like(p)) for name in ("m", "v"))
    m.copy_(config.beta1 * m + (1 - config.beta1) * g)
    v.copy_(config.beta2 * v + (1 - config.beta2) * g * g)
    lr = config.adamw_lr if config.adamw_lr is not None else config.lr
    decay = config.weight_decay if p.dim() >= 2 else 0.0
    scale = m / (1 - config.beta1**step) / ((v / (1 - config.beta2**step)).sqrt() + config.eps)
    p -= lr * (scale + decay * p)


@cache
def serial(model_name: str, batch: int, optimizer: OptimizerConfig) -> Outcome:
    """Train on whole batches in this process, with the formulas of the papers."""
    return train(model_name, batch, optimizer, run_blocks)


def train(
    model_name: str,
    batch: int,
    optimizer: OptimizerConfig,
    logits_of: Callable[[Sequence[nn.Module], Tensor], Tensor],
    after: Callable[[Sequence[nn.Module]], None] = lambda blocks: None,
) -> Outcome:
    """As `serial`, with logits (B, S, V) by a function of blocks and tokens, and a call `after` each update."""
    model = MODELS[model_name]
    blocks = model.blocks(torch.float64)
    stacks = {(spec.name, param.name) for spec in model.declared for param in spec.params if param.is_stack}
    rules: dict[nn.Parameter, Any] = {}
    names: dict[nn.Parameter, str] = {}
    of_matrices = projected_step if optimizer.name in PROJECTED else muon_step
    for index, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            is_stack = bool(model.declared) and (model.declared[index].name, name) in stacks
            inner = 0 < index < len(blocks) - 1 and parameter.dim() - is_stack == 2
            of_all = own_step if optimizer.is_own else of_matrices if inner else adamw_step
            rule = {"adamw": adamw_step, "lion": lion_step, "sgd": sgd_step}.get(optimizer.name, of_all)
            names.setdefault(parameter, f"block.{index}.{name}")
            rules.setdefault(parameter, partial(each_part, rule) if is_stack else rule)
    trained = [parameter for parameter in rules if parameter.requires_grad]
    states: dict[nn.Parameter, dict[str, Any]] = {parameter: {"name": names[parameter]} for parameter in trained}
    losses, norms = [], []
    for step in range(NUM_STEPS):
        tokens, labels = make_batch(step, batch)
        loss = model.objective(logits_of(blocks, tokens), labels) / count_tokens(labels)
        for parameter in trained:
            parameter.grad = None
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(trained, optimizer.clip)))
        with torch.no_grad():
            for parameter in trained:
                assert parameter.grad is not None
                rules[parameter](parameter.data, parameter.grad, states[parameter], optimizer, step + 1)
            after(blocks)
        losses.append(float(loss.detach()))
    return Outcome(losses, norms, flatten(blocks))
