"""Progress line of a step, with a bar on a terminal.

The bar is part of an ordinary line that the next one overwrites. No cursor is hidden and no thread started, so a killed
run leaves a usable terminal.
"""

import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.text import Text

from terrace.base.progress import Passing
from terrace.base.words import quantity
from terrace.cli.output import raw_stream
from terrace.report.tables import utilisation
from terrace.train.metrics import StepRecord, eval_figures
from terrace.train.utilisation import Utilisation

_BAR = 24  # characters
# Left out of a narrow line, in this order; metrics.jsonl has them all.
_SPARE = (r"\S+ \S+ (resident|allocated)$", "lr ", "norm ", "balance ")


class ProgressLine:
    """Progress of steps: on a terminal, a line updated in place; permanent lines at intervals, also elsewhere."""

    def __init__(self, console: Console, num_steps: int, log_every: int) -> None:
        self._console, self._num_steps, self._log_every = console, num_steps, log_every
        # In a file, lines that overwrite each other would only be noise.
        self._live, self._raw = sys.stdout.isatty(), raw_stream(sys.stdout)

    def show(self, record: StepRecord, seconds_left: float) -> None:
        line = step_words(record, self._num_steps, seconds_left, self._console.width)
        # First and last step are always kept.
        keep = record.step % self._log_every == 0 or record.step in (1, self._num_steps)
        if keep or record.eval:
            self._permanent(line)
        for words in eval_words(record):
            self._permanent(words)
        if self._live and record.step < self._num_steps:
            # The figures come first. A line longer than the terminal would wrap, and could not be overwritten.
            width = self._console.width - 1
            bar = self._bar(record.step) if len(line) + _BAR + 1 <= width else ""
            print(f"{ERASE}{bar}", end="", file=self._raw, flush=True)
            print(line[:width], end="", flush=True)

    def above(self, text: str) -> None:
        """Prints a permanent line above the progress line."""
        self._permanent(text)

    def _permanent(self, text: str) -> None:
        print(ERASE if self._live else "", end="", file=self._raw)
        print(text, flush=True)

    def _bar(self, step: int) -> str:
        # Rich ends each print with a line break, which would leave the line.
        with self._console.capture() as captured:
            self._console.print(ProgressBar(total=self._num_steps, completed=step, width=_BAR))
        bar = captured.get().replace("\n", "")
        return bar + " " * (
            _BAR + 1 - len(Text.from_ansi(bar).plain)
        )  # without colours the rest of the bar is not drawn


def step_words(record: StepRecord, num_steps: int, seconds_left: float, width: int = 1 << 30) -> str:
    """One-line summary of a step. If `width` is too small, memory, learning rate, norm and balance are left out."""
    parts = [
        f"step {record.step:>{len(str(num_steps))}}/{num_steps}",
        f"loss {record.loss:.3f}",
        f"norm {record.grad_norm:.2f}",
        f"lr {record.learning_rate:.2e}",
        quantity(record.tokens_per_s, "tokens/s"),
    ]
    if record.outer:
        # Every fragment has had its turn over the same steps, but for some at the ends.
        parts.insert(2, f"islands {next(iter(record.outer.values()))['loss']:.3f}")
    if record.pairs:
        parts.insert(2, f"right {100 * record.pairs['accuracy']:.1f} %  margin {record.pairs['margin']:.3f}")
    if record.teacher:
        parts.insert(2, f"entropy {record.teacher['cross_entropy']:.3f}  KL {record.teacher['divergence']:.3f}")
    if record.mfu is not None:
        parts.append(f"MFU {utilisation(record.mfu)}")
    if record.balance is not None:
        parts.append(f"balance {record.balance:.2f}")
    if record.peak_memory_bytes:
        # The first kind is the relevant one: allocated on CUDA, resident on a CPU.
        name, size = next(iter(record.peak_memory_bytes.items()))
        parts.append(f"{quantity(size, 'B')} {name}")
    parts.append(f"{clock(seconds_left)} left")
    for spare in _SPARE:
        if len("  ".join(parts)) > width:
            parts = [part for part in parts if not re.match(spare, part)]
    return "  ".join(parts)


def eval_words(record: StepRecord) -> list[str]:
    """A line for each source that was evaluated after a step."""
    return [
        f"  {name}: loss {row.get('loss', math.nan):.4f}  perplexity {row['perplexity']:.3f}  "
        f"{row.get('tokens', 0):,.0f} tokens"
        for name, row in eval_figures(record).items()
    ]


def clock(seconds_left: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def utilisation_words(used: Utilisation) -> str:
    """The constants behind a run's MFU and HFU."""
    flops, peak = used.flops, quantity(used.peak_flops_per_s, "FLOP/s")
    return (
        f"MFU = {quantity(flops.model, 'FLOP')} / (seconds of a step x {used.num_devices} x {peak}): "
        f"{quantity(flops.products, 'FLOP')} of products (6 a weight and token, 4 of a frozen one), "
        f"{quantity(flops.attention, 'FLOP')} of causal attention\n"
        f"HFU = the same with {quantity(flops.hardware, 'FLOP')}, {quantity(flops.again, 'FLOP')} of them recomputed\n"
        f"  the peak is {used.origin}"
    )


ERASE = "\r\x1b[K"  # the line that the terminal's cursor is in
_FIRST_S, _LATER = 5.0, 3.0  # off a terminal: time of the first line, and the ratio of each line's time to the last's


@contextmanager
def passing_lines(now: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """A function that prints messages. On a terminal, `Passing` ones are overwritten, the last at the end
    of the body.
    """
    raw, live = raw_stream(sys.stdout), sys.stdout.isatty()
    begin_s, next_s, stands = now(), _FIRST_S, False

    def clear() -> None:
        nonlocal stands
        if stands:
            print(ERASE, end="", file=raw, flush=True)
        stands = False

    def show(text: str) -> None:
        nonlocal next_s, stands
        if not isinstance(text, Passing):
            clear()
            print(text, flush=True)
        elif live:
            clear()
            # A line longer than the terminal would wrap, and could not be overwritten.
            print(text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
            stands = True
        elif (spent_s := now() - begin_s) >= next_s:
            print(text, flush=True)
            next_s = _LATER * spent_s

    try:
        yield show
    finally:
        clear()
