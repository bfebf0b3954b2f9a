"""Cached hashes, for large frozen dataclasses that are used as cache keys."""

from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def hashed_once(cls: _Class) -> _Class:
    """Class decorator, above `@dataclass(frozen=True)`: caches the hash of an instance.

    Pickles omit it, since hashes of strings differ between processes.
    """
    class_: Any = cls
    whole = class_.__hash__

    def hashed(self: Any) -> int:
        values = self.__dict__
        found: int | None = values.get("_hash")
        if found is None:
            found = values["_hash"] = whole(self)
        return found

    def pickled(self: Any) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    class_.__hash__, class_.__getstate__ = hashed, pickled
    return cls
