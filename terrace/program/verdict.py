"""Whether a prediction kept to its limit: one rule for all that print it.

A verdict needs enough timed steps, and constants that were not measured while other programs used the machine.
"""

LEAST_STEPS = 10  # fewer say little about a steady step


def why_no_verdict(num_timed: int, busy: str = "") -> str:
    """Why steps, `num_timed` of them in the mean, say nothing about a prediction; "" where they do.

    `busy` says by whom the machine was used while its constants were measured, if it was.
    """
    few = f"{num_timed} of at least {LEAST_STEPS} timed steps" if num_timed < LEAST_STEPS else ""
    return " and ".join(filter(None, (few, busy)))


def judged(error: float, limit: float, why_not: str = "", where: str = "") -> str:
    """The relative error of a prediction and whether it kept to its limit, or why that stays open."""
    found = f"{100 * error:+.0f} %{where}"
    if why_not:
        return f"{found}; no verdict on its limit of {100 * limit:.0f} %: {why_not}"
    return f"{found}, {'within' if abs(error) <= limit else 'OUTSIDE'} its limit of {100 * limit:.0f} %"
