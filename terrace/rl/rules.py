"""Rules across the sections of a `terrace rl` run, and errors that name the role whose plan they concern."""

from collections.abc import Iterator
from contextlib import contextmanager

from terrace.base.errors import ConfigError, TerraceError
from terrace.model.config import ModelConfig
from terrace.model.facts import vocabulary_size
from terrace.plan.mesh import TENSOR, Mesh
from terrace.rl.config import RlConfig
from terrace.rl.keys import RunKeys
from terrace.rl.placing import ACTOR, ROLLOUT
from terrace.rl.tasks import TASKS
from terrace.train.teacher_keys import check_same_tokens


@contextmanager
def naming(config: RlConfig, role: str) -> Iterator[None]:
    """Prefix errors of the body with `role`, if any role has its own pool or plan."""
    try:
        yield
    except TerraceError as error:
        if not (config.plans or config.pool):
            raise
        raise type(error)(f"role {role}: {error}") from error


def check_sections(config: RlConfig) -> None:
    """Raise a `TerraceError` for sections that contradict each other."""
    if "fp16" in (config.plan.compute, *(plan.compute for plan in config.plans.values())):
        raise ConfigError("plan.compute = 'fp16': losses of token numbers are not scaled; use 'bf16' or 'fp32'")
    for plan in (config.plan, *config.plans.values()):
        if plan.shares:
            raise ConfigError(
                f"plan.shares = {list(plan.shares)} deals the batches of terrace train: learning from feedback deals "
                "its rows evenly, so leave it out"
            )
    algorithm, run = config.algorithm, config.run
    _check_compared(config)
    if algorithm.kl_coefficient and not run.reference:
        raise ConfigError(
            f"algorithm.kl_coefficient = {algorithm.kl_coefficient} needs the reference: leave out run.reference"
        )
    if (config.cost is not None) != algorithm.traits.has_cost:
        raise ConfigError(
            f"[cost] and algorithm.name = {algorithm.name!r}: safe-rlhf needs a [cost], and no other algorithm has one"
        )
    _check_reference(config)
    if not (config.reward or config.environment.name or algorithm.traits.is_distilled):
        raise ConfigError(
            'reward is missing: write [[reward]] for each, with function = "module:function", or [environment]'
        )
    if config.reward and not config.environment.name and not any(reward.weight for reward in config.reward):
        raise ConfigError("every [[reward]] has weight = 0, so all responses count alike: give one of them a weight")
    if algorithm.overlong_window > run.max_response:
        raise ConfigError(
            f"algorithm.overlong_window = {algorithm.overlong_window} is longer than run.max_response = "
            f"{run.max_response}, the longest response: use at most that"
        )
    drawn = run.prompts * run.responses
    if algorithm.kl_target is not None and drawn >= 5 * algorithm.kl_horizon:
        raise ConfigError(
            f"algorithm.kl_horizon = {algorithm.kl_horizon:g}: a step of {drawn} responses could turn the sign of the "
            f"coefficient; it must be above {drawn / 5:g}"
        )
    if algorithm.entropy and any(Mesh.of(config.places[ACTOR].cluster, config.plan).total(axis) > 1 for axis in TENSOR):
        raise ConfigError(
            f"algorithm.entropy = {algorithm.entropy} has no form where a tensor axis cuts the vocabulary: leave it "
            "out, or give the ranks of that axis to another"
        )
    if config.environment.name and config.environment.deadline_s >= run.timeout_s:
        raise ConfigError(
            f"environment.deadline_s = {config.environment.deadline_s:g} must be below run.timeout_s = "
            f"{run.timeout_s:g}, since the call that draws waits for environments: raise run.timeout_s"
        )
    if run.router_replay and run.max_lag:
        raise ConfigError(
            f"run.router_replay keeps the experts of responses that the present weights drew, and run.max_lag = "
            f"{run.max_lag} takes older ones: set one of them to its default"
        )
    if run.router_replay and config.environment.name:
        raise ConfigError(
            "run.router_replay keeps the experts of responses of one turn, and an [environment] answers in between: "
            "leave one of them out"
        )
    _check_servers(config)
    _check_task(run)
    if run.start_steps and not run.task:
        raise ConfigError(f"run.start_steps = {run.start_steps}: only a task has right responses; leave it out")
    if config.is_apart and run.max_lag and len(config.pool[config.places[ROLLOUT].pool].roles) > 1:
        raise ConfigError(
            f"run.max_lag = {run.max_lag} lets the rollout draw while others learn, and the other roles of its pool "
            "would wait for it: give it a pool of its own, or set run.max_lag = 0"
        )


