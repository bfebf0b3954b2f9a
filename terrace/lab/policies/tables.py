"""Document lengths: histogram as table and SVG, and the cost of balance policies on a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from terrace.base.printable import escape
from terrace.base.words import seconds
from terrace.lab.policies.costs import PolicyCost
from terrace.report.plot import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, frame, round_ticks
from terrace.report.table import Table
from terrace.report.tables import bytes_words

_BAR = 30  # characters of the longest bar
_TOP = 56
_SHARES = (("documents", "#93c5fd"), ("tokens", "#1d4ed8"), ("attention", "#dc2626"))


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Documents of `shortest` to `longest` tokens, with their shares of all documents, tokens and attention."""

    shortest: int
    longest: int
    num_documents: int
    documents: float
    tokens: float
    attention: float  # of the squared lengths, to which (query, key) pairs are proportional


def bins_of(lengths: Sequence[int]) -> list[Bin]:
    """One bin per power of two, from the shortest document to the longest."""
    counts, tokens, squares = ([0] * (max(lengths).bit_length() + 1) for _ in range(3))
    for length in lengths:
        # The bin of a length is its number of binary digits.
        at = length.bit_length()
        counts[at] += 1
        tokens[at] += length
        squares[at] += length * length
    return [
        Bin(
            shortest=1 << at - 1,
            longest=(1 << at) - 1,
            num_documents=counts[at],
            documents=counts[at] / len(lengths),
            tokens=tokens[at] / sum(tokens),
            attention=squares[at] / sum(squares),
        )
        for at in range(min(lengths).bit_length(), len(counts))
    ]


def histogram_table(bins: Sequence[Bin]) -> Table:
    headings = ("from", "to", "documents", "of documents", "of tokens", "of attention", "tokens")
    table = Table(title="lengths of documents, in tokens", headings=headings, left=("tokens",))
    most = max(each.tokens for each in bins)
    for each in bins:
        table.add_row(
            f"{each.shortest:,}",
            f"{each.longest:,}",
            f"{each.num_documents:,}",
            *(f"{getattr(each, name):.1%}" for name, _ in _SHARES),
            "█" * round(_BAR * each.tokens / most),
        )
    return table


def policies_table(costs: Sequence[PolicyCost], tiers: Sequence[str]) -> Table:
    """Seconds per layer of each policy, and its bytes over each tier, outermost first."""
    headings = ("policy", "layer", "attention", "max / mean", "over the bound", *reversed(tiers))
    table = Table(title="a layer, forward and backward, as modelled", headings=headings, left=("policy",))
    for each in costs:
        attention_s = max(each.attention_s)
        table.add_row(
            each.policy,
            seconds(each.layer_s),
            seconds(attention_s),
            f"{each.imbalance:.2f}",
            f"{attention_s / each.bound_s:.2f}",
            *map(bytes_words, reversed(each.sent_bytes)),
        )
    return table


def lengths_svg(bins: Sequence[Bin], title: str) -> str:
    # In percent, with a margin of 5 % above the highest bar.
    high = 105 * max(float(getattr(each, name)) for each in bins for name, _ in _SHARES)
    height = HEIGHT - _TOP - BOTTOM
    step = (WIDTH - LEFT - RIGHT) / len(bins)

    def y(percent: float) -> float:
        return _TOP + (high - percent) / high * height

    parts = frame(title, "tokens of a document, from", {tick: y(tick) for tick in round_ticks(0, high)})
    parts.append(f'<text x="{LEFT}" y="42" fill="#52525b">% of all</text>')
    for at, each in enumerate(bins):
        left = LEFT + at * step
        for order, (name, colour) in enumerate(_SHARES):
            top = y(100 * getattr(each, name))
            place = f'x="{left + (0.1 + 0.27 * order) * step:.1f}" y="{top:.1f}"'
            size = f'width="{0.25 * step:.1f}" height="{y(0) - top:.1f}"'
            # Three bars per bin, a quarter of its width each.
            parts.append(f'<rect {place} {size} fill="{colour}"/>')
        label = f'<text x="{left + step / 2:.1f}" y="{HEIGHT - 24}" text-anchor="middle" fill="#52525b">'
        shortest = f"{each.shortest >> 10}k" if each.shortest >= 1024 else str(each.shortest)
        parts.append(f"{label}{shortest}</text>")
    for order, (name, colour) in enumerate(reversed(_SHARES)):
        label = f'<text x="{WIDTH - RIGHT - 90 * order}" y="42" text-anchor="end" fill="{colour}">'
        parts.append(f"{label}{escape(name)}</text>")
    return "\n".join([*parts, "</svg>\n"])
