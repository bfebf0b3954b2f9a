"""The figures of an exchange of islands. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OuterResult:
    """One exchange of a fragment, as it is applied.

    `loss` is the mean over the valid tokens of all islands since the fragment's last exchange began, `change` the root
    mean square over islands of the norms of their changes. `agreement` is the norm of the mean over `change`, of the
    exchange before: 1 where all islands changed alike, near the root of 1 / islands where they share no direction:
    then `every` is too long.
    """

    fragment: int
    loss: float
    num_tokens: int
    change: float
    agreement: float | None
