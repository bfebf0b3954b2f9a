"""Rules across the sections of a run. Needs no torch."""

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from terrace.base.errors import ClusterError, ConfigError, ModelError, PlanError, did_you_mean
from terrace.base.words import counted
from terrace.data.config import HOLDOUT
from terrace.data.feeding import MADE_AHEAD
from terrace.model.attention_kernel import AttentionCase, refusal
from terrace.model.balance import BalanceConfig
from terrace.model.block_operations import layer_operations
from terrace.model.facts import (
    has_scalar_head,
    layer_windows,
    longest_row,
    num_further_tokens,
    refuse_non_causal,
    rope_limit,
)
from terrace.model.hf.keys import NEXTN
from terrace.model.part_kernel import PARTS, Part, PartsCase, left_to_torch
from terrace.model.part_kernel import refusal as parts_refusal
from terrace.model.spec import BlockSpec
from terrace.plan.balance_rules import check_balance
from terrace.plan.context import is_context_parallel
from terrace.plan.keep_rules import check_clip, kept_in
from terrace.plan.members import boundary_formats, check_new_formats, check_new_shares, with_shared_size
from terrace.plan.pruning import NO_PRUNING, check_pruning
from terrace.plan.routes import lossy_messages
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.train.config import RunConfig, parse_sections
from terrace.train.keys import AUTO, TrainConfig
from terrace.train.planned import num_machines
from terrace.train.teacher import check_teacher
from terrace.train.teacher_keys import DISTILL

NUMBERS = ("micro_batch", "unit")  # of a plan, chosen where it leaves them out


def checked_run(table: Mapping[str, Any]) -> RunConfig:
    """Builds and checks a run from its whole table; numbers that its plan leaves out take the defaults of `Plan`.

    If the run trains on pairs, a micro-batch holds at least one pair. Raises the `TerraceError` of the first mistake.
    """
    run, free = parse_sections(table), free_numbers(table)
    if run.plan.shares and "micro_batch" not in table["plan"]:
        run = replace(run, plan=with_shared_size(run.plan, run.layout, run.rows))
    check_run(run)
    return _with_whole_pairs(run, free)


def free_numbers(table: Mapping[str, Any]) -> list[str]:
    """The numbers (micro_batch, unit) that the plan in a run's table leaves open; shares determine the micro-batch."""
    shared = ["micro_batch"] if table["plan"].get("shares") else []
    return [name for name in NUMBERS if name not in (*table["plan"], *shared)]


def check_run(run: RunConfig) -> None:
    """Raises a `TerraceError` where sections, each checked by itself, do not fit together."""
    blocks = run.blocks()
    validate(run.cluster, run.plan, blocks)
    check_objective(run)
    check_teacher(run)
    check_blocks(run, blocks)
    check_elastic(run)
    check_evaluation(run)
    check_attention(run)
    check_kernels(run)
    check_positions(run)
    run.num_micros()
    if 0 < (most := longest_row(run.model)) < run.train.sequence:
        raise ModelError(
            f"train.sequence = {run.train.sequence} is longer than the {most} positions the "
            f"model has: use at most {most}"
        )
    check_balance(run.balance or BalanceConfig(), run.mesh, run.plan, blocks)
    if run.balance is not None and run.balance.bias:
        check_moved(run, blocks)
    lossy = [message.value for message in lossy_messages(run.layout, run.plan)]
    for name in run.train.error_budget:
        if name not in lossy:
            raise ConfigError(
                f"train.error_budget.{name} has no effect: the messages that round in a block format are "
                f"{', '.join(lossy) or 'none'}{did_you_mean(name, lossy)}"
            )
    if run.train.peer_copies and run.plan.outer.has_islands:
        # Every step must end on all ranks before a copy of the next begins, and islands wait for none of their steps.
        raise ConfigError(
            "train.peer_copies = 1 copies a state that all ranks have at once, and islands (plan.outer) go on apart: "
            "leave one of them out; checkpoints on disk hold islands"
        )
    if run.train.checkpoint_every == AUTO:
        check_cadence(run)
    if run.train.follow:
        check_following(run)
    kept_in(run.plan, run.train.keep_folder, "train.keep_folder")
    check_clip(run.plan, run.optimizer.clip)
    if not any(block.num_trainable for block in blocks):
        raise ModelError(f"train.freeze = {list(run.train.freeze)} freezes every parameter: leave something to train")


