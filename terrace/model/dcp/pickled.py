"""Safe reader for pickles of `torch.distributed.checkpoint` and `torch.save`.

Unpickling can call any function, so an untrusted pickle could run anything. This reader accepts only names of an
allow-list, and replaces each by a class that merely records its arguments; nothing of torch is called. The classes are
created anew for each file.

It also bounds the time. Nested tuples that repeat their items can have 2^60 elements with 60 objects, and hashing one
as a dict key runs in C, where Ctrl-C has no effect. Dict keys are therefore limited to strings, integers and records,
calls to a few arguments, and opcodes that neither writer needs are rejected. The reader is derived from pickle's Python
implementation, because in the C implementation a five-byte memo index can allocate 64 GiB.
"""

import pickle
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from terrace.base.errors import ModelError

# Errors that a damaged pickle can raise, including those of a stack underflow.
OF_PICKLE = (
    pickle.UnpicklingError,
    struct.error,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    EOFError,
)
_MOST_ARGUMENTS = 16  # of a call; torch needs up to seven
_NUMBERS = 1 << 60  # bound of integer keys, which are parameter indices
_TAKEN = (
    pickle.PROTO,
    pickle.FRAME,
    pickle.STOP,
    pickle.MARK,
    pickle.POP,
    pickle.POP_MARK,
    pickle.MEMOIZE,
    pickle.PUT,
    pickle.BINPUT,
    pickle.LONG_BINPUT,
    pickle.GET,
    pickle.BINGET,
    pickle.LONG_BINGET,
    pickle.NONE,
    pickle.NEWTRUE,
    pickle.NEWFALSE,
    pickle.BININT,
    pickle.BININT1,
    pickle.BININT2,
    pickle.LONG1,
    pickle.BINFLOAT,
    pickle.BINUNICODE,
    pickle.SHORT_BINUNICODE,
    pickle.BINUNICODE8,
    pickle.BINBYTES,
    pickle.SHORT_BINBYTES,
    pickle.EMPTY_TUPLE,
    pickle.TUPLE,
    pickle.TUPLE1,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.EMPTY_LIST,
    pickle.APPEND,
    pickle.APPENDS,
    pickle.EMPTY_DICT,
    pickle.SETITEM,
    pickle.SETITEMS,
    pickle.GLOBAL,
    pickle.STACK_GLOBAL,
    pickle.REDUCE,
    pickle.NEWOBJ,
    pickle.BUILD,
    pickle.BINPERSID,
)


class DamagedError(Exception):
    """A damaged pickle; the caller adds the name of the file."""


class Kept:
    """Placeholder for every allowed class and function; records arguments and state."""

    kind = ""
    args: tuple[object, ...]
    state: object

    def __init__(self, *args: object) -> None:
        self.args, self.state = args, None


class PickleReader(pickle._Unpickler):
    """Reads one pickle. `is_known(module, name)` is the allow-list; `of` names the writing program in errors."""

    # Attributes of the Python implementation, which are missing in the type stubs.
    stack: list[Any]
    append: Callable[[object], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, path: Path, content: bytes, is_known: Callable[[str, str], bool], of: str) -> None:
        super().__init__(BytesIO(content))
        self._path, self._is_known, self._of = path, is_known, of
        self._made = dict[tuple[str, str], type[Kept]]()

    def find_class(self, module: str, name: str) -> Any:
        if not self._is_known(module, name):
            raise ModelError(
                f"{self._path} names {f'{module}.{name}'[:80]!r}, which {self._of} does not write: a pickle can run "
                "anything, so the file is not read; save the model again from its own program"
            )
        if (module, name) not in self._made:
            self._made[module, name] = type(name, (Kept,), {"kind": name})
        return self._made[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise DamagedError("it refers to objects elsewhere")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._put(key, value)

    def load_call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not (isinstance(function, type) and issubclass(function, Kept) and type(arguments) is tuple):
            raise DamagedError("it calls what is no record")
        if len(arguments) > _MOST_ARGUMENTS:
            raise DamagedError(f"it calls {function.kind} with {len(arguments)} arguments")
        self.append(function(*arguments))

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Kept):
            raise DamagedError("it gives a state to what is no record")
        self.stack[-1].state = state

    def _put(self, key: object, value: object) -> None:
        # Larger integers could be chosen such that hashes collide, which makes a dict quadratic.
        is_number = type(key) is int and abs(key) < _NUMBERS
        if type(self.stack[-1]) is not dict or not (type(key) is str or is_number or isinstance(key, Kept)):
            raise DamagedError("a table has keys that are neither names nor records")
        self.stack[-1][key] = value

    class _Table(dict[int, Any]):
        def __missing__(self, code: int) -> Any:
            raise DamagedError(f"it has the operation {chr(code)!a}, which no checkpoint needs")

    dispatch = _Table({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _TAKEN})
    dispatch |= {
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.REDUCE[0]: load_call,
        pickle.NEWOBJ[0]: load_call,
        pickle.BUILD[0]: load_build,
    }
