"""Packages that only some commands need, and the extra that installs each.

The distribution's name differs from the import's: `terrace` on the package index is somebody else's.
"""

DISTRIBUTION = "terrace-train"
EXTRAS = {
    "torch": "train",
    "numpy": "train",
    "safetensors": "train",
    "tokenizers": "hf",
    "jinja2": "hf",
    "pyarrow": "data",
    "pyyaml": "data",
    "tensorboard": "metrics",
    "ray": "ray",
    "liger-kernel": "liger",
}


def install(package: str) -> str:
    """The command that installs `package`, by the extra that has it."""
    extra = EXTRAS.get(package)
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {package}"


def needs(package: str) -> str:
    """Words of a package that is not there, with the command that installs it."""
    return f"needs the package {package!r}: {install(package)}"
