"""Refuses keys that a user has set although other settings leave them without effect, or a start refuses them.

A key on the command line counts as set, whatever its value. A key in a file counts only if it differs from the default,
since the config.toml of an earlier run has every key.

`terrace simulate` and `terrace doctor` read no corpus, and a run's file may name paths of another machine. But a key on
the command line was set on purpose, so it is refused here if `terrace train` would refuse it. Of a corpus, only the
first part is opened.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from terrace.base.errors import ConfigError, DataError
from terrace.base.schema import read_table
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import num_params
from terrace.model.facts import has_attention, has_scalar_head, is_causal, layer_windows
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.train.config import RunConfig
from terrace.train.keys import TrainConfig
from terrace.train.layers import section

SAMPLE_MAX_PARAMS = 100_000_000  # of a model that writes a sample at the end of its run
BYTES, AUTO = "bytes", "auto"
_OF_TOKENIZER = {"tokenizer", "bos", "eos"}
_OF_SOURCES = {"path", "mixture", "format", "column", "split", "separator"}

T = TypeVar("T")
# Why a key has no effect and what to do; "" if it has one.
Rule = Callable[[RunConfig], str]
PlanRule = Callable[[Cluster, Plan, int], str]  # of a key of a plan, with the micro-batches of a rank in a step


def _final_lr_fraction(run: RunConfig) -> str:
    if run.train.schedule != "constant":
        return ""
    return 'train.schedule = "constant" ends at the peak rate: choose another schedule, or leave it out'


def why_no_peak(section: str, warmup_steps: int, steps: int) -> str:
    """Why a learning rate with `warmup_steps` never reaches its peak, and the remedy; "" if it does."""
    if warmup_steps <= steps:
        return ""
    return (
        f"the run ends after {counted(steps, 'step')}, below the peak rate: use at most {steps}, or raise "
        f"{section}.steps"
    )


def _warmup_steps(run: RunConfig) -> str:
    return why_no_peak("train", run.train.warmup_steps, run.train.steps)


def why_no_sample(run: RunConfig) -> str:
    """Why a run generates no sample at its end, and the remedy; "" if it does."""
    if not is_causal(run.model):
        return "the experts of a token depend on later tokens, so nothing can be sampled: leave it out"
    if has_scalar_head(run.model):
        return "a model with one output a token writes nothing: leave it out"
    if not has_attention(run.model):
        return "all layers are linear, and generation needs a layer with attention: leave it out"
    if num_params(run.model) <= SAMPLE_MAX_PARAMS:
        return ""
    # Too slow while all ranks wait.
    return (
        f"a model of more than {SAMPLE_MAX_PARAMS / 1e6:.0f} M parameters writes no sample at the end of its run: "
        "leave it out, and use terrace generate"
    )


def _prefetch(cluster: Cluster, plan: Plan, num_micros: int) -> str:
    if plan.params != "device":
        return ""
    return 'under params = "device" nothing is gathered: leave it out, or shard the parameters'


def _sequence_parallel(cluster: Cluster, plan: Plan, num_micros: int) -> str:
    if Mesh.of(cluster, plan).total("rows") > 1:
        return ""
    return "the tensor axis has no rows: leave it out, or give the tensor axis rows"


def _unit(cluster: Cluster, plan: Plan, num_micros: int) -> str:
    if plan.unit <= num_micros:
        return ""
    return f"a rank has {counted(num_micros, 'micro-batch')} in a step: use at most {num_micros}"


def _freeze(run: RunConfig) -> str:
    if run.lora is None:
        return ""
    bare = replace(run, train=replace(run.train, freeze=()))
    without = {(block.name, param.name) for block in bare.blocks() for param in block.params if param.trainable}
    for pattern in run.train.freeze:
        if not any(fnmatchcase(f"{block}.{param}", pattern) for block, param in without):
            return f"[lora] freezes all that {pattern!r} matches: leave it out"
    return ""


PLAN_RULES: dict[str, PlanRule] = {"prefetch": _prefetch, "sequence_parallel": _sequence_parallel, "unit": _unit}


def _of_plan(rule: PlanRule) -> Rule:
    return lambda run: rule(run.cluster, run.plan, run.num_micros())


def _most_prefetch(run: RunConfig) -> str:
    num_blocks = len(run.blocks())
    if why := _prefetch(run.cluster, run.plan, run.num_micros()):
        return why
    return "" if run.plan.prefetch <= num_blocks else f"the model has {num_blocks} blocks: use at most {num_blocks}"


def _slow_steps(run: RunConfig) -> str:
    if not run.train.slow_factor or run.train.slow_steps <= run.train.steps:
        return ""
    return f"the run ends after {counted(run.train.steps, 'step')}: use at most {run.train.steps}, or raise train.steps"


def _master_apart(run: RunConfig) -> str:
    if run.prune.is_on or not run.plan.master_apart:
        return ""
    return "it only takes memory without [prune]: leave it out"


def _initializer_range(run: RunConfig) -> str:
    # The score of a reward model may begin anew beside loaded weights.
    if has_scalar_head(run.model):
        return ""
    return f"the weights in {run.train.weights} are loaded: leave it out" if run.train.weights else ""


def _window(run: RunConfig) -> str:
    if any(layer_windows(run.model)):
        return ""
    return "no layer has a window: leave it out, or set model.use_sliding_window = true where the family has that key"


RULES: dict[str, Rule] = {
    "train.final_lr_fraction": _final_lr_fraction,
    "train.warmup_steps": _warmup_steps,
    "train.prompt": why_no_sample,
    "train.freeze": _freeze,
    **{f"plan.{key}": _of_plan(rule) for key, rule in PLAN_RULES.items()},
    "plan.prefetch": _most_prefetch,
}
# These count on the command line alone: a file has every key of a published model, or serves short runs, too.
ASKED: dict[str, Rule] = {
    "plan.master_apart": _master_apart,
    "train.slow_steps": _slow_steps,
    "model.initializer_range": _initializer_range,
    "model.sliding_window": _window,
    "model.max_window_layers": _window,
}


def check_effects(run: RunConfig, files: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for the first key in `files` or `overrides` (tables by section) that has no effect."""
    defaults = read_table(Path(str(resources.files(__package__) / "default.toml")))
    silent = {
        name: [*_default(name), *([own] if (own := value_at(defaults, name)) is not None else [])] for name in RULES
    }
    refuse_without_effect(RULES, run, files, overrides, silent)
    refuse_without_effect(ASKED, run, {}, overrides, {})


