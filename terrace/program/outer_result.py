"""Statistics of an exchange between islands. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OuterResult:
    """One exchange of a fragment, recorded when it is applied.

    `loss` is the mean over the valid tokens of all islands since the fragment's last exchange began, `change` the RMS
    over islands of the norm of their changes. `agreement` is, for the previous exchange, the norm of the mean change
    divided by `change`: 1 if all islands changed equally, near sqrt(1 / islands) if their changes are uncorrelated,
    which means that `every` is too long.
    """

    fragment: int
    loss: float
    num_tokens: int
    change: float
    agreement: float | None
