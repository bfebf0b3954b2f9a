"""Pickles of `torch.distributed.checkpoint` and of `torch.save`, read without running anything in them.

A pickle names classes and functions and has them called, so one from a stranger could run anything. Here every name is
looked up in a table, and each stands for a class of this module that only keeps its arguments; no class or function of
torch is called. Any other name is refused. The classes are made anew for each file.

Nor can a small pickle take long. A tuple may hold one object twice, which holds another twice: what is 60 objects in
the file has 2^60 parts, and a dict hashes them all for a key, inside of Python where Ctrl-C does not reach. So keys are
texts, numbers or records, a call has few arguments, and operations that neither writer needs are refused. The reader is
pickle's own in Python: five bytes, the number of an object, can make the one in C clear 64 GiB of memory.
"""

import pickle
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from terrace.base.errors import ModelError

# A damaged pickle may raise nearly any of these, among them the errors of a stack that is too short.
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
_MOST_ARGUMENTS = 16  # of a call; torch's largest has seven
_NUMBERS = 1 << 60  # of keys of a table, which are numbers of parameters
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
    """What is wrong with a pickle, for the error that names its file."""


class Kept:
    """Stands for every class and function of the table: keeps its arguments and its state."""

    kind = ""
    args: tuple[object, ...]
    state: object

    def __init__(self, *args: object) -> None:
        self.args, self.state = args, None


class PickleReader(pickle._Unpickler):
    """Reads one pickle. `is_known(module, name)` is the table, `of` says in errors whose it is."""

    # Attributes of the reader in Python, which its type in C does not declare.
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
        # Beyond the modulus of hashes, numbers can be made to collide, and a table takes the square of its size.
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
