"""Sentences on a plan's throughput and energy, and on time and price of training on a number of tokens."""

import math

from terrace.base.errors import ConfigError
from terrace.base.words import counted, quantity, seconds
from terrace.planner.figures import tokens_per_s
from terrace.planner.ranking import Cost
from terrace.planner.task import Task

_MOST_TOKENS = 1e18
_MOST_MINUTES_S, _MOST_HOURS_S = 100 * 60.0, 100 * 3600.0  # longer durations are shown in the next unit


def throughput_words(task: Task, cost: Cost) -> str:
    """Tokens per second over all devices and per device."""
    rate = tokens_per_s(task, cost)
    each = quantity(rate / task.cluster.world_size, "").strip()
    return f"throughput: {quantity(rate, '').strip()} tokens/s of all devices, {each} of one"


def training_words(task: Task, cost: Cost, tokens: int | None, price: float | None) -> str:
    """Steps, time, device-hours and price of training on `tokens`; without `tokens`, the price of a million tokens.

    `price` is that of one device-hour. Returns "" if neither is given.
    """
    devices = task.cluster.world_size
    if tokens is None:
        million_s = 1e6 / tokens_per_s(task, cost)
        return "" if price is None else f"a million tokens: price {_rounded(million_s * devices / 3600 * price)}"
    steps = -(-tokens // (task.batch * task.sequence))
    hours = steps * cost.step_s / 3600
    words = f"{tokens_words(tokens)}: {counted(steps, 'step', ',')}, {duration(3600 * hours)}, "
    words += f"{quantity(hours * devices, '').strip()} device-hours"
    return words if price is None else f"{words}, price {_rounded(hours * devices * price)}"


def energy_words(task: Task, cost: Cost, tokens: int | None) -> str:
    """Energy of a step, and of `tokens` if given, at the device's maximum power; "" if that is unknown."""
    watts = task.cluster.device.power_watts
    if not watts:
        return ""
    step_wh = cost.step_s * watts * task.cluster.world_size / 3600
    words = f"energy, at the {watts:g} W that a device takes at most: {quantity(step_wh, 'Wh')} a step"
    if tokens is not None:
        steps = -(-tokens // (task.batch * task.sequence))
        words += f", {quantity(steps * step_wh, 'Wh')} for {tokens_words(tokens)}"
    return f"{words}, without hosts, links and cooling"


def tokens_words(number: int) -> str:
    return f"{quantity(number, '').strip()} token{'s' * (number != 1)}"


def parse_tokens(text: str) -> int:
    """Parse a whole number of tokens such as `300e9` or `300000000000`; raises `ConfigError` for anything else."""
    try:
        tokens = float(text)
    except ValueError:
        tokens = math.nan
    if not 1 <= tokens <= _MOST_TOKENS or tokens != int(tokens):
        raise ConfigError(f"--tokens {text}: write a whole number of tokens up to {_MOST_TOKENS:g}, such as 300e9")
    return int(tokens)


def duration(time_s: float) -> str:
    """A duration in seconds, minutes, hours or days, with three significant digits or all integer digits."""
    if time_s < 60:
        return seconds(time_s)
    if time_s < _MOST_HOURS_S:
        return f"{time_s / 60:.3g} min" if time_s < _MOST_MINUTES_S else f"{time_s / 3600:.3g} h"
    return f"{_rounded(time_s / 86400)} days"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
