"""Steps named by a user: `"10-12"` or `"10"`, counted from 1 like all steps that a user sees."""

import re

from terrace.base.errors import ConfigError

_MOST = 100  # steps: of each a file is written


def parse_steps(text: str | int) -> range:
    """Steps of `train.profile`, counted from 0; raises `ConfigError` for anything but a short range."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", str(text).strip())
    if found is None:
        raise ConfigError(
            f"train.profile = {text!r} must be a step or a range of steps such as '10-12', counted from 1"
        )
    # One number is a range of one step.
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last:
        raise ConfigError(f"train.profile = {text!r} must go upward and begin at 1 or later, such as '10-12'")
    if last - first >= _MOST:
        raise ConfigError(f"train.profile = {text!r} names {last - first + 1} steps: {_MOST} are traced at most")
    return range(first - 1, last)


def check_profile(text: str | int | None, with_torch: bool, num_steps: int) -> None:
    """Raises `ConfigError` if `train.profile` names no steps of the run, or only torch's profiler is requested."""
    if text is not None:
        last = parse_steps(text).stop
        if last > num_steps:
            raise ConfigError(f"train.profile = {text!r} goes up to step {last}, but the run ends at {num_steps}")
    elif with_torch:
        raise ConfigError("train.profile_torch = true has no effect without train.profile: name steps such as '10-12'")
