"""What users write in Python modules: found by `module:name`, and its errors in one line."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, did_you_mean


def load_object(name: str, folder: str, kind: str, form: str, example: str) -> Callable[..., Any]:
    """Import `module:name` from an installed module or from `folder`; raises `ConfigError` if that fails.

    `kind` says what it is ("reward"), `form` what its second part names ("function"); `example` is one of its kind.
    """
    module_name, _, own_name = name.partition(":")
    if not module_name or not own_name:
        raise ConfigError(f"the {kind} {name!r} must be module:{form}, such as {example}")
    if module_name.endswith(".py") or not all(each.isidentifier() for each in module_name.split(".")):
        of_module, _, of_name = example.partition(":")
        raise ConfigError(
            f"the {kind} {name!r} must be module:{form}, such as {example} for {of_name} of {of_module}.py in the "
            "working folder: give the module without its folder and without .py"
        )
    _check_name(name, kind, module_name, folder)
    if folder not in sys.path:
        # Last in the path, so that the user's modules in the folder can import each other but shadow no installed one.
        sys.path.append(folder)
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(
            f"the {kind} {name!r} cannot be imported: {shown_error(error).removeprefix('raised ')}"
        ) from error
    found = getattr(module, own_name, None)
    if not callable(found) or (form == "class" and not isinstance(found, type)):
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"the {kind} {name!r}: no {form} of {module_name}{did_you_mean(own_name, names)}")
    function: Callable[..., Any] = found
    return function


def _check_name(name: str, kind: str, module_name: str, folder: str) -> None:
    """Raise `ConfigError` if the module's top-level name is both in the folder and installed."""
    first = module_name.partition(".")[0]
    own = next(
        (path for path in (Path(folder, f"{first}.py"), Path(folder, first, "__init__.py")) if path.is_file()), None
    )
    if own is None or folder in sys.path:
        return
    try:
        installed = find_spec(first)
    except ValueError:  # a module without a spec, created by hand
        return
    if installed is not None and installed.origin != str(own.resolve()):
        raise ConfigError(
            f"the {kind} {name!r}: {own} has the name of an installed module ({installed.origin}), which would be "
            "imported in its place: rename the file"
        )


def shown_error(error: BaseException) -> str:
    """The type of an error and the first line of its message, even if its own __str__ raises."""
    try:
        lines = str(error).strip().splitlines()
    except (Exception, SystemExit):  # its own __str__ raises
        lines = []
    if isinstance(error, SystemExit):
        return f"called sys.exit({lines[0] if lines else ''})"
    return f"raised {type(error).__name__}{f': {lines[0][:200]}' if lines else ''}"