def _check_servers(config: RlConfig) -> None:
    """Raise `ConfigError` for what rollout servers cannot do."""
    run, rollout = config.run, config.rollout
    if not rollout.is_served:
        return
    if run.router_replay:
        raise ConfigError(
            "run.router_replay needs the experts of each token, and rollout servers do not tell them: leave it out, or "
            "rollout.engine = 'http'"
        )
    if run.max_lag > int(config.is_apart):
        raise ConfigError(
            f"run.max_lag = {run.max_lag}: rollout servers return whole responses, so none goes on in another round; "
            "set run.max_lag = 0, or 1 with a [[pool]] of its own for the rollout"
        )
    if config.cluster.world_size > 1 and rollout.deadline_s >= run.timeout_s:
        raise ConfigError(
            f"rollout.deadline_s = {rollout.deadline_s:g} must be below run.timeout_s = {run.timeout_s:g}, of "
            "the call that waits for the responses: lower it, or raise that"
        )


def _check_reference(config: RlConfig) -> None:
    """Raise `ConfigError` or `ModelError` for a reference whose log-probabilities would mean nothing."""
    if config.reference_folder:
        check_same_tokens(config.model, config.reference_model, f"run.reference = {config.reference_folder!r}")
    elif config.algorithm.traits.is_distilled:
        raise ConfigError(
            f"run.reference = {str(config.run.reference).lower()}: algorithm.name = {config.algorithm.name!r} learns "
            "from another model; give its folder, as --run.reference FOLDER"
        )


def _check_compared(config: RlConfig) -> None:
    """Raise `ConfigError` if a reward would have no baseline, so that nothing would be learned."""
    run, name, baseline = config.run, config.algorithm.name, config.algorithm.traits.baseline
    if baseline == "group" and run.responses < 2:
        raise ConfigError(
            f"run.responses = {run.responses}: algorithm.name = {name!r} compares a response with the others to its "
            "prompt, and a group of one has none, so nothing would be learned: use at least 2, or an algorithm that "
            "compares otherwise, such as 'reinforce++' or 'ppo'"
        )
    if baseline == "batch" and run.prompts * run.responses < 2:
        raise ConfigError(
            f"run.prompts x run.responses = {run.prompts} x {run.responses}: algorithm.name = {name!r} compares a "
            "response with the others of its step, and there is none, so nothing would be learned: use more"
        )


def check_sizes(config: RlConfig) -> None:
    """Raise `PlanError` for a role whose plan cannot divide the rows of a step."""
    for role, has_engine in config.roles.items():
        if has_engine:
            with naming(config, role):
                config.num_micros(config.run.mini_batch, role)


def check_vocabulary(run: RunKeys, model: ModelConfig) -> None:
    """Raise `ConfigError` for a model with a larger vocabulary than its task's; predictions skip this check."""
    if run.task and vocabulary_size(model) > (known := TASKS[run.task].tokenizer.vocab_size):
        raise ConfigError(
            f"task {run.task!r} has a tokenizer of its own, of {known} tokens, and the model would write "
            f"{vocabulary_size(model)}: leave --model out, or give run.prompts_file in place of the task"
        )


def _check_task(run: RunKeys) -> None:
    if not run.task:
        return
    task = TASKS[run.task]
    if run.max_prompt < task.longest_prompt:
        raise ConfigError(
            f"run.max_prompt = {run.max_prompt}: prompts of task {run.task!r} have up to {task.longest_prompt} "
            "tokens; raise it"
        )
    if run.start_steps and run.max_response < task.longest_response:
        raise ConfigError(
            f"run.max_response = {run.max_response}: the responses that a supervised start learns have up to "
            f"{task.longest_response} tokens; raise it, or set run.start_steps = 0"
        )
