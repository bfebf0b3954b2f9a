"""Messages of progress."""


class Passing(str):
    """A message that the next one of the same work replaces: a screen may overwrite it, or leave it out."""