def check_blocks(run: RunConfig, blocks: Sequence[BlockSpec]) -> None:
    """Raises a `TerraceError` for a section [prune] without effect, or one that the run cannot have."""
    prune = run.prune
    if not prune.is_on and prune != NO_PRUNING:
        raise ConfigError(
            "[prune] has no effect without prune.blocks: give rows and columns of a block, as [16, 16]; to go on "
            "without it, export the run, whose zeros are then weights like others, and begin from that folder (--model)"
        )
    if not prune.is_on:
        return
    if run.lora is not None:
        raise ConfigError("[prune] sets blocks of matrices to zero, and [lora] leaves them as they are: leave one out")
    check_pruning(run.cluster, run.plan, blocks, prune)
    if prune.after >= run.train.steps:
        raise ConfigError(
            f"prune.after = {prune.after} sets no block to zero in train.steps = {run.train.steps}: make it smaller"
        )


def check_cadence(run: RunConfig) -> None:
    """Raises a `TerraceError` where `train.checkpoint_every = "auto"` has nothing to go by."""
    cluster, key = run.cluster, f'train.checkpoint_every = "{AUTO}"'
    if not cluster.failures.are_known:
        raise ConfigError(
            f"{key} needs to know how often parts fail: give the cluster a table [failures] (--cluster.failures."
            "device_hours 50000 --cluster.failures.restart_s 300), or a number of steps"
        )
    if wrong := cluster.failures.restarts_prevail(cluster.world_size, num_machines(cluster)):
        raise ClusterError(wrong)
    if run.plan.outer.has_islands:
        raise ConfigError(
            f"{key} is agreed by all ranks after each save, and islands (plan.outer) go on apart: give a number of "
            "steps"
        )


