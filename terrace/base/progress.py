"""Progress messages."""


class Passing(str):
    """A transient message, which the next one replaces: a display may overwrite or omit it."""
