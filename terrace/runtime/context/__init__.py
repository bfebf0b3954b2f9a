"""The context axis at run time: attention of tokens that are spread over ranks."""

from terrace.runtime.context.axis import ContextAxis, check_declared
from terrace.runtime.context.moves import Mover

__all__ = ["ContextAxis", "Mover", "check_declared"]
