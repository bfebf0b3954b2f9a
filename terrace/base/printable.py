"""Outside text (names of files, tokens, templates, generated text) made safe to show."""

import html
import re

# Control characters but tab and line break, which could drive a terminal; those that reverse the direction of writing
# or break lines unseen; halves of surrogate pairs, which no stream takes.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""`text` with control characters, which a terminal would act on, spelled out: `\x1b` for ESC."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape(text: str) -> str:
    """`text` for HTML or SVG."""
    return html.escape(printable(text))
