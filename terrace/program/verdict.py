"""The rule whether a prediction is within its error limit, for all that print it.

A verdict needs enough timed steps, and a machine that was otherwise idle while its constants were measured and while
steps were timed.
"""

LEAST_STEPS = 10  # fewer say little about a steady step


def why_no_verdict(num_timed: int, busy: str = "") -> str:
    """Why `num_timed` averaged steps allow no verdict on a prediction; "" if they do.

    `busy` says who else used the machine while its constants or the steps were measured; "" for nobody.
    """
    few = f"{num_timed} of at least {LEAST_STEPS} timed steps" if num_timed < LEAST_STEPS else ""
    return " and ".join(filter(None, (few, busy)))


def judged(error: float, limit: float, why_not: str = "", where: str = "") -> str:
    """The relative error of a prediction, and whether it is within its limit or why there is no verdict."""
    found = f"{100 * error:+.0f} %{where}"
    if why_not:
        return f"{found}; no verdict on its limit of {100 * limit:.0f} %: {why_not}"
    return f"{found}, {'within' if abs(error) <= limit else 'OUTSIDE'} its limit of {100 * limit:.0f} %"
