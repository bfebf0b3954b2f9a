"""Makes untrusted text (file names, tokens, templates, generated text) safe to print."""

import re

# Control characters that a terminal would act on, except tab and line feed; characters that change the direction of
# text or break lines invisibly; lone surrogates, which cannot be encoded.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escape unsafe characters of `text`, for example ESC as `\x1b`."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape(text: str) -> str:
    import html  # here alone: it takes a moment, and screens need none of it

    return html.escape(printable(text))