def check_following(run: RunConfig) -> None:
    """Raises a `TerraceError` where `train.follow = true` cannot deal shares anew, nor choose formats of a pipeline."""
    key, train = "train.follow = true", run.train
    if boundary_formats(run.cluster, run.plan):
        check_new_formats(run.cluster, run.plan, key)
        if train.slow_steps >= train.steps:
            raise ConfigError(
                f"{key} has no effect in train.steps = {train.steps}: links are compared after train.slow_steps = "
                f"{train.slow_steps} first; lower train.slow_steps, raise train.steps, or leave {key} out"
            )
        return
    check_new_shares(run.cluster, run.plan, run.layout, key)
    if is_context_parallel(run.mesh, run.plan):
        raise PlanError(f"{key} deals whole rows, and a context axis divides them: leave one of them out")
    if run.on_pairs:
        raise ConfigError(f'{key} is not implemented for train.objective = "{run.train.objective}": leave it out')
    every = run.plan.outer.every
    first = -(-train.slow_steps // every) * every + MADE_AHEAD  # islands compare where all of them exchange
    if first >= train.steps:
        raise ConfigError(
            f"{key} has no effect in train.steps = {train.steps}: after train.slow_steps = {train.slow_steps}, shares "
            f"could change in step {first + 1} first; lower train.slow_steps, raise train.steps, or leave {key} out"
        )


def check_elastic(run: RunConfig) -> None:
    """Raises a `TerraceError` for a run that cannot be an island of a roster, and for wrong keys of `[elastic]`."""
    run.elastic.check()
    if not run.elastic.meet:
        return
    here = "a run with --meet is one island of a roster"
    if run.plan.outer.has_islands:
        raise PlanError(f"{here}, and its plan has islands of its own: leave plan.outer out, for the keys of [elastic]")
    if run.train.epochs:
        raise ConfigError(f"{here}, which takes its steps with others: give train.steps in place of train.epochs")
    if run.plan.shares:
        raise PlanError(f"{here}, which deals shares anew at every exchange: leave plan.shares out")
    if run.train.follow:
        raise ConfigError(f"{here}, which deals shares anew at every exchange: leave train.follow out")
    if run.prune != NO_PRUNING:
        raise ConfigError(f"{here}, and [prune] is not implemented for them: leave it out")
    if is_context_parallel(run.mesh, run.plan):
        raise PlanError(f"{here}, whose batch is dealt in whole rows: leave out the context axis and balance")
    if run.layout.span(run.layout.optimizer) < run.layout.degree:
        raise PlanError(
            f"{here}, and optimizer = {run.plan.optimizer!r} keeps several copies of its states in it, which would all "
            "cross the slow link: shard them over the island (zero1, zero3, three-level)"
        )
    if run.plan.keep.is_below:
        raise PlanError(f"{here}, whose states must be on the device: leave plan.keep out")
    if MessageClass.OUTER.value in run.plan.wire:
        raise PlanError(f"{here}, whose exchanges are in plan.sums: leave plan.wire.outer out")
    if run.train.objective == DISTILL or run.on_pairs:
        raise ConfigError(f'{here}, and train.objective = "{run.train.objective}" is not implemented for them')
    if run.train.peer_copies:
        raise ConfigError(f"{here}, and other islands have the copies: leave train.peer_copies out")
    if run.train.checkpoint_every == AUTO:
        raise ConfigError(f'train.checkpoint_every = "{AUTO}" is not implemented for a roster: give a number of steps')
    if run.balance is not None and (run.balance.bias or run.balance.step):
        raise ConfigError(f"{here}, and balance.bias and balance.step count the tokens of all ranks: leave them out")


def attention_case(run: RunConfig, backend: str) -> AttentionCase:
    """The attention inputs of a run's layers on devices of type `backend`."""
    core = layer_operations(run.model).core
    is_cut = run.has_documents or any(0 < window < run.train.sequence for window in layer_windows(run.model))
    return AttentionCase(backend, run.plan.compute, core.head_dim, core.is_grouped, is_cut, core.cap > 0)


def check_positions(run: RunConfig) -> None:
    """Raises `ConfigError` if RoPE depends on the longest row of the batch, but rows are packed or divided by a context
    axis.
    """
    limit, sequence = rope_limit(run.model), run.train.sequence
    if not 0 < limit < sequence:
        return
    spread = is_context_parallel(run.mesh, run.plan)
    if run.has_documents or spread:
        why = "a context axis divides rows" if spread else "rows hold several documents"
        raise ConfigError(
            f"train.sequence = {sequence}: beyond {limit} positions this model's RoPE depends on the longest row, "
            f"which no rank knows, since {why}: use at most {limit}, or whole rows of one document"
        )


def check_attention(run: RunConfig) -> None:
    """Raises `ConfigError` if the run's devices, dtype or plan do not allow the chosen attention kernel."""
    choice = run.train.attention
    if choice == "auto":
        return
    if is_context_parallel(run.mesh, run.plan):
        raise ConfigError(
            f"train.attention = {choice!r} has no effect where ranks attend together (a context axis, or balance = "
            '"cost"), with kernels of their own: leave train.attention out'
        )
    if reason := refusal(choice, attention_case(run, run.cluster.device.type)):
        raise ConfigError(f"train.attention = {choice!r} cannot serve: {reason}; leave train.attention out")


def parts_case(run: RunConfig, backend: str) -> PartsCase:
    """The facts that decide which kernels can run the parts of blocks between matrix products."""
    mesh = run.mesh
    return PartsCase(
        run.model, backend, run.plan.compute, mesh.total("rows"), mesh.total("columns"), run.train.objective
    )


def check_kernels(run: RunConfig) -> None:
    """Raises `ConfigError` if the run's devices, dtype or model do not allow `train.kernels`."""
    if run.train.kernels == "torch":
        return
    if reason := parts_refusal(parts_case(run, run.cluster.device.type)):
        raise ConfigError(f"train.kernels = {run.train.kernels!r} cannot serve: {reason}; leave train.kernels out")


def parts_of(run: RunConfig) -> list[Part]:
    """The parts of a run's blocks that run in liger-kernel's kernels."""
    if run.train.kernels == "torch":
        return []
    left = left_to_torch(parts_case(run, run.cluster.device.type))
    return [part for part in PARTS if part not in left]


def parts_words(run: RunConfig) -> str:
    """A line on the parts that run in liger-kernel's kernels and the reason for each other part; "" if none do."""
    if run.train.kernels == "torch":
        return ""
    left = left_to_torch(parts_case(run, run.cluster.device.type))
    served = ", ".join(parts_of(run))
    others = "".join(f"; {part} by torch: {reason}" for part, reason in left.items())
    return f"kernels of liger-kernel: {served}{others}"


def check_moved(run: RunConfig, blocks: Sequence[BlockSpec]) -> None:
    """Raises `ConfigError` if `balance.bias` would move a router bias that the run does not train."""
    if run.lora is not None:
        raise ConfigError(
            "balance.bias moves a bias of the base model, and [lora] leaves the base as it is: leave one of them out"
        )
    moved = [f"{block.name}.{param.name}" for block in blocks for param in block.params if param.is_expert_bias]
    for pattern in run.train.freeze:
        if found := fnmatch.filter(moved, pattern):
            raise ConfigError(
                f"balance.bias moves {found[0]}, and train.freeze pattern {pattern!r} names it: leave balance.bias "
                "out, or freeze other parameters"
            )


def check_evaluation(run: RunConfig) -> None:
    """Raises `ConfigError` for evaluation keys without effect, and `ModelError` for a model that cannot be
    evaluated.
    """
    train, names = run.train, [*([HOLDOUT] if run.data.holdout else []), *run.data.eval]
    if not train.eval_every:
        if run.data.eval:
            raise ConfigError("data.eval has no effect: train.eval_every = 0; set it to a number of steps")
        for key in ("keep_best", "eval_batches"):
            if getattr(train, key) != getattr(TrainConfig, key):
                raise ConfigError(f"train.{key} has no effect: train.eval_every = 0; set it to a number of steps")
        return
    if run.on_pairs:
        raise ConfigError(
            f"train.eval_every = {train.eval_every} evaluates the prediction of tokens, and train.objective = "
            f"{train.objective!r} trains on pairs: leave it out"
        )
    if not names:
        raise ConfigError(
            f"train.eval_every = {train.eval_every}, but there is nothing to evaluate: hold out a part of the data "
            "(data.holdout = 0.01), or name other data (data.eval.NAME = PATH)"
        )
    if train.keep_best and train.keep_best not in names:
        known = did_you_mean(train.keep_best, names)
        raise ConfigError(f"train.keep_best = {train.keep_best!r} names nothing that is evaluated{known}")
    refuse_non_causal(run.model)


def check_objective(run: RunConfig) -> None:
    """Raises a `TerraceError` if the objective does not fit the data, the model or the plan."""
    objective, beta = run.train.objective, run.train.beta
    if not 0 < beta < math.inf:
        raise ConfigError(f"train.beta = {beta} must be positive and finite")
    if objective != "dpo" and beta != type(run.train).beta:
        raise ConfigError(f'train.beta = {beta} has no effect: train.objective = "{objective}", not "dpo"')
    if not 0 < run.train.mtp_loss_weight < math.inf:
        raise ConfigError(
            f"train.mtp_loss_weight = {run.train.mtp_loss_weight} must be positive and finite; to train no layers that "
            f"predict further tokens, give --model.{NEXTN} 0"
        )
    if not num_further_tokens(run.model) and run.train.mtp_loss_weight != type(run.train).mtp_loss_weight:
        raise ConfigError(
            f"train.mtp_loss_weight = {run.train.mtp_loss_weight} has no effect: the model predicts no further tokens; "
            f"name one with {NEXTN}, or leave it out"
        )
    if num_further_tokens(run.model) and objective != "next-token":
        raise ConfigError(
            f"the model predicts {counted(num_further_tokens(run.model), 'further token')}, which train.objective = "
            f'"{objective}" does not train: give --model.{NEXTN} 0'
        )
    has_pairs = any(source.format == "pairs" for source in run.data.sources())
    if has_scalar_head(run.model) and objective != "reward":
        raise ModelError(
            f'the model has one output a token, and train.objective = "{objective}" needs logits: name a model with an '
            'output matrix, or set train.objective = "reward"'
        )
    if run.on_pairs and not has_pairs:
        raise ConfigError(
            f'train.objective = "{objective}" needs pairs: give --data a file of them, with data.format = "pairs"'
        )
    if not run.on_pairs:
        if has_pairs:
            raise ConfigError(
                'data.format = "pairs" needs train.objective = "reward" or "dpo": set one for the preferences of '
                f"{run.data.sources()[0].path}, or give text or conversations"
            )
        return
    degree = run.layout.data_degree
    if run.train.batch % degree:
        raise PlanError(
            f"{counted(run.train.batch, 'pair')} in a step do not divide among {degree} data ranks: make train.batch a "
            f"multiple of {degree}"
        )
    if is_context_parallel(run.mesh, run.plan):
        raise PlanError("pairs need whole rows: leave out the context axis and balance")
    if run.plan.outer.has_islands:
        raise PlanError(f'train.objective = "{objective}" is not implemented for islands: leave plan.outer out')
    if run.balance is not None:
        raise ConfigError(f'[balance] is not implemented for train.objective = "{objective}": leave it out')
    if run.lora is not None and objective == "reward":
        raise ConfigError('[lora] would leave the score of train.objective = "reward" as it began: leave it out')


def _with_whole_pairs(run: RunConfig, free: Collection[str]) -> RunConfig:
    """For a run on pairs, makes the micro-batch even: 2 if the plan leaves it out (`free`).

    Raises `PlanError` if the plan gives an odd number.
    """
    if not run.on_pairs or run.plan.micro_batch % 2 == 0:
        return run
    if "micro_batch" not in free:
        raise PlanError(
            f"plan.micro_batch = {run.plan.micro_batch} is odd, and both sequences of a pair are in one micro-batch: "
            "make it even, or leave it out"
        )
    return replace(run, plan=replace(run.plan, micro_batch=2))
