"""Counts with nouns, in English."""


def counted(number: int, noun: str, spec: str = "") -> str:
    """`1 step`, `2 steps`, `3 micro-batches`, `4 copies`; `spec` formats the number."""
    return f"{number:{spec}} {noun if number == 1 else plural(noun)}"


def were(number: int, noun: str) -> str:
    """`1 rank was`, `2 ranks were`."""
    return f"{counted(number, noun)} {'was' if number == 1 else 'were'}"


def plural(noun: str) -> str:
    """Regular plural of a noun."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
