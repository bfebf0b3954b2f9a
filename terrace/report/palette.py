"""Colours of categories, on light and on dark paper.

Colours that share a row stay distinguishable under the common colour deficiencies, and all but waiting have a contrast
of at least 3 to 1 with the paper (WCAG 2.2, 1.4.11); `tests/report/test_page.py` measures both.
"""

PAPER = ("#ffffff", "#14171c")  # (light, dark)

STREAM = {
    "forward": ("#1f8ae0", "#2f86d6"),
    "backward": ("#0b3a7a", "#b4d3f4"),
    "update": ("#1f7a3d", "#4fd08a"),
    "wait": ("#d0d3da", "#454b58"),
}
PIPELINE = STREAM | {"weight": ("#e07b00", "#ffa64d")}  # of a stage: plus the weight half of a split backward
MESSAGES = {
    "gather": ("#e07b00", "#ffc078"),
    "gather_backward": ("#70370f", "#b5651d"),
    "reduce": ("#d35fc6", "#d873d4"),
    "sync": ("#5a2fc2", "#7f5bff"),
    "refresh": ("#0b4a46", "#35806f"),
    "control": ("#8b8e97", "#cfd2d8"),
}
OUTER = {"outer": MESSAGES["gather_backward"]}  # exchanges of islands, which are drawn in separate rows
_KNOWN = PIPELINE | MESSAGES | OUTER
MEMORY = {  # states have the colour of the messages that carry them
    "params": MESSAGES["gather"],
    "secondary": MESSAGES["control"],
    "grads": MESSAGES["reduce"],
    "optimizer": MESSAGES["sync"],
    **OUTER,
    "feedback": MESSAGES["refresh"],
    "buffers": STREAM["wait"],
    "gathered": MESSAGES["gather_backward"],
    "grads_full": ("#8f2d84", "#a8479f"),
    "activations": STREAM["forward"],
    "working": STREAM["backward"],
    "batch": STREAM["update"],
    "context": ("#5b616e", "#a4abb8"),
    "allocator": ("#a9aeb8", "#6b7280"),
}
_OTHER = ("#5b616e", "#a4abb8")


def colour_key(category: str) -> str:
    """Name of a category's colour: all waits share one, and so do all unknown categories."""
    # More colours would not be distinguishable; tables list waits by name.
    if category.startswith("wait "):
        return "wait"
    # Traces of later versions may have categories that this palette lacks.
    return category if category in _KNOWN else "other"


def known_order(key: str) -> int:
    """The place of a colour in legends; unknown ones are last."""
    return list(_KNOWN).index(key) if key in _KNOWN else len(_KNOWN)


def colour_variables(dark: bool) -> str:
    """The colours as CSS custom properties: `--c-forward`, `--m-params`, `--paper`, ..."""
    lines = [f"--paper:{PAPER[dark]};--c-other:{_OTHER[dark]}"]
    lines += [f"--c-{name}:{pair[dark]}" for name, pair in _KNOWN.items()]
    lines += [f"--m-{name}:{pair[dark]}" for name, pair in MEMORY.items()]
    return ";".join(lines)
