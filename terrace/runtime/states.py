"""The kinds of optimizer state that each group of parameters has. No torch here.

A group stands for an update rule: parameters of one group have the same kinds of state, each of the parameter's
shape. `master` is the parameter itself in the master dtype and comes first. A new optimizer adds its groups here,
says in `group_of` which parameters belong to them, and returns its tensors as `StatePart`s
(`terrace/runtime/elementwise.py`); checkpoints then store and restore them under any plan.
"""

from terrace.model.base_formats import BASE_FORMATS
from terrace.model.params import ParamSpec
from terrace.plan.update import GALORE, LSP, OWN, parse_update
from terrace.runtime.settings import OptimizerConfig

ADAMW, LION, MUON, FROZEN = "adamw", "lion", "muon", "frozen"
SGD, SGD_MOMENTUM = "sgd", "sgd+momentum"
CONSTANTS = "constants"  # of a frozen matrix held in codes, stored beside it
KINDS: dict[str, tuple[str, ...]] = {  # group -> kinds of state of each of its parameters
    ADAMW: ("master", "exp_avg", "exp_avg_sq"),
    LION: ("master", "momentum"),
    MUON: ("master", "momentum"),
    SGD: ("master",),
    SGD_MOMENTUM: ("master", "momentum"),
    FROZEN: ("frozen",),
    GALORE: ("master",),
    LSP: ("master",),
    CONSTANTS: ("constants",),
    **dict.fromkeys(BASE_FORMATS, ("codes",)),
}
# Groups without an optimizer; the last ones are of frozen matrices held in codes (terrace.model.base_formats).
UNTRAINED = (FROZEN, CONSTANTS, *BASE_FORMATS)
PROJECTION = "projection"  # kind of the state of a whole matrix under GaLore and LSP (terrace.runtime.projected)
UNSIGNED = ("exp_avg_sq",)  # kinds without negative values
# Kinds beside these under an outer loop (terrace.runtime.outer_state): one for all islands, and two of each island.
OUTER_MOMENTUM, OUTER_START, OUTER_MESSAGE = "outer_momentum", "outer_start", "outer_message"


def kinds_of(group: str) -> tuple[str, ...]:
    """The kinds of state of a group. Some names of groups end in numbers or kinds (terrace.plan.update)."""
    name = group.partition(":")[0]
    return ("master", *parse_update(group).states) if name == OWN else KINDS[name]


def constants_name(parameter: str) -> str:
    return f"{parameter}.{CONSTANTS}"


def is_trained(spec: ParamSpec) -> bool:
    """Whether an optimizer updates a parameter: it is trainable and has elements."""
    return spec.trainable and spec.numel > 0


def group_of(spec: ParamSpec, optimizer: OptimizerConfig, in_layer: bool) -> str:
    """The group of a parameter; `in_layer` says that it belongs to a layer, not to the first or last block."""
    if not is_trained(spec):
        return spec.code or FROZEN
    if parse_update(optimizer.update).takes_whole and not (in_layer and spec.is_matrix):
        return ADAMW
    return optimizer.group