def refuse_without_effect(
    rules: Mapping[str, Callable[[T], str]],
    run: T,
    files: Mapping[str, Any],
    overrides: Mapping[str, Any],
    silent: Mapping[str, Sequence[Any]],
) -> None:
    """Raises `ConfigError` for the first key in `files` or `overrides` that, by its rule, has no effect on `run`.

    `silent` lists, per key, the default values that a file may hold without being refused.
    """
    for name, rule in rules.items():
        given, in_file = value_at(overrides, name), value_at(files, name)
        if given is None and (in_file is None or in_file in silent[name]):
            continue
        if why := rule(run):
            raise ConfigError(f"{name} = {(in_file if given is None else given)!r} has no effect: {why}")


def file_layers(config_path: str | None, plan: str | None) -> dict[str, Any]:
    """The sections that the user's files set: those of `--config`, and the plan of `--plan`."""
    table = dict(read_table(Path(config_path))) if config_path is not None else {}
    named = plan if plan is not None else table.get("plan")
    if isinstance(named, str):
        folder = Path() if plan is not None or config_path is None else Path(config_path).parent
        path = folder / named
        table["plan"] = section("plan", str(path)) if path.is_file() else {}
    return table


def _default(name: str) -> list[Any]:
    head, _, key = name.partition(".")
    owner = TrainConfig if head == "train" else Plan
    return [item.default for item in fields(owner) if item.name == key]


def value_at(table: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted name in nested tables, or None."""
    inner: Any = table
    for key in name.split("."):
        inner = inner.get(key) if isinstance(inner, Mapping) else None
    return inner


def check_inputs(run: RunConfig, given: Mapping[str, Any]) -> None:
    """Raises the `TerraceError` that `terrace train` would raise for the keys `given`, nested tables of overrides."""
    data, train = (given.get(name) for name in ("data", "train"))
    if isinstance(train, Mapping) and "metrics" in train:
        from terrace.train.trackers import check_installed

        check_installed(run.train.metrics)
    if run.data.tokenizer == BYTES and (run.data.bos, run.data.eos) != (AUTO, AUTO):
        from terrace.data.tokenizer import load_tokenizer

        load_tokenizer(BYTES, run.data.bos, run.data.eos)
    if not isinstance(data, Mapping) or not data:
        return
    # Here, since these need numpy, and most commands name no data.
    from terrace.data.chat_tokens import holds_conversations
    from terrace.data.corpus import corpus_units
    from terrace.data.indexed import is_indexed
    from terrace.data.tokenizer import load_tokenizer
    from terrace.train.folder import check_tokenizer

    config = run.data.absolute()
    if _OF_TOKENIZER & data.keys():
        check_tokenizer(load_tokenizer(config.tokenizer, config.bos, config.eos), run)
    sources = config.sources() if _OF_SOURCES & data.keys() else ()
    for spec in (*sources, *(config.eval_sources() if "eval" in data else ())):
        if spec.format != "text":
            holds_conversations(spec.path, spec.split)
        elif not is_indexed(spec.path):
            next(corpus_units(spec.path, spec.column, spec.split, separator=spec.separator), None)
    _check_cache(Path(config.cache))


def _check_cache(folder: Path) -> None:
    for each in (folder, *folder.parents):
        if each.exists():
            if not each.is_dir():
                raise DataError(f"data.cache = {str(folder)!r} cannot be made, since {each} is a file: name another")
            return
