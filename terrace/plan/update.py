"""Update rules of optimizers, which determine their states and messages, as `plan.update` writes them.

adamw | lion | muon | sgd | sgd+momentum     SGD without momentum has no state
galore:RANK | lsp:RANK:DENSITY               AdamW in a projected space of width RANK (terrace.plan.projected)
own:CLASS | own:CLASS:STATE...               a user's class, with the names of its states (terrace.runtime.own_rule)

Each may end in +qk_clip (terrace.plan.score_clip).
"""

from dataclasses import dataclass, field
from functools import lru_cache

from terrace.base.errors import PlanError, did_you_mean

Update = str
# Of matrices that are updated whole, in the flat buffer that holds them.
Shape = tuple[int, ...]
Extent = tuple[Shape, int, int]  # (shape of a matrix, its start and stop in the flat buffer)
MatrixSlice = tuple[tuple[Shape, ...], int]  # (shapes that overlap a rank's slice, its elements behind all matrices)
GALORE, LSP, OWN = "galore", "lsp", "own"
QK_CLIP = "+qk_clip"
EVERY = 200  # default of `optimizer.check_every`, in steps, which prices assume; T in GaLore's experiments
_NUMBERS = {  # rule -> names of its numbers
    "adamw": (),
    "lion": (),
    "muon": (),
    "sgd": (),
    "sgd+momentum": (),
    GALORE: ("rank",),
    LSP: ("rank", "density"),
}
_WHOLE = ("muon", GALORE, LSP)


@dataclass(frozen=True)
class UpdateRule:
    """An update rule. `rank` is the width of the projected space, `density` the non-zeros in a projector's row.

    `states` names the states of a user's own rule. If it `clips_scores`, each step ends with QK-clip.
    """

    name: str
    rank: int = 0
    density: int = 0
    states: tuple[str, ...] = field(default=(), kw_only=True)
    clips_scores: bool = field(default=False, kw_only=True)

    @property
    def takes_whole(self) -> bool:
        """Whether it updates each matrix of a layer whole, and leaves other parameters to AdamW."""
        return self.name in _WHOLE

    @property
    def projects(self) -> bool:
        return self.rank > 0


@lru_cache(maxsize=256)
def parse_update(text: Update) -> UpdateRule:
    """The rule that `plan.update` names. Raises `PlanError` for an unknown rule or invalid numbers."""
    (name, *numbers), clips_scores = text.removesuffix(QK_CLIP).split(":"), text.endswith(QK_CLIP)
    if name == OWN and numbers:
        return UpdateRule(name, states=tuple(numbers[1:]), clips_scores=clips_scores)
    if name not in _NUMBERS:
        raise PlanError(f"update = {text!r} names no optimizer{did_you_mean(name, _NUMBERS)}")
    form = ":".join((name, *(number.upper() for number in _NUMBERS[name])))
    if len(numbers) != len(_NUMBERS[name]) or not all(each.isascii() and each.isdigit() for each in numbers):
        raise PlanError(f"update = {text!r} is not of the form {form!r}")
    rule = UpdateRule(name, *map(int, numbers), clips_scores=clips_scores)
    if why := wrong_numbers(rule):
        raise PlanError(f"update = {text!r}: {why}")
    return rule


def wrong_numbers(rule: UpdateRule) -> str:
    """What is wrong with the numbers of a rule that projects, with the fix; "" if nothing is."""
    if rule.name in (GALORE, LSP) and rule.rank < 1:
        return f"rank = {rule.rank} must be at least 1: it is the width of the projected space"
    if rule.name == LSP and not 1 <= rule.density <= rule.rank:
        return (
            f"density = {rule.density} must be 1 to rank = {rule.rank}: it counts the non-zeros in a row of a "
            f"projector, which has {rule.rank} elements"
        )
    return ""
