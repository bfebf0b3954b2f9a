"""Lines of progress."""


class Passing(str):
    """A line that the next one of the same work replaces: a screen may show it in place, or leave it out."""
